"""The choice follows the times, and bits where times do not tell."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import (
    Outlook,
    PlannedBatch,
    PlannedMemory,
    PlannedRecipe,
    Recommendation,
    Workload,
)
from quantkit.planning.ranking import Losses, rank
from quantkit.planning.roofline import Bound, ModelStep
from quantkit.planning.traffic import traffic
from quantkit.target import Target

WORK = Workload([1, 8], prompt=100, output=10, context=110, traffic=traffic(prompt=100, output=10, rate=2.0))


def recommend(candidates: list[PlannedRecipe], work: Workload) -> Recommendation:
    """The choice among recipes whose losses nobody measured."""
    plan = Outlook(configs.read("llama-3-8b"), Target.load("h100"), work, candidates, Recommendation(None, ()))
    unknown = Losses(schema=1, model="none", recipes={})  # type: ignore[call-arg]
    return rank(plan, unknown)[0].recommendation


def timed(least: float | None, forecast: float | None = None, spread: float = 0.0) -> TimedStep:
    interval = (forecast * (1 - spread), forecast * (1 + spread)) if forecast is not None else None
    return TimedStep(Bound(ModelStep(1), []), least, forecast, interval, "test")


def candidate(label: str, bits: float | None, step: TimedStep, **more: Any) -> PlannedRecipe:
    rows = [PlannedBatch(batch, step, step, {}, more.pop(f"fits_{batch}", True)) for batch in (1, 8)]
    return PlannedRecipe(label, "float" if label == "bf16" else label, bits=bits, rows=rows, **more)


def test_the_faster_one_is_taken_and_swapping_times_swaps_the_answer() -> None:
    slow, fast = timed(1.0, 2.0, 0.1), timed(1.0, 1.0, 0.1)
    for label, steps in (("int4", (fast, slow)), ("bf16", (slow, fast))):
        found = recommend([candidate("int4", 4.3, steps[0]), candidate("bf16", None, steps[1])], WORK)
        assert found.label == label
        assert "at batch 8" in found.because[0]
        assert "≥" not in "".join(found.because)


def test_where_intervals_meet_the_one_with_more_bits_is_taken() -> None:
    found = recommend([candidate("int4", 4.3, timed(1, 1.0, 0.2)), candidate("fp8", 8.0, timed(1, 1.3, 0.2))], WORK)
    assert found.label == "fp8"
    assert "not surely" in found.because[1]


def test_bounds_are_set_against_bounds() -> None:
    """A forecast is above every bound: set against one, it would lose to whatever was never measured."""
    found = recommend([candidate("int4", 4.3, timed(1.0, 5.0)), candidate("bf16", None, timed(3.0))], WORK)
    assert found.label == "int4"
    assert any("times are bounds" in line for line in found.because)
    assert all("≥" in line for line in found.because[:2])


def test_on_bounds_a_tenth_is_no_difference() -> None:
    found = recommend([candidate("int4", 4.3, timed(1.0)), candidate("fp8", 8.0, timed(1.05))], WORK)
    assert found.label == "fp8"


def test_on_bounds_fewer_devices_are_taken_where_times_are_tied() -> None:
    """What several devices tell each other is in no bound."""
    memory = PlannedMemory({}, 1, 8e10, 1.0, None, None, 1, 1)
    floats = candidate("bf16", None, timed(0.25), memory=replace(memory, devices=4))
    found = recommend([floats, candidate("int4", 4.3, timed(1.0), memory=memory)], WORK)
    assert found.label == "int4"
    assert "on more devices (bf16: 4)" in found.because[1]
    swift = replace(floats, rows=candidate("bf16", None, timed(0.2)).rows)
    assert recommend([swift, candidate("int4", 4.3, timed(1.0), memory=memory)], WORK).label == "bf16"


def test_what_cannot_run_or_does_not_fit_is_not_taken() -> None:
    memory = PlannedMemory({"weights": 9e10}, 1, 8e10, 1.0, None, None, 1, 2)
    problem = InputError("target-cannot-run", value="x")
    big = candidate("bf16", None, timed(0.1), memory=memory, fits_1=False, fits_8=False)
    absent = PlannedRecipe("nvfp4", "nvfp4", problem=problem)
    found = recommend([big, absent, candidate("int4", 4.3, timed(1.0), memory=memory)], WORK)
    assert found.label == "int4"
    assert "bf16 does not fit" in found.because
    nothing = recommend([big, absent], WORK)
    assert nothing.label is None
    assert nothing.because == ["bf16 takes 90 GB of 80; 2 devices would hold it"]
    crowded = candidate("fp8", 8.0, timed(0.1), fits_1=False, fits_8=False, memory=replace(memory, batch=512, needed=1))
    assert recommend([crowded], WORK).because == ["fp8 takes 90 GB of 80"]
    crowded = replace(crowded, memory=replace(memory, batch=512, needed=1, largest_batch=55))
    assert recommend([crowded], WORK).because == ["fp8 takes 90 GB of 80 at batch 512; batch 55 would fit"]
    assert recommend([absent], WORK).because == [f"nvfp4: {problem}"]


def test_what_does_not_keep_up_is_not_taken() -> None:
    stable, late = SimpleNamespace(stable=True), SimpleNamespace(stable=False)
    one, two = candidate("int4", 4.3, timed(1.0), load=late), candidate("fp8", 8.0, timed(2.0), load=stable)
    found = recommend([one, two], WORK)
    assert found.label == "fp8"
    assert any("would not sustain 2 requests" in line for line in found.because)
    none = recommend([one], WORK)
    assert none.label == "int4"
    assert "none sustains" in none.because[0]


@pytest.mark.parametrize("first", [True, False])
def test_without_times_bits_decide(first: bool) -> None:
    both = [candidate("int4", 4.3, timed(None)), candidate("bf16", None, timed(None))]
    assert recommend(both if first else both[::-1], WORK).label == "bf16"
