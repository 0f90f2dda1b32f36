"""Compare interleaved times of two sides (`measurement.timing.schedule`): their ratio and its uncertainty.

Consecutive steps are alike, so the bootstrap draws whole blocks, and in long runs groups of neighbouring blocks, both
sides together. From six rounds on, with something else running between them, the rounds are the groups. Other programs
disturb a machine's memory for seconds to minutes, and harm the side that reads more memory more. So the blocks of one
round have similar ratios too:

    ratio       median(baseline) / median(subject), above 1 where the subject is faster; likewise for the 99th
    percentiles
    interval    percentiles of the ratio over resampled blocks, at the level that matches Student's t with G − 1 degrees
                (Hesterberg 2015, section 5.3: plain percentiles are too narrow for few groups)
    a median    in seconds, unlike the ratio, includes the drift of the machine. Its interval is that of batch means,
                Student's t over the medians of a few long stretches, best taken at different times (Law, Simulation
                Modeling and Analysis, 9.5.3)
    A/A spread  a coin assigns the two visits of one side in each block to a first and a second pile. The piles are two
                measurements of one thing. The spread is the 95th percentile, over the tosses, of the difference of
                their medians as a share; the larger of the two sides counts.

Sources: Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69 (2015); Kuensch,
Annals of Statistics 17 (1989), for resampling blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import draws, special, student

Array = NDArray[Any]
Interval = tuple[float, float]

QUANTILES = (0.5, 0.9, 0.99)
# with fewer steps, the 99th percentile is the largest of them
P99_FROM = 100
# a relative interval or an A/A spread above this share is flagged `noisy`
NOISY = 0.1
_GROUPS = 20
_STRETCHES = 8
_ROUNDS = 4
_CLUSTERS = 6
_TOSSES = 400


@dataclass(frozen=True, eq=False)
class Comparison:
    """A subject and its baseline, from interleaved steps. Times in seconds.

    Args:
        quantiles, baseline: `p50`, `p90`, `p99` of the steps of both sides.
        ci95, baseline_ci95: intervals of the medians.
        ratio: speed-up of the subject at the median; `p99_ratio`: at the 99th percentile.
        aa_spread: difference between two measurements of one side, as a share.
        n: steps of each side.
        draws: `[resamples]` ratio in each resample, for results over several comparisons.
        flags: `p99-from-few`, `interval-spans-1`, `aa-exceeds-effect`, `noisy`.
        tail: share of the draws below the interval of the ratio, and above it; less than 2.5 % with few groups.
    """

    quantiles: dict[str, float]
    baseline: dict[str, float]
    ci95: Interval
    baseline_ci95: Interval
    ratio: float
    ratio_ci95: Interval
    p99_ratio: float
    p99_ratio_ci95: Interval
    aa_spread: float
    n: int
    draws: Array
    flags: tuple[str, ...]
    tail: float = 0.025


def compare(
    subject: Array, baseline: Array, *, rounds: Sequence[int] = (), resamples: int = 1999, seed: int = 0
) -> Comparison:
    """Compare interleaved times of two sides, each interval at 95 %.

    Args:
        subject, baseline: `[blocks, 2, burst]` seconds, in the order of measurement.
        rounds: blocks of each round, if something else ran between rounds; from six on, the bootstrap draws rounds.

    Raises ValueError: different shapes, fewer than two blocks, a time that is not positive; MissingDependency: scipy.
    """
    subject, baseline = np.asarray(subject, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if subject.shape != baseline.shape or subject.ndim != 3 or subject.shape[1] != 2:
        raise ValueError(f"two sides of [blocks, 2, burst], got {subject.shape} and {baseline.shape}")
    if subject.shape[0] < 2 or not (np.all(subject > 0) and np.all(baseline > 0)):
        raise ValueError("a comparison needs two blocks and times above zero")
    generator = np.random.default_rng(seed)
    groups = resampled_groups(subject.shape[0], rounds)
    tail = tail_of(len(groups))
    point, draws, (p50, p99) = _resampled(subject, baseline, groups, resamples, generator)
    spread = max(aa_spread(side, generator) for side in (subject, baseline))
    flags = {
        "p99-from-few": subject.size < P99_FROM,
        "interval-spans-1": p50[0] <= 1 <= p50[1],
        "aa-exceeds-effect": spread >= abs(np.expm1(abs(np.log(point[0])))),
        "noisy": p50[1] / p50[0] - 1 > NOISY or spread > NOISY,
    }
    return Comparison(
        quantiles=_quantiles(subject),
        baseline=_quantiles(baseline),
        ci95=median_interval(subject, rounds),
        baseline_ci95=median_interval(baseline, rounds),
        ratio=point[0],
        ratio_ci95=p50,
        p99_ratio=point[1],
        p99_ratio_ci95=p99,
        aa_spread=spread,
        n=subject.size,
        draws=draws,
        flags=tuple(flag for flag, holds in flags.items() if holds),
        tail=tail,
    )


def summed(parts: Sequence[Comparison], counts: Sequence[int]) -> tuple[float, Interval, Array]:
    """Return (ratio, its 95 % interval, draws) of a sum of parts, each taken `counts` times and compared separately.

    ratio = Σ c·hp / Σ c·(hp / ratio). The parts were timed one after another; compare each with its own seed, so that
    their draws are independent. Baseline medians are taken as exact, since the draws of each ratio carry the noise of
    both sides.
    """
    weights = np.array([count * part.baseline["p50"] for part, count in zip(parts, counts, strict=True)])
    ratio = float(weights.sum() / sum(w / part.ratio for w, part in zip(weights, parts, strict=True)))
    draws = weights.sum() / sum(w / part.draws for w, part in zip(weights, parts, strict=True))
    tail = min(part.tail for part in parts)
    low, high = (float(x) for x in np.quantile(draws, (tail, 1 - tail)))
    return ratio, (min(low, ratio), max(high, ratio)), draws


def summed_spread(parts: Sequence[Comparison], counts: Sequence[int]) -> float:
    """Bound the A/A spread of a sum of parts, each taken `counts` times.

    |Σ d| ≤ Σ |d|: the mean of the spreads, weighted by the time of each part, so a short noisy part counts little.
    """
    weights = [count * part.quantiles["p50"] for part, count in zip(parts, counts, strict=True)]
    spread = sum(weight * part.aa_spread for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    return float(spread)


def aa_spread(times: Array, generator: np.random.Generator) -> float:
    """Return the A/A spread of times [blocks, 2, burst]: the difference, as a share, that 95 of 100 random splits
    stay below."""
    coins = generator.integers(0, 2, (_TOSSES, times.shape[0]))
    blocks = np.arange(times.shape[0])
    first, second = (np.median(times[blocks, side].reshape(_TOSSES, -1), axis=1) for side in (coins, 1 - coins))
    return float(np.expm1(np.quantile(np.abs(np.log(first / second)), 0.95)))


def median_interval(times: Array, rounds: Sequence[int] = ()) -> Interval:
    """Return the 95 % interval of the median of consecutive times [blocks, ...], drift of the machine included.

    It is Student's t over the logarithms of the rounds' medians. With fewer than four rounds, 8 stretches of blocks
    take their place, or the single blocks if there are fewer than 8.
    """
    few = len(rounds) < _ROUNDS
    parts = np.array_split(times, min(_STRETCHES, times.shape[0]) if few else np.cumsum(rounds)[:-1])
    middles = np.log([np.median(part) for part in parts])
    reach = student(0.95, len(parts) - 1) * float(np.std(middles, ddof=1)) / len(parts) ** 0.5
    middle = float(np.median(times))
    return middle * float(np.exp(-reach)), middle * float(np.exp(reach))


def _resampled(
    subject: Array, baseline: Array, groups: Array, resamples: int, generator: np.random.Generator
) -> tuple[list[float], Array, tuple[Interval, Interval]]:
    """Return (both ratios, draws of the first [resamples], both intervals)."""
    above, below = (side[groups].reshape(len(groups), -1) for side in (baseline, subject))

    def ratios(index: Array) -> Array:
        drawn = [np.sort(side[index].reshape(*index.shape[:-1], -1)) for side in (above, below)]
        high, low = (np.stack([_of_sorted(side, q) for q in (0.5, 0.99)]) for side in drawn)
        result: Array = high / low
        return result

    drawn = draws(ratios, len(groups), resamples, 200, generator)
    tail = tail_of(len(groups))
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=-1)
    point = [_quantiles(baseline)[q] / _quantiles(subject)[q] for q in ("p50", "p99")]
    intervals = [(float(min(low[i], point[i])), float(max(high[i], point[i]))) for i in (0, 1)]
    return point, drawn[0], (intervals[0], intervals[1])


def resampled_groups(blocks: int, rounds: Sequence[int] = ()) -> Array:
    """Return groups of blocks, [groups, blocks in each], for a bootstrap: rounds from six on, else neighbouring blocks.

    Surplus blocks at the start, the least settled ones, belong to no group.
    """
    if len(rounds) >= _CLUSTERS and sum(rounds) == blocks and 2 * min(rounds) >= float(np.median(rounds)):
        size = min(rounds)
        groups: Array = np.cumsum(rounds)[:, None] + np.arange(-size, 0)
        return groups
    size = max(1, blocks // _GROUPS)
    return np.arange(blocks - blocks // size * size, blocks).reshape(-1, size)


def tail_of(groups: int) -> float:
    """Return the share of draws to leave on each side, so that the interval of so few groups covers 95 %."""
    return float(special().ndtr(-student(0.95, groups - 1) * (groups / (groups - 1)) ** 0.5))


def _of_sorted(times: Array, share: float) -> Array:
    """Return `np.quantile` along the last axis of sorted times; sorting is several times faster than selecting."""
    at = share * (times.shape[-1] - 1)
    first, part = int(at), at - int(at)
    low, high = times[..., first], times[..., min(first + 1, times.shape[-1] - 1)]
    # from the nearer end, as in numpy, to get the same number
    quantile: Array = low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
    return quantile


def _quantiles(times: Array) -> dict[str, float]:
    return {f"p{100 * q:.0f}": float(x) for q, x in zip(QUANTILES, np.quantile(times, QUANTILES), strict=True)}
