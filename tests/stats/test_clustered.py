import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from quantkit.stats.clustered import chance, clustered_mean, clustered_ratio, mean_interval, ratio_interval, student

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
    assert (mixed.standard_error, mixed.clusters) == (pytest.approx(plain.standard_error, rel=1e-12), 4)
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
def test_values_and_clusters_that_do_not_match_are_refused(values, clusters):
    with pytest.raises(ValueError, match="values"):
        clustered_mean(np.array(values), np.array(clusters))


def test_students_quantile_equals_scipys():
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
