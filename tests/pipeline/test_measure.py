"""A finished bundle measured again: what is refused first, what is kept, and what verdict, page and card make of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zoo
from planted_times import Timer, rows

from quantkit.bundle import Bundle, Verdict
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.pipeline.measure import batches_of, default_runtime, measure_bundle, with_changes
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import REPORT, is_timing
from quantkit.target import Target

if TYPE_CHECKING:
    from conftest import Made

Copy = Callable[[Path], Bundle]
PLAN = TimingPlan(batches=(1, 2), contexts=(16,), prefills=(8,), seconds=0.5, rounds=1)


class Notes(Progress):
    """What was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def timer(made: Made, monkeypatch: pytest.MonkeyPatch) -> Timer:
    found = Timer()
    monkeypatch.setenv("QUANTKIT_CACHE", str(made.model.parent / "cache"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    monkeypatch.setattr("quantkit.measurement.timing.speed.run", found)
    monkeypatch.setattr(
        "quantkit.pipeline.measure.float_export", lambda source, exporter, options: made.floating / "onnx"
    )
    return found


def stored(bundle: Bundle, name: str) -> list[Row]:
    return [row for row in map(Row.model_validate, Bundle.load(bundle.path).measurements) if row.name == name]


def sound(bundle: Bundle) -> bool:
    return all(check.ok for check in Bundle.load(bundle.path).verify())


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.machine.has", lambda package: package != "torch")


# --- what it does -----------------------------------------------------------------------------------------------------


def test_everything_that_the_runtime_runs_is_measured_and_decided_on(made: Made, copied: Copy, timer: Timer) -> None:
    bundle = copied(made.both)
    assert bundle.manifest.verdict is None
    found = measure_bundle(bundle, str(made.model), plan=PLAN)
    names = {row.name for row in found}
    assert names >= {"accuracy.kl", "size.bytes", "latency.decode_step", "latency.prefill"}
    assert {row.subject for row in found if row.runtime} == {bundle.manifest.content_sha256}
    after = Bundle.load(bundle.path)
    assert isinstance(after.manifest.verdict, Verdict)
    # the target has larger batches than were timed
    assert (after.manifest.verdict.answer, after.manifest.verdict.batch) == ("ship_up_to", max(PLAN.batches))
    times = [row for row in stored(bundle, "latency.decode_step") if row.baseline]
    because = " ".join(after.manifest.verdict.because)
    assert all(f"{row.baseline.ratio:.2f} times" in because for row in times if row.baseline)
    assert after.manifest.content_sha256 == bundle.manifest.content_sha256
    assert sound(bundle)
    for name in (REPORT, "README.md"):
        assert "2.00" in (bundle.path / name).read_text(), name
    # the same accuracy as the compile had found, in both runtimes, and each once
    kl = {row.runtime: row.value for row in stored(Bundle.load(made.both), "accuracy.kl")}
    assert {row.runtime: row.value for row in stored(after, "accuracy.kl")} == pytest.approx(kl)
    assert len(stored(after, "accuracy.kl")) == 2
    (job,) = timer.jobs
    assert job.theirs.subject == bundle.manifest.model.source.sha256


def test_rows_of_a_kind_are_there_once_and_torch_leaves_the_verdict(made: Made, copied: Copy, timer: Timer) -> None:
    bundle = copied(made.both)
    first = measure_bundle(bundle, str(made.model), plan=PLAN)
    found = measure_bundle(bundle, str(made.model), runtime="torch")
    assert {row.runtime for row in found if row.name.startswith("accuracy.")} == {"torch"}
    assert not [row for row in found if is_timing(row)]
    before = Bundle.load(bundle.path)
    assert before.manifest.verdict is not None
    assert before.manifest.verdict.answer == "ship_up_to"
    assert len(timer.jobs) == 1
    assert [check.name for check in before.manifest.checks] == [check.name for check in bundle.manifest.checks]
    timer.ratio = lambda batch: 0.5
    assert len(measure_bundle(bundle, str(made.model), plan=PLAN)) == len(first)
    after = Bundle.load(bundle.path)
    assert len(after.measurements) == len(before.measurements)
    assert after.manifest.verdict is not None
    assert after.manifest.verdict.answer == "do_not_quantize"


def test_on_the_gpu_of_its_target_steps_in_torch_are_timed(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def steps(bundle: Bundle, source: Any, plan: TimingPlan, device: Any, **_: Any) -> tuple[list[Row], str]:
        asked.append((bundle.path, source.sha256, plan, device.torch_device))
        return [], "no kernel takes 2 linears"

    monkeypatch.setattr("quantkit.measurement.timing.cuda.run", steps)
    monkeypatch.setattr("quantkit.machine.gpus", lambda: ([{"name": "NVIDIA H100", "sm": "9.0"}], ""))
    bundle, notes = copied(made.both), Notes()
    measure_bundle(bundle, str(made.model), runtime="torch", plan=PLAN)
    assert not asked, "its target is a processor"
    monkeypatch.setattr("quantkit.pipeline.measure.target_of", lambda manifest: Target.load("h100"))
    measure_bundle(bundle, str(made.model), notes, runtime="torch", plan=PLAN)
    source = bundle.manifest.model.source.sha256
    assert asked == [(bundle.path, source, PLAN, "cuda")] and notes.lines == ["no kernel takes 2 linears"]
    with pytest.raises(InputError, match="baseline-needed"):
        measure_bundle(bundle, str(made.packed), runtime="torch", plan=PLAN)
    measure_bundle(bundle, str(made.model), runtime="torch", plan=PLAN, speed=False)
    monkeypatch.setattr("quantkit.machine.gpus", lambda: ([{"name": "Tesla V100", "sm": "7.0"}], ""))
    measure_bundle(bundle, str(made.model), old := Notes(), runtime="torch", plan=PLAN)
    assert len(asked) == 1 and "SM 7.0" in old.lines[0]


def test_a_bundle_without_a_graph_is_measured_in_torch(made: Made, copied: Copy, timer: Timer) -> None:
    bundle = copied(made.packed)
    assert default_runtime(bundle) == "torch"
    assert default_runtime(Bundle.load(made.both)) == "onnxruntime"
    measure_bundle(bundle, str(made.model), plan=PLAN)
    assert timer.jobs == []
    assert Bundle.load(bundle.path).manifest.verdict is None
    assert sound(bundle)


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torch", [True, False])
def test_a_float_bundle_of_the_same_model_is_the_original(
    torch: bool, made: Made, copied: Copy, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And needs no torch: what an edge box does."""
    if not torch:
        without_torch(monkeypatch)
    bundle = copied(made.both)
    found = measure_bundle(bundle, str(made.floating), plan=PLAN)
    assert not [row for row in found if row.name.startswith("accuracy.")], "it has no checkpoint to score against"
    after = Bundle.load(bundle.path)
    assert after.manifest.verdict is not None
    assert len(stored(after, "accuracy.kl")) == 2, "what had been measured is still there"
    (job,) = timer.jobs
    assert job.theirs.path == str(made.floating / "onnx")
    assert (job.theirs.subject, job.theirs.format) == (bundle.manifest.model.source.sha256, "float32")


def test_against_something_else_it_is_compared_and_not_judged(made: Made, copied: Copy, timer: Timer) -> None:
    bundle = copied(made.both)
    measure_bundle(bundle, str(made.model), plan=PLAN)
    before, count = Bundle.load(bundle.path), len(stored(bundle, "latency.decode_step"))
    timer.ratio = lambda batch: 0.5
    found = measure_bundle(bundle, str(made.both), plan=PLAN)
    other = Bundle.load(made.both).manifest.content_sha256
    assert {row.baseline.subject for row in found if row.baseline} == {other}
    assert timer.jobs[-1].theirs.format == "int4"
    after = Bundle.load(bundle.path)
    assert after.manifest.verdict == before.manifest.verdict
    for name in ("README.md", REPORT, "items-onnxruntime.safetensors"):
        assert [entry for entry in after.manifest.files if entry.path == name] == [
            entry for entry in before.manifest.files if entry.path == name
        ]
    assert len(stored(after, "latency.decode_step")) == 2 * count
    assert len(stored(after, "tax.break_even")) == 1, "it does not say against what"
    assert sound(bundle)


def test_a_shape_that_did_not_fit_once_gives_way_when_it_does(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(job: Any, progress: object = None) -> list[Row]:
        found = rows(job, lambda batch: 2.0)
        lost = {"value": None, "baseline": None, "flags": ["out-of-memory"], "n": None, "aa_spread": None}
        return [row.model_copy(update=lost) if row.batch == 2 else row for row in found]

    bundle = copied(made.both)
    with monkeypatch.context() as patched:
        patched.setattr("quantkit.measurement.timing.speed.run", half)
        measure_bundle(bundle, str(made.model), plan=PLAN)
    lost = Bundle.load(bundle.path).manifest.verdict
    assert lost is not None
    assert (lost.answer, lost.batch) == ("ship_up_to", 1)
    measure_bundle(bundle, str(made.model), plan=PLAN)
    found = Bundle.load(bundle.path).manifest.verdict
    assert found is not None
    assert found.answer == "ship_up_to"


# --- gates ------------------------------------------------------------------------------------------------------------


def test_a_gate_that_only_the_added_graph_fails_is_judged_when_it_is_measured(made: Made, copied: Copy) -> None:
    """An export to a finished bundle is scored by nobody before."""
    bundle = copied(made.both)
    kl = {row.runtime: row.value or 0.0 for row in stored(bundle, "accuracy.kl")}
    assert kl["onnxruntime"] != kl["torch"]
    worse = "onnxruntime" if kl["onnxruntime"] > kl["torch"] else "torch"
    gates = {**bundle.manifest.recipe["gates"], "kl_max": sum(kl.values()) / 2}
    bundle = bundle.put_all({}, recipe={**bundle.manifest.recipe, "gates": gates})
    measure_bundle(bundle, str(made.model), plan=PLAN)
    after = Bundle.load(bundle.path).manifest
    named = {check.name: check.ok for check in after.checks if check.name.startswith("gate.")}
    assert named == {"gate.kl_max": worse != "torch", "gate.onnxruntime.kl_max": worse != "onnxruntime"}
    assert after.state == "gate_failed"
    assert after.verdict is not None
    assert after.verdict.answer == "do_not_quantize"


# --- another machine --------------------------------------------------------------------------------------------------


def test_times_taken_here_are_no_verdict_on_a_target_elsewhere(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.verdict.runs_here", lambda target: False)
    bundle, notes = copied(made.both), Notes()
    measure_bundle(bundle, str(made.model), notes, plan=PLAN)
    assert Bundle.load(bundle.path).manifest.verdict is None
    assert stored(bundle, "latency.decode_step")
    assert any("another machine" in line for line in notes.lines)
    measure_bundle(bundle, str(made.model), runtime="torch")
    assert Bundle.load(bundle.path).manifest.verdict is None


def test_accuracy_measured_elsewhere_leaves_the_verdict_of_the_target(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(made.both)
    measure_bundle(bundle, str(made.model), plan=PLAN)
    before = Bundle.load(bundle.path).manifest.verdict
    monkeypatch.setattr("quantkit.pipeline.verdict.runs_here", lambda target: False)
    measure_bundle(bundle, str(made.model), runtime="torch")
    assert Bundle.load(bundle.path).manifest.verdict == before


# --- what is refused, before anything is measured ---------------------------------------------------------------------


def refused(code: str, *arguments: Any, **options: Any) -> str:
    def never(*_: object, **__: object) -> object:
        raise AssertionError("it is refused before it is scored")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.measurement.accuracy.score.rows", never)
        with pytest.raises((InputError, MissingDependency)) as caught:
            measure_bundle(*arguments, **options)
    assert caught.value.code == code
    return caught.value.line()


def test_a_bundle_that_cannot_be_written_is_refused_first(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> object:
        raise OSError(30, "Read-only file system")

    bundle = copied(made.both)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    refused("bundle-not-writable", bundle, str(made.model), plan=PLAN)


@pytest.mark.parametrize("name", ["onnx/model.onnx.data", "model/model.safetensors"])
def test_a_damaged_bundle_is_refused_whichever_side_it_is_on(name: str, made: Made, copied: Copy) -> None:
    bundle = copied(made.both)
    path = bundle.path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert name in refused("hash-mismatch", bundle, str(made.model), plan=PLAN)
    assert name in refused("hash-mismatch", Bundle.load(made.both), str(bundle.path), plan=PLAN)


def test_a_baseline_that_lacks_what_is_needed(made: Made, tmp_path: Path, own_cache: Path) -> None:
    both = Bundle.load(made.both)
    assert "llama.tiny" in refused("baseline-needed", both, plan=PLAN)
    refused("baseline-needed", both, runtime="torch")
    refused("bundle-without-onnx", both, str(made.packed), plan=PLAN)
    refused("bundle-without-checkpoint", both, str(made.floating), speed=False)
    refused("bundle-without-checkpoint", both, str(made.floating), runtime="torch")
    refused("file-missing", both, str(tmp_path / "nowhere"), plan=PLAN)
    refused("unknown-model", both, "nothing", plan=PLAN)
    refused("bundle-without-onnx", Bundle.load(made.packed), str(made.model), runtime="onnxruntime")
    refused("bundle-without-checkpoint", Bundle.load(made.floating), str(made.model), runtime="torch")


def test_a_baseline_that_does_something_else(made: Made, tmp_path: Path, byte_tokenizer: Any) -> None:
    for name, changes, code in (
        ("bert", {"vocab_size": 258}, "baseline-kind"),
        ("llama", {"vocab_size": 300}, "baseline-vocabulary"),
    ):
        folder = tmp_path / f"{name}.other"
        zoo.save(folder, byte_tokenizer, name, num_hidden_layers=1, **changes)
        refused(code, Bundle.load(made.both), str(folder), plan=PLAN)


def test_without_torch_what_can_be_measured_is_said(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    both = Bundle.load(made.both)
    assert "--recipe float" in refused("baseline-needed", both, plan=PLAN)
    for options in ({"speed": False}, {"runtime": "torch"}):
        assert "-e '.[compile]'" in refused("missing-dependency", both, str(made.floating), **options)
        refused("missing-dependency", both, **options)


@pytest.mark.parametrize("package", ["scipy", "onnxruntime"])
def test_what_timing_needs_is_looked_for_before_it_begins(
    package: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.machine.has", lambda name: name != package)
    said = refused("missing-dependency", Bundle.load(made.both), str(made.model), runtime="onnxruntime", plan=PLAN)
    assert package in said


# --- what goes wrong later --------------------------------------------------------------------------------------------


def test_what_was_measured_before_the_timing_failed_is_kept(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[Row]:
        raise InputError("speed-failed", value="ended with -9")

    bundle, notes = copied(made.both), Notes()
    kept = [row for row in bundle.measurements if row["runtime"] != "onnxruntime"]
    bundle = bundle.put("measurements.jsonl", "".join(f"{Row.model_validate(row).line()}\n" for row in kept).encode())
    monkeypatch.setattr("quantkit.measurement.timing.speed.run", fail)
    with pytest.raises(InputError, match="speed-failed"):
        measure_bundle(bundle, str(made.model), notes, plan=PLAN)
    assert {row.runtime for row in stored(bundle, "accuracy.kl")} == {"torch", "onnxruntime"}
    assert any("kept" in line for line in notes.lines)
    assert sound(bundle)


def test_a_stop_while_timing_leaves_the_bundle_as_it_was(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> list[Row]:
        raise KeyboardInterrupt

    bundle = copied(made.both)
    monkeypatch.setattr("quantkit.measurement.timing.speed.run", stop)
    with pytest.raises(KeyboardInterrupt):
        measure_bundle(bundle, str(made.model), plan=PLAN)
    assert Bundle.load(bundle.path) == bundle
    assert sound(bundle)


def test_a_bundle_that_changed_meanwhile_is_left_alone(
    made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch, timer: Timer, tmp_path: Path
) -> None:
    bundle = copied(made.both)

    def change(job: Any, progress: object = None) -> list[Row]:
        shutil.copytree(made.model, tmp_path / "gguf")
        Bundle.load(bundle.path).add_content("gguf", tmp_path / "gguf")
        return timer(job)

    monkeypatch.setattr("quantkit.measurement.timing.speed.run", change)
    with pytest.raises(InputError, match="bundle-changed"):
        measure_bundle(bundle, str(made.model), plan=PLAN)
    assert sound(bundle)


def test_an_old_page_does_not_outlive_its_figures(made: Made, copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise MissingDependency("plotly", extra="report", purpose="the report page")

    bundle, notes = copied(made.both), Notes()
    assert (bundle.path / REPORT).is_file()
    monkeypatch.setattr("quantkit.report.kit.html.page", fail)
    measure_bundle(bundle, str(made.model), notes, plan=PLAN)
    assert not (bundle.path / REPORT).exists()
    assert any("plotly" in line for line in notes.lines)
    assert sound(bundle)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_the_batches_are_the_target_s_as_far_as_a_machine_has_patience(made: Made) -> None:
    bundle = Bundle.load(made.both)
    assert batches_of(bundle) == [1, 2, 4, 8, 16, 32]
    target = {**(bundle.manifest.target or {}), "batches": [64, 128]}
    assert batches_of(Bundle(bundle.path, bundle.manifest.model_copy(update={"target": target}))) == [1]


def test_a_plan_takes_what_is_given() -> None:
    plan = TimingPlan()
    assert with_changes(plan, None, None) == plan
    assert with_changes(plan, [4, 1, 4], 60.0) == replace(plan, batches=(1, 4), seconds=60.0)
