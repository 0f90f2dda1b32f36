from math import expm1, log1p
from statistics import median

import numpy as np
import pytest
from reference import plain_decisions as plain

from quantkit.errors import InputError
from quantkit.stats.slowdown import BLOCKS, ROUNDS, Noise, slowdown

DEFAULT = [BLOCKS] * ROUNDS


@pytest.mark.parametrize(("rounds", "burst"), [([4] * 10, 2), ([1] * 7, 1), ([3] * 6, 3)])
@pytest.mark.parametrize(("quantile", "stands"), [(0.0, min), (0.5, median)])
def test_is_what_plain_loops_give(rounds, burst, quantile, stands):
    a, b = Noise().night(np.random.default_rng(0), sum(rounds), burst)
    found = slowdown(a, b, rounds=rounds, quantile=quantile, resamples=40, seed=3)
    effect, draws = plain.slowdown(a, b, rounds, 40, 3, stands=stands)
    assert (found.effect, found.draws) == (pytest.approx(effect, abs=1e-14), pytest.approx(draws, abs=1e-14))
    assert found.groups == len(rounds)


def test_a_planted_slowdown_is_what_is_told():
    a, b = Noise().night(np.random.default_rng(1), 40, 2)
    found = slowdown(1.05 * a, b, rounds=DEFAULT)
    assert found.told(found.effect) == pytest.approx(0.05, abs=0.006)
    typical = slowdown(1.05 * a, b, rounds=DEFAULT, quantile=0.5)
    assert typical.told(typical.effect) == pytest.approx(0.05, abs=0.006)
    assert found.told(found.margin) == pytest.approx(0.02)


def test_spikes_and_drift_leave_it_alone():
    generator = np.random.default_rng(2)
    a, b = (np.full((40, 2, 2), 1.0) for _ in range(2))
    a[generator.random(40) < 0.3] *= 3
    drift = np.linspace(1, 4, 40)[:, None, None]
    assert slowdown(1.1 * a * drift, b * drift, rounds=DEFAULT).effect == pytest.approx(log1p(0.1))


def test_what_slows_half_of_the_steps_is_in_their_median_alone():
    times = np.ones((40, 2, 2))
    slower = times * np.array([1.0, 1.2])
    assert slowdown(slower, times, rounds=DEFAULT).effect == 0
    assert slowdown(slower, times, rounds=DEFAULT, quantile=0.5).effect == pytest.approx(log1p(0.1))


def test_exchanged_sides_have_the_opposite_effect():
    a, b = Noise().night(np.random.default_rng(3), 40, 2)
    there, back = slowdown(a, b, rounds=DEFAULT), slowdown(b, a, rounds=DEFAULT)
    assert there.effect == -back.effect
    for x in (-0.01, 0.0, 0.004):
        assert there.p_above(x) == pytest.approx(back.p_below(-x))
    assert there.interval(0.95) == pytest.approx([-x for x in reversed(back.interval(0.95))])


def test_the_unit_of_time_does_not_matter():
    a, b = Noise().night(np.random.default_rng(4), 40, 2)
    once, scaled = slowdown(a, b, rounds=DEFAULT), slowdown(1e-6 * a, 1e-6 * b, rounds=DEFAULT)
    assert scaled.effect == pytest.approx(once.effect, abs=1e-13)
    assert scaled.p_above(0.001) == pytest.approx(once.p_above(0.001))


def test_the_order_of_rounds_does_not_matter_but_that_of_blocks_does():
    generator = np.random.default_rng(5)
    a, b = Noise().night(generator, 40, 2)
    moods = np.repeat(generator.normal(0, 0.03, 10), 4)[:, None, None]
    a = a * np.exp(moods)
    found = slowdown(a, b, rounds=DEFAULT)
    rounds = np.concatenate([np.arange(4) + 4 * i for i in generator.permutation(10)])
    moved = slowdown(a[rounds], b[rounds], rounds=DEFAULT)
    assert (moved.effect, moved.standard_error) == (found.effect, pytest.approx(found.standard_error, rel=0.1))
    # blocks of one round are alike: mixed over the rounds they would look like more than they are
    mixed = generator.permutation(40)
    assert slowdown(a[mixed], b[mixed], rounds=DEFAULT).standard_error < 0.8 * found.standard_error


@pytest.mark.parametrize(
    ("wrong", "code"),
    [(np.nan, "times-invalid"), (0.0, "times-invalid"), (np.inf, "times-invalid"), (-1e-3, "clock-backwards")],
)
def test_what_is_no_time_is_refused_in_one_line(wrong, code):
    a, b = (np.full((5, 2, 2), 0.1) for _ in range(2))
    b[3, 1, 0] = wrong
    with pytest.raises(InputError) as refused:
        slowdown(a, b, where="decode, batch 1")
    assert (refused.value.code, refused.value.exit) == (code, 2)
    line = refused.value.line()
    assert "decode, batch 1, baseline" in line
    assert "step 0 of visit 1 in block 3" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("sides", "rounds"),
    [
        ((np.ones((5, 2, 1)), np.ones((4, 2, 1))), []),
        ((np.ones((5, 4)), np.ones((5, 4))), []),
        ((np.ones((1, 2, 1)), np.ones((1, 2, 1))), []),
        ((np.ones((5, 2, 0)), np.ones((5, 2, 0))), []),
        ((np.ones((5, 2, 1)), np.ones((5, 2, 1))), [3, 3]),
    ],
)
def test_what_is_no_pair_of_sides_is_refused(sides, rounds):
    with pytest.raises(InputError, match="times-invalid"):
        slowdown(*sides, rounds=rounds)


def test_times_without_noise_are_certain():
    found = slowdown(np.full((12, 2, 1), 1.03), np.ones((12, 2, 1)))
    assert (found.p_above(log1p(0.03)), found.p_above(found.alarm)) == (1.0, 0.0)
    assert found.interval(0.95) == pytest.approx((log1p(0.03), log1p(0.03)))
    assert expm1(found.detectable(0.01, 0.9)) == pytest.approx(0.02)


def test_steps_have_the_spread_the_spikes_and_the_correlation_that_are_asked_for():
    a, b = Noise(cv=0.02, spikes=0.03, size=5.0, lag=0.5).night(np.random.default_rng(0), 5000, burst=1)
    assert a.shape == b.shape == (5000, 2, 1)
    times = np.concatenate([a.ravel(), b.ravel()])
    spikes = times > 2
    assert spikes.mean() == pytest.approx(0.03, abs=0.004)
    assert np.std(times[~spikes]) / np.mean(times[~spikes]) == pytest.approx(0.02, rel=0.03)
    # of a block A B B A or B A A B the inner two stand side by side, the outer two three steps apart
    calm = np.log(Noise(spikes=0.0).night(np.random.default_rng(1), 20000)[0][..., 0])
    assert np.corrcoef(calm.T)[0, 1] == pytest.approx((0.5 + 0.5**3) / 2, abs=0.02)


def test_steps_that_settle_are_not_among_them():
    a, _ = Noise().night(np.random.default_rng(0), 6, burst=2, settle=1)
    assert a.shape == (6, 2, 2)
