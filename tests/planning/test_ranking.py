"""The order of recipes follows what fits, what is native, the loss and the time; losses are those of the records."""

import json
from dataclasses import replace
from pathlib import Path

import planned
import pytest

from quantkit import content
from quantkit.pipeline.plan import PlanQuestion, every, plan
from quantkit.planning.outlook import Outlook, PlannedCell
from quantkit.planning.ranking import Loss, Losses, rank
from quantkit.target import Target

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def outlook(model: str = "llama-3-8b", target: str = "h100", batch: int = 1, recipes: tuple[str, ...] = ()) -> Outlook:
    question = PlanQuestion(model, recipes, target, batches=(batch,))
    return plan(question if recipes else every(question), samples=())


def losses(**kl: float) -> Losses:
    return Losses(
        schema=1, model="another", recipes={name.replace("_", "-"): Loss(kl=value) for name, value in kl.items()}
    )  # type: ignore[call-arg]


def order(whole: Outlook, known: Losses | None = None) -> list[str]:
    return [one.candidate.recipe for one in rank(whole, known)[1]]


def test_the_first_is_recommended_and_every_recipe_that_runs_has_its_place() -> None:
    whole, ranked = rank(outlook())
    assert whole.recommendation.label == ranked[0].candidate.label == "int4-best"
    assert len(ranked) == len(whole.candidates) > 15
    assert any("2.74 times fewer bytes" in reason for reason in ranked[0].because)
    assert any("quantkit tax" in reason for reason in whole.recommendation.because)


def test_of_small_losses_the_faster_comes_first_and_a_larger_loss_comes_later() -> None:
    whole = outlook(recipes=("float", "int8-weights", "awq-int4"))
    assert order(whole, losses(int8_weights=0.01, awq_int4=0.05)) == ["awq-int4", "int8-weights", "float"]
    assert order(whole, losses(int8_weights=0.01, awq_int4=0.15)) == ["int8-weights", "float", "awq-int4"]


def test_about_as_fast_the_smaller_loss_comes_first() -> None:
    whole = outlook(recipes=("awq-int4", "int4-symmetric"))
    assert order(whole, losses(awq_int4=0.05, int4_symmetric=0.06)) == ["awq-int4", "int4-symmetric"]
    assert order(whole, losses(awq_int4=0.06, int4_symmetric=0.05)) == ["int4-symmetric", "awq-int4"]


def test_what_does_not_fit_and_what_is_emulated_comes_after_what_is_neither() -> None:
    whole = outlook("llama-3-70b", batch=16)
    ranked = rank(whole)[1]
    assert [one.fits for one in ranked] == sorted((one.fits for one in ranked), reverse=True)
    assert not ranked[-1].fits and "it does not fit" in ranked[-1].because
    first = whole.candidates[1]
    emulated = replace(first, cells=[PlannedCell("int4", "weights", "emulated", "test")])
    ranked = rank(replace(whole, candidates=[whole.candidates[0], emulated, *whole.candidates[2:]]))[1]
    place = next(number for number, one in enumerate(ranked) if one.candidate is emulated)
    assert all(one.native for one in ranked[:place]) and "smaller, not faster" in ranked[place].because[-2]


def test_a_loss_of_more_bits_than_the_recipe_has_here_does_not_count() -> None:
    known = Losses(schema=1, model="another", recipes={"awq-int4": Loss(kl=0.01, bits=5.4)})  # type: ignore[call-arg]
    whole = outlook(recipes=("float", "awq-int4"))
    assert {one.candidate.recipe: one.loss is None for one in rank(whole, known)[1]} == {
        "float": False,
        "awq-int4": True,
    }


def test_of_a_model_that_does_not_decode_no_loss_is_claimed() -> None:
    whole, ranked = rank(outlook("bert-base", "cpu-x86"))
    assert all(one.loss is None for one in ranked)
    assert whole.recommendation.label == "int8-encoder"
    because = " ".join(whole.recommendation.because)
    assert "no KL was measured on models that do not generate" in because
    assert "ranked by bits and bytes, since no time is known" in because


def test_the_shipped_losses_come_from_one_benchmark_on_one_model() -> None:
    shipped, rows, ways = Losses.shipped(), {}, set()
    for name in {loss.record for loss in shipped.recipes.values()}:
        record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        mine = [row for row in record["rows"] if row["model"] == shipped.model]
        rows |= {(name, row["recipe"]): row for row in mine}
        ways |= {(record["benchmark"], record["settings"]["set"], row["scored"]) for row in mine}
        assert {row["samples"] for row in mine} <= {8, None}
    assert len(ways) == 1, "other positions are no scale for these"
    both = [row["kl"] for (_, recipe), row in rows.items() if recipe == "int8-weights"]
    assert len(both) == 2 and max(both) == pytest.approx(min(both), rel=1e-3), "the records share a scale"
    for name, loss in shipped.recipes.items():
        assert name in content.names("recipes")
        row = rows[loss.record, name]
        low, high = row["kl_ci95"]
        assert (loss.kl, loss.half) == (pytest.approx(row["kl"], abs=5e-5), pytest.approx((high - low) / 2, abs=5e-5))
        assert loss.bits == pytest.approx(row["bits"], abs=5e-3)


def test_the_classes_of_losses() -> None:
    names = [Loss(kl=kl).name for kl in (0.0, 0.02, 0.1, 0.25, 0.3)]
    assert names == ["none", "tiny", "small", "moderate", "large"]


FIGURES = {"memory.read_bandwidth": 4e10, "memory.capacity": 2.5e10, "compute.fp32": 2e11, "compute.int8": 1e12}


def measured(name: str) -> Target:
    """A target with what `quantkit doctor --write` would have measured."""
    return planned.unmeasured().resolve({"figures": FIGURES}) if name == "cpu-x86, measured" else Target.load(name)


@pytest.mark.parametrize("target", ["h100", "rtx-4090", "cpu-x86-avx2", "cpu-x86", "cpu-x86, measured"])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3-8b", "qwen3-30b-a3b", "bert-base"])
def test_plan_and_recommend_give_one_verdict(model: str, target: str) -> None:
    aimed = measured(target)
    whole, ranked = rank(plan(every(PlanQuestion(model, (), aimed)), samples=()))
    first, order = whole.recommendation.label, [one.candidate.recipe for one in ranked]
    again = plan(PlanQuestion(model, tuple(order[::-1]), aimed), samples=())
    assert again.recommendation.label == first == order[0], "whatever else is planned, batch 1 is judged"
    for recipe in ("int4-cpu", "int4-best", "awq-int4", "gguf-q4_k_m", "fp8", "rtn-int4"):
        if recipe in order and recipe != first:
            before = min(recipe, "float", key=order.index)
            pair = plan(PlanQuestion(model, ("float", recipe), aimed), samples=())
            assert pair.recommendation.label == before, recipe
