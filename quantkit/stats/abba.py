"""What interleaved times of two sides say (`measurement.timing.schedule`), and how sure one can be of their ratio.

Steps that follow each other are alike, so what is drawn again in the bootstrap is whole blocks, and of long runs groups
of neighbouring blocks, both sides together. Where they were taken in six rounds or more, with something else between
them, the rounds are the groups: what other programs do to a machine's memory lasts for seconds to minutes, and harms a
side that reads more of it more than the other, so that blocks of one round are alike in their ratio too:

    ratio       median(baseline) / median(subject), above 1 where the subject is faster; the same of 99th percentiles
    interval    percentiles of the ratio over resampled blocks, at the level that Student's t with G − 1 degrees asks
                for (Hesterberg 2015, section 5.3: plain percentiles are too narrow for few groups)
    a median    in seconds carries what the ratio is spared: the drift of the machine. Its interval is that of batch
                means, Student's t over the medians of a few long stretches, best taken at different times
                (Law, Simulation Modeling and Analysis, 9.5.3)
    A/A spread  of one side's two visits in each block, one goes to a first and one to a second pile by the toss of a
                coin; the piles are two measurements of one thing. The spread is the difference of their medians, as a
                share, that 95 of 100 tosses stay below: the larger of the two sides'.

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
# fewer steps than this, and the 99th percentile is the largest of them
P99_FROM = 100
# a ratio's interval this much wider than a point, or an A/A spread of this share, is called noisy
_NOISY = 0.1
_GROUPS = 20
_STRETCHES = 8
_ROUNDS = 4
_CLUSTERS = 6
_TOSSES = 400


@dataclass(frozen=True, eq=False)
class Comparison:
    """A subject and its baseline, from steps that were interleaved. Times in seconds.

    Args:
        quantiles, baseline: `p50`, `p90`, `p99` of both sides' steps.
        ci95, baseline_ci95: of the medians.
        ratio: how many times as fast the subject is at the median; `p99_ratio`: at the 99th percentile.
        aa_spread: what two measurements of one side differ by, as a share.
        n: steps of each side.
        draws: `[resamples]` the ratio in each resample, for what is computed from several comparisons.
        flags: `p99-from-few`, `interval-spans-1`, `aa-exceeds-effect`, `noisy`.
        tail: share of the draws below the interval of the ratio, and above it; less than 2.5 % where groups are few.
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
        subject, baseline: `[blocks, 2, burst]` seconds, in the order in which they were taken.
        rounds: blocks of each round, where they were taken in rounds with something else between them; from six on
            they are what is resampled.

    Raises ValueError: different shapes, fewer than two blocks, a time that is not positive; MissingDependency: scipy.
    """
    subject, baseline = np.asarray(subject, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if subject.shape != baseline.shape or subject.ndim != 3 or subject.shape[1] != 2:
        raise ValueError(f"two sides of [blocks, 2, burst], got {subject.shape} and {baseline.shape}")
    if subject.shape[0] < 2 or not (np.all(subject > 0) and np.all(baseline > 0)):
        raise ValueError("a comparison needs two blocks and times above zero")
    generator = np.random.default_rng(seed)
    groups = resampled_groups(subject.shape[0], rounds)
    tail = _tail(len(groups))
    point, draws, (p50, p99) = _resampled(subject, baseline, groups, resamples, generator)
    spread = max(aa_spread(side, generator) for side in (subject, baseline))
    flags = {
        "p99-from-few": subject.size < P99_FROM,
        "interval-spans-1": p50[0] <= 1 <= p50[1],
        "aa-exceeds-effect": spread >= abs(np.expm1(abs(np.log(point[0])))),
        "noisy": p50[1] / p50[0] - 1 > _NOISY or spread > _NOISY,
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
    """Give (ratio, its 95 % interval, draws) of the sum of several things, each `counts` times, compared one by one.

    ratio = Σ c·hp / Σ c·(hp / ratio). Parts were timed after each other; compare them with seeds of their own, so that
    their draws are independent. Medians of the baseline are taken as they are, since each ratio's draws carry the noise
    of both sides.
    """
    weights = np.array([count * part.baseline["p50"] for part, count in zip(parts, counts, strict=True)])
    ratio = float(weights.sum() / sum(w / part.ratio for w, part in zip(weights, parts, strict=True)))
    draws = weights.sum() / sum(w / part.draws for w, part in zip(weights, parts, strict=True))
    tail = min(part.tail for part in parts)
    low, high = (float(x) for x in np.quantile(draws, (tail, 1 - tail)))
    return ratio, (min(low, ratio), max(high, ratio)), draws


def summed_spread(parts: Sequence[Comparison], counts: Sequence[int]) -> float:
    """Bound what two measurements of the sum of several things, each `counts` times, differ by as a share.

    |Σ d| ≤ Σ |d|: the spreads' mean, weighted by the time of each part. A short part that is noisy says little of it.
    """
    weights = [count * part.quantiles["p50"] for part, count in zip(parts, counts, strict=True)]
    found = sum(weight * part.aa_spread for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    return float(found)


def aa_spread(times: Array, generator: np.random.Generator) -> float:
    """Tell what two measurements of one side, [blocks, 2, burst], differ by as a share, in all but 5 of 100 splits."""
    coins = generator.integers(0, 2, (_TOSSES, times.shape[0]))
    each = np.arange(times.shape[0])
    first, second = (np.median(times[each, side].reshape(_TOSSES, -1), axis=1) for side in (coins, 1 - coins))
    return float(np.expm1(np.quantile(np.abs(np.log(first / second)), 0.95)))


def median_interval(times: Array, rounds: Sequence[int] = ()) -> Interval:
    """Give the 95 % interval of the median of consecutive times [blocks, ...], drift of the machine included.

    Student's t over the logarithms of the medians of the rounds. Fewer than four rounds are no sample of a machine's
    moods: then over those of 8 stretches, or of each block where there are fewer.
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
    """(both ratios, draws of the first [resamples], both intervals)."""
    above, below = (side[groups].reshape(len(groups), -1) for side in (baseline, subject))

    def ratios(index: Array) -> Array:
        drawn = [np.sort(side[index].reshape(*index.shape[:-1], -1)) for side in (above, below)]
        high, low = (np.stack([_of_sorted(side, q) for q in (0.5, 0.99)]) for side in drawn)
        result: Array = high / low
        return result

    drawn = draws(ratios, len(groups), resamples, 200, generator)
    tail = _tail(len(groups))
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=-1)
    point = [_quantiles(baseline)[q] / _quantiles(subject)[q] for q in ("p50", "p99")]
    intervals = [(float(min(low[i], point[i])), float(max(high[i], point[i]))) for i in (0, 1)]
    return point, drawn[0], (intervals[0], intervals[1])


