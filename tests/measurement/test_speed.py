"""The timing's own process: what it is asked, what it answers, and how its end is told."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from small_onnx import Small, export, scheme

from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.rows import Row
from quantkit.measurement.timing import speed
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.measurement.timing.speed import SpeedJob, SpeedSide, footprint, run
from quantkit.runtimes.child import Caller
from quantkit.scheme import ActivationScheme

PLAN = TimingPlan(batches=(1,), contexts=(16,), prefills=(8,), seconds=0.05, cell_seconds=0.05, rounds=1)
CHANGES = {"vocab_size": 258, "num_hidden_layers": 1}  # as in tests/pipeline, so that it is traced once


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Small, Small]:
    """int4 at level 4, and float."""
    home = tmp_path_factory.mktemp("speed")
    return (
        export(home / "int4", "llama", scheme(), changes=CHANGES, accuracy_level=4),
        export(home / "float", "llama", None, changes=CHANGES),
    )


@pytest.fixture(scope="module")
def job(pair: tuple[Small, Small]) -> SpeedJob:
    ours, theirs = (str(small.onnx) for small in pair)
    return SpeedJob(SpeedSide(ours, "ours", "int4"), SpeedSide(theirs, "theirs", "float32"), 1, PLAN)


class Told(Caller):
    """What the child would tell."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.rows: list[Row] = []
        self.shares: list[float] = []

    def row(self, data: Any) -> None:
        self.rows.append(Row.model_validate(json.loads(json.dumps(data))))

    def at(self, share: float, words: str) -> None:
        self.shares.append(share)


def in_this_process(job: SpeedJob, monkeypatch: pytest.MonkeyPatch) -> Told:
    """The child's work, done here."""
    ceilings = [
        Ceiling("ceiling.read", "B/s", (1e10, 1e10), {}, {}),
        Ceiling("ceiling.compute", "flop/s", (1e11,), {"compute_type": "fp32"}, {}),
        Ceiling("ceiling.compute", "op/s", (1e11,), {"compute_type": "int8"}, {}),
    ]
    monkeypatch.setattr("quantkit.measurement.operators.ceilings.measured", lambda threads: ceilings)
    told = Told()
    speed._time(json.loads(json.dumps(asdict(job))), told)
    return told


# --- the child --------------------------------------------------------------------------------------------------------


