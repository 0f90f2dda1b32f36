import json
from pathlib import Path

import numpy as np
import pytest
from reference import plain_decisions as plain

from quantkit.stats.changes import changes

OTAVA = json.loads((Path(__file__).parent.parent / "reference" / "otava_changes.json").read_text())


def nights(seed, count, levels=3, noise=0.02):
    """A series whose level moves a few times, with a spike now and then."""
    generator = np.random.default_rng([seed, count])
    values = 1 + noise * generator.normal(size=count)
    for at in generator.integers(1, count, levels - 1):
        values[at:] *= generator.choice([0.9, 1.06, 1.15])
    values[generator.random(count) < 0.02] *= 1.3
    return values


@pytest.mark.parametrize("seed", range(4))
def test_is_what_plain_loops_give(seed):
    values = nights(seed, 34)
    found = changes(values, window=16, p=0.02, least=0.01)
    oracle = plain.changes(list(values), 16, 0.02, 0.01)
    assert [each.index for each in found] == [index for index, _ in oracle]
    assert [each.p for each in found] == pytest.approx([p for _, p in oracle])


@pytest.mark.parametrize("case", [case for case in OTAVA["cases"] if case["count"] < 40])
def test_the_plain_loops_are_those_of_otava(case):
    values = nights(case["seed"], case["count"])
    found = plain.changes(list(values), case["window"], case["p"], 0.0, retested=(0, 1))
    assert [index for index, _ in found] == [index for index, _ in case["changes"]]
    assert [p for _, p in found] == pytest.approx([p for _, p in case["changes"]])


@pytest.mark.parametrize("case", [case for case in OTAVA["cases"] if case["count"] > 40])
def test_a_year_of_nights_has_the_changes_that_otava_finds(case):
    found = changes(nights(case["seed"], case["count"]))
    assert [each.index for each in found] == [index for index, _ in case["changes"]]


def test_a_level_and_what_it_rose_by():
    values = np.concatenate([np.full(20, 2.0), np.full(15, 2.5)]) + 0.001 * np.random.default_rng(0).normal(size=35)
    (found,) = changes(values)
    assert found.index == 20
    assert (found.before, found.after) == pytest.approx((2.0, 2.5), abs=0.001)
    assert (found.size, changes(values, least=0.3)) == (pytest.approx(0.25, abs=0.002), [])


def test_the_unit_does_not_matter_and_time_may_run_back():
    values = nights(1, 120)
    found = [each.index for each in changes(values)]
    assert found
    assert [each.index for each in changes(1e-6 * values)] == found
    assert len(changes(values[::-1])) >= 1


def test_nights_without_a_value_are_left_out_and_counted():
    noise = 0.01 * np.random.default_rng(1).normal(size=40)
    values = list(np.where(np.arange(40) < 18, 1.0, 1.2) + noise)
    values[3] = None
    values[17] = float("nan")
    assert [each.index for each in changes(values)] == [18]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0] * 80, [None] * 5])
def test_too_little_or_nothing_to_see(values):
    assert changes(values) == []


def test_constant_levels_are_told_apart():
    assert [each.index for each in changes([1.0] * 10 + [2.0] * 10)] == [10]
    assert changes([0.0] * 10 + [2.0] * 10)[0].size == float("inf")


def test_pure_noise_seldom_has_a_change():
    found = sum(bool(changes(np.random.default_rng(seed).normal(1, 0.01, 60))) for seed in range(40))
    assert found <= 6


def test_a_window_of_one_night_is_refused():
    with pytest.raises(ValueError, match="two nights"):
        changes([1.0, 2.0], window=1)
