from __future__ import annotations

from typing import Any

import pytest

from quantkit.bundle import Check, LayerEntry
from quantkit.measure.latency import Plan
from quantkit.measure.rows import Row
from quantkit.pipeline import worth
from quantkit.pipeline.gates import judge
from quantkit.pipeline.request import Request, for_target, this_machine
from quantkit.recipe import Gates, Recipe
from quantkit.target import Target

LAYER = LayerEntry(name="a", shape=[8, 8], scheme={"format": "int4"}, bits_per_weight=4.5)


def step(batch: int, ratio: float, runtime: str = worth.RUNTIME) -> Row:
    data: dict[str, Any] = {
        "name": "latency.decode_step",
        "value": 0.01,
        "unit": "s",
        "better": "lower",
        "n": 120,
        "subject": "s",
        "baseline": {
            "subject": "b",
            "value": 0.01 * ratio,
            "ratio": ratio,
            "ratio_ci95": [ratio * 0.97, ratio * 1.03],
        },
        "batch": batch,
        "shape": {"new_tokens": 1, "context": 16},
        "runtime": runtime,
    }
    return Row.model_validate(data)


def target() -> Target:
    return Target.load(this_machine())


def test_the_verdict_rests_on_the_batches_of_the_target_that_were_timed() -> None:
    rows = [step(1, 2.0), step(4, 1.5), step(16, 0.8)]
    found = worth.decide(rows, [], [LAYER], target())
    assert found is not None
    assert (found.answer, found.batch) == ("ship_up_to", 4)
    slower = worth.decide([step(1, 0.5)], [], [LAYER], target())
    assert slower is not None and slower.answer == "do_not_quantize"


def test_there_is_no_verdict_where_nothing_was_timed_or_nothing_is_quantized() -> None:
    assert worth.decide([], [], [LAYER], target()) is None
    assert worth.decide([step(1, 2.0, runtime="torch")], [], [LAYER], target()) is None
    assert worth.decide([step(1, 2.0)], [], [], target()) is None


def test_a_failed_gate_decides_before_any_speed() -> None:
    failed = Check(name="gate.kl_max", value=1.0, limit=0.1, ok=False)
    found = worth.decide([step(1, 3.0)], [failed], [LAYER], target())
    assert found is not None and found.answer == "do_not_quantize"


def test_shapes_are_cut_to_the_context_of_a_model() -> None:
    plan = worth.fitting(Plan(contexts=(128, 1024), prefills=(64, 256, 1024)), 200)
    assert (plan.contexts, plan.prefills) == ((128, 199), (64, 200))


@pytest.mark.parametrize(("name", "here"), [("h100", False), ("cpu-x86", None), ("cpu-arm", None)])
def test_only_a_target_of_this_kind_is_timed(name: str, here: bool | None) -> None:
    assert worth.runs_here(Target.load(name)) is (name == this_machine() if here is None else here)


def test_each_runtime_is_held_against_each_gate() -> None:
    rows = [
        Row(name="accuracy.kl", value=value, unit="nat", subject="s", runtime=runtime)
        for runtime, value in (("torch", 0.1), ("onnxruntime", 0.3))
    ]
    checks, decisions = judge(Gates(kl_max=0.2, cosine_min=0.5), rows)
    assert [(check.name, check.ok) for check in checks] == [
        ("gate.kl_max", True),
        ("gate.onnxruntime.kl_max", False),
    ]
    assert [decision.code for decision in decisions] == ["gate-not-judged"]


def test_an_export_that_the_target_cannot_read_is_left_out_and_named() -> None:
    both = Recipe.load("awq-int4")
    kept, left_out = for_target(both, Target.load("h100"))
    assert ([step.name for step in kept.export], left_out) == (["checkpoint"], ("onnx",))
    alone = Recipe.load("int4-cpu")
    assert for_target(alone, Target.load("h100")) == (alone, ())
    with pytest.raises(Exception, match="target-cannot-run"):
        Request.of(recipe="int4-cpu", target="h100")


def test_options_left_out_are_the_targets() -> None:
    recipe = Recipe.load("int4-cpu", ["export=[{onnx: {}}]"])
    kept, _ = for_target(recipe, Target.load("cpu-x86"))
    assert kept.export[0].options == {"accuracy_level": 4}
    chosen = Recipe.load("int4-cpu", ["export=[{onnx: {accuracy_level: 0}}]"])
    kept, _ = for_target(chosen, Target.load("cpu-x86"))
    assert kept.export[0].options == {"accuracy_level": 0}