def test_it_times_both_and_says_how_far_it_is(
    job: SpeedJob, pair: tuple[Small, Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = in_this_process(job, monkeypatch)
    assert told.shares[-1] == 1.0 and told.shares == sorted(told.shares)
    named = {row.name: row for row in told.rows}
    assert {"latency.decode_step", "latency.prefill", "bandwidth.effective", "tax.total"} <= set(named)
    step = named["latency.decode_step"]
    assert step.baseline is not None
    assert (step.subject, step.baseline.subject) == ("ours", "theirs")
    assert (step.settings["accuracy_level"], step.settings["compute_type"]) == (4, "int8")
    assert step.settings["baseline_format"] == "float32"
    tax = named["tax.total"]
    assert tax.op is not None
    assert tax.op.format == "int4"
    # what a step must move: the exporter's figure, a cache of 16 tokens read and of one written, its logits
    loaded = pair[0].load()
    read = int(loaded.meta["quantkit.step_bytes"])
    assert 0 < read < loaded.weight_bytes
    moved = named["bandwidth.effective"].settings["bytes"]
    assert isinstance(moved, int | float)
    assert read <= moved <= read + 20 * loaded.cache_bytes + 8 * loaded.vocabulary


def test_an_encoder_is_timed_by_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = ActivationScheme(format="int8")
    ours = export(tmp_path / "ours", "bert", scheme("int8", granularity="channel"), activations=how)
    theirs = export(tmp_path / "theirs", "bert")
    plan = TimingPlan(batches=(), contexts=(), prefills=(8, 100), prefill_batches=(1, 3), seconds=0.05, rounds=1)
    sides = SpeedSide(str(ours.onnx), "ours", "int8"), SpeedSide(str(theirs.onnx), "theirs", "float32")
    rows = in_this_process(SpeedJob(*sides, 1, plan), monkeypatch).rows
    passes = {(row.batch, (row.shape or {})["new_tokens"]): row for row in rows if row.name == "latency.prefill"}
    assert set(passes) == {(1, 8), (3, 8), (1, 100), (3, 100)}
    assert all(row.baseline is not None and row.value for (_, new), row in passes.items() if new == 8)
    assert passes[1, 100].flags == ["prompt-too-long-baseline"], "the model has 64 positions"
    assert passes[1, 8].settings["compute_type"] == "int8"
    # over the batch: a model that does not decode has no other M
    assert {row.settings["over"] for row in rows if row.name == "tax.break_even"} == {"batch"}
    # 3 layers of 4 matrices 64 x 64 and two of 64 x 96, and attention over all tokens
    meta = ours.load().meta
    assert int(meta["quantkit.flops"]) == 2 * 3 * (4 * 64 * 64 + 2 * 64 * 96)
    assert (int(meta["quantkit.attention_flops"]), footprint(sides[0], 1)["new_tokens"]) == (3 * 8 * 64, 64)


def test_what_it_meets_is_its_answer(job: SpeedJob, tmp_path: Path) -> None:
    """Really started."""
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(InputError, match="onnx-unreadable"):
        footprint(SpeedSide(str(tmp_path), "ours", "int4"), 1)


def test_it_weighs_one_side_in_a_process_of_its_own(
    job: SpeedJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Really started, in a folder that holds a trap for whoever imports from there."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    found = footprint(job.ours, 1)
    assert 0 < found["before"] < found["resident"] <= found["peak"]
    assert found["context"] == 63, "the model has 64 positions"


# --- whoever started it -----------------------------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the interpreter that is started by a shell script."""

    def replace(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def ended(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def weighing(kilobytes: dict[str, int]) -> dict[str, int]:
    return {"before": 1000, "new_tokens": 1, "context": 63, **{name: 1000 * size for name, size in kilobytes.items()}}


def test_rows_come_back_with_the_memory_of_both(
    job: SpeedJob, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(name="latency.prefill", value=0.5, unit="s", subject="ours").line()
    child(f"""read job; echo 'at 0.5 decode, batch 1'; echo 'row {row}'; echo chatter of a library""")
    sizes = {"ours": {"resident": 40, "peak": 50}, "theirs": {"resident": 80, "peak": 100}}
    monkeypatch.setattr(speed, "footprint", lambda part, threads: weighing(sizes[part.subject]))
    told: list[tuple[float, str]] = []
    rows = run(job, lambda share, words: told.append((share, words)))
    assert told == [(0.5, "decode, batch 1")]
    assert [found.name for found in rows] == ["latency.prefill", "memory.peak"]
    peak = rows[1]
    assert peak.baseline is not None
    assert (peak.value, peak.resident_bytes) == (50_000, 40_000)
    assert (peak.baseline.value, peak.baseline.ratio) == (100_000, 2.0)
    assert (peak.shape, peak.settings["baseline_resident"]) == ({"new_tokens": 1, "context": 63}, 80_000)


def test_an_error_of_the_child_is_ours(job: SpeedJob, child: Callable[[str], None], tmp_path: Path) -> None:
    fields = {"code": "onnx-unreadable", "where": "x", "value": "y", "rule": "z", "remedy": "w"}
    child(f"echo $$ > {tmp_path}/pid; echo 'error {json.dumps(fields)}'; exec sleep 60")
    with pytest.raises(InputError, match="onnx-unreadable"):
        run(job)
    assert ended(tmp_path / "pid"), "and the child is not waited for"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'Traceback' >&2; echo 'RuntimeError: no luck' >&2; exit 1", "exit code 1: RuntimeError: no luck"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("exit 3", "ended with exit code 3"),
    ],
)
def test_a_child_that_ends_without_a_word_is_told_of(
    script: str, says: str, job: SpeedJob, child: Callable[[str], None]
) -> None:
    child(script)
    with pytest.raises(InputError) as caught:
        run(job)
    assert caught.value.code == "speed-failed"
    assert says in caught.value.value
    assert "\n" not in caught.value.line()


def test_a_stop_ends_the_child_too(
    job: SpeedJob, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(speed, "footprint", lambda part, threads: weighing({}))
    child(f"echo $$ > {tmp_path}/pid; echo 'at 0.1 decode'; exec sleep 60")

    def stop(share: float, words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, stop)
    assert ended(tmp_path / "pid")


def test_what_does_not_fit_is_refused_before_anything_is_started(
    job: SpeedJob, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("exit 1")
    monkeypatch.setattr("quantkit.machine.memory_available", lambda: 1000)
    with pytest.raises(InputError, match="out-of-memory"):
        run(job)


@pytest.mark.parametrize("package", ["onnxruntime", "scipy"])
def test_what_is_missing_is_said_before_anything_is_started(
    package: str, job: SpeedJob, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("exit 1")
    monkeypatch.setattr("quantkit.machine.has", lambda name: name != package)
    with pytest.raises(MissingDependency, match=rf"{package}.*-e '\.\[onnx\]'"):
        run(job)


def test_a_graph_that_says_nothing_of_its_work_is_taken_by_its_files(pair: tuple[Small, Small], job: SpeedJob) -> None:
    """One that somebody else exported."""
    model: Any = pair[1].load()
    model.meta = {}
    cost = StepCost(job.theirs.format, **model.work())
    assert (cost.weight_bytes, cost.flops_per_token) == (model.weight_bytes, 0)
