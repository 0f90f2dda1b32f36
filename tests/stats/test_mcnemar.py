from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quantkit.stats.mcnemar import from_counts, mcnemar


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_equals_the_exact_binomial_test(b, c):
    oracle = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert from_counts(b, c).p == pytest.approx(oracle, rel=1e-8, abs=1e-250)


def test_counts_only_where_they_disagree():
    first = np.array([1, 1, 1, 0, 0, 1], dtype=bool)
    second = np.array([1, 0, 0, 1, 0, 0], dtype=bool)
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (3, 1)
    assert found.p == pytest.approx(0.625)


def test_equal_models_do_not_differ():
    answers = np.random.default_rng(0).random(1000) < 0.3
    assert mcnemar(answers, answers).p == 1.0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="one length"):
        mcnemar(np.ones(3, bool), np.ones(4, bool))
    with pytest.raises(ValueError, match="negative"):
        from_counts(-1, 2)


def test_what_flips_together_counts_for_less():
    """All 24 that were lost are crops of two photographs of 20."""
    before, clusters = np.ones(240, bool), np.repeat(np.arange(20), 12)
    after = before & (clusters >= 2)
    assert mcnemar(before, after).p < 1e-6
    moved = np.where(np.arange(20) < 2, -1.0, 0.0)
    found = mcnemar(before, after, clusters)
    assert (found.only_first, found.only_second) == (24, 0)
    assert found.p == pytest.approx(stats.ttest_1samp(moved, 0).pvalue)
    assert found.p > 0.1


def test_clusters_never_make_it_surer():
    generator = np.random.default_rng(1)
    for _ in range(50):
        first, second = (generator.random(60) < 0.9 for _ in range(2))
        assert mcnemar(first, second, np.arange(60) // 3).p >= mcnemar(first, second).p
    assert mcnemar(first, first, np.arange(60) // 3).p == 1.0
