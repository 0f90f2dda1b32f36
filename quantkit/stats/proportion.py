"""Wilson's interval of a share: k of n independent items.

With z = 1.96 for 95 % and p = k/n,

    (p + z²/2n ± z·sqrt(p(1 − p)/n + z²/4n²)) / (1 + z²/n) ,

which stays within 0 and 1 and has a width at k = 0 and k = n, where the textbook's p ± z·sqrt(p(1 − p)/n) and every
bootstrap have none: 480 of 480 is 99.2 % to 100 %. Source: Wilson, JASA 22 (1927).
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def wilson(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Low and high end for the share of successes among n items: `wilson(480, 480)` is (0.9921, 1.0).

    Raises:
        ValueError: no items, or not 0 ≤ successes ≤ n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"0 ≤ successes ≤ n with n > 0, got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / n
    middle = share + z * z / (2 * n)
    reach = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (middle - reach) / (1 + z * z / n), (middle + reach) / (1 + z * z / n)
    # exactly 0 and 1 at the ends, where rounding would leave 1e-17
    return (0.0 if successes == 0 else low, 1.0 if successes == n else high)
