"""What a runtime needs on a device: carried as wheels, or found there, or refused in one line before anything is."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from devices.loopback import Loopback
from devices.wheels import packed, wheelhouse
from quantkit import cli
from quantkit.devices import probed as wheels
from quantkit.devices.named import NamedDevice, demand_sessions, reach
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import Probed, probe
from quantkit.errors import InputError
from quantkit.runtimes import load_runtime

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheelhouse(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def about() -> Probed:
    """This machine, where nothing is installed."""
    found = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"], python=sys.executable), "~/quantkit")
    return found.model_copy(update={"packages": {}, "gpus": []})


def test_what_a_runtime_needs_is_chosen_with_the_rest(house: Path, about: Probed) -> None:
    pytest.importorskip("openvino")
    for name in ("openvino", "openvino-telemetry"):
        packed(name, house)
    bare = wheels.wheels(about, wheelhouse=house, where="here")
    found = wheels.wheels(about, wheelhouse=house, where="here", more=load_runtime("openvino").packages)
    names = {path.name.partition("-")[0] for sha, path in found.items() if sha not in bare}
    assert {each.replace("_", "-") for each in names} == {"openvino", "openvino-telemetry"}
    # as recent as quantkit itself asks for
    asked = wheels.requirements({"openvino": "2024.1"}, ["openvino"])
    assert any(each.startswith("openvino>=20") for each in asked)
    have = {each.partition(">=")[0]: "9999.0" for each in asked}
    assert wheels.requirements(have, ["openvino"]) == []


def test_what_is_compiled_there_is_said_before_anything_is_carried(
    house: Path, devices: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no wheel of llama-cpp-python: a device has it, or a wheelhouse does."""
    address, there = "ssh://plain", tmp_path / "there"
    words = ["device", "add", "pi", address, "--workdir", str(there), "--python", sys.executable]
    assert cli.run([*words, "--wheelhouse", str(house)]) == 0, capsys.readouterr().err
    with pytest.raises(InputError, match="no-wheel") as met, reach("pi", runtimes=["llama_cpp"]):
        pass
    line = met.value.line()
    assert "llama-cpp-python" in line and "install the package on the device" in line and "\n" not in line
    assert met.value.where == "pi"
    assert not there.exists()
    assert devices.wires["plain"].carried < 1e6


def test_what_a_device_has_is_not_asked_for(about: Probed, house: Path) -> None:
    have = dict.fromkeys(load_runtime("llama_cpp").packages, "99.0")
    found = about.model_copy(update={"packages": have})
    more = load_runtime("llama_cpp").packages
    assert not any(
        "llama" in path.name for path in wheels.wheels(found, wheelhouse=house, where="x", more=more).values()
    )


@pytest.mark.parametrize("runtime", ["torch", "tensorrt", "tensorrt_rtx"])
def test_what_is_no_session_makes_no_text_there_and_takes_no_turns(runtime: str) -> None:
    with pytest.raises(InputError, match="runtime-unsupported") as met:
        demand_sessions(["onnxruntime", runtime])
    assert "\n" not in met.value.line() and runtime in met.value.line()
    demand_sessions(["onnxruntime", "openvino", "llama_cpp"])
    # text is torch's too
    demand_sessions(["onnxruntime", "openvino", "llama_cpp", "torch"], text=True)
    if runtime != "torch":
        with pytest.raises(InputError, match=rf"runtime-unsupported.*{runtime} with `measure`"):
            demand_sessions([runtime], text=True)


@pytest.mark.parametrize(
    ("runtime", "there", "lacks"),
    [
        ("torch", {}, "no torch>="),
        ("torch", {"torch": "2.3.1"}, "no torch>="),
        ("tensorrt_rtx", {"torch": "2.13.0+cu130"}, "no tensorrt-rtx>="),
        ("tensorrt", {"torch": "2.13.0"}, "no tensorrt;"),
    ],
)
def test_what_is_too_large_to_carry_has_to_be_there(
    devices: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, there: dict[str, str], lacks: str
) -> None:
    def bare(*asked: Any) -> Probed:
        return probe(*asked).model_copy(update={"packages": there})

    monkeypatch.setattr("quantkit.devices.probed.probe", bare)
    device = NamedDevice(name="box", address="ssh://plain", workdir=str(tmp_path / "there"), python=sys.executable)
    with pytest.raises(InputError, match="runtime-not-here") as met, reach(device, runtimes=[runtime]):
        pass
    line = met.value.line()
    assert lacks in line and "--python PATH" in line and "\n" not in line
    assert not (tmp_path / "there").exists()


def test_pip_takes_what_is_there_for_what_it_is_and_fetches_no_other(house: Path, about: Probed) -> None:
    """A package that needs torch comes without it; a version is no requirement of a stranger's."""
    with zipfile.ZipFile(house / "on_torch-1.0-py3-none-any.whl", "w") as made:
        text = "Metadata-Version: 2.1\nName: on-torch\nVersion: 1.0\nRequires-Dist: torch>=2.10\n"
        made.writestr("on_torch-1.0.dist-info/METADATA", text)
        made.writestr("on_torch-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr("on_torch-1.0.dist-info/RECORD", "")
    there = about.model_copy(update={"packages": {"torch": "2.13.0+cu130"}})
    installed = there.installed(["torch"], "here")
    found = wheels.wheels(there, wheelhouse=house, where="here", more=["on-torch"], installed=installed)
    names = {path.name.partition("-")[0] for path in found.values()}
    assert "on_torch" in names and "torch" not in names
    with pytest.raises(InputError, match="answer-invalid"):
        about.model_copy(update={"packages": {"torch": "9 @ https://x.invalid"}}).installed(["torch"], "here")
