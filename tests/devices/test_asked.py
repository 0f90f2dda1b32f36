"""What a device is asked beside measuring: its ceilings, a bundle's wholeness, room. Over a real sshd.

And the commands of docs/devices.md as they stand; what takes minutes is only asked for.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_onnx

from devices.conftest import Links, job, numbered
from devices.loopback import Loopback
from devices.test_device_command import said
from quantkit.bundle import Bundle
from quantkit.cli import run
from quantkit.devices import asked
from quantkit.devices.answers import Cells
from quantkit.devices.asked import DeviceTimer
from quantkit.devices.link import Link
from quantkit.devices.named import NamedDevice, reach
from quantkit.devices.openssh import OpenSSH
from quantkit.devices.probed import probe
from quantkit.devices.sides import running
from quantkit.errors import InputError
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.rounds import RoundsJob
from quantkit.measurement.timing.schedule import Shape
from quantkit.target import Target

GUIDE = (Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")
COMMANDS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    """A tiny decoder in 4 bits, as a graph."""
    folder = tmp_path_factory.mktemp("bundle")
    small = small_onnx.export(folder, "llama", small_onnx.scheme(), tokenizer=byte_tokenizer, changes=small_onnx.TEXT)
    return small_onnx.bundle(small.folder).path


@pytest.fixture
def known(devices: Loopback, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """`plain` and `tiny` by name, with this Python, which lacks nothing; their workdir."""
    for name in ("plain", "tiny"):
        words = ("--workdir", tmp_path / name, "--python", sys.executable)
        assert said(capsys, "device", "add", name, f"ssh://{name}", *words)["error"] is None
    return tmp_path


def test_a_doctor_measures_there_and_writes_a_target(
    known: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "RUNS", 2)
    found = said(capsys, "device", "doctor", "tiny", "--write")
    assert found["error"] is None
    rows = {(row["name"], row["settings"].get("compute_type")): row for row in found["result"]["measurements"]}
    assert {row["device"]["on"] for row in rows.values()} == {"tiny"}
    # one core, as sshd gives it
    assert {row["settings"].get("threads", 1) for row in rows.values()} == {1}
    target = Target.load(found["result"]["written"])
    assert target.name == "tiny"
    assert target.memory.capacity.value == 1 << 30
    assert target.memory.read_bandwidth.value == rows["ceiling.read", None]["value"] > 0
    assert target.compute["fp32"].value == rows["ceiling.compute", "fp32"]["value"] > 0
    # a plan reckons with it
    planned = said(capsys, "plan", "llama-3-8b", "--target", found["result"]["written"], "--compare", "int4")
    assert planned["result"]["target"]["name"] == "tiny"
    assert said(capsys, "device", "remove", "tiny")["error"] is None
    assert not Path(found["result"]["written"]).exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("doctor", "--on", "ssh://plain", "--write"), "usage"),
        (("doctor", "--on", "plain", "--target", "cpu-x86"), "usage"),
        (("doctor", "--wheelhouse", "."), "usage"),
        (("doctor", "--on", "plain", "--wheelhouse", "./nothing"), "file-missing"),
        (("doctor", "--on", "pi5"), "unknown-device"),
    ],
)
def test_what_a_doctor_is_not_asked(
    words: tuple[str, ...], code: str, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, *words)["error"]
    assert (found["code"], "\n" in found["value"]) == (code, False)
    assert not (known / "plain").exists()
    assert not list(known.rglob("targets/*.yaml"))


def test_an_emulator_makes_no_target(
    known: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Cells.about
    emulated = property(lambda self: real.fget(self).model_copy(update={"emulated": True}))  # type: ignore[attr-defined]
    monkeypatch.setattr(Cells, "about", emulated)
    assert said(capsys, "device", "doctor", "plain", "--write")["error"]["code"] == "emulated"
    assert not list(known.rglob("targets/*.yaml"))


def test_a_bundle_is_verified_there_and_what_rotted_is_found(
    bundle: Path, known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "verify", bundle, "--on", "plain")
    assert found["error"] is None
    checks = {check["name"]: check["ok"] for check in found["result"]["checks"]}
    assert checks.pop("onnxruntime.loads")
    assert checks == {check.name: True for check in Bundle.load(bundle).verify()}
    # a bit falls over on its card
    (graph,) = (known / "plain/files").rglob("onnx/model.onnx")
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    found = said(capsys, "verify", bundle, "--on", "plain")
    assert (found["exit"], found["error"]["code"]) == (1, "verify-failed")
    assert found["error"]["where"] == "plain: onnx/model.onnx"
    assert found["warnings"] == ["not loaded: files differ"]
    # the remedy is one
    assert "quantkit device clean plain" in found["error"]["remedy"]
    assert said(capsys, "device", "clean", "plain")["result"]["bundles"] == 1
    assert not graph.exists()


def test_a_bundle_that_is_not_whole_here_is_not_carried(
    bundle: Path, known: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    (broken / "onnx/model.onnx").write_bytes(b"x")
    assert said(capsys, "verify", broken, "--on", "plain")["error"]["code"] == "hash-mismatch"
    assert said(capsys, "verify", bundle, "--on", "plain", "--layers", bundle)["error"]["code"] == "usage"
    assert not (known / "plain").exists()


def test_too_little_memory_is_said_before_anything_is_carried(bundle: Path, known: Path) -> None:
    """The weights fit; what a batch needs of keys and values does not."""
    heads, width, layers, tokens = 2, 16, 2, 17
    config = json.loads((bundle / "onnx/config.json").read_text())
    assert (config["num_key_value_heads"], config["num_hidden_layers"]) == (heads, layers)
    assert config["hidden_size"] // config["num_attention_heads"] == width
    # keys and values in float32, of two models
    fits = (1 << 30) // (2 * 4 * heads * width * layers * tokens * 2)
    graph = str(bundle / "onnx")
    small, large = (Shape("decode", batch, tokens - 1) for batch in (1, fits))
    with reach("tiny") as found:
        timer = DeviceTimer(found)
        with pytest.raises(InputError, match=r"out-of-memory.*of its 1\.1 are free"):
            timer(RoundsJob(graph, graph, [large], threads=1, seconds=0.1), lambda share, words: None)
        # what is too large beside something that fits is left out there, with its reason
        found.about.demand_memory([], "tiny", 2 * running(bundle, [small, large], "onnxruntime"))
    assert not (known / "tiny").exists()


def test_a_device_is_cleaned(linked: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, link = tmp_path / "there", linked(kind=Link)
    device = NamedDevice(name="here", address="ssh://here", workdir=str(there))
    way = OpenSSH(link._shell.address, name="here", begin=["sh", "-c"])
    monkeypatch.setattr(asked, "shell", lambda device: way)
    # where nothing was, nothing is made
    assert (asked.clean(device).bytes, there.exists()) == (0, False)
    link.install()
    (tmp_path / "file").write_bytes(b"x" * 1000)
    laid = {"a": tmp_path / "file", "b": tmp_path / "file"}
    link.carry("x", laid)
    (there / "files/.y-begun").mkdir()
    (there / "files/.y-begun/z.part").write_bytes(b"y" * 50)
    # while something is under way all of it stays, and a probe says whose that is
    busy: list[str] = []

    def row(cells: Cells, cell: str) -> None:
        if busy:
            return
        with pytest.raises(InputError, match=r"device-busy.*for: measure"):
            asked.clean(device)
        busy.append(probe(way, str(there)).busy)

    link.run("measure", job("slow", rounds=12), row=row)
    assert busy[0].endswith("has it, for: measure") and probe(way, str(there)).busy == ""
    before = sum(path.stat().st_size for path in there.rglob("*") if path.is_file())
    removed = asked.clean(device)
    after = sum(path.stat().st_size for path in there.rglob("*") if path.is_file())
    assert (removed.bundles, removed.wheels) == (1, 1)
    assert removed.bytes == before - after > 2050
    # what is needed again is carried again
    link.install()
    assert list(link.run("measure", job(rounds=4))) == numbered(4)
    assert (there / link.carry("x", laid) / "a").read_bytes() == b"x" * 1000


def test_a_name_is_not_given_to_another_device_unsaid(devices: Loopback, capsys: pytest.CaptureFixture[str]) -> None:
    add = ("device", "add", "pi5")
    assert said(capsys, *add, "ssh://plain")["error"] is None
    assert said(capsys, *add, "ssh://plain")["error"] is None
    refused = said(capsys, *add, "ssh://tiny")
    assert (refused["exit"], refused["error"]["code"]) == (2, "device-exists")
    assert said(capsys, "device", "show", "pi5")["result"]["address"] == "ssh://plain"
    assert said(capsys, *add, "ssh://tiny", "--force")["error"] is None
    assert said(capsys, "device", "show", "pi5")["result"]["address"] == "ssh://tiny"


# --- the guide -----------------------------------------------------------------------------------------------------


def blocks(text: str) -> list[list[str]]:
    """The commands of each block of a page."""
    found = re.findall(r"```bash\n(.*?)```", text.replace("\\\n", " "), re.DOTALL)
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in found]


TEN = blocks(GUIDE)[0]


def test_a_page_takes_ten_commands() -> None:
    assert len(TEN) == 10
    assert any(line.startswith("xdg-open") for line in TEN)


@pytest.fixture
def place(
    devices: Loopback, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[tuple[str, dict[str, Any]]]]:
    """A folder with a small bundle under the guide's name, hosts under the guide's names; what was to be measured."""
    for name in ("raspberrypi.local", "jetson", "box.example.com", "board"):
        if name not in devices.wires:
            devices.wire(name)
    for name in ("smollm2-135m--int4-cpu", "smollm2-135m--int4-best", "my-bundle"):
        shutil.copytree(bundle, tmp_path / name)
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(asked, "RUNS", 2)
    wanted: list[tuple[str, dict[str, Any]]] = []

    def measure_on(bundle: Any, device: Any, baseline: Any = None, progress: Any = None, **how: Any) -> list[Row]:
        wanted.append((device.link.name, how))
        return []

    @contextmanager
    def measured(on: str, **how: Any) -> Iterator[Any]:
        if how.get("runtimes", ["onnxruntime"]) != ["onnxruntime"]:  # what it lacks is not the question
            yield SimpleNamespace(link=SimpleNamespace(name=on))
        else:
            with reach(on, **how) as found:
                yield found

    monkeypatch.setattr("quantkit.devices.measure.measure_on", measure_on)
    monkeypatch.setattr("quantkit.devices.named.reach", measured)
    return tmp_path, wanted


def as_here(line: str, folder: Path) -> list[str]:
    """A command of the guide, for hosts that are this machine: nobody here is called pi, and no port is that."""
    words = shlex.split(re.sub(r"ssh://(\w+@)?([\w.]+)(:\d+)?", r"ssh://\2", line).replace("~", str(folder)))[1:]
    if words[:2] == ["device", "add"]:
        if "--workdir" in words:
            words[words.index("--workdir") + 1] = str(folder / "there" / words[2])
        else:
            words += ["--workdir", str(folder / "there" / words[2])]
        words += ["--python", sys.executable]
    return words


def test_the_commands_run(
    place: tuple[Path, list[tuple[str, dict[str, Any]]]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = place
    for line in [line for block in blocks(GUIDE) for line in block if line.startswith("quantkit ")]:
        words = as_here(line, folder)
        if words[0] == "compile":  # that it takes a path is its own tests' business; that it is this one is ours
            assert Target.load(words[words.index("--target") + 1]).name == "pi5"
            continue
        if words[0] == "export":  # an engine wants a GPU: `test_engine_there.py`
            continue
        code = run(words)
        assert code == 0, (words, capfd.readouterr().err)
    assert [on for on, _ in wanted] == ["pi5", "pi5", "jetson", "box", "box", "box", "board"]
    assert [how["resume"] for _, how in wanted] == [False, True, False, False, False, False, False]
    assert [how["runtime"] for _, how in wanted[4:6]] == ["torch", "tensorrt_rtx"]
    # `clean` leaves nothing of what was carried
    assert not list((folder / "there/pi5").glob("files/[!.]*"))
    assert not list((folder / "there/pi5").glob("wheels/*"))


def test_the_page_of_commands_shows_those_of_the_guide() -> None:
    asked = [line for block in blocks(COMMANDS) for line in block if "device " in line or "--on " in line]
    shown = [line for line in asked if "ray://" not in line]  # a cluster is no device
    assert len(shown) == 3
    for line in shown:
        assert re.sub(r" +", " ", line).replace("awq-int4", "int4-cpu") in TEN
