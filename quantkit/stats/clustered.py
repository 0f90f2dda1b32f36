"""The mean of correlated values, and how sure it is.

Tokens of one sequence are alike, so their number overstates what was seen: the sequence is what was drawn. With
clusters c of sums s_c and sizes n_c, the mean is m = Σs_c / Σn_c, the ratio of two sums, and its standard error by
linearization is

    se = sqrt( C/(C-1) · Σ (s_c − m·n_c)² ) / Σn_c ,      interval m ± t(0.975, C−1) · se.

Clusters of size one give the textbook s/√n. Student's t holds its level with few clusters where a bootstrap does not:
12 log-normal sequences (σ 0.35) are covered 95 % of the time, by percentile or BCa resampling 92 %. The ratio R of two
means is the same with the values below in place of the sizes; its interval is made on the logarithm, R · exp(±t·se/R),
and so is above 0.
Source: Cochran, Sampling Techniques (1977), section 6.3; the cluster-robust mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import MissingDependency

Array = NDArray[Any]

# fewer sequences than this say too little of how they differ: then blocks of each of them are the clusters
FEWEST = 8


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Args:
        value: the estimate.
        standard_error: of the value; None with fewer than two clusters, where nothing is known of it.
        ci95: low and high end; None with fewer than two clusters.
        clusters: independent draws that it rests on.
        n: values that it rests on.
    """

    value: float
    standard_error: float | None
    ci95: tuple[float, float] | None
    clusters: int
    n: int


def special() -> Any:
    """Import `scipy.special`.

    Raises:
        MissingDependency: scipy is not installed.
    """
    try:
        from scipy import special as functions
    except ImportError:
        raise MissingDependency("scipy", extra="compile", purpose="a confidence interval or a test") from None
    return functions


def student(level: float, degrees: int) -> float:
    """The two-sided quantile of Student's t: `student(0.95, 11)` is 2.20.

    Raises:
        MissingDependency: scipy is not installed.
    """
    return float(special().stdtrit(degrees, 0.5 + level / 2))


def clustered_mean(values: Array, clusters: Array) -> Estimate:
    """The mean of values [n] whose clusters [n] (any labels) were drawn independently.

    Raises:
        ValueError: no values, or as many labels as values do not stand there.
    """
    values = np.asarray(values, dtype=np.float64)
    clusters = np.asarray(clusters)
    if values.ndim != 1 or values.size == 0 or clusters.shape != values.shape:
        raise ValueError(f"values [n] and clusters [n] with n > 0, got {values.shape} and {clusters.shape}")
    mean = float(values.mean())
    error, count = _error(values - mean, clusters, values.size)
    ci95 = None
    if error is not None:
        reach = student(0.95, count - 1) * error
        ci95 = (mean - reach, mean + reach)
    return Estimate(value=mean, standard_error=error, ci95=ci95, clusters=count, n=values.size)


def chance(found: Estimate) -> float:
    """How likely an estimate as far from 0 is, if 0 is the truth: two-sided, of Student's t.

    Raises:
        MissingDependency: scipy is not installed.
    """
    if found.standard_error is None or found.value == 0:
        return 1.0
    if found.standard_error == 0:
        return 0.0
    return float(2 * special().stdtr(found.clusters - 1, -abs(found.value) / found.standard_error))


def clustered_ratio(above: Array, below: Array, clusters: Array) -> Estimate:
    """mean(above) / mean(below), none negative and both [n], item i the same in both; clusters as of `clustered_mean`.

    Raises:
        ValueError: no values, other lengths, or nothing below.
    """
    above, below = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    clusters, total = np.asarray(clusters), float(below.sum())
    if above.ndim != 1 or not above.shape == below.shape == clusters.shape or total <= 0:
        raise ValueError(f"two [n] and clusters [n], got {above.shape}, {below.shape} and {clusters.shape}")
    ratio = float(above.sum() / total)
    error, count = _error(above - ratio * below, clusters, total)
    ci95 = None
    if error is not None:
        reach = student(0.95, count - 1) * error / ratio if ratio else 0.0
        ci95 = (ratio * float(np.exp(-reach)), ratio * float(np.exp(reach)))
    return Estimate(value=ratio, standard_error=error, ci95=ci95, clusters=count, n=above.size)


def _error(residuals: Array, clusters: Array, size: float) -> tuple[float | None, int]:
    """(the standard error of what the residuals are of, None of a single cluster; how many clusters there are)."""
    labels, index = np.unique(clusters, return_inverse=True)
    count = int(labels.size)
    if count < 2:
        return None, count
    sums = np.bincount(index, weights=residuals, minlength=count)
    return float(np.sqrt(count / (count - 1) * np.sum(sums**2)) / size), count


def clusters_of(sequence: Array) -> tuple[Array, str]:
    """A label [n] for every item, and what the clusters are: `sequence`, or `block` where those are few.

    Args:
        sequence: `[n]`, that each item belongs to; those of one are in order.
    """
    labels, counts = np.unique(sequence, return_counts=True)
    if labels.size >= FEWEST:
        return sequence, "sequence"
    parts = -(-FEWEST // labels.size)
    blocks = [np.arange(count) * parts // count + parts * i for i, count in enumerate(counts)]
    found = np.empty(len(sequence), dtype=np.int64)
    for label, block in zip(labels, blocks, strict=True):
        found[sequence == label] = block
    return found, "block"
