from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from quantkit.stats.proportion import wilson


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
