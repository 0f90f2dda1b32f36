"""The doctor: plausible ceilings as rows, figures that reach the target, none measured on another machine."""

import io
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.doctor import doctor, tensorrt
from quantkit.measurement.operators import ceilings
from quantkit.measurement.rows import Row
from quantkit.pipeline.request import runs_here
from quantkit.report import terminal
from quantkit.target import Target, measured_path

HERE = "cpu-arm" if machine.isa().startswith(("neon", "sve")) else "cpu-x86"
ELSEWHERE = "cpu-x86" if HERE == "cpu-arm" else "cpu-arm"


def shown(report: dict[str, Any]) -> str:
    """What a terminal shows of it."""
    console = Console(width=200, file=io.StringIO())
    console.print(*terminal.machine(report, {"vllm": "0.32.0 in python"}))
    found: str = console.file.getvalue()  # type: ignore[attr-defined]
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    # bandwidth is measured over several times as much, and a server's takes seconds to be written once
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)


def test_doctor_measures_what_the_target_leaves_open_and_writes_it() -> None:
    report = doctor(Target.load(HERE), write=True, runs=7, size=256)
    rows = [Row.model_validate(row) for row in report["measurements"]]
    assert [row.name for row in rows] == ["ceiling.read", "ceiling.copy", *["ceiling.compute"] * 3]
    assert [row.unit for row in rows] == ["B/s", "B/s", "flop/s", "op/s", "flop/s"]
    for row in (*rows[:3], rows[4]):
        assert row.value is not None
        assert 1e8 < row.value < 1e14
        assert row.ci95 is not None
        assert row.ci95[0] <= row.value <= row.ci95[1]
    after = Target.load(HERE)
    assert after.memory.read_bandwidth.number == rows[0].value
    assert (after.memory.capacity.number, after.arch.isa) == (machine.memory_limit(), machine.isa_features())
    assert machine.cpu_name() in after.memory.read_bandwidth.source
    assert (set(after.unmeasured()), report["written"]) == (set(report["unmeasured"]), str(measured_path(HERE)))


def test_nothing_is_written_unasked() -> None:
    report = doctor(Target.load(HERE), runs=1, size=64)
    assert report["written"] is None
    assert not measured_path(HERE).exists()


def test_figures_of_one_architecture_are_not_measured_on_another() -> None:
    with pytest.raises(InputError) as caught:
        doctor(Target.load(ELSEWHERE), write=True, runs=1, size=64)
    assert caught.value.code == "wrong-machine"


def test_figures_of_a_processor_are_measured_on_one_that_has_its_instructions() -> None:
    here = Target.load(HERE)
    other = here.model_copy(update={"arch": here.arch.model_copy(update={"isa": ["amx_of_tomorrow"]})})
    with pytest.raises(InputError, match="the machine has no amx_of_tomorrow"):
        doctor(other, write=True, runs=1, size=64)
    assert not runs_here(other)
    assert runs_here(here)


