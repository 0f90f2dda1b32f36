"""The schedule: palindromes in a random order, what is counted, how long it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.measurement.timing.rounds import BASELINE, CANDIDATE, LEAST, MOST, RoundsJob, in_rounds, joined, run, take
from quantkit.measurement.timing.schedule import Array, Shape, Step, Timing, TimingPlan, Visit, interleave, runs_of
from quantkit.stats.decision import decide
from quantkit.stats.slowdown import BLOCKS, slowdown


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def step(self, name, seconds, log):
        def run():
            log.append(name)
            self.now += seconds

        return run


def test_blocks_are_palindromes_in_random_order():
    clock, log = FakeClock(), []
    turns = interleave(
        {"A": clock.step("A", 1.0, log), "B": clock.step("B", 2.0, log)},
        blocks=(40, 40),
        seconds=0,
        generator=np.random.default_rng(0),
        clock=clock,
    )
    a, b = turns.seconds["A"], turns.seconds["B"]
    assert [side for side, *_ in turns.steps()] == log
    assert turns.rounds == (40,)
    blocks = ["".join(log[i : i + 4]) for i in range(0, len(log), 4)]
    assert set(blocks) == {"ABBA", "BAAB"}
    assert 10 <= blocks.count("ABBA") <= 30
    assert a.shape == b.shape == (40, 2, 1)
    assert np.all(a == 1.0)
    assert np.all(b == 2.0)


def test_a_third_side_is_visited_the_same_way():
    clock, log = FakeClock(), []
    sides = {name: clock.step(name, 1.0, log) for name in "ABC"}
    interleave(sides, blocks=(3, 3), seconds=0, generator=np.random.default_rng(0), clock=clock)
    for i in range(0, 18, 6):
        assert log[i : i + 6] == log[i : i + 6][::-1]


def test_steps_that_settle_are_not_counted():
    clock, log = FakeClock(), []
    found = interleave(
        {"A": clock.step("A", 1.0, log), "B": clock.step("B", 1.0, log)},
        blocks=(2, 2),
        seconds=0,
        generator=np.random.default_rng(0),
        visit=Visit(burst=3, settle=1, runs=5),
        clock=clock,
    )
    assert found.seconds["A"].shape == (2, 2, 3)
    assert np.all(found.seconds["A"] == 1.0), "the mean of its runs"
    assert len(log) == 2 * 4 * (3 + 1) * 5
    assert [place for side, block, place, *_ in found.steps()] == [*range(12)] * 2


@pytest.mark.parametrize(("seconds", "blocks"), [(0.0, 5), (30.0, 8), (1e9, 20)])
def test_time_that_is_left_is_used(seconds, blocks):
    clock, log = FakeClock(), []
    sides = {name: clock.step(name, 1.0, log) for name in "AB"}
    turns = interleave(sides, blocks=(5, 20), seconds=seconds, generator=np.random.default_rng(0), clock=clock)
    assert len(turns.seconds["A"]) == blocks


def test_rounds_are_joined_in_order_and_survive_the_way_between_processes():
    clock, log = FakeClock(), []
    sides = {name: clock.step(name, 1.0 + (name == "B"), log) for name in "AB"}
    generator = np.random.default_rng(3)
    parts = [interleave(sides, blocks=(n, n), seconds=0, generator=generator, clock=clock) for n in (2, 3)]
    both = Timing.joined(parts)
    assert both.rounds == (2, 3)
    assert [side for side, *_ in both.steps()] == log
    again = Timing.read(json.loads(json.dumps(both.as_dict())))
    assert ([*again.steps()], again.rounds) == ([*both.steps()], both.rounds)
    alone = both.of("B")
    assert set(alone.seconds) == {"B"}
    assert np.all(alone.seconds["B"] == 2.0)


def test_short_steps_have_two_timed_a_visit_after_one_that_is_not():
    assert (Visit.fitting(0.01), Visit.fitting(0.1), runs_of(2e-4)) == (Visit(2, 1), Visit(1, 0), 5)
    assert (runs_of(0.1), Visit(2, 1, 5).block([1.0, 2.0])) == (1, 2 * 3 * 5 * 3.0)


STEP = Shape("decode", 4, 128)
PROMPT = Shape("prefill", 1, 256)


class Machine:
    """A clock that moves only by what is run on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loads: list[str] = []
        self.generator = np.random.default_rng(0)

    def __call__(self) -> float:
        return self.now

    def load(self, name: str, seconds: float, *, refuses: str = "") -> Callable[[], Side]:
        def loaded() -> Side:
            self.loads.append(name)
            self.now += 0.1
            # how a load happens to lie in memory lasts as long as it does
            return Side(self, seconds * float(self.generator.lognormal(0.0, 0.002)), refuses)

        return loaded


class Side:
    def __init__(self, machine: Machine, seconds: float, refuses: str) -> None:
        self.machine, self.seconds, self.refuses = machine, seconds, refuses

    def decode(self, batch: int, context: int) -> Step:
        return self._step(1.0)

    def prefill(self, batch: int, tokens: int) -> Step:
        if self.refuses:
            raise InputError(self.refuses, where="prefill")
        return self._step(10.0)

    def _step(self, times: float) -> Step:
        def step() -> None:
            self.machine.now += times * self.seconds * float(self.machine.generator.lognormal(0.0, 0.01))

        return step


