"""The difference of two shares of the same items: Tango's score test and the interval that inverts it.

Of n items, b are right on the first side alone and c on the second alone; what both or neither get right says nothing.
The loss of the second is b/n − c/n. If it were Δ ≥ 0, c's likeliest probability q (b's is then q + Δ) would be

    q = (√(B² − 4AC) − B) / 2A ,    A = 2n ,  B = (2n − b + c)·Δ − b − c ,  C = −c·Δ·(1 − Δ) ,

and b − c has the mean nΔ and the variance n(2q + Δ(1 − Δ)), which gives a standard normal score

    T(Δ) = (b − c − nΔ) / √(n (2q + Δ(1 − Δ))) .

For Δ < 0 the sides change places. At Δ = 0 it is McNemar's test without a correction. The interval keeps each Δ with
|T(Δ)| ≤ z: it has a width even where the sides never differ (at n = 1000 and 95 % ± 0.4 points), and stays within ± 1.
Counts need not be whole: of correlated items each counts for less than one. Source: Tango, Equivalence Test and
Confidence Interval for the Difference in Proportions for the Paired-Sample Design, Statistics in Medicine 17 (1998).
"""

from __future__ import annotations

from math import copysign, inf, sqrt
from statistics import NormalDist


def score(lost: float, gained: float, n: float, loss: float) -> float:
    """T(Δ): how many standard errors the observed loss lies above `loss`.

    Args:
        lost: items that the first side alone gets right.
        gained: items that the second alone gets right.
        n: items.
        loss: Δ, within −1 and 1.

    Raises:
        ValueError: counts below zero or of more than n items.
    """
    if min(lost, gained) < 0 or n <= 0 or lost + gained > n * (1 + 1e-9):
        raise ValueError(f"lost + gained ≤ n with n > 0, got {lost}, {gained} of {n}")
    if loss < 0:
        return -score(gained, lost, n, -loss)
    a = 2 * n
    b = (2 * n - lost + gained) * loss - lost - gained
    c = -gained * loss * (1 - loss)
    chance = max((sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a), 0.0)
    variance = n * (2 * chance + loss * (1 - loss))
    above = lost - gained - n * loss
    if variance <= 0:
        return 0.0 if above == 0 else copysign(inf, above)
    return above / sqrt(variance)


def interval(lost: float, gained: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Low and high end for the loss b/n − c/n: `interval(7, 3, 100)` is (-0.026, 0.113).

    Raises:
        ValueError: as `score`.
    """
    z = NormalDist().inv_cdf(0.5 + level / 2)
    middle = (lost - gained) / n
    return _crossing(lost, gained, n, z, -1.0, middle), _crossing(lost, gained, n, -z, middle, 1.0)


def _crossing(lost: float, gained: float, n: float, z: float, low: float, high: float) -> float:
    """Where T, which falls as Δ rises, passes z: by bisection, to the last bit that matters."""
    for _ in range(60):
        middle = (low + high) / 2
        if score(lost, gained, n, middle) > z:
            low = middle
        else:
            high = middle
    return (low + high) / 2
