"""Wilson's interval of a share: k of n independent items, or of items that were drawn in clusters.

With z = 1.96 for 95 % and p = k/n,

    (p + z²/2n ± z·sqrt(p(1 − p)/n + z²/4n²)) / (1 + z²/n) ,

which stays within 0 and 1 and has a width at k = 0 and k = n, where the textbook's p ± z·sqrt(p(1 − p)/n) and every
bootstrap have none: 480 of 480 is 99.2 % to 100 %. Source: Wilson, JASA 22 (1927).

Items of one cluster (crops of a photograph) are alike. With s the share's standard error over C clusters
(`stats.clustered`), n becomes the effective p(1 − p)/s², no more than there are items, and z Student's t for C − 1
degrees. Of five photographs with 96 crops each, right in 95 % of them on average and correlated by 0.05, this covers
the truth 94 % of the time, Student's symmetric interval 90 %, Wilson's over all crops 62 %. Where all items are right,
or none, nothing is seen of how alike they are, and they count as C. Source: Korn and Graubard, Confidence Intervals for
Proportions with Small Expected Number of Positive Counts Estimated from Survey Data, Survey Methodology 24 (1998); in
the score's form Dean and Pagano, Journal of Survey Statistics and Methodology 3 (2015).
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import clustered_mean, student

Array = NDArray[Any]


def wilson(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Low and high end for the share of successes among n items: `wilson(480, 480)` is (0.9921, 1.0).

    Raises:
        ValueError: no items, or not 0 ≤ successes ≤ n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"0 ≤ successes ≤ n with n > 0, got {successes} of {n}")
    low, high = _score(successes / n, n, NormalDist().inv_cdf(0.5 + level / 2))
    # exactly 0 and 1 at the ends, where rounding would leave 1e-17
    return (0.0 if successes == 0 else low, 1.0 if successes == n else high)


def clustered_share(right: Array, clusters: Array) -> tuple[float, float]:
    """The 95 % interval of the share of right [n] bool, whose clusters [n] (any labels) were drawn independently.

    Raises:
        ValueError: no items, or as many labels as items do not stand there.
        MissingDependency: scipy is not installed.
    """
    found, items = clustered_mean(right, clusters), np.asarray(right).size
    if found.standard_error is None:
        return 0.0, 1.0  # a single cluster says nothing of the next one
    if found.value in (0.0, 1.0):
        return wilson(round(found.value) * found.clusters, found.clusters)
    spread = found.value * (1 - found.value)
    size = spread / max(found.standard_error**2, spread / items)
    return _score(found.value, size, student(0.95, found.clusters - 1))


def _score(share: float, n: float, z: float) -> tuple[float, float]:
    middle = share + z * z / (2 * n)
    reach = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - reach) / (1 + z * z / n), (middle + reach) / (1 + z * z / n)
