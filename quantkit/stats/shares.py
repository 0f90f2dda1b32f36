"""Bound the share of right items, of one side or of two sides that answered the same items.

**Wilson's interval** of k of n, with p = k/n and z = 1.96 for 95 %, is (p + z²/2n ± z·sqrt(p(1 − p)/n + z²/4n²)) /
(1 + z²/n). It stays within 0 and 1, and has a width at k = 0 and k = n, where the textbook's and every bootstrap have
none: 480 of 480 is 99.2 % to 100 %. Items of one cluster (crops of a photograph) are alike. With s the share's standard
error over C clusters (`stats.clustered`), n becomes the effective p(1 − p)/s², at most the number of items, and z
becomes Student's t with C − 1 degrees. For five photographs with 96 crops each, right in 95 % of them and correlated by
0.05, this covers the truth 94 % of the time, Wilson's over all crops 62 %. If all items are right, or none, they count
as C. Sources: Wilson, JASA 22 (1927); Korn and Graubard, Survey Methodology 24 (1998); Dean and Pagano, Journal of
Survey Statistics and Methodology 3 (2015).

**McNemar's exact test**: only items on which the two sides disagree count. If neither side is better, the number b that
only the first gets right is Binomial(b + c, 1/2), and p is 2·P(X ≤ min(b, c)), at most 1. For items in clusters, p is
at least that of Student's t for the mean change over clusters. Source: McNemar, Psychometrika 12 (1947).

**Tango's score** of the loss b/n − c/n: if the loss were Δ ≥ 0, the most likely probability q of c would be

    q = (√(B² − 4AC) − B) / 2A ,    A = 2n ,  B = (2n − b + c)·Δ − b − c ,  C = −c·Δ·(1 − Δ) ,
    T(Δ) = (b − c − nΔ) / √(n (2q + Δ(1 − Δ)))      a standard normal;  for Δ < 0 the sides change places

At Δ = 0 it is McNemar's test without a correction. The interval keeps each Δ with |T(Δ)| ≤ z. It has a width even where
the sides never differ, and stays within ± 1. Counts may be fractions: a correlated item counts for less than one.
Source: Tango, Statistics in Medicine 17 (1998).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, copysign, exp, inf, lgamma, log, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import chance, clustered_mean, student

Array = NDArray[Any]


def wilson(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval for the share of successes among n items: `wilson(480, 480)` is (0.9921, 1.0).

    Raises ValueError: no items, or not 0 ≤ successes ≤ n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"0 ≤ successes ≤ n with n > 0, got {successes} of {n}")
    low, high = _wilson(successes / n, n, NormalDist().inv_cdf(0.5 + level / 2))
    # exactly 0 and 1 at the ends, where rounding would leave 1e-17
    return (0.0 if successes == 0 else low, 1.0 if successes == n else high)


def clustered_share(right: Array, clusters: Array) -> tuple[float, float]:
    """Return the 95 % interval of a share: right [n] bool, clusters [n] (any labels) drawn independently.

    Raises ValueError: no items, or different lengths; MissingDependency: scipy.
    """
    mean, items = clustered_mean(right, clusters), np.asarray(right).size
    if mean.standard_error is None:
        return 0.0, 1.0  # a single cluster gives no spread
    if mean.value in (0.0, 1.0):
        return wilson(round(mean.value) * mean.clusters, mean.clusters)
    spread = mean.value * (1 - mean.value)
    size = spread / max(mean.standard_error**2, spread / items)
    return _wilson(mean.value, size, student(0.95, mean.clusters - 1))


def _wilson(share: float, n: float, z: float) -> tuple[float, float]:
    middle = share + z * z / (2 * n)
    reach = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - reach) / (1 + z * z / n), (middle + reach) / (1 + z * z / n)


@dataclass(frozen=True)
class McNemar:
    """Result of the test; `only_first`: items that only the first model gets right.

    `p`: two-sided p-value, exact for independent items; 1.0 if they never disagree.
    """

    only_first: int
    only_second: int
    p: float


def mcnemar(first: Array, second: Array, clusters: Array | None = None) -> McNemar:
    """Compare two models' right-or-wrong on the same items, both bool [n].

    `clusters`: `[n]` label of each item; items with one label were drawn together; None: each was drawn alone.

    Raises ValueError: different lengths; MissingDependency: with clusters, scipy.
    """
    first, second = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if first.shape != second.shape:
        raise ValueError(f"paired answers have one length, got {first.shape} and {second.shape}")
    test = from_counts(int(np.sum(first & ~second)), int(np.sum(second & ~first)))
    if clusters is None or test.only_first + test.only_second == 0:
        return test
    return replace(test, p=max(test.p, chance(clustered_mean(second.astype(np.float64) - first, clusters))))


def from_counts(only_first: int, only_second: int) -> McNemar:
    """Compare by the two discordant counts. Raises ValueError if one is negative."""
    if only_first < 0 or only_second < 0:
        raise ValueError("counts are not negative")
    n, k = only_first + only_second, min(only_first, only_second)
    # in logarithms, because C(n, n/2) leaves the range of a float at n = 1030
    tail = sum(exp(lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) - n * log(2)) for i in range(k + 1))
    return McNemar(only_first=only_first, only_second=only_second, p=min(1.0, 2 * tail))


def for_loss(loss: float, flips: float, *, level: float = 0.95, power: float = 0.8) -> int:
    """Count the items for McNemar's test to show a loss, at such a share of flips: `for_loss(0.01, 0.06)` is
    4,707.

    n = ((z + z') / loss)² · flips, less the square of the loss. Source: Connor, Biometrics 43 (1987), simplified.
    """
    flips = max(flips, loss)
    z, beyond = NormalDist().inv_cdf(0.5 + level / 2), NormalDist().inv_cdf(power)
    return ceil(((z * sqrt(flips) + beyond * sqrt(flips - loss * loss)) / loss) ** 2)


def tango_score(lost: float, gained: float, n: float, loss: float) -> float:
    """Return T(Δ), the standard errors by which the observed loss lies above `loss`, Δ within −1 and 1.

    `lost`: items that only the first side gets right; `gained`: only the second.

    Raises ValueError: counts below zero or of more than n items.
    """
    if min(lost, gained) < 0 or n <= 0 or lost + gained > n * (1 + 1e-9):
        raise ValueError(f"lost + gained ≤ n with n > 0, got {lost}, {gained} of {n}")
    if loss < 0:
        return -tango_score(gained, lost, n, -loss)
    a = 2 * n
    b = (2 * n - lost + gained) * loss - lost - gained
    c = -gained * loss * (1 - loss)
    q = max((sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a), 0.0)
    variance = n * (2 * q + loss * (1 - loss))
    above = lost - gained - n * loss
    if variance <= 0:
        return 0.0 if above == 0 else copysign(inf, above)
    return above / sqrt(variance)


def tango_interval(lost: float, gained: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Return Tango's interval for the loss b/n − c/n: `tango_interval(7, 3, 100)` is (-0.026, 0.113)."""
    z, middle = NormalDist().inv_cdf(0.5 + level / 2), (lost - gained) / n

    def crossing(level: float, low: float, high: float) -> float:
        # T falls as Δ rises: bisected to the last bit that matters
        for _ in range(60):
            half = (low + high) / 2
            low, high = (half, high) if tango_score(lost, gained, n, half) > level else (low, half)
        return (low + high) / 2

    return crossing(z, -1.0, middle), crossing(-z, middle, 1.0)
