"""An engine built on a device comes back into the bundle: built by TensorRT-RTX, without a GPU; a file's way back."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_onnx

from devices.conftest import Links
from devices.local import local
from devices.loopback import Loopback
from devices.planted import Planted, reached
from quantkit import cli
from quantkit.bundle import Bundle, seal
from quantkit.devices.asked import export_on
from quantkit.devices.openssh import Address, Conversation, OpenSSH
from quantkit.devices.probed import Gpu, Probed, probe
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.runtimes.tensorrt.file import verified
from quantkit.target import Profile

pytestmark = pytest.mark.usefixtures("one_thread")
PROFILE = Profile(name="decode", batch=(1, 1, 2), length=(1, 1, 4), context=(1, 16, 60))
A10 = Gpu(name="NVIDIA A10", sm="8.6", memory=1, driver="575")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a float network, without an engine, for a card of SM 8.9."""
    found = small_onnx.export(
        tmp_path_factory.mktemp("engine"),
        "llama",
        None,
        exporter=load_exporter("tensorrt"),
        engine=False,
        changes=small_onnx.LAYERS,
        profiles=[PROFILE.model_dump()],
    )
    bundle = small_onnx.bundle(found.folder)
    target = {"runtimes": ["tensorrt_rtx"], "arch": {"sm": "8.9"}, "profiles": [PROFILE.model_dump(mode="json")]}
    seal.write_manifest(found.folder, bundle.manifest.model_copy(update={"target": target}).as_bytes())
    return found.folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Bundle:
    return Bundle.load(shutil.copytree(made, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def about() -> Probed:
    """This machine, with TensorRT-RTX and no GPU."""
    found = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"], python=sys.executable), "~/quantkit")
    return found.model_copy(update={"packages": {"tensorrt-rtx": "1.7"}, "gpus": []})


def test_an_engine_is_built_there_and_checked_here(bundle: Bundle, about: Probed, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    device = local(tmp_path / "there", "box", gpus=[A10], packages={"tensorrt-rtx": "1.7"})
    before = bundle.manifest.content_sha256
    assert export_on(bundle, reached(device.link, about), "tensorrt", dry_run=True).engine == ""
    assert not (tmp_path / "there").exists()
    done = export_on(bundle, device, "tensorrt")
    assert done.engine == "engine/sm86.engine", "the device's GPU, not the target's"
    after = Bundle.load(bundle.path)
    assert after.manifest.content_sha256 == before
    files = verified(after)
    record = json.loads((bundle.path / "engine" / "sm86.json").read_text())
    assert record["built_on"] == "box" and record["sm"] == ["8.6"]
    assert files[bundle.path / "engine" / "sm86.engine"] == record["sha256"]
    (said,) = [each for each in after.manifest.decisions if each.where == "engine/sm86.engine"]
    assert said.reason.startswith("built on box by tensorrt_rtx 1.") and said.reason in done.says
    # what this machine builds of it is the same but for what the library itself draws
    assert record["bytes"] == (bundle.path / "engine" / "sm86.engine").stat().st_size
    assert not list((tmp_path / "there" / "made").iterdir())
    assert [path.name for path in bundle.path.parent.iterdir() if path.name.startswith(".")] == []


class Lying(Planted):
    """A device that says one thing of its engine and gives another."""

    def __init__(self, data: bytes, **said: Any) -> None:
        self.data = data
        sha = hashlib.sha256(data).hexdigest()
        built = {"library": "tensorrt_rtx", "version": "1", "sm": ["8.9"], "gpu": "", "bytes": len(data)}
        super().__init__(("engine", [{**built, "sha256": sha, "seconds": 1.0, "layers": 1, **said}]), name="box")

    def fetch(self, sha256: str, size: int, to: Path, progress: Any = None) -> None:
        to.write_bytes(self.data)


@pytest.mark.parametrize(
    "said",
    [
        {"sm": ["9.0"]},
        {"library": "tensorrt"},
        {"gpu": "mine"},
        {"bytes": 1 << 40},
        {"bytes": 0},
        {"bytes": 5},
        {"x": 1},
    ],
    ids=str,
)
def test_what_a_device_may_not_say_of_it(bundle: Bundle, about: Probed, said: dict[str, Any]) -> None:
    before = (bundle.path / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="answer-invalid"):
        export_on(bundle, reached(Lying(b"engine", **said), about), "tensorrt")
    assert (bundle.path / "manifest.json").read_bytes() == before
    assert not list((bundle.path / "engine").glob("*.engine"))
    assert [path.name for path in bundle.path.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("changes", "there", "code"),
    [
        (["library=tensorrt"], {}, "runtime-not-here"),
        (["library=tensorrt"], {"packages": {"tensorrt": "11"}}, "gpu-absent"),
        (["library=tensorrt", "sm='8.9'"], {"packages": {"tensorrt": "11"}, "gpus": [A10]}, "gpu-other"),
        (["version_compatible=true"], {}, "layout-unsupported"),
        ([], {"packages": {}}, "runtime-not-here"),
        (["engine=false"], {}, "engine-missing"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_carried(
    bundle: Bundle, about: Probed, changes: list[str], there: dict[str, Any], code: str
) -> None:
    link = Planted()
    with pytest.raises(InputError) as met:
        export_on(bundle, reached(link, about.model_copy(update=there)), "tensorrt", changes)
    assert met.value.code == code and "\n" not in met.value.line()
    assert not link.carried


def test_only_what_is_built_needs_a_device(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", str(made), "--to", "onnx", "--on", "ssh://nowhere.invalid"]) == 2
    assert "export-unsupported" in capsys.readouterr().err
    words = ["export", str(made), "--to", "tensorrt", "--autotune-qdq", "--on", "ssh://nowhere.invalid"]
    assert cli.run(words) == 2
    assert "usage" in capsys.readouterr().err


# --- the way back -----------------------------------------------------------------------------------------------------


def left_there(linked: Links, folder: Path, data: bytes) -> tuple[Any, str, Path]:
    """A link, and a file that a work has left there."""
    link = linked()
    (folder / "seed").write_bytes(b"seed")
    link.carry("x", {"seed": folder / "seed"})
    sha = hashlib.sha256(data).hexdigest()
    path = folder / "there" / "made" / sha
    path.parent.mkdir()
    path.write_bytes(data)
    return link, sha, path


def test_a_file_comes_back_whole_and_is_gone_there(linked: Links, tmp_path: Path) -> None:
    data = os.urandom((2 << 20) + 17)
    link, sha, there = left_there(linked, tmp_path, data)
    shares: list[float] = []
    link.fetch(sha, len(data), tmp_path / "got", lambda share, words: shares.append(share))
    assert (tmp_path / "got").read_bytes() == data
    assert shares[-1] == 1.0 and not there.exists()
    with pytest.raises(InputError, match=r"device-failed.*absent"):
        link.fetch(sha, len(data), tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got", "seed", "there"]


@pytest.mark.parametrize(("change", "code"), [("longer", "answer-invalid"), ("other", "transfer-damaged")])
def test_what_is_not_what_was_made_is_not_taken(linked: Links, tmp_path: Path, change: str, code: str) -> None:
    data = os.urandom(1 << 20)
    link, sha, there = left_there(linked, tmp_path, data)
    there.write_bytes(data + b"more" if change == "longer" else bytes(len(data)))
    with pytest.raises(InputError, match=code):
        link.fetch(sha, len(data), tmp_path / "got")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed", "there"]


def test_an_engine_comes_over_a_line_that_is_cut(
    bundle: Bundle,
    devices: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command, with the runner that travels, through sshd; the way back breaks once and goes on."""
    pytest.importorskip("tensorrt_rtx")
    wire, lines, cut = devices.wires["plain"], Conversation.lines, []

    def broken(self: Conversation, most: int, line_most: int | None = None) -> Iterator[bytes]:
        for line in lines(self, most, line_most):
            yield line
            if line_most == 2 << 20 and not cut:  # of a file on its way
                cut.append(line)
                wire.cut()

    monkeypatch.setattr(Conversation, "lines", broken)
    there = tmp_path / "there"
    words = ["device", "add", "box", "ssh://plain", "--workdir", str(there), "--python", sys.executable]
    assert cli.run(words) == 0, capsys.readouterr().err
    assert cli.run(["export", str(bundle.path), "--to", "tensorrt", "--on", "box", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]
    assert found["engine"] == "engine/sm89.engine"
    assert cut
    verified(Bundle.load(bundle.path))
    record = json.loads((bundle.path / "engine" / "sm89.json").read_text())
    assert record["built_on"] == "box"
    assert not (there / "made" / record["sha256"]).exists()
