"""How a cell is timed: who is visited when, what is kept of it, and sides that do not load."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.measurement.timing.clocks import Clocks
from quantkit.measurement.timing.rounds import Task, measure
from quantkit.nightly.config import TimeBudget
from quantkit.nightly.evidence import paired
from quantkit.nightly.records import Time
from quantkit.nightly.timing import times
from quantkit.stats.slowdown import BURST, SETTLE

from .conftest import CELLS, FIRST

SECONDS = {"candidate": 2e-3, "baseline": 1e-3, "release": 1e-3}
Loads = list[str]


def task(*sides: str, **others: Any) -> Task:
    budget = TimeBudget(**{"rounds": 3, "blocks": 7, **others})
    return Task(
        rounds=budget.rounds,
        blocks=budget.most,
        seconds=budget.seconds,
        sides={side: f"./{side}" for side in sides},
        runtime="onnxruntime",
        batch=1,
        seed=5,
    )


def loading(loads: Loads, fails: dict[str, int] | None = None) -> Callable[[str], Callable[[], object]]:
    """Sides that take their time, and fail at a given load."""

    def load(side: str) -> Callable[[], object]:
        loads.append(side)
        if loads.count(side) == (fails or {}).get(side):
            raise InputError("hash-mismatch", where=side)
        return lambda: time.sleep(SECONDS[side])

    return load


def taken(given: Task, load: Any, look: Callable[[], Clocks] = Clocks) -> tuple[list[Time], list[dict[str, Any]]]:
    # as the parent reads it
    rows = [json.loads(json.dumps(row)) for row in measure(given, load, look)]
    kept = [row for row in rows if "turns" in row]
    return times(kept, FIRST, CELLS[0].key, 1), [row for row in rows if "turns" not in row]


def test_rounds_load_all_sides_anew_and_blocks_pair_them() -> None:
    loads: Loads = []
    steps, lost = taken(task("candidate", "baseline", "release"), loading(loads))
    assert not lost
    assert Counter(loads) == {"candidate": 3, "baseline": 3, "release": 3}
    assert len({tuple(loads[i : i + 3]) for i in (0, 3, 6)}) > 1, "always in one order"
    for other in ("baseline", "release"):
        ours, theirs, rounds = paired(steps, other, "")  # type: ignore[arg-type]
        assert ours.shape == theirs.shape == (7, 2, BURST)
        assert sorted(rounds) == [2, 2, 3], "seven blocks over three rounds"
        # wall clock on a busy machine: the sides are not mixed up, that is all
        assert (ours.min() > 1.9e-3) and 0.9e-3 < theirs.min() < ours.min()
    began = [each.began for each in steps]
    assert began == sorted(began) and abs(began[0] - time.time()) < 60


def test_a_block_is_a_palindrome() -> None:
    steps, _ = taken(task("candidate", "baseline"), loading([]))
    orders = set()
    for number in {(each.round, each.block) for each in steps}:
        block = [each for each in steps if (each.round, each.block) == number]
        visits = [each.side for each in sorted(block, key=lambda each: each.began)][::BURST]
        assert visits == visits[::-1] and len(visits) == 4
        assert [each.position for each in block if each.side == "candidate"] in ([0, 1, 6, 7], [2, 3, 4, 5])
        orders.add(visits[0])
    assert orders == {"candidate", "baseline"}


def test_the_first_night_times_the_candidate_alone() -> None:
    steps, _ = taken(task("candidate"), loading([]))
    assert {each.side for each in steps} == {"candidate"} and len(steps) == 7 * 2 * BURST


def test_a_side_that_does_not_load_is_left_out_with_its_reason() -> None:
    steps, lost = taken(task("candidate", "baseline", "release"), loading([], {"baseline": 2}))
    assert [row["unloadable"] for row in lost] == ["baseline"] and lost[0]["error"]["code"] == "hash-mismatch"
    assert {each.side for each in steps if each.round > 0} == {"candidate", "release"}
    paired(steps, "release", "")


def test_a_candidate_that_does_not_load_is_an_error() -> None:
    with pytest.raises(InputError, match="hash-mismatch"):
        taken(task("candidate", "baseline"), loading([], {"candidate": 1}))


def test_seconds_instead_of_blocks() -> None:
    steps, _ = taken(task("candidate", rounds=2, blocks=None, seconds=0.1), loading([]))
    blocks = Counter(each.round for each in steps)
    assert set(blocks) == {0, 1} and all(1 <= count / (2 * BURST) < 20 for count in blocks.values())


def test_short_steps_are_run_several_times_and_told_by_their_mean() -> None:
    calls: list[float] = []

    def step() -> float:
        calls.append(time.sleep(1e-4) or 1e-4)
        return calls[-1]  # says itself how long it took: nothing else on the machine changes that

    steps, _ = taken(task("candidate", rounds=1, blocks=1), lambda side: step)
    counted = 2 * (BURST + SETTLE)
    assert len(calls) == 2 + 10 * counted and len(steps) == 2 * BURST
    assert all(each.seconds > 1e-4 for each in steps)


def test_what_the_device_was_at_stands_with_its_round() -> None:
    looks = iter([Clocks(2e9, 40.0, 7), Clocks(3e9, 50.0, 7), Clocks(2e9, 60.0, 7), Clocks(2e9, 70.0, 8)])
    steps, _ = taken(task("candidate", rounds=2, blocks=2), loading([]), lambda: next(looks))
    found = {(each.round, each.clock_hz, each.temperature_c, each.throttled) for each in steps}
    assert found == {(0, 2.5e9, 50.0, False), (1, 2e9, 70.0, True)}
