import itertools
import json
from math import expm1, log, log1p, nan
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quantkit.errors import InputError
from quantkit.stats.decision import decide
from quantkit.stats.evidence import KNOWN, MeasuredValue, Resampled, difference


def normal(effect=0.0, error=1.0, groups=20, draws=20000):
    """Evidence whose draws are as normal as so many can be."""
    each = stats.norm.ppf((np.arange(draws) + 0.5) / draws) * error * ((groups - 1) / groups) ** 0.5
    return Resampled(effect=effect, draws=effect + each, groups=groups, alarm=0.0, margin=1.0)


@pytest.mark.parametrize("groups", [3, 10, 200])
def test_of_normal_draws_it_is_students_t(groups):
    found = normal(2.0, 0.7, groups)
    assert found.standard_error == pytest.approx(0.7, rel=1e-3)
    for x in (0.5, 2.0, 2.3):
        assert found.p_above(x) == pytest.approx(stats.t.sf((2.0 - x) / 0.7, groups - 1), rel=0.01)
        assert found.p_below(x) == pytest.approx(stats.t.cdf((2.0 - x) / 0.7, groups - 1), rel=0.01)
    reach = stats.t.ppf(0.975, groups - 1) * 0.7
    assert found.interval(0.95) == pytest.approx((2 - reach, 2 + reach), rel=0.02)


def test_where_the_draws_end_students_t_goes_on():
    found = normal(10.0, 1.0)
    assert found.draws.min() > 0
    assert found.p_above(0.0) == pytest.approx(stats.t.sf(10, 19), rel=1e-3)
    assert 0 < found.p_above(0.0) < 1 / found.draws.size


def test_a_long_tail_of_draws_is_believed():
    generator = np.random.default_rng(0)
    draws = np.where(generator.random(2000) < 0.03, -3.0, 1.0 + 0.1 * generator.normal(size=2000))
    found = Resampled(effect=1.0, draws=draws, groups=50, alarm=0.0, margin=1.0)
    # by its standard error alone, 0.7, and by a count of draws as by Student's t with many degrees
    assert found.p_above(-1.5) > 0.02
    assert found.interval(0.95)[0] < -2.5


def test_p_rises_with_what_is_asked_of_it():
    generator = np.random.default_rng(1)
    found = Resampled(effect=0.4, draws=generator.standard_t(3, 999) + 0.4, groups=8, alarm=0.0, margin=1.0)
    above = [found.p_above(x) for x in np.linspace(-60, 60, 400)]
    assert np.all(np.diff(above) >= 0)
    assert np.all(np.diff([found.p_below(x) for x in np.linspace(-60, 60, 400)]) <= 0)


def test_an_interval_and_its_p_agree():
    found = normal(0.3, 0.2, 12)
    low, high = found.interval(0.95)
    assert found.p_above(low) == pytest.approx(0.025, rel=0.02)
    assert found.p_below(high) == pytest.approx(0.025, rel=0.02)


def test_the_smallest_effect_is_found_as_often_as_it_says():
    generator, error, groups = np.random.default_rng(2), 0.5, 15
    smallest = normal(0.0, error, groups).detectable(0.01, 0.9)
    hits = 0
    for _ in range(400):
        values = smallest + error * groups**0.5 * generator.normal(size=groups)
        t = values.mean() / (values.std(ddof=1) / groups**0.5)
        hits += stats.t.sf(t, groups - 1) <= 0.01
    assert 0.85 <= hits / 400 <= 0.95


REPEATS = Path(__file__).parents[2] / "benchmarks" / "results" / "repeat-20261121.json"


def test_a_difference_has_the_reach_of_both():
    found = difference(MeasuredValue(5.0, (4.0, 8.0)), MeasuredValue(3.0, (1.0, 3.5)), margin=1.0)
    assert found.effect == 2.0
    # below: 1 of the candidate's own, 0.5 of the baseline's upper end; above: 3 and 2
    assert found.interval(0.95) == pytest.approx((2 - 1.25**0.5, 2 + 13**0.5), rel=1e-3)
    assert found.p_above(found.interval(0.95)[0]) == pytest.approx(0.025, rel=1e-3)
    assert found.p_below(found.interval(0.95)[1]) == pytest.approx(0.025, rel=1e-3)


def test_exchanged_sides_have_the_opposite_effect():
    one, other = MeasuredValue(5.0, (4.0, 8.0)), MeasuredValue(3.0, (1.0, 3.5))
    there, back = difference(one, other, margin=1.0), difference(other, one, margin=1.0)
    assert there.effect == -back.effect
    assert there.interval(0.9) == pytest.approx(tuple(-end for end in back.interval(0.9)[::-1]))
    assert there.p_above(0.5) == pytest.approx(back.p_below(-0.5))


