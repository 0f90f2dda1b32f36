from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from quantkit.stats.proportion import clustered_share, wilson


@pytest.mark.parametrize("k, n", [(1, 3), (5, 10), (433, 480), (4560, 5000), (1, 5000)])
def test_is_what_scipy_gives(k, n):
    oracle = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((oracle.low, oracle.high), abs=1e-12)


def test_the_ends_have_a_width_and_stay_inside():
    assert wilson(480, 480) == (pytest.approx(0.99206, abs=1e-5), 1.0)
    assert wilson(0, 480) == (0.0, pytest.approx(1 - 0.99206, abs=1e-5))
    low, high = wilson(1, 1)
    assert 0.2 < low < 0.21
    assert high == 1.0


def test_it_covers_what_it_says():
    """Exactly, on average over shares of 0.95 to 0.99 of 200; the textbook's interval covers 91 %."""
    counts = np.arange(201)
    ends = np.array([wilson(int(k), 200) for k in counts])
    covered = [
        stats.binom.pmf(counts, 200, share)[(ends[:, 0] <= share) & (share <= ends[:, 1])].sum()
        for share in np.linspace(0.95, 0.99, 41)
    ]
    assert 0.945 < np.mean(covered) < 0.965


@pytest.mark.parametrize("k, n", [(0, 0), (-1, 3), (4, 3)])
def test_what_is_no_share_is_refused(k, n):
    with pytest.raises(ValueError, match="successes"):
        wilson(k, n)


def test_clusters_of_one_are_nearly_wilsons():
    """Student's t and s² over n − 1 take the place of the normal quantile and of p(1 − p)/n."""
    right = np.repeat([True, False], [433, 47])
    assert clustered_share(right, np.arange(480)) == pytest.approx(wilson(433, 480), abs=5e-4)


def test_copies_of_a_cluster_teach_nothing():
    right = np.random.default_rng(0).random((40, 12)) < 0.8
    once = clustered_share(right.ravel(), np.repeat(np.arange(40), 12))
    often = clustered_share(np.repeat(right, 5, axis=1).ravel(), np.repeat(np.arange(40), 60))
    assert often == pytest.approx(once)


@pytest.mark.parametrize("mean, alike", [(0.95, 0.05), (0.8, 0.1), (0.985, 0.05)])
def test_five_photographs_are_covered_as_often_as_five_can_be(mean, alike):
    generator, scale = np.random.default_rng(0), 1 / alike - 1
    clusters, hits, naive = np.repeat(np.arange(5), 96), 0, 0
    for _ in range(400):
        shares = generator.beta(mean * scale, (1 - mean) * scale, 5)
        right = generator.random((5, 96)) < shares[:, None]
        low, high = clustered_share(right.ravel(), clusters)
        hits += low <= mean <= high
        low, high = wilson(int(right.sum()), 480)
        naive += low <= mean <= high
    # 380 expected, standard deviation 4.4; crops taken for independent are right 190 to 270 times
    assert hits >= 365
    assert naive < 300


def test_what_clusters_cannot_tell_is_not_told():
    clusters = np.repeat(np.arange(5), 96)
    assert clustered_share(np.ones(480, bool), clusters) == wilson(5, 5)
    assert clustered_share(np.zeros(480, bool), clusters) == wilson(0, 5)
    assert clustered_share(np.arange(480) % 2 == 0, np.zeros(480)) == (0.0, 1.0)
    # every photograph alike: no more is known than 480 items tell, and t is that of five
    low, high = clustered_share(np.arange(480) % 2 == 0, clusters)
    assert high - low == pytest.approx(2 * 2.776 * 0.5 / np.sqrt(480), rel=0.02)
