import numpy as np
import pytest

from quantkit.stats.abba import aa_spread, compare, median_interval, summed, summed_spread

BURST = 2


def machine(blocks, seed, *, speedup=1.0, drift=0.95, spikes=0.03):
    """(subject, baseline) as a shared machine would give them: a drift that both see, jitter, now and then a spike."""
    rng = np.random.default_rng(seed)
    n = blocks * 4 * BURST
    slow = np.empty(n)
    slow[0] = rng.normal()
    for i, step in enumerate(rng.normal(size=n - 1) * np.sqrt(1 - drift**2)):
        slow[i + 1] = drift * slow[i] + step
    times = np.exp(0.05 * slow + 0.02 * np.abs(rng.normal(size=n)))
    times *= np.where(rng.random(n) < spikes, 1 + rng.exponential(0.5, size=n), 1)
    times = times.reshape(blocks, 4, BURST)
    swap = (rng.random(blocks) < 0.5)[:, None, None]
    outer, inner = times[:, [0, 3]], times[:, [1, 2]]
    return np.where(swap, outer, inner) / speedup, np.where(swap, inner, outer)


def test_linear_drift_leaves_the_ratio_alone():
    # the machine slows down by a factor of three; every block sees a straight piece of that
    at = np.arange(4 * 60).reshape(60, 4)
    times = 1 + 2 * at / at.size
    swap = (np.arange(60) % 2 == 0)[:, None]
    outer, inner = times[:, [0, 3]], times[:, [1, 2]]
    a, b = np.where(swap, outer, inner)[..., None], np.where(swap, inner, outer)[..., None]
    found = compare(a, b)
    assert found.ratio == pytest.approx(1.0, abs=0.01)
    assert found.ratio_ci95[1] - found.ratio_ci95[0] < 0.03
    # while the time itself is anything but sure
    assert found.ci95[1] / found.ci95[0] > 1.3


@pytest.mark.parametrize("blocks", [6, 15, 60])
def test_the_interval_holds_the_true_ratio_and_equal_sides_seldom_alarm(blocks):
    held = alarms = 0
    for seed in range(80):
        held += _holds(compare(*machine(blocks, seed, speedup=1.2), resamples=299), 1.2)
        alarms += not _holds(compare(*machine(blocks, seed + 1000), resamples=299), 1.0)
    assert held >= 72
    assert alarms <= 8


def _holds(found, ratio):
    return found.ratio_ci95[0] <= ratio <= found.ratio_ci95[1]


