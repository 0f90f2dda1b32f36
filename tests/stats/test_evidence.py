from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from quantkit.stats.evidence import Resampled


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
