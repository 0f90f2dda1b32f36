from __future__ import annotations

import numpy as np
import pytest
from reference import plain_decisions as plain

from quantkit.errors import InputError
from quantkit.stats.clustered import clustered_mean
from quantkit.stats.deciding import increase as module
from quantkit.stats.deciding.increase import increase


def texts(seed, clusters=30, rise=0.02):
    """(before, after, labels): sequences of different lengths whose tokens are alike."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(clusters), generator.integers(5, 15, clusters))
    before = generator.gamma(2.0, size=labels.size)
    return before, before + rise + generator.normal(0, 0.02, clusters)[labels], labels


def test_is_what_plain_loops_give():
    before, after, labels = texts(0, clusters=9)
    found = increase(before, after, margin=0.01, clusters=labels + 100, resamples=60, seed=4)
    effect, draws = plain.increase(before, after, labels, 60, 4)
    assert found.effect == pytest.approx(effect)
    assert found.draws == pytest.approx(draws)
    assert found.groups == 9


def test_its_spread_is_that_of_the_clusters():
    before, after, labels = texts(1)
    found = increase(before, after, margin=0.01, clusters=labels, resamples=4000)
    assert found.standard_error == pytest.approx(clustered_mean(after - before, labels).standard_error, rel=0.05)
    alone = increase(before, after, margin=0.01)
    assert alone.standard_error < 0.5 * found.standard_error


def test_exchanged_sides_have_the_opposite_effect():
    before, after, labels = texts(2)
    there = increase(before, after, margin=0.01, clusters=labels)
    back = increase(after, before, margin=0.01, clusters=labels)
    assert there.effect == -back.effect
    assert there.p_above(0.01) == pytest.approx(back.p_below(-0.01))


def test_resamples_by_parts_are_the_same_draws(monkeypatch):
    before, after, labels = texts(3)
    whole = increase(before, after, margin=0.01, clusters=labels, resamples=50)
    monkeypatch.setattr(module, "_DRAWS", 100)
    assert np.array_equal(increase(before, after, margin=0.01, clusters=labels, resamples=50).draws, whole.draws)


def test_equal_sides_are_certain():
    before, _, labels = texts(4)
    found = increase(before, before, margin=0.01, clusters=labels)
    assert found.p_above(0.0) == 1.0
    assert found.interval(0.95) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_refused(wrong):
    after = np.ones(6)
    after[4] = wrong
    with pytest.raises(InputError, match=r"the candidate has .* at item 4"):
        increase(np.ones(6), after, margin=0.01, where="kl")


def test_what_does_not_pair_is_refused():
    with pytest.raises(InputError, match="items-differ"):
        increase(np.ones(6), np.ones(5), margin=0.01)
    with pytest.raises(InputError, match="one cluster"):
        increase(np.ones(6), np.ones(6), margin=0.01, clusters=np.zeros(6))
