from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from quantkit.stats.clustered import mean_interval, ratio_interval


def test_mean_and_ratio_are_what_scipy_gives_of_the_same_draws():
    """To the last digits: the same draws, bias and skew."""
    values = np.random.default_rng(0).gamma(2.0, size=80)
    words = {"n_resamples": 9999, "method": "BCa", "batch": 1000}
    oracle = stats.bootstrap((values,), np.mean, **words, rng=np.random.default_rng(5))
    assert mean_interval(values, seed=5) == pytest.approx(oracle.confidence_interval, rel=1e-12)
    below = 1 + np.random.default_rng(1).random(80)

    def ratio(a, b, axis):
        return a.sum(axis) / b.sum(axis)

    oracle = stats.bootstrap((values, below), ratio, paired=True, **words, rng=np.random.default_rng(6))
    assert ratio_interval(values, below, seed=6) == pytest.approx(oracle.confidence_interval, rel=1e-12)


def test_sides_of_one_size_are_drawn_alone():
    """As if what they are divided by were drawn with them."""
    values = np.random.default_rng(0).gamma(2.0, size=40)
    alone = mean_interval(values, seed=1, resamples=999)
    assert ratio_interval(values, np.full(40, 2.0), seed=1, resamples=999) == pytest.approx(np.array(alone) / 2)


def test_seed_fixes_it():
    values = np.random.default_rng(0).normal(size=30)
    assert mean_interval(values, resamples=500, seed=3) == mean_interval(values, resamples=500, seed=3)
    assert mean_interval(values, resamples=500, seed=3) != mean_interval(values, resamples=500, seed=4)


def test_clusters_are_drawn_whole():
    level = np.random.default_rng(0).normal(size=25)
    values, clusters = np.repeat(level, 40), np.repeat(np.arange(25), 40)
    assert mean_interval(values, clusters, seed=2) == pytest.approx(mean_interval(level, seed=2), rel=1e-9)
    free = mean_interval(values, seed=2, resamples=999)
    whole = mean_interval(values, clusters, seed=2, resamples=999)
    assert (whole[1] - whole[0]) > 4 * (free[1] - free[0])


def test_ratio_is_paired():
    generator = np.random.default_rng(0)
    below = generator.lognormal(sigma=1.0, size=200)
    above = 2 * below * generator.normal(1.0, 0.01, size=200)
    low, high = ratio_interval(above, below)
    assert low < above.sum() / below.sum() < high
    # unpaired, the spread of the sides alone would make this about 0.4
    assert high - low < 0.01


def test_constant_values_have_no_width():
    assert mean_interval(np.full(10, 3.0)) == (3.0, 3.0)
    assert ratio_interval(np.array([2.0, 4.0]), np.array([1.0, 2.0])) == (2.0, 2.0)


def test_one_cluster_is_refused():
    with pytest.raises(ValueError, match="two clusters"):
        mean_interval(np.array([1.0, 2.0]), np.array([0, 0]))
    with pytest.raises(ValueError, match="one length"):
        ratio_interval(np.ones(3), np.ones(4))