def test_the_median_carries_the_drift():
    # consecutive steps are alike over 20 of them: an interval that took them for independent would hold a third
    true = float(np.median(np.concatenate([machine(4000, seed)[0].ravel() for seed in range(3)])))
    held = naive = 0
    for seed in range(80):
        times = machine(60, seed)[0]
        low, high = median_interval(times)
        held += low <= true <= high
        ordered = np.sort(times.ravel())
        reach = int(0.98 * ordered.size**0.5)
        naive += ordered[ordered.size // 2 - reach] <= true <= ordered[ordered.size // 2 + reach]
    assert held >= 66
    assert naive < held - 15


def test_rounds_at_different_times_are_the_sample():
    # five rounds on a machine that was in five moods; within a round nothing moves
    moods = np.array([1.0, 1.1, 0.9, 1.05, 0.95])
    times = np.repeat(moods, 20)[:, None, None] * np.ones((100, 2, 1))
    low, high = median_interval(times, [20] * 5)
    spread = np.std(np.log(moods), ddof=1)
    assert np.log(high / low) / 2 == pytest.approx(2.776 * spread / 5**0.5, rel=1e-3)
    # a few rounds say little: stretches of them stand in
    assert median_interval(times, [50, 50]) == median_interval(times)


def test_swapped_sides_give_the_inverse():
    a, b = machine(30, 0, speedup=1.5)
    there, back = compare(a, b), compare(b, a)
    assert (there.ratio, there.p99_ratio) == (pytest.approx(1 / back.ratio), pytest.approx(1 / back.p99_ratio))
    assert there.quantiles == back.baseline
    assert there.ratio_ci95[0] == pytest.approx(1 / back.ratio_ci95[1], rel=0.01)


def test_aa_spread_is_what_two_piles_differ_by():
    rng = np.random.default_rng(0)
    times = np.exp(0.1 * rng.normal(size=(50, 2, 1)))
    # the log median of 50 normal values has the standard error 1.253 sigma / sqrt(50); two of them, at 95 %
    expected = 1.96 * 2**0.5 * 1.253 * 0.1 / 50**0.5
    spreads = [aa_spread(np.exp(0.1 * rng.normal(size=(50, 2, 1))), rng) for _ in range(30)]
    assert float(np.mean(spreads)) == pytest.approx(expected, rel=0.25)
    assert aa_spread(np.ones_like(times), rng) == 0.0


def test_flags_say_what_noise_swamps():
    few = compare(*machine(15, 0))
    assert "p99-from-few" in few.flags
    assert "interval-spans-1" in few.flags
    assert "aa-exceeds-effect" in few.flags
    clear = compare(*machine(60, 0, speedup=2.0, spikes=0.0))
    assert clear.flags == ()
    assert clear.n == 240
    rng = np.random.default_rng(0)
    wild = compare(*np.exp(rng.normal(size=(2, 15, 2, 1))))
    assert "noisy" in wild.flags


def test_identical_steps_have_no_width():
    found = compare(np.full((5, 2, 1), 1.0), np.full((5, 2, 1), 2.0))
    assert found.ratio_ci95 == (2.0, 2.0)
    assert found.p99_ratio_ci95 == (2.0, 2.0)
    assert found.ci95 == (1.0, 1.0)
    assert found.aa_spread == 0.0


def test_a_seed_fixes_it():
    sides = machine(15, 0)
    assert compare(*sides, seed=1).ratio_ci95 == compare(*sides, seed=1).ratio_ci95
    assert compare(*sides, seed=1).ratio_ci95 != compare(*sides, seed=2).ratio_ci95


@pytest.mark.parametrize(
    "sides",
    [
        (np.ones((5, 2, 1)), np.ones((4, 2, 1))),
        (np.ones((5, 4)), np.ones((5, 4))),
        (np.ones((1, 2, 1)), np.ones((1, 2, 1))),
        (np.zeros((5, 2, 1)), np.ones((5, 2, 1))),
    ],
)
def test_what_is_no_pair_of_sides_is_refused(sides):
    with pytest.raises(ValueError, match="two"):
        compare(*sides)


def test_a_sum_of_comparisons_covers_the_true_ratio_of_the_sums():
    rng = np.random.default_rng(5)
    hp, own, counts = (3.0, 1.0), (1.0, 2.0), (2, 5)
    true = sum(c * t for c, t in zip(counts, hp, strict=True)) / sum(c * t for c, t in zip(counts, own, strict=True))
    held = 0
    for night in range(40):
        parts = []
        for i in (0, 1):
            times = [mean * np.exp(0.05 * rng.standard_normal((12, 2, 2))) for mean in (own[i], hp[i])]
            parts.append(compare(*times, seed=2 * night + i, resamples=499))
        ratio, (low, high), draws = summed(parts, counts)
        assert low <= ratio <= high
        assert draws.shape == parts[0].draws.shape
        held += low <= true <= high
    assert held >= 35


def test_a_sum_of_one_is_that_one():
    rng = np.random.default_rng(6)
    part = compare(*(np.exp(0.02 * rng.standard_normal((12, 2, 2))) for _ in range(2)))
    ratio, ci95, _ = summed([part], [7])
    assert (ratio, ci95) == (pytest.approx(part.ratio), pytest.approx(part.ratio_ci95, rel=0.002))


def test_the_spread_of_a_sum_is_no_more_than_said_and_a_short_noisy_part_counts_little():
    rng, generator = np.random.default_rng(7), np.random.default_rng(8)
    noise, mean, counts = (0.3, 0.03), (0.01, 1.0), (3, 2)
    held = 0
    for night in range(30):
        sides = [mean[i] * np.exp(noise[i] * rng.standard_normal((20, 2, 1))) for i in (0, 1)]
        hp = [mean[i] * np.exp(noise[i] * rng.standard_normal((20, 2, 1))) for i in (0, 1)]
        parts = [compare(sides[i], hp[i], seed=2 * night + i, resamples=199) for i in (0, 1)]
        said = summed_spread(parts, counts)
        held += aa_spread(sum(c * side for c, side in zip(counts, sides, strict=True)), generator) <= said
        assert said < 0.5 * max(part.aa_spread for part in parts)
    assert held >= 28
    assert summed_spread(parts[:1], [7]) == pytest.approx(parts[0].aa_spread)


def test_ratios_of_six_rounds_or_more_are_resampled_by_round():
    # a side that a neighbour slows in every other round: within a round nothing moves
    base = np.full((60, 2, 1), 1.0) * rng(1, 60, 0.002)
    side = np.repeat([1.0, 1.1, 1.0, 1.1, 1.0, 1.1], 10)[:, None, None] * rng(2, 60, 0.002)
    whole = compare(base, side, rounds=[10] * 6)
    low, high = whole.ratio_ci95
    assert low < 1.005
    assert high > 1.095
    # what is known of one moment alone cannot show that
    (low, high) = compare(base[:10], side[:10]).ratio_ci95
    assert high - low < 0.02
    # rounds of different lengths are cut to the shortest, from their ends
    assert compare(base, side, rounds=[5, 15, 10, 10, 8, 12]).ratio == whole.ratio


def rng(seed, blocks, noise):
    return np.exp(np.random.default_rng(seed).normal(0, noise, (blocks, 2, 1)))
