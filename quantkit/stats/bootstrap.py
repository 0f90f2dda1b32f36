"""Bootstrap intervals of a mean or of a ratio of means, resampling whole clusters.

For statistics without a textbook interval. A resample draws C clusters of C with replacement and recomputes
Σs_c / Σn_c (or the ratio of two such sums, drawn together, for paired sides); the interval is the BCa one, which
corrects the percentiles for bias and skew. With fewer than about 20 clusters it is too narrow: prefer
`quantkit.stats.clustered` for a plain mean. Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993),
chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import special

Array = NDArray[Any]

# values of resamples that are in memory at one time
_DRAWS = 5_000_000


def mean_interval(
    values: Array, clusters: Array | None = None, *, level: float = 0.95, resamples: int = 9999, seed: int = 0
) -> tuple[float, float]:
    """Low and high end for the mean of values [n]; clusters [n] are drawn as wholes, None: every value by itself.

    Raises:
        ValueError: fewer than two clusters.
        MissingDependency: scipy is not installed.
    """
    sums, sizes = _per_cluster(values, clusters)
    return _interval(sums, sizes, level, resamples, seed)


def ratio_interval(
    numerator: Array,
    denominator: Array,
    clusters: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[float, float]:
    """Low and high end for mean(numerator) / mean(denominator), both [n], paired: item i is the same on both sides.

    Raises:
        ValueError: fewer than two clusters, or different lengths.
        MissingDependency: scipy is not installed.
    """
    if np.shape(numerator) != np.shape(denominator):
        raise ValueError(f"paired sides have one length, got {np.shape(numerator)} and {np.shape(denominator)}")
    above, _ = _per_cluster(numerator, clusters)
    below, _ = _per_cluster(denominator, clusters)
    return _interval(above, below, level, resamples, seed)


def _per_cluster(values: Array, clusters: Array | None) -> tuple[Array, Array]:
    values = np.asarray(values, dtype=np.float64)
    if clusters is None:
        return values, np.ones_like(values)
    labels, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=values, minlength=labels.size)
    return sums, np.bincount(index, minlength=labels.size).astype(np.float64)


def _interval(above: Array, below: Array, level: float, resamples: int, seed: int) -> tuple[float, float]:
    if above.size < 2:
        raise ValueError("a bootstrap needs at least two clusters")
    shares = above / below
    if np.ptp(shares) <= 1e-12 * np.max(np.abs(shares)):
        # every resample gives the same number, and BCa would divide by its spread
        point = float(above.sum() / below.sum())
        return point, point

    # clusters of one size: what a resample is divided by need not be drawn
    whole = below[0] * below.size if np.ptp(below) == 0 else None

    def ratio(index: Array) -> Array:
        result: Array = above[index].sum(axis=-1) / (below[index].sum(axis=-1) if whole is None else whole)
        return result

    # as many resamples at a time as a few hundred MB hold
    batch = max(1, min(1000, _DRAWS // above.size))
    drawn = draws(ratio, above.size, resamples, batch, np.random.default_rng(seed))
    # each cluster left out once: of sums, without drawing any
    without = (above.sum() - above) / (below.sum() - below)
    low, high = np.quantile(drawn, _bca(drawn, float(ratio(np.arange(above.size))), without, level))
    return float(low), float(high)


def draws(
    statistic: Callable[[Array], Array], count: int, resamples: int, batch: int, generator: np.random.Generator
) -> Array:
    """[..., resamples]: a statistic of indices [some, count], which draw `count` things with replacement.

    scipy.stats.bootstrap draws the same; importing it takes longer than most of what is drawn here.
    """
    parts = [min(batch, resamples - start) for start in range(0, resamples, batch)]
    return np.concatenate([statistic(generator.integers(0, count, (part, count))) for part in parts], axis=-1)


def _bca(drawn: Array, point: float, without: Array, level: float) -> Array:
    """The two quantiles of the draws that bound a BCa interval.

    Args:
        drawn: [resamples].
        point: the statistic of all.
        without: [clusters], of all but one each.
        level: of the interval.
    """
    ndtr, ndtri = special().ndtr, special().ndtri
    below = ((drawn < point).mean() + (drawn <= point).mean()) / 2
    bias = ndtri(np.clip(below, 0.5 / drawn.size, 1 - 0.5 / drawn.size))
    spread = without.mean() - without
    skew = (spread**3).sum() / (6 * (spread**2).sum() ** 1.5)
    ends = bias + ndtri(np.array([1 - level, 1 + level]) / 2)
    result: Array = ndtr(bias + ends / (1 - skew * ends))
    return result
