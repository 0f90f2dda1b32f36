from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from measurement.labelled.made_up import about
from quantkit.measurement.accuracy.labelled import Drawn, difference_interval, share_interval, share_row


def sides(both: int, only_before: int, only_right: int, neither: int):
    right = np.repeat([True, False, True, False], [both, only_before, only_right, neither])
    before = np.repeat([True, True, False, False], [both, only_before, only_right, neither])
    return right, before


def test_the_row_says_all():
    right, before = sides(420, 12, 8, 40)
    row = share_row(
        "accuracy.top1", right, before, Drawn(right.size, "image"), about=about(480), shape={"classes": 10}, seed=1
    )
    assert (row.value, row.n, row.runtime, row.settings, row.shape) == (
        428 / 480,
        480,
        "onnxruntime",
        {"threads": 2},
        {"classes": 10},
    )
    oracle = stats.binomtest(428, 480).proportion_ci(method="wilson")
    assert row.ci95 == pytest.approx((oracle.low, oracle.high))
    base = row.baseline
    assert (base.subject, base.value, base.ratio) == ("bb", 432 / 480, pytest.approx(428 / 432))
    assert base.difference == pytest.approx(-4 / 480)
    assert base.p_value == pytest.approx(stats.binomtest(8, 20).pvalue)
    assert row.flags == ["ci95-by-image"]


def test_the_difference_is_paired():
    right, before = sides(420, 12, 8, 40)
    moved = right.astype(float) - before
    oracle = stats.bootstrap((moved,), np.mean, n_resamples=9999, method="BCa", rng=np.random.default_rng(5))
    low, high = difference_interval(right, before, seed=1)
    width = high - low
    # two draws of resamples differ by a few per cent of the width
    assert (low, high) == pytest.approx(tuple(oracle.confidence_interval), abs=0.06 * width)
    # unpaired, the spread of the two shares alone would be 0.077
    assert width < 0.045


def test_no_difference_is_not_proved_by_a_sample():
    right, before = sides(470, 0, 0, 10)
    assert difference_interval(right, before) == pytest.approx((-0.0079, 0.0079), abs=1e-4)
    # of 48 groups as much as 48 items would say
    assert difference_interval(right, before, np.arange(480) // 10)[1] == pytest.approx(0.0741, abs=1e-3)


def test_tiny_samples_have_finite_intervals_or_none():
    for n in range(2, 6):
        for moved in itertools.combinations_with_replacement((-1, 0, 1), n):
            d = np.array(moved)
            low, high = difference_interval(d > 0, d < 0)
            assert -1 <= low <= d.mean() <= high <= 1, moved
    assert difference_interval(np.array([True]), np.array([False])) is None
    row = share_row("accuracy.top1", np.array([True]), np.array([False]), Drawn(1, "image"), about=about())
    assert row.baseline.ratio is None
    assert row.baseline.difference == 1.0
    assert row.ci95 == (pytest.approx(0.2065, abs=1e-4), 1.0)


def test_what_was_drawn_together_counts_as_one():
    generator = np.random.default_rng(0)
    right = np.repeat(generator.random(40) < 0.8, 12)
    clusters = np.repeat(np.arange(40), 12)
    alone, together = share_interval(right), share_interval(right, clusters)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])
    row = share_row("accuracy.top1", right, None, Drawn(480, "image", clusters), about=about())
    assert (row.flags, row.shape) == (["ci95-by-cluster"], {"clusters": 40})
    # all right: as much as 40 draws say
    assert share_interval(np.ones(480, bool), clusters)[0] == pytest.approx(0.9124, abs=1e-3)
    assert share_interval(np.zeros(480, bool), clusters)[1] == pytest.approx(0.0876, abs=1e-3)
    assert share_interval(np.ones(4, bool), np.zeros(4)) == (0.0, 1.0)


def test_crops_of_five_photographs_are_five_draws():
    """96 crops each of five photographs: intervals are those of five numbers, whatever the number of crops."""
    generator = np.random.default_rng(4)
    shares = np.array([0.99, 0.97, 0.95, 0.93, 0.88])
    clusters = np.repeat(np.arange(5), 96)
    right = (generator.random((5, 96)) < shares[:, None]).ravel()
    before = np.ones(480, bool)
    row = share_row("accuracy.top1", right, before, Drawn(480, "image", clusters), about=about(480))
    each = right.reshape(5, 96).mean(axis=1)
    reach = stats.t.ppf(0.975, 4) * stats.sem(each)
    assert np.ptp(row.ci95) == pytest.approx(2 * reach, rel=0.15)
    assert np.ptp(row.ci95) > 2 * np.ptp(share_interval(right))
    moved = each - 1
    oracle = stats.t.interval(0.95, 4, loc=moved.mean(), scale=stats.sem(moved))
    assert row.baseline.difference_ci95 == pytest.approx(oracle)
    assert row.baseline.p_value == pytest.approx(stats.ttest_1samp(moved, 0).pvalue)
    assert row.shape == {"clusters": 5}
    # ten times as many crops of the same five say no more of the next photograph
    more = share_interval(np.repeat(right, 10), np.repeat(clusters, 10))
    assert more == pytest.approx(row.ci95)
