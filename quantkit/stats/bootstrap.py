"""Bootstrap intervals of a mean or of a ratio of means, resampling whole clusters.

For statistics without a textbook interval. A resample draws C clusters of C with replacement and recomputes
Σs_c / Σn_c (or the ratio of two such sums, drawn together, for paired sides); the interval is the BCa one, which
corrects the percentiles for bias and skew. With fewer than about 20 clusters it is too narrow: prefer
`quantkit.stats.clustered` for a plain mean. Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993),
chapter 14.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import MissingDependency

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
    try:
        from scipy import stats
    except ImportError:
        raise MissingDependency("scipy", extra="compile", purpose="a bootstrap interval") from None
    shares = above / below
    if np.ptp(shares) <= 1e-12 * np.max(np.abs(shares)):
        # every resample gives the same number, and BCa would divide by its spread
        point = float(above.sum() / below.sum())
        return point, point

    # clusters of one size: what a resample is divided by need not be drawn
    same = np.ptp(below) == 0

    def ratio(a: Array, b: Array | None = None, axis: int = -1) -> Array:
        result: Array = a.sum(axis=axis) / (below[0] * a.shape[axis] if b is None else b.sum(axis=axis))
        return result

    found = stats.bootstrap(
        (above,) if same else (above, below),
        ratio,
        paired=not same,
        vectorized=True,
        confidence_level=level,
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(seed),
        # as many resamples at a time as a few hundred MB hold
        batch=max(1, min(1000, _DRAWS // above.size)),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