def timed(
    slower: float, *, seconds: float = 0.01, budget: float = 20.0, **options: str
) -> tuple[list[Timing], Machine]:
    machine = Machine()
    loads = {
        CANDIDATE: machine.load("candidate", slower * seconds, **options),
        BASELINE: machine.load("baseline", seconds),
    }
    return take(loads, [STEP, PROMPT], seconds=budget, clock=machine), machine


def sides(taken: Timing) -> tuple[Array, Array]:
    return taken.seconds[CANDIDATE], taken.seconds[BASELINE]


def test_both_are_loaded_anew_in_every_round_in_an_order_that_is_drawn() -> None:
    (step, _), machine = timed(1.0)
    turns = step
    rounds = len(turns.rounds)
    assert LEAST <= rounds <= MOST
    pairs = list(zip(machine.loads[::2], machine.loads[1::2], strict=True))
    assert (len(pairs), set(pairs)) == (rounds, {("candidate", "baseline"), ("baseline", "candidate")})
    assert {each.shape for each in sides(step)} == {(sum(turns.rounds), 2, 2)}
    assert {each.shape for each in turns.began.values()} == {(sum(turns.rounds), 2, 2)}
    assert {tuple(order) for order in turns.order} == {("candidate", "baseline"), ("baseline", "candidate")}
    assert set(turns.rounds) == {BLOCKS}


@pytest.mark.parametrize(("slower", "answer"), [(1.0, "same"), (1.1, "worse"), (1 / 1.1, "better")])
def test_what_is_slower_is_found_by_the_test_of_every_night(slower: float, answer: str) -> None:
    found, _ = timed(slower)
    evidence = [slowdown(*sides(each), rounds=each.rounds, margin=0.05) for each in found]
    assert [each.answer for each in decide(evidence)] == [answer] * 2
    assert [each.groups for each in evidence] == [len(each.rounds) for each in found], "rounds are what is resampled"


@pytest.mark.parametrize(("refuses", "cut"), [("", 1), ("", 8), ("", 13), ("out-of-memory", 3)])
def test_who_breaks_off_goes_on_with_the_next_round_as_if_nothing_had_been(refuses: str, cut: int) -> None:
    def begun() -> tuple[Machine, dict[str, Callable[[], Side]]]:
        machine = Machine()
        loads = {side: machine.load(side, 0.01, refuses=refuses) for side in (CANDIDATE, BASELINE)}
        return machine, loads

    machine, loads = begun()
    whole = [*in_rounds(loads, [STEP, PROMPT], seconds=50.0, clock=machine)]
    other, loads = begun()
    first = [*islice(in_rounds(loads, [STEP, PROMPT], seconds=50.0, clock=other), cut)]
    # in another process, whose clock and whose machine are others
    other.now = 0.0
    rest = [*in_rounds(loads, [STEP, PROMPT], seconds=50.0, clock=other, done=first)]
    assert len(first) + len(rest) == len(whole) > 13
    assert other.loads == machine.loads
    step, prompt = joined([*first, *rest])
    assert (step.order, prompt.skipped) == ([each for found in whole for each in found.parts[0].order], refuses)
    # and what was settled in the first round stays
    assert len({part.visit for found in (*first, *rest) for part in found.parts[:1]}) == 1


def test_a_round_is_shorter_where_there_is_no_time_and_never_less_than_a_block() -> None:
    (step, prompt), _ = timed(1.0, seconds=1.0, budget=1.0)
    assert step.rounds == prompt.rounds == (1,) * LEAST
    assert sides(step)[0].shape == (LEAST, 2, 1), "what takes long is timed once a visit"


def test_what_takes_microseconds_is_run_several_times_and_told_as_one() -> None:
    (step, _), _ = timed(1.0, seconds=2e-5, budget=60.0)
    assert (len(step.rounds), np.median(sides(step)[0])) == (MOST, pytest.approx(2e-5, rel=0.05))


def test_a_shape_that_does_not_fit_is_left_out_and_said() -> None:
    (step, prompt), _ = timed(1.0, refuses="out-of-memory")
    assert (prompt.skipped, dict(prompt.seconds), step.skipped) == ("out-of-memory", {}, "")
    assert Timing.read(prompt.as_dict()).skipped == "out-of-memory"
    with pytest.raises(InputError, match="onnx-unreadable"):
        timed(1.0, refuses="onnx-unreadable")


def test_times_survive_the_way_between_processes() -> None:
    (step, _), _ = timed(1.0)
    again = Timing.read(json.loads(json.dumps(step.as_dict())))
    assert (again.shape, again.rounds) == (step.shape, step.rounds)
    for there, here in zip(sides(again), sides(step), strict=True):
        np.testing.assert_array_equal(there, here)
    assert [*again.steps()] == [*step.steps()]


def test_the_shapes_of_a_plan() -> None:
    found = TimingPlan(batches=(1, 4), contexts=(128,), prefills=(64,), prefill_batches=(1,)).shapes()
    assert [each.words for each in found] == [
        "decode, batch 1, context 128",
        "decode, batch 4, context 128",
        "prefill, batch 1, tokens 64",
    ]
    assert [each.sizes for each in found[1:]] == [{"new_tokens": 1, "context": 128}, {"new_tokens": 64, "context": 0}]


def test_two_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("quantkit.machine.memory_available", lambda: -1)
    with pytest.raises(InputError, match="out-of-memory"):
        run(RoundsJob(str(tmp_path), str(tmp_path), [STEP], 1, 1.0))
