"""What was seen of one cell, in the form that a decision needs: an effect, and how sure it is.

An effect above zero is for the worse: slower, fewer right answers, farther from the original. Each kind of evidence
says how likely what was seen would be if the true effect were a given one (`p_above`, `p_below`, one-sided), gives an
interval, and the smallest effect that it would have found.

`Resampled` is an estimate whose bootstrap drew whole groups. Two things make a bound of it honest for few groups and
far out in the tail. The level that is asked of the draws is the one that Student's t with G − 1 degrees asks for, as in
`stats.abba`; and where the draws end, at one in R, Student's t with the draws' own standard error goes on:

    p(effect ≤ x) = the larger of  P(t > (effect − x) / se)  and  P(t > z·√((G − 1)/G)) ,

    se = the draws' standard deviation · √(G/(G − 1)) ,   z of the share of draws at or below x, where there are any.

Sources: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 and 13; Hesterberg, The American
Statistician 69 (2015), section 5.3. The smallest effect found is what is called the minimum detectable effect: Bloom,
Evaluation Review 19 (1995).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import special

Array = NDArray[Any]
Interval = tuple[float, float]
# one side differs from itself by as much; bytes and operations do not allow it
Doubt = Literal["", "noise", "ceiling"]

# the chance on either side of the interval that decides whether things are the same
EACH_WAY = 0.025
# draws that differ by no more than this are equal
_ROUNDING = 1e-12


class Evidence(Protocol):
    """What a decision needs. Effects are in the unit of the evidence; above zero is for the worse."""

    @property
    def effect(self) -> float:
        """The estimate."""
        ...

    @property
    def alarm(self) -> float:
        """An alarm says that the true effect is larger than this."""
        ...

    @property
    def margin(self) -> float:
        """An effect of less than this, either way, is nobody's concern."""
        ...

    @property
    def doubt(self) -> Doubt:
        """Why neither side is to be called better."""
        ...

    def p_above(self, effect: float) -> float:
        """How likely so large an estimate is, or a larger one, if the true effect is no larger than `effect`."""
        ...

    def p_below(self, effect: float) -> float:
        """How likely so small an estimate is, or a smaller one, if the true effect is no smaller than `effect`."""
        ...

    def interval(self, level: float) -> Interval:
        """Low and high end, of a two-sided level."""
        ...

    def detectable(self, alpha: float, power: float) -> float:
        """The smallest effect that an alarm at `alpha` has the chance `power` of finding."""
        ...

    def told(self, effect: float) -> float:
        """An effect as people are told it."""
        ...


@dataclass(frozen=True, eq=False)
class Resampled:
    """An estimate with its bootstrap.

    Args:
        effect: the estimate.
        draws: `[resamples]`, the estimate of each resample.
        groups: that were drawn from; two at least.
        alarm: see `Evidence`.
        margin: see `Evidence`.
        logarithm: effects are logarithms of a ratio, and told as ratio − 1.
        doubt: see `Evidence`.
    """

    effect: float
    draws: Array
    groups: int
    alarm: float
    margin: float
    logarithm: bool = False
    doubt: Doubt = ""

    @property
    def standard_error(self) -> float:
        """Of the estimate."""
        return float(np.std(self.draws) * (self.groups / (self.groups - 1)) ** 0.5)

    def p_above(self, effect: float) -> float:
        """See `Evidence`."""
        return self._p(self.effect - effect, int(np.sum(self.draws <= effect)))

    def p_below(self, effect: float) -> float:
        """See `Evidence`."""
        return self._p(effect - self.effect, int(np.sum(self.draws >= effect)))

    def interval(self, level: float) -> Interval:
        """See `Evidence`."""
        functions = special()
        t = -float(functions.stdtrit(self.groups - 1, (1 - level) / 2))
        share = float(functions.ndtr(-t * (self.groups / (self.groups - 1)) ** 0.5))
        low, high = (float(end) for end in np.quantile(self.draws, (share, 1 - share)))
        reach = t * self.standard_error
        return min(low, self.effect - reach), max(high, self.effect + reach)

    def detectable(self, alpha: float, power: float) -> float:
        """See `Evidence`."""
        functions, degrees, error = special(), self.groups - 1, self.standard_error
        found, sure, missed = (-float(functions.stdtrit(degrees, p)) for p in (alpha, EACH_WAY, 1 - power))
        # it must be seen to lie above the alarm, and must not be seen to lie below the margin
        return float(max(self.alarm + (found + missed) * error, self.margin + (missed - sure) * error))

    def told(self, effect: float) -> float:
        """See `Evidence`."""
        return expm1(effect) if self.logarithm else effect

    def _p(self, distance: float, beyond: int) -> float:
        functions, degrees, error = special(), self.groups - 1, self.standard_error
        if error < _ROUNDING:
            return 0.0 if distance > _ROUNDING else 1.0
        p = float(functions.stdtr(degrees, -distance / error))
        if beyond:
            z = float(functions.ndtri((beyond + 1) / (self.draws.size + 1)))
            p = max(p, float(functions.stdtr(degrees, z * (degrees / self.groups) ** 0.5)))
        return p
