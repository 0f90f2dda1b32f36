"""The schedule: palindromes in a random order, what is counted, how long it goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quantkit.measurement.timing.schedule import Timing, Visit, interleave, runs_of


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
    assert [*again.steps()] == [*both.steps()]
    assert again.rounds == both.rounds
    alone = both.of("B")
    assert set(alone.seconds) == {"B"}
    assert np.all(alone.seconds["B"] == 2.0)


def test_short_steps_have_two_timed_a_visit_after_one_that_is_not():
    assert Visit.fitting(0.01) == Visit(2, 1)
    assert Visit.fitting(0.1) == Visit(1, 0)
    assert runs_of(2e-4) == 5
    assert runs_of(0.1) == 1
    assert Visit(2, 1, 5).block([1.0, 2.0]) == 2 * 3 * 5 * 3.0