CARD = {"name": "A GPU", "sm": "8.9", "memory": 1, "driver": "1"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of SM 8.9 with 24 GB, for which Triton's interpreter stands in: its rates are nothing beside an L4's."""
    pytest.importorskip("triton")  # Linux alone has it
    import torch

    from quantkit.measurement.cuda import device

    real = device.GpuDevice
    monkeypatch.setattr(device, "GpuDevice", lambda *_, **__: real("cpu", dry=True))
    monkeypatch.setattr(machine, "gpus", lambda: ([CARD], ""))
    monkeypatch.setattr("quantkit.measurement.doctor._torch_blind", lambda: "")
    for name, answer in (
        ("get_device_name", "A GPU"),
        ("get_device_capability", (8, 9)),
        ("get_device_properties", types.SimpleNamespace(total_memory=24e9)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_a_gpu_target_without_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ([], "no card"))
    report = doctor(Target.load("l4"), write=True)
    assert (report["measurements"], report["written"], report["stated"]) == ([], None, {})
    first, second = report["warnings"]
    assert first == "nothing was measured of l4: no card"
    assert second == "nothing was written: l4 states all of its figures"
    assert first in shown(report)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_measured_beside_what_its_target_states() -> None:
    report = doctor(Target.load("l4"))
    rows = [Row.model_validate(row) for row in report["measurements"]]
    assert {row.name for row in rows} == {"ceiling.read", "ceiling.copy", "ceiling.compute", "ceiling.launch"}
    assert {"memory.read_bandwidth", "compute.fp16", "compute.int8"} <= report["stated"].keys()
    assert report["stated"]["memory.read_bandwidth"] == pytest.approx(rows[0].value / 300e9)
    assert report["figures"] == {}
    assert not [each for each in report["warnings"] if "differ" not in each]
    assert "0% of what the target states" in shown(report)
    assert "launch" in shown(report)


@pytest.mark.usefixtures("gpu")
def test_another_card_and_one_that_cannot_be_measured_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor(Target.load("h200"))["warnings"] == [
        "nothing was measured of h200: A GPU is SM 8.9, the target SM 9.0"
    ]
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=48e9))
    warned = doctor(Target.load("l4"))["warnings"]
    assert warned[0] == "A GPU has 48 GB, l4 24: it is another card"

    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB\nmore")

    monkeypatch.setattr("quantkit.measurement.cuda.device.measured", full)
    report = doctor(Target.load("l4"))
    assert report["warnings"] == ["nothing was measured of l4: A GPU: CUDA out of memory. Tried to allocate 4.00 GiB"]
    assert report["machine"]


def test_without_torch_the_int8_rate_is_null_with_the_reason() -> None:
    program = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxruntime"}:
            raise ModuleNotFoundError(name)
class Spec(Absent): ...
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {"torch", "onnx", "onnxruntime"} else real(name, *rest)
sys.meta_path.insert(0, Absent())
from quantkit import machine
from quantkit.measurement.doctor import doctor
from quantkit.target import Target
machine.last_level_cache = lambda: 1 << 20
row = doctor(Target.load(sys.argv[1]), runs=1, size=64)["measurements"][3]
assert row["value"] is None and "torch is not installed" in row["flags"][0], row
"""
    subprocess.run([sys.executable, "-c", program, HERE], check=True)


def test_median_interval_covers_the_median_and_needs_six_values() -> None:
    assert ceilings.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert ceilings.median_interval([float(x) for x in range(6)]) == (0.0, 5.0)  # P(miss) = 2 / 64 = 3.1 %
    # the table of order statistics: n = 15 has the 4th and the 12th
    assert ceilings.median_interval([float(x) for x in range(1, 16)]) == (4.0, 12.0)
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        low, high = ceilings.median_interval(list(generator.exponential(size=15))) or (0.0, 0.0)
        hits += low <= np.log(2) <= high
    assert hits / 400 > 0.93


def test_rates_count_the_work_that_was_done() -> None:
    # a task of a known duration: the rate is work over time, whatever the work is called
    import time

    samples = ceilings._timed(lambda: time.sleep(0.02), 2.0, 3)
    assert len(samples) == 3
    assert all(2.0 / 0.2 < sample <= 2.0 / 0.02 for sample in samples)


def test_noisy_runs_are_flagged() -> None:
    steady = ceilings.Ceiling("ceiling.read", "B/s", (1.0,) * 8, {}, {"bytes": 1})
    shaken = ceilings.Ceiling("ceiling.read", "B/s", (1.0,) * 4 + (2.0,) * 4, {}, {"bytes": 1})
    about = {"device": machine.device(), "versions": {}}
    assert (steady.row(**about).flags, shaken.row(**about).flags) == ([], ["noisy"])
    assert shaken.row(**about).aa_spread == 0.5


def test_it_says_what_tensorrt_lacks_here() -> None:
    pytest.importorskip("tensorrt_rtx")
    (rtx, full) = tensorrt([], "no NVIDIA driver")
    assert "8.9" in rtx["builds_for"]
    assert rtx["missing"] == ["it runs no engine here: no NVIDIA driver"]
    assert full["library"] == "tensorrt" and full["missing"] == ["not installed; pip install tensorrt"]
    hopper = {"name": "NVIDIA H200", "sm": "9.0"}
    (rtx, _) = tensorrt([hopper], "")
    assert rtx["missing"][0] == "NVIDIA H200 is SM 9.0, for which it has no engines"
