"""Shares of items that are right: intervals and tests against scipy, simulation and the sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_decisions as plain
from scipy import stats

from quantkit.stats.shares import clustered_share, from_counts, mcnemar, tango_interval, tango_score, wilson

TABLES = [(7, 3, 100), (3, 7, 100), (1, 0, 30), (5, 0, 50), (120, 80, 5000), (43, 0, 44), (12, 9, 21)]


@pytest.mark.parametrize("table", TABLES)
def test_the_interval_ends_at_the_roots_of_its_polynomial(table):
    assert tango_interval(*table) == pytest.approx(plain.tango_interval(*table), abs=1e-9)


@pytest.mark.parametrize("table", TABLES[:5])
@pytest.mark.parametrize("loss", [-0.2, -0.01, 0.003, 0.1])
def test_the_score_takes_the_likeliest_chances(table, loss):
    assert tango_score(*table, loss) == pytest.approx(plain.tango_score(*table, loss), rel=1e-4)


def test_at_no_loss_it_is_mcnemars_chi_square():
    assert tango_score(30, 12, 500, 0.0) == pytest.approx((30 - 12) / np.sqrt(30 + 12))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 500))
def test_exchanged_sides_have_the_opposite_interval(lost, gained, rest):
    n = lost + gained + rest + 1
    low, high = tango_interval(lost, gained, n)
    assert tango_interval(gained, lost, n) == pytest.approx((-high, -low), abs=1e-12)
    assert low <= (lost - gained) / n + 1e-12
    assert high >= (lost - gained) / n - 1e-12


def test_no_difference_has_a_width():
    low, high = tango_interval(0, 0, 1000)
    assert high == -low == pytest.approx(1.96**2 / (1000 + 1.96**2), rel=1e-3)


def test_it_covers_what_it_says():
    """Exactly, over every table of 40 items, for a loss of 5 points among 15 that flip."""
    chances, true, covered = (0.10, 0.05), 0.05, 0.0
    for lost in range(41):
        for gained in range(41 - lost):
            low, high = tango_interval(lost, gained, 40)
            if low <= true <= high:
                covered += stats.multinomial.pmf([lost, gained, 40 - lost - gained], 40, [*chances, 1 - sum(chances)])
    assert 0.94 < covered < 0.97


@pytest.mark.parametrize("table", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ValueError, match="lost"):
        tango_score(*table, 0.0)


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


def test_answers_of_other_lengths_and_negative_counts_are_refused():
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


def test_wilson_covers_what_it_says():
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
