from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from quantkit.stats.clustered import chance, clustered_mean, clustered_ratio, student

finite = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


@settings(deadline=None, max_examples=50)
@given(arrays(np.float64, st.integers(2, 40), elements=finite))
def test_clusters_of_one_are_the_textbook_standard_error(values):
    found = clustered_mean(values, np.arange(values.size))
    assert found.standard_error == pytest.approx(stats.sem(values), rel=1e-9, abs=1e-9)
    low, high = stats.t.interval(0.95, values.size - 1, loc=values.mean(), scale=stats.sem(values) + 1e-300)
    assert found.ci95 == pytest.approx((low, high), rel=1e-9, abs=1e-8)


@settings(deadline=None, max_examples=50)
@given(arrays(np.float64, st.integers(2, 20), elements=finite), st.integers(1, 7))
def test_repeating_a_value_within_its_cluster_teaches_nothing(values, copies):
    once = clustered_mean(values, np.arange(values.size))
    often = clustered_mean(np.repeat(values, copies), np.repeat(np.arange(values.size), copies))
    assert often.standard_error == pytest.approx(once.standard_error, rel=1e-9, abs=1e-9)
    assert often.value == pytest.approx(once.value, rel=1e-9, abs=1e-9)


def test_labels_and_order_do_not_matter():
    generator = np.random.default_rng(0)
    values, clusters = generator.normal(size=60), np.repeat([7, 1, 300, 2], 15)
    order = generator.permutation(60)
    plain, mixed = clustered_mean(values, clusters), clustered_mean(values[order], clusters[order])
    assert mixed.standard_error == pytest.approx(plain.standard_error, rel=1e-12)
    assert mixed.clusters == 4
    assert mixed.n == 60


def test_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        level = generator.normal(size=12)  # what the sequences differ by, far more than their tokens do
        values = np.repeat(level, 50) + 0.1 * generator.normal(size=600)
        low, high = clustered_mean(values, np.repeat(np.arange(12), 50)).ci95
        hits += low < 0 < high
    # 950 expected, standard deviation 7; an interval that takes tokens for independent hits about 220 times
    assert 922 <= hits <= 978


def test_one_cluster_says_nothing_of_its_spread():
    found = clustered_mean(np.array([1.0, 2.0]), np.zeros(2))
    assert found.value == 1.5
    assert found.standard_error is None
    assert found.ci95 is None


@pytest.mark.parametrize("values, clusters", [([], []), ([1.0], [0, 1]), ([[1.0]], [[0]])])
def test_what_does_not_fit_is_refused(values, clusters):
    with pytest.raises(ValueError, match="values"):
        clustered_mean(np.array(values), np.array(clusters))


def test_student():
    assert student(0.95, 11) == pytest.approx(stats.t.ppf(0.975, 11), rel=1e-12)


def test_the_chance_is_that_of_students_test():
    values = np.random.default_rng(0).normal(0.4, 1.0, 20)
    assert chance(clustered_mean(values, np.arange(20))) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    repeated = clustered_mean(np.repeat(values, 6), np.repeat(np.arange(20), 6))
    assert chance(repeated) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert chance(clustered_mean(values, np.zeros(20))) == 1.0
    assert chance(clustered_mean(np.array([1.0, -1.0]), np.arange(2))) == 1.0


def test_a_ratio_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(2)
    clusters, hits = np.repeat(np.arange(12), 20), 0
    for _ in range(600):
        size = generator.lognormal(0, 0.3, 12).repeat(20) * generator.lognormal(0, 0.1, 240)
        harm = 0.01 * generator.lognormal(-0.08, 0.4, 12).repeat(20) * size
        found = clustered_ratio(harm, size, clusters)
        hits += found.ci95[0] < 0.01 < found.ci95[1]
    assert found.value == pytest.approx(harm.sum() / size.sum())
    # 570 expected, standard deviation 5; few clusters of skewed sizes cost a little
    assert 545 <= hits <= 590
    assert clustered_ratio(np.zeros(4), np.ones(4), np.arange(4)).ci95 == (0.0, 0.0)
    assert clustered_ratio(np.ones(4), np.ones(4), np.zeros(4)).ci95 is None
    with pytest.raises(ValueError, match="two"):
        clustered_ratio(np.ones(4), np.zeros(4), np.arange(4))
