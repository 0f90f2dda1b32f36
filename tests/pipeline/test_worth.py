"""Was it worth it: what is timed, against what, and which rows a verdict rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from planted_times import Timer, rows

from quantkit.bundle import Bundle, Check, LayerEntry
from quantkit.errors import GateError, InputError, MissingDependency
from quantkit.measurement.rows import Row
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.measurement.timing.speed import SpeedJob, SpeedSide
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline import measure as measuring
from quantkit.pipeline import verdict
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.request import runs_here, this_machine
from quantkit.runtimes import load_runtime
from quantkit.target import Target

if TYPE_CHECKING:
    from conftest import Made

PLAN = TimingPlan(batches=(1, 2, 8), contexts=(16,), prefills=(8,), seconds=0.5, rounds=1)
HERE = Target.load(this_machine())
ELSEWHERE = {"id": "cpu-elsewhere", "kind": "cpu", "name": "Another"}


def job(baseline: str = "source", form: str = "float32") -> SpeedJob:
    return SpeedJob(SpeedSide("a", "ours", "int4"), SpeedSide("b", baseline, form), 2, PLAN)


def layer(form: str) -> LayerEntry:
    return LayerEntry(name="x", shape=[8, 8], scheme={"format": form}, bits_per_weight=4.0)


LAYERS = [layer("int4"), layer("int4"), layer("int8")]


def test_only_a_processor_of_this_kind_can_be_timed_here() -> None:
    other = {"cpu-x86": "cpu-arm", "cpu-arm": "cpu-x86"}[this_machine()]
    assert runs_here(HERE)
    assert not runs_here(Target.load(other))
    assert not runs_here(Target.load("h100"))
    data = {key: value for key, value in HERE.as_dict().items() if key != "name"}
    assert not runs_here(Target.from_dict({**data, "runtimes": ["torch"], "build": {}}, name="own"))


def test_the_format_of_a_bundle_is_that_of_most_layers() -> None:
    assert verdict.format_of(LAYERS) == "int4"
    assert verdict.format_of([]) == "float32"


@pytest.mark.parametrize(
    ("context", "contexts", "prefills"),
    [(4096, (128, 1024), (64, 256, 1024)), (1024, (128, 1023), (64, 256, 1024)), (100, (99,), (64, 100))],
)
def test_shapes_that_a_model_does_not_have_are_shortened(
    context: int, contexts: tuple[int, ...], prefills: tuple[int, ...]
) -> None:
    """A step needs room for its own token as well."""
    found = measuring.fitting(TimingPlan(), context)
    assert (found.contexts, found.prefills) == (contexts, prefills)
    assert found.batches == TimingPlan().batches


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"max_position_embeddings": None, "n_ctx": 8}, 8),
        ({}, 4096),
    ],
)
def test_the_context_is_the_config_s(config: dict[str, Any], context: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_runtime("onnxruntime").context(tmp_path) == context


# --- timing -----------------------------------------------------------------------------------------------------------


def test_a_compile_times_what_fits_against_the_same_export_of_the_source(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Timer()
    monkeypatch.setattr("quantkit.measurement.timing.speed.run", timer)
    monkeypatch.setattr(
        "quantkit.pipeline.measure.float_export", lambda source, exporter, options: made.floating / "onnx"
    )
    source, bundle = open_model(str(made.model)), Bundle.load(made.both)
    original = measuring.MeasuredAgainst(source.sha256, stream=StreamedModel(source))
    found, decisions = measuring.quick_times(bundle, original, "onnxruntime", Progress())
    ours = bundle.manifest.content_sha256
    assert decisions == []
    assert {row.subject for row in found if row.baseline} == {ours}
    (asked,) = timer.jobs
    assert (asked.ours.subject, asked.ours.format) == (ours, "int4")
    assert (asked.theirs.subject, asked.theirs.format) == (source.sha256, "float32")
    assert (asked.plan.batches, asked.plan.contexts, asked.plan.prefills) == ((1,), (63,), (64,))


@pytest.mark.parametrize(
    "problem",
    [
        InputError("out-of-memory", value="too much"),
        MissingDependency("scipy", extra="onnx", purpose="x"),
        GateError("check-failed", where="float baseline"),
    ],
    ids=lambda problem: str(problem.code),
)
def test_what_prevents_timing_is_a_decision_and_not_the_end_of_a_compile(
    problem: Exception, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise problem

    monkeypatch.setattr("quantkit.pipeline.measure.float_export", fail)
    source = open_model(str(made.model))
    original = measuring.MeasuredAgainst(source.sha256, stream=StreamedModel(source))
    found, decisions = measuring.quick_times(Bundle.load(made.both), original, "onnxruntime", Progress())
    assert found == []
    assert [each.code for each in decisions] == ["speed-not-measured"]
    assert problem.code in decisions[0].reason  # type: ignore[attr-defined]


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_a_verdict_is_on_the_batches_of_the_target_that_were_measured() -> None:
    found = verdict.decide(rows(job(), lambda batch: 2.0 if batch < 8 else 0.5), [], LAYERS, HERE)
    assert found is not None
    assert (found.answer, found.batch) == ("ship_up_to", 2)
    data = {key: value for key, value in HERE.as_dict().items() if key != "name"}
    small = Target.from_dict({**data, "batches": [1, 2]}, name="own")
    whole = verdict.decide(rows(job(), lambda batch: 2.0 if batch < 8 else 0.5), [], LAYERS, small)
    assert whole is not None
    assert whole.answer == "ship_it"
    none = Target.from_dict({**data, "batches": [64]}, name="own")
    instead = verdict.decide(rows(job(), lambda batch: 2.0), [], LAYERS, none)
    assert instead is not None, "none of its batches: of those that there are"
    assert instead.answer == "ship_it"


def test_prompts_stand_beside_the_steps_and_are_offered_what_the_exporter_has() -> None:
    fast = HERE.model_copy(update={"arch": HERE.arch.model_copy(update={"isa": ["avx512_vnni"]})})
    timed = [
        row.model_copy(update={"baseline": row.baseline.model_copy(update={"ratio": 0.5, "ratio_ci95": (0.49, 0.51)})})
        if row.name == "latency.prefill" and row.baseline
        else row
        for row in rows(job(), lambda batch: 2.0)
    ]
    found = verdict.decide(timed, [], LAYERS, fast, [{"onnx": {"head_rows": 8}}])
    assert found is not None
    assert found.prompts is not None
    # of the target's batches those above 8 were not timed, and what was not timed has not won
    assert (found.answer, found.batch, found.prompts.slower) == ("ship_up_to", 8, [8])
    assert "batches above 8: not timed; `quantkit measure BUNDLE` times them" in found.because
    assert "`--set onnx.prefill=int8`" in found.instead
    without = verdict.decide(timed, [], LAYERS, fast, [{"checkpoint": None}])
    assert without is not None
    assert "--set" not in without.instead


def test_without_times_or_without_codes_there_is_no_verdict() -> None:
    assert verdict.decide([], [], LAYERS, HERE) is None
    assert verdict.decide(rows(job(), lambda batch: 2.0), [], [], HERE) is None
    torch = [row.model_copy(update={"runtime": "torch"}) for row in rows(job(), lambda batch: 2.0)]
    assert verdict.decide(torch, [], LAYERS, HERE) is None


def test_a_failed_gate_decides_alone() -> None:
    failed = Check(name="gate.onnxruntime.kl_max", value=0.3, limit=0.25, ok=False)
    for timed in ([], rows(job(), lambda batch: 2.0)):
        found = verdict.decide(timed, [failed], LAYERS, HERE)
        assert found is not None
        assert found.answer == "do_not_quantize"
        assert "gate.onnxruntime.kl_max" in found.because[0]


def test_a_model_that_does_not_decode_is_judged_by_its_passes() -> None:
    plan = measuring.fitting(measuring.quick("encoder"), 100, "encoder")
    assert (plan.batches, plan.contexts) == ((), ())
    assert (plan.prefill_batches, plan.prefills) == ((1, 32), (32, 100))
    timed = rows(
        SpeedJob(SpeedSide("a", "ours", "int8"), SpeedSide("b", "source", "float32"), 2, plan), lambda b: 2.0 / b
    )
    found = verdict.decide(timed, [], LAYERS, HERE)
    assert found is not None
    assert (found.answer, found.batch) == ("ship_up_to", 1)


def test_rows_against_others_are_not_about_the_original() -> None:
    accuracy = Row(name="accuracy.kl", value=0.1, unit="nat", subject="ours", device=ELSEWHERE)
    against = {"subject": "other", "value": 30.0}
    foreign = Row(name="accuracy.perplexity", value=33.0, unit="1", subject="ours", baseline=against)
    mine, theirs = rows(job(), lambda batch: 2.0), rows(job("other"), lambda batch: 0.5)
    found = verdict.of_original([accuracy, *mine, foreign, *theirs], "source")
    assert {row.baseline.subject for row in found if row.baseline} == {"source"}
    assert accuracy in found
    assert foreign not in found


def test_of_two_machines_times_those_of_the_last_count() -> None:
    accuracy = Row(name="accuracy.kl", value=0.1, unit="nat", subject="ours", device=ELSEWHERE)
    before, now = rows(job(), lambda batch: 0.5, device=ELSEWHERE), rows(job(), lambda batch: 2.0)
    found = verdict.of_original([accuracy, *before, *now], "source")
    assert accuracy in found, "is no matter of the machine"
    assert [row for row in found if verdict.is_timing(row)] == now
    assert verdict.of_original([accuracy], "source") == [accuracy]


def test_each_runtime_has_the_times_of_its_own_device() -> None:
    ours = rows(job(), lambda batch: 2.0)
    card = [
        row.model_copy(update={"runtime": "torch"} if row.runtime else {})
        for row in rows(job(), lambda batch: 3.0, device=ELSEWHERE)
    ]
    assert verdict.of_original([*ours, *card], "source") == [*ours, *card]


# --- page and card ----------------------------------------------------------------------------------------------------


def test_the_documents_of_a_bundle(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.load(made.both)
    files, decisions = verdict.documents(bundle.manifest, rows(job(), lambda batch: 2.0), bundle.path)
    assert decisions == []
    assert bundle.manifest.content_sha256.encode() in (files["README.md"] or b"")
    assert (files[verdict.REPORT] or b"").startswith(b"<!")

    def fail(*_: object, **__: object) -> str:
        raise MissingDependency("plotly", extra="report", purpose="the report page")

    monkeypatch.setattr("quantkit.report.kit.html.page", fail)
    files, decisions = verdict.documents(bundle.manifest, [], bundle.path)
    assert files[verdict.REPORT] is None
    assert [each.code for each in decisions] == ["page-not-made"]
    assert "plotly" in decisions[0].reason


@pytest.mark.parametrize("text", [None, "", "{", "[1, 2]", '{"blocks": 1}', "null"])
def test_a_harm_that_is_missing_or_damaged_is_none(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / verdict.HARM).write_text(text)
    assert verdict.read_harm(tmp_path) is None


def test_the_harm_is_read_as_it_was_written(made: Made) -> None:
    found = verdict.read_harm(made.both)
    assert found is not None
    assert [block.name for block in found.blocks] == ["model.layers.0"]
    assert 0 < found.blocks[0].error < 1
    assert {layer.name for layer in found.layers} == {layer.name for layer in Bundle.load(made.both).manifest.layers}
    assert len(found.worst) == 10


def test_a_verdict_says_where_another_runtime_is_faster_with_the_same_file() -> None:
    plain = rows(job(), lambda batch: 1.5)
    own = [
        row.model_copy(update={"runtime": "quantkit_cpu"})
        for row in rows(job(), lambda batch: 3.0 if batch == 1 else 1.5)
    ]
    both = verdict.decide([*plain, *own], [], LAYERS, HERE)
    assert both is not None
    (line,) = [each for each in both.because if "quantkit_cpu" in each]
    assert "batch 1 3.0" in line and "batch 2" not in line and "batch 8" not in line
    # an interval that reaches the other's decides nothing
    vague = [
        row
        if row.baseline is None
        else row.model_copy(update={"baseline": row.baseline.model_copy(update={"ratio_ci95": (1.0, 9.0)})})
        for row in own
    ]
    open_ = verdict.decide([*plain, *vague], [], LAYERS, HERE)
    assert open_ is not None and not any("quantkit_cpu" in each for each in open_.because)
    alone = verdict.decide(own, [], LAYERS, HERE)
    assert alone is not None and any("timed in quantkit_cpu alone" in each for each in alone.because)
