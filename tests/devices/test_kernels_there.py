"""Steps on quantkit's own kernels, timed on a device's GPU: Triton's interpreter stands in for it, and a script for its
driver."""

import functools
import os
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.planted import Within, reached
from devices.tiny_home import tiny_home
from quantkit.bundle import Bundle, Decision
from quantkit.devices import there as work
from quantkit.devices.measure import measure_on
from quantkit.devices.openssh import Address, OpenSSH
from quantkit.devices.probed import Gpu, Probed, probe
from quantkit.runtimes.torch.packed import joined_layers

pytest.importorskip("triton")  # Linux alone has it

from quantkit.errors import InputError
from quantkit.kernels import linear, matmul
from quantkit.kernels.dispatch import EXPANDED, FILE, Choice, Recorded, Table, versions
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.rows import Row
from quantkit.measurement.timing import cuda as speed_cuda
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.model.source.open import open_model
from quantkit.pipeline.progress import Progress

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = TimingPlan(batches=(2,), contexts=(3,), prefills=(5,), seconds=0.01, cell_seconds=0.01, rounds=1)
GPU = Gpu(name="NVIDIA L4", sm="8.9", memory=24 << 30, driver="575.51")
PROBED = Probed.model_construct(
    packages={"torch": "2.9.1"}, gpus=[GPU], cuda="12.8", triton=True, memory=1 << 35, memory_free=1 << 34
)
# what the device's driver says of it
SMI = f"""#!/bin/sh
case "$*" in *--query-gpu=name,compute_cap,*) echo "{GPU.name}, {GPU.sm}, 23034, {GPU.driver}";; esac
"""


class Notes(Progress):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Path]:
    """A folder with `model`, a tiny decoder, and its bundles: `int4`, which kernels take, and `int3`, which none do."""
    with tiny_home(tmp_path_factory.mktemp("home"), byte_tokenizer, {"int4": "int4", "int3": "int3"}) as path:
        yield path


