"""Count the answers that flipped between two models with the same questions, as evidence for a decision.

Of n items the baseline alone gets b right (lost) and the candidate alone c (gained). The effect is (b − c)/n, a share:
0.01 is one point lost. McNemar's exact test, one-sided, shows that anything was lost at all,

    p = P(X ≥ b) ,  X ~ Binomial(b + c, 1/2) ,

and Tango's score (`stats.shares`) tests the loss against a margin. Items that were not drawn one by one, such as the
tokens of a text or the crops of a photograph, count for less: with clusters, n, b and c are all divided by the design
effect, the variance of the effect over clusters divided by that over items, where that is above 1. Sources: McNemar,
Psychometrika 12 (1947); Rao and Scott, A Simple Method for the Analysis of Clustered Binary Data, Biometrics 48 (1992).

`increase` measures how much a mean over the same items has risen, of KL divergence or negative log-likelihood:

    effect   mean of (candidate − baseline) over items: Σ s_c / Σ n_c over clusters c

The bootstrap draws whole clusters, both sides of an item together: tokens of one sequence are alike, so the sequence is
the independent draw. A mean of negative log-likelihoods is the logarithm of a perplexity: a rise of 0.01 nats is a
perplexity 1 % higher. Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), 8.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.stats.clustered import clustered_mean, draws, special
from quantkit.stats.evidence import EACH_WAY, Doubt, Resampled
from quantkit.stats.shares import tango_interval, tango_score

Array = NDArray[Any]
Interval = tuple[float, float]
# indices of resamples in memory at one time
_DRAWS = 5_000_000


@dataclass(frozen=True)
class Flips:
    """Flipped answers as `Evidence`.

    Args:
        lost: items that only the baseline gets right; `gained`: only the candidate.
        n: items answered by both.
        design_effect: number of correlated items that carry as much evidence as one independent item.
    """

    lost: int
    gained: int
    n: int
    margin: float
    alarm: float = 0.0
    design_effect: float = 1.0

    @property
    def effect(self) -> float:
        """Share of items lost, less the share gained."""
        return (self.lost - self.gained) / self.n

    @property
    def doubt(self) -> Doubt:
        """Return "": the same model gives the same answers again. See `Evidence`."""
        return ""

    def p_above(self, effect: float) -> float:
        """See `Evidence`."""
        return _p(*self._counts(), effect)

    def p_below(self, effect: float) -> float:
        """See `Evidence`."""
        lost, gained, n = self._counts()
        return _p(gained, lost, n, -effect)

    def interval(self, level: float) -> Interval:
        """See `Evidence`."""
        return tango_interval(*self._counts(), level=level)

    def detectable(self, alpha: float, power: float) -> float:
        """Return the smallest effect: see `Evidence`. Equal flips in both directions are taken as constant noise."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self._finds(middle, alpha, power) else (middle, high)
        return high

    def told(self, effect: float) -> float:
        """See `Evidence`."""
        return effect

    def _counts(self) -> tuple[float, float, float]:
        return self.lost / self.design_effect, self.gained / self.design_effect, self.n / self.design_effect

    def _finds(self, loss: float, alpha: float, power: float) -> bool:
        """Tell whether a loss is called even if chance hides as much of it as on the unluckiest share 1 − power of
        nights."""
        lost, gained, n = self._counts()
        noise = min(lost, gained, n * (1 - loss) / 2)
        lost, gained = noise + loss * n, noise
        unlucky = NormalDist().inv_cdf(power) / sqrt(lost + gained)
        lost, gained = max(lost * (1 - unlucky), 0.0), gained * (1 + unlucky)
        if lost + gained > n:
            return False
        return _p(lost, gained, n, self.alarm) <= alpha and _p(gained, lost, n, -self.margin) >= EACH_WAY


