"""Flipped answers and means that rose, as evidence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_decisions as plain
from scipy import stats

from quantkit.errors import InputError
from quantkit.stats import flips as module
from quantkit.stats.clustered import clustered_mean
from quantkit.stats.flips import Flips, flips, increase
from quantkit.stats.shares import tango_interval, tango_score


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.integers(0, 300))
def test_that_something_was_lost_is_the_exact_binomial_test(lost, gained):
    found = Flips(lost, gained, 1000, margin=0.01)
    oracle = stats.binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue if lost + gained else 1.0
    assert found.p_above(0.0) == pytest.approx(oracle, rel=1e-9)


def test_against_a_margin_it_is_tangos_score():
    found = Flips(60, 20, 5000, margin=0.01)
    assert found.p_above(0.01) == pytest.approx(stats.norm.sf(tango_score(60, 20, 5000, 0.01)))
    assert found.p_below(0.01) == pytest.approx(1 - found.p_above(0.01))
    assert (found.interval(0.95), found.effect) == (tango_interval(60, 20, 5000), pytest.approx(0.008))


def test_exchanged_sides_have_the_opposite_effect():
    there, back = Flips(60, 20, 5000, margin=0.01), Flips(20, 60, 5000, margin=0.01)
    for x in (0.0, 0.01, -0.004):
        assert there.p_above(x) == pytest.approx(back.p_below(-x))
    assert there.interval(0.95) == pytest.approx([-x for x in reversed(back.interval(0.95))])


def test_answers_are_counted():
    before = np.array([1, 1, 1, 0, 0, 1], dtype=bool)
    after = np.array([1, 0, 0, 1, 0, 0], dtype=bool)
    found = flips(before, after, margin=0.01)
    assert (found.lost, found.gained, found.n, found.design_effect) == (3, 1, 6, 1.0)


def test_items_that_flip_together_count_for_one():
    generator = np.random.default_rng(0)
    before, after = generator.random(400) < 0.7, generator.random(400) < 0.65
    once = flips(before, after, margin=0.01, clusters=np.arange(400))
    often = flips(np.repeat(before, 5), np.repeat(after, 5), margin=0.01, clusters=np.repeat(np.arange(400), 5))
    assert (once.design_effect, often.design_effect) == (pytest.approx(1.0), pytest.approx(5.0, rel=0.01))
    assert (often.effect, often.p_above(0.0)) == (once.effect, pytest.approx(once.p_above(0.0), rel=0.02))
    assert often.interval(0.95) == pytest.approx(once.interval(0.95), rel=0.01)
    # clusters whose items differ less than chance would have it are no better than single items
    balanced = np.tile([True, False], 200)
    assert flips(balanced, ~balanced, margin=0.01, clusters=np.repeat(np.arange(200), 2)).design_effect == 1.0


def test_one_cluster_is_one_item():
    found = flips(np.ones(50, bool), np.zeros(50, bool), margin=0.01, clusters=np.zeros(50))
    assert (found.design_effect, found.p_above(0.0)) == (50, 0.5)


@pytest.mark.parametrize("noise", [0, 10, 60])
def test_the_smallest_loss_is_found_as_often_as_it_says(noise):
    n, generator = 5000, np.random.default_rng(1)
    smallest = Flips(noise, noise, n, margin=0.01).detectable(0.01, 0.9)
    hits = 0
    for _ in range(200):
        lost, gained, _ = generator.multinomial(n, [noise / n + smallest, noise / n, 1 - 2 * noise / n - smallest])
        found = Flips(int(lost), int(gained), n, margin=0.01)
        hits += found.p_above(0.0) <= 0.01 and found.interval(0.95)[1] >= 0.01
    assert 0.82 <= hits / 200 <= 0.97


def test_different_items_are_refused():
    right = np.ones(4, bool)
    with pytest.raises(InputError, match="items-differ") as refused:
        flips(right, np.ones(5, bool), margin=0.01, where="top-1")
    assert "top-1: 4 and 5 items" in refused.value.line()
    with pytest.raises(InputError, match="item 2 is c and x, 1 of 4 differ"):
        flips(right, right, margin=0.01, items=(np.array(list("abcd")), np.array(list("abxd"))))
    with pytest.raises(InputError, match="items-differ"):
        flips(right, right, margin=0.01, items=(np.arange(4), np.arange(5)))
    with pytest.raises(InputError, match="nothing-scored"):
        flips(right[:0], right[:0], margin=0.01)


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
    assert (found.effect, found.draws, found.groups) == (pytest.approx(effect), pytest.approx(draws), 9)


def test_its_spread_is_that_of_the_clusters():
    before, after, labels = texts(1)
    found = increase(before, after, margin=0.01, clusters=labels, resamples=4000)
    assert found.standard_error == pytest.approx(clustered_mean(after - before, labels).standard_error, rel=0.05)
    alone = increase(before, after, margin=0.01)
    assert alone.standard_error < 0.5 * found.standard_error


def test_exchanged_sides_of_a_mean_have_the_opposite_effect():
    before, after, labels = texts(2)
    there = increase(before, after, margin=0.01, clusters=labels)
    back = increase(after, before, margin=0.01, clusters=labels)
    assert (there.effect, there.p_above(0.01)) == (-back.effect, pytest.approx(back.p_below(-0.01)))


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