@pytest.fixture
def bundle(home: Path, tmp_path: Path) -> Bundle:
    """With what was recorded of its linears, on the interpreter."""
    made = Bundle.load(shutil.copytree(home / "int4", tmp_path / "int4"))
    shapes = {(layer.shape[0], layer.shape[1]) for layer in joined_layers(made.model_folder, made.manifest.layers)}
    choices = Table({shape: (Choice(2, EXPANDED, None, 1e-6, 1),) for shape in shapes})
    own = GpuDevice("cpu", dry=True).identity()
    return made.put(FILE, Recorded(own, versions(), "int4.g32.zeros", choices).as_bytes())


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Within:
    # half a second each in the interpreter, a hundred times over: what they take is not what is looked at
    expanded = functools.cache(matmul.dequantize)
    monkeypatch.setattr(linear, "by_slabs", lambda x, w: torch.nn.functional.linear(x, expanded(w, x.dtype)))
    driver(tmp_path / "bin", monkeypatch)
    return Within(tmp_path / "there", monkeypatch)


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia-smi` on the path, and nvidia-ml-py not there."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)


def measured(bundle: Bundle, link: Any, home: Path, about: Probed = PROBED, **how: Any) -> list[Row]:
    asked: dict[str, Any] = {"baseline": str(home / "model"), "plan": PLAN, **how}
    return measure_on(bundle, reached(link, about), runtime="torch", **asked)


def test_steps_there_are_the_rows_of_steps_here(home: Path, bundle: Bundle, link: Within) -> None:
    source = open_model(str(home / "model"))
    here, said = speed_cuda.run(bundle, source, PLAN, GpuDevice("cpu", dry=True))
    assert said == ""
    notes = Notes()
    rows = measured(bundle, link, home, progress=notes)
    timed = [row for row in rows if not row.name.startswith("accuracy.")]

    def key(row: Row) -> Any:
        named = {k: v for k, v in row.settings.items() if isinstance(v, str | bool)}
        return row.name, row.unit, row.batch, str(row.shape), row.baseline and row.baseline.subject, str(named)

    assert sorted(map(str, map(key, timed))) == sorted(map(str, map(key, here)))
    (step,) = [row for row in timed if row.name == "latency.decode_step"]
    (own,) = [row for row in here if row.name == "latency.decode_step"]
    # beside what it is called there, and how many cores that has
    assert step.settings.keys() - own.settings.keys() == {"cores"}
    assert not own.settings.keys() - step.settings.keys()
    linears = 1e-6 * len(joined_layers(bundle.model_folder, bundle.manifest.layers))
    assert step.settings["linears_s"] == pytest.approx(linears)
    assert step.settings["residual_s"] == pytest.approx((step.value or 0) - linears)
    assert notes.lines == []
    # of the GPU what it ran, of the processor what that scored
    for row in rows:
        assert row.device is not None
        kind = "cpu" if row.name.startswith("accuracy.") else "gpu"
        assert (row.device.kind, row.on, row.device.name == GPU.name) == (kind, "box", kind == "gpu"), row.name
        assert row.versions.get("driver") == (GPU.driver if kind == "gpu" else None)
    scored, asked = (job for _, job in link.asked)
    assert [layer["name"] for layer in asked["layers"]] == [layer.name for layer in bundle.manifest.layers]
    assert asked["graphs"] is None and not scored["built"]
    assert {path.name for path in (link.workdir / asked["ours"]["path"]).iterdir()} == {"model", FILE}
    stored = [Row.model_validate(row) for row in Bundle.load(bundle.path).measurements]
    assert {row.name for row in stored if row.on == "box"} == {row.name for row in rows}
    assert measured(Bundle.load(bundle.path), link, home, resume=True) == []


def test_what_no_kernel_takes_there_is_said_here(home: Path, tmp_path: Path, link: Within) -> None:
    bundle, notes = Bundle.load(shutil.copytree(home / "int3", tmp_path / "int3")), Notes()
    other = Recorded({"id": "gpu-x", "kind": "gpu", "name": "another GPU"}, {}, "x", Table({}))
    bundle = bundle.put(FILE, other.as_bytes())
    rows = measured(bundle, link, home, progress=notes)
    (line,) = notes.lines
    assert line.startswith("box: kernels.json was measured on another GPU")
    assert f"no kernel takes these, which are expanded to floats: {len(bundle.manifest.layers)} (the first: " in line
    (step,) = [row for row in rows if row.name == "latency.decode_step"]
    assert step.settings["linears_s"] is None and step.settings["residual_s"] is None


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"cuda": "", "packages": {"torch": "2.9.1+cpu"}}, "box: its torch (2.9.1+cpu) is built without CUDA"),
        ({"triton": False}, "box: its Python has no triton, which compiles the kernels there"),
        ({"gpus": [], "cuda": ""}, ""),
    ],
    ids=["a torch for processors", "no Triton", "no GPU"],
)
def test_where_no_steps_are_timed_one_line_says_why(
    home: Path, bundle: Bundle, link: Within, there: dict[str, Any], said: str
) -> None:
    decisions: list[Decision] = []
    rows = measured(bundle, link, home, PROBED.model_copy(update=there), decisions=decisions)
    assert {row.name.partition(".")[0] for row in rows} == {"accuracy"}
    assert [each.reason for each in decisions if each.code == "speed-not-measured"] == ([said] if said else [])
    # who asks for no times has to know nothing
    measured(bundle, link, home, PROBED.model_copy(update=there), decisions=(quiet := []), speed=False)
    assert [each for each in quiet if each.code == "speed-not-measured"] == []


@pytest.mark.parametrize(
    ("there", "how", "code"),
    [
        ({"gpus": [GPU.model_copy(update={"memory": 1000})]}, {}, r"out-of-memory.*bundle and the float.*--no-speed"),
        ({}, {"baseline": "int4"}, "baseline-needed.*--no-speed"),
    ],
    ids=["a small GPU", "against another bundle"],
)
def test_what_cannot_be_timed_is_said_before_anything_is_carried(
    home: Path, bundle: Bundle, link: Within, there: dict[str, Any], how: dict[str, Any], code: str
) -> None:
    about = PROBED.model_copy(update=there)
    how = {name: str(home / value) for name, value in how.items()}
    with pytest.raises(InputError, match=code) as met:
        measured(bundle, link, home, about, **how)
    assert "\n" not in met.value.line()
    assert not link.workdir.exists()
    # and is no reason not to score it
    assert measured(bundle, link, home, about, speed=False, **how)


def test_the_memory_that_times_take_is_asked_for(
    home: Path, bundle: Bundle, link: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def demand(self: Probed, models: Any, where: str, running: float = 0.0) -> None:
        asked.append(running)
        raise InputError("enough")

    monkeypatch.setattr(Probed, "demand_memory", demand)
    shared = PROBED.model_copy(update={"gpus": [GPU.model_copy(update={"memory": 0})]})
    for about, speed in ((PROBED, False), (shared, True)):
        with pytest.raises(InputError, match="enough"):
            measured(bundle, link, home, about, speed=speed)
    files = sum(path.stat().st_size for path in [*bundle.model_folder.iterdir(), bundle.path / FILE])
    weights = sum(each.numel() for each in open_model(str(home / "model")).load().parameters())
    assert asked[1] - asked[0] == pytest.approx(files + 2 * weights, rel=0.2)


def test_a_gpu_that_torch_there_does_not_see_ends_the_times_alone(
    home: Path, bundle: Bundle, link: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match=r"device-absent.*torch.*no GPU that torch sees") as met:
        measured(bundle, link, home)
    assert "\n" not in met.value.line()
    stored = [Row.model_validate(row) for row in Bundle.load(bundle.path).measurements]
    assert {row.name.partition(".")[0] for row in stored if row.on == "box"} == {"accuracy"}


# --- what a device says of itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "packages", "cuda", "said"),
    [
        ("cuda: Optional[str] = '12.8'", ("torch", "triton"), "12.8", ""),
        ('cuda = "13.0"', ("torch",), "13.0", "no triton"),
        ("cuda: Optional[str] = None", ("torch", "triton"), "", "built without CUDA"),
        ("", ("triton",), "", "built without CUDA"),
    ],
)
def test_the_probe_says_what_torch_there_is_built_for_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, packages: tuple[str, ...], cuda: str, said: str
) -> None:
    venv.create(tmp_path / "python", symlinks=True)
    (site,) = (tmp_path / "python/lib").glob("python3*/site-packages")
    for name in packages:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise SystemExit('imported')")
        (site / name / "version.py").write_text(f"__all__ = ['cuda', 'hip']\n{line}\nhip = '6.1'\n")
    driver(tmp_path / "bin", monkeypatch)
    python = str(tmp_path / "python/bin/python")
    found = probe(OpenSSH(Address("here"), name="here", begin=["sh", "-c"], python=python), str(tmp_path / "there"))
    assert (found.cuda, found.triton) == (cuda, "triton" in packages)
    assert found.gpus == [GPU.model_copy(update={"memory": 23034 << 20})]
    assert said in found.why_no_kernels() and bool(said) == bool(found.why_no_kernels())


@pytest.mark.parametrize(("sm", "runs"), [("7.5", False), ("8.0", True), ("12.0", True), ("[N/A]", True)])
def test_a_gpu_that_is_too_old_for_the_kernels_is_known_before_any_work(sm: str, runs: bool) -> None:
    found = PROBED.model_copy(update={"gpus": [GPU.model_copy(update={"sm": sm})]})
    assert (found.why_no_kernels() == "") == runs
    assert runs or f"SM {sm}" in found.why_no_kernels()


def test_a_device_names_its_gpu_without_a_library_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (work.about().gpu, work.about().driver) == ("", "")
    driver(tmp_path / "bin", monkeypatch)
    assert (work.about().gpu, work.about().driver) == (GPU.name, GPU.driver)