def flips(
    before: Array,
    after: Array,
    *,
    margin: float,
    alarm: float = 0.0,
    clusters: Array | None = None,
    items: tuple[Array, Array] | None = None,
    where: str = "",
) -> Flips:
    """Count the flips between two sets of right-or-wrong answers to the same items.

    Args:
        before, after: `[n]` bool, right answers of the baseline and of the candidate.
        margin: smallest loss that matters: 0.01 is one point.
        alarm: loss above which an alarm is raised.
        clusters: `[n]` label of each item; items with one label were drawn together; None: each was drawn alone.
        items: `[n]` of each side, identity of each item: an id, a hash, the next token; refused where they differ.

    Raises InputError: `items-differ`, `nothing-scored`; MissingDependency: scipy.
    """
    before, after = np.asarray(before, dtype=bool), np.asarray(after, dtype=bool)
    same_items(before, after, items, where)
    lost, gained = int(np.sum(before & ~after)), int(np.sum(after & ~before))
    effect = 1.0
    if clusters is not None and lost + gained:
        moved = before.astype(np.float64) - after
        whole, single = (clustered_mean(moved, labels).standard_error for labels in (clusters, np.arange(moved.size)))
        # the spread of a single cluster is unknown: it counts as one item
        effect = max(1.0, (whole / single) ** 2) if whole is not None and single else float(moved.size)
    return Flips(lost=lost, gained=gained, n=before.size, margin=margin, alarm=alarm, design_effect=effect)


def same_items(before: Array, after: Array, items: tuple[Array, Array] | None, where: str) -> None:
    """Refuse sides with answers to different items. Raises InputError: `items-differ`, `nothing-scored`."""
    sizes = sorted({len(side) for side in (before, after, *(items or ()))})
    if len(sizes) > 1:
        raise _differ(where, f"{' and '.join(map(str, sizes))} items")
    if sizes == [0]:
        raise InputError("nothing-scored", where=where, value="no item", rule="a comparison needs items")
    if items is not None:
        wrong = np.flatnonzero(np.asarray(items[0]) != np.asarray(items[1]))
        if wrong.size:
            first = int(wrong[0])
            pair = f"{items[0][first]} and {items[1][first]}"
            raise _differ(where, f"item {first} is {pair}, {wrong.size} of {sizes[0]} differ")


def _differ(where: str, value: str) -> InputError:
    rule = "both sides answered the same items in the same order"
    return InputError("items-differ", where=where, value=value, rule=rule, remedy="score both on one set")


def _p(lost: float, gained: float, n: float, loss: float) -> float:
    """Return the p-value of as many lost and as few gained items if the true loss is at most `loss`."""
    if loss == 0:
        # P(X >= lost) as an incomplete beta function, which also takes fractions
        return float(special().betainc(lost, gained + 1, 0.5)) if lost > 0 else 1.0
    return float(special().ndtr(-tango_score(lost, gained, n, loss)))


def increase(
    before: Array,
    after: Array,
    *,
    margin: float,
    alarm: float = 0.0,
    clusters: Array | None = None,
    items: tuple[Array, Array] | None = None,
    where: str = "",
    resamples: int = 1999,
    seed: int = 0,
) -> Resampled:
    """Measure how much the mean has risen from `before` to `after`, both [n], in their unit.

    Args:
        before, after: values of the baseline and the candidate: KL divergence from the original, or −log p of the next
            token, nats.
        margin: smallest rise that matters; `alarm`: rise above which an alarm is raised.
        clusters, items: see `flips`.

    Raises InputError: `items-differ`, `nothing-scored`; `values-invalid`, NaN or infinite ones, or fewer than two
    clusters.
    """
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    same_items(before, after, items, where)
    for side, values in (("baseline", before), ("candidate", after)):
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            value = f"the {side} has {values[wrong[0]]} at item {wrong[0]} ({wrong.size} such of {values.size})"
            raise InputError("values-invalid", where=where, value=value, rule="values are finite")
    labels = np.arange(before.size) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    sizes = np.bincount(labels).astype(np.float64)
    if sizes.size < 2:
        raise InputError(
            "values-invalid", where=where, value="one cluster", rule="the bootstrap resamples clusters and needs two"
        )
    sums = np.bincount(labels, weights=after - before)

    def mean(index: Array) -> Array:
        result: Array = sums[index].sum(axis=1) / sizes[index].sum(axis=1)
        return result

    return Resampled(
        effect=float(np.mean(after - before)),
        draws=draws(mean, sizes.size, resamples, max(1, _DRAWS // sizes.size), np.random.default_rng(seed)),
        groups=sizes.size,
        alarm=alarm,
        margin=margin,
    )