def test_a_ratio_of_ratios_is_told_as_a_slowdown():
    fast, slow = (MeasuredValue.ratio(r, (0.99 * r, 1.01 * r)) for r in (2.0, 1.6))
    found = difference(slow, fast, margin=0.05, alarm=0.05, lower_is_better=False, logarithm=True)
    assert (found.told(found.effect), found.told(found.margin)) == (pytest.approx(0.25), pytest.approx(0.05))
    (decision,) = decide([found])
    assert decision.answer == "worse"
    (back,) = decide([difference(fast, slow, margin=0.05, alarm=0.05, lower_is_better=False, logarithm=True)])
    assert (back.answer, log1p(back.effect)) == ("better", pytest.approx(-log1p(decision.effect)))


def test_the_spread_of_a_run_widens_it_and_few_groups_make_it_careful():
    narrow, wide = (MeasuredValue.ratio(2.0, (1.9, 2.1), spread=spread) for spread in (0.0, 0.1))
    assert wide.ci95[0] < narrow.ci95[0]
    assert wide.ci95[1] - wide.value == pytest.approx(np.hypot(log(2.1 / 2), log1p(0.1)))
    few, many = (difference(MeasuredValue(1.0, (0.9, 1.1), n), KNOWN, margin=0.1) for n in (4, 1000))
    assert few.interval(0.95) == pytest.approx(many.interval(0.95))
    assert few.interval(0.999)[1] > many.interval(0.999)[1]
    assert few.p_above(0.8) > many.p_above(0.8)
    assert few.detectable(0.01, 0.9) > many.detectable(0.01, 0.9) > 0.1
    wild = MeasuredValue.ratio(1.0, (0.01, 100.0), degrees=1)
    found = difference(wild, KNOWN, margin=0.05, lower_is_better=False, logarithm=True)
    assert np.isfinite(found.told(found.detectable(0.001, 0.9)))


def test_what_is_known_exactly_is_certain():
    found = difference(MeasuredValue(0.2, (0.2, 0.2)), KNOWN, margin=0.1, alarm=0.1)
    assert (found.p_above(0.1), found.p_below(-0.1), found.p_above(0.3)) == (0.0, 1.0, 1.0)
    assert found.interval(0.95) == (0.2, 0.2)
    assert decide([found])[0].answer == "worse"
    assert decide([difference(KNOWN, KNOWN, margin=0.1)])[0].answer == "same"


@pytest.mark.parametrize(
    "wrong", [MeasuredValue(nan, (0.0, 1.0)), MeasuredValue(2.0, (0.0, 1.0)), MeasuredValue(0.5, (0.0, nan))]
)
def test_what_is_no_measurement_is_refused(wrong):
    with pytest.raises(InputError, match="values-invalid"):
        difference(wrong, KNOWN, margin=0.1)
    for value, ends in ((0.0, (0.0, 1.0)), (nan, (1.0, 2.0)), (1.0, (-1.0, 2.0)), (1.0, (0.5, float("inf")))):
        with pytest.raises(InputError, match="values-invalid"):
            MeasuredValue.ratio(value, ends)


def test_intervals_cover_what_they_are_of():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        x, y = generator.normal(3.0, 0.1), generator.normal(2.0, 0.3)
        found = difference(
            MeasuredValue(x, (x - 0.196, x + 0.196)), MeasuredValue(y, (y - 0.588, y + 0.588)), margin=0.1
        )
        low, high = found.interval(0.95)
        covered += low <= 1.0 <= high
    assert 0.93 <= covered / 400 <= 0.97


def test_recorded_runs_of_one_bundle_agree_within_the_interval():
    rows = [row for row in json.loads(REPEATS.read_text())["rows"] if row["row"].startswith("latency.")]
    outside = {0: 0, 1: 0}
    pairs = 0
    for row, weight in itertools.product(rows, outside):
        runs = [
            MeasuredValue.ratio((low * high) ** 0.5, (low, high), spread=expm1(weight * log1p(spread)))
            for (low, high), spread in zip(row["ratio_ci95"], row["aa_spread"], strict=True)
        ]
        for one, other in itertools.combinations(runs, 2):
            low, high = difference(one, other, margin=0.1, lower_is_better=False).interval(0.95)
            outside[weight] += not low <= 0 <= high
            pairs += weight
    assert (pairs, outside) == (24, {0: 4, 1: 1})
