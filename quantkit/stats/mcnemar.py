"""McNemar's exact test: do two models that answered the same items differ in how many they get right?

Only the items on which they disagree count. If neither is better, each of the b + c discordant items falls to either
side with probability 1/2, so b ~ Binomial(b + c, 1/2), and the two-sided p-value is 2·P(X ≤ min(b, c)), at most 1.
Source: McNemar, Psychometrika 12 (1947). It takes the items for independent. Tokens of one sequence and crops of one
photograph are not: of items in clusters, p is no less than that of Student's t for the mean change over clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, lgamma, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import chance, clustered_mean

Array = NDArray[Any]


@dataclass(frozen=True)
class McNemar:
    """What the test found.

    Args:
        only_first: items that only the first model gets right.
        only_second: items that only the second gets right.
        p: two-sided; exact of independent items; 1.0 where they never disagree.
    """

    only_first: int
    only_second: int
    p: float


def mcnemar(first: Array, second: Array, clusters: Array | None = None) -> McNemar:
    """Compare two models' right-or-wrong on the same items, both bool [n].

    Args:
        first, second: what each gets right.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.

    Raises:
        ValueError: different lengths.
        MissingDependency: with clusters, scipy is not installed.
    """
    first, second = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if first.shape != second.shape:
        raise ValueError(f"paired answers have one length, got {first.shape} and {second.shape}")
    found = from_counts(int(np.sum(first & ~second)), int(np.sum(second & ~first)))
    if clusters is None or found.only_first + found.only_second == 0:
        return found
    return replace(found, p=max(found.p, chance(clustered_mean(second.astype(np.float64) - first, clusters))))


def from_counts(only_first: int, only_second: int) -> McNemar:
    """The same from the two discordant counts. Raises ValueError if one is negative."""
    if only_first < 0 or only_second < 0:
        raise ValueError("counts are not negative")
    n, k = only_first + only_second, min(only_first, only_second)
    # in logarithms, because C(n, n/2) leaves the range of a float at n = 1030
    tail = sum(exp(lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) - n * log(2)) for i in range(k + 1))
    return McNemar(only_first=only_first, only_second=only_second, p=min(1.0, 2 * tail))