def resampled_groups(blocks: int, rounds: Sequence[int] = ()) -> Array:
    """Group the blocks that a bootstrap draws together, [groups, blocks in each]: rounds from six on, else neighbours.

    Odd ones at a start, the least settled, belong to none.
    """
    if len(rounds) >= _CLUSTERS and sum(rounds) == blocks and 2 * min(rounds) >= float(np.median(rounds)):
        size = min(rounds)
        found: Array = np.cumsum(rounds)[:, None] + np.arange(-size, 0)
        return found
    size = max(1, blocks // _GROUPS)
    return np.arange(blocks - blocks // size * size, blocks).reshape(-1, size)


def _tail(groups: int) -> float:
    """The share of draws to leave on each side, so that so few groups cover 95 %."""
    return float(special().ndtr(-student(0.95, groups - 1) * (groups / (groups - 1)) ** 0.5))


def _of_sorted(times: Array, share: float) -> Array:
    """`np.quantile` along the last axis of what is sorted along it; sorting is several times faster than selecting."""
    at = share * (times.shape[-1] - 1)
    first, part = int(at), at - int(at)
    low, high = times[..., first], times[..., min(first + 1, times.shape[-1] - 1)]
    # from the nearer end, as numpy does, so that it is the same number
    found: Array = low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
    return found


def _quantiles(times: Array) -> dict[str, float]:
    return {f"p{100 * q:.0f}": float(x) for q, x in zip(QUANTILES, np.quantile(times, QUANTILES), strict=True)}
