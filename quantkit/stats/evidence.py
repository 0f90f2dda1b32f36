"""Hold the evidence on one cell in the form that a decision needs: an effect and its uncertainty.

An effect above zero is worse: slower, fewer right answers, farther from the original. Each kind of evidence gives
one-sided p-values against a supposed true effect (`p_above`, `p_below`), an interval, and the smallest effect that it
would have found.

`Resampled` is an estimate whose bootstrap drew whole groups. Two corrections make its bounds honest with few groups and
far out in the tail. The level of the draws is the one that matches Student's t with G − 1 degrees, as in `stats.abba`.
Beyond the last draw, at one in R, Student's t with the standard error of the draws takes over:

    p(effect ≤ x) = the larger of  P(t > (effect − x) / se)  and  P(t > z·√((G − 1)/G)) ,
    se = the draws' standard deviation · √(G/(G − 1)) ,   z of the share of draws at or below x, where there are any.

Sources: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 and 13; Hesterberg, The American
Statistician 69 (2015), section 5.3. The smallest effect found is known as the minimum detectable effect: Bloom,
Evaluation Review 19 (1995).

`Apart` is the difference of two separate measurements, each with its own 95 % interval. Nothing was drawn together, so
nothing can be resampled: x (the candidate) and y (the baseline) are each known as (value, low, high). For the
difference d = x − y,

    low  = d − √((x − x_low)² + (y_high − y)²) ,   high = d + √((x_high − x)² + (y − y_low)²) ,

which preserves asymmetric intervals (MOVER). Farther out, the two reaches grow as Student's t does. The formula assumes
that x and y are independent. Measurements on the same items rise and fall together; for them the interval is too wide,
never too narrow.

Two ratios to one baseline, from separate runs, form a ratio of ratios: x and y are their logarithms. A run's interval
does not include the difference from the next run, because a load's place in memory lasts as long as the load. So each
reach grows by the A/A spread a of its run, √(reach² + log(1 + a)²). Of 24 pairs of runs of one bundle
(`benchmarks/repeat.py`, recorded) 4 lie outside of the interval without this term, and 1 with it.

**Verdicts on a ratio of times** (`SpeedUp`) all follow one rule, with the same reach. A spread as large as the effect
leaves 1 inside, whatever the interval. If the interval is wider than a tenth, or the times of one side differ by more,
the machine was busy. Its effect on the other side is unknown, and taken to be as large as the interval is wide: the
spread a is then at least that width. So a busy machine leaves small effects undecided; a large one is decided where the
interval is narrow beside it (`benchmarks/busy.py` plants both). A speed-up above S* = R_hp / R_f, the roofline's limit
from bytes and operations with the uncertainty of the ceilings, is not believed: one of the times, or a ceiling, is
wrong.

Source: Zou and Donner, Construction of confidence intervals about effect measures: a simplified approach, Statistics in
Medicine 27 (2008).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, hypot, inf, isfinite, log, log1p
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.stats.abba import NOISY
from quantkit.stats.clustered import special, student

Array = NDArray[Any]
Interval = tuple[float, float]
# noise: one side differs from itself by as much; ceiling: bytes and operations do not allow it
Doubt = Literal["", "noise", "ceiling"]

# chance on either side of the interval that decides whether things are the same
EACH_WAY = 0.025
# draws count as equal up to this difference
_ROUNDING = 1e-12


class Evidence(Protocol):
    """Evidence for a decision. Effects are in the unit of the evidence; above zero is worse."""

    @property
    def effect(self) -> float:
        """Estimate of the effect."""
        ...

    @property
    def alarm(self) -> float:
        """Largest effect without an alarm."""
        ...

    @property
    def margin(self) -> float:
        """Margin: smaller effects, either way, do not matter."""
        ...

    @property
    def doubt(self) -> Doubt:
        """Reason for calling neither side better."""
        ...

    def p_above(self, effect: float) -> float:
        """Return the p-value of so large an estimate if the true effect is at most `effect`."""
        ...

    def p_below(self, effect: float) -> float:
        """Return the p-value of so small an estimate if the true effect is at least `effect`."""
        ...

    def interval(self, level: float) -> Interval:
        """Return the low and high end at a two-sided level."""
        ...

    def detectable(self, alpha: float, power: float) -> float:
        """Return the smallest effect found by an alarm at `alpha` with chance `power`."""
        ...

    def told(self, effect: float) -> float:
        """Convert an effect to the form that people read."""
        ...


@dataclass(frozen=True, eq=False)
class Resampled:
    """An estimate with its bootstrap, as `Evidence`.

    Args:
        draws: `[resamples]` estimate of each resample.
        groups: number of groups that were resampled; at least two.
        logarithm: True if effects are logarithms of a ratio, shown as ratio − 1.
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
        """Standard error of the estimate."""
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
        called, sure, missed = (-float(functions.stdtrit(degrees, p)) for p in (alpha, EACH_WAY, 1 - power))
        # it must show above the alarm, and must not show below the margin
        return float(max(self.alarm + (called + missed) * error, self.margin + (missed - sure) * error))

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


# degrees of freedom beyond which Student's t is the normal distribution
MANY = 1000
_LARGEST = 700.0


@dataclass(frozen=True)
class MeasuredValue:
    """A value with its 95 % interval; an exact value is both of its ends.

    `degrees`: degrees of freedom of the Student's t behind the interval: the number of groups less one.
    """

    value: float
    ci95: Interval
    degrees: int = MANY

    @classmethod
    def ratio(cls, value: float, ci95: Interval, *, spread: float = 0.0, degrees: int = MANY) -> MeasuredValue:
        """Take the logarithm of a ratio of times; `spread`: the A/A spread, 0 if both sides were in one run.

        Raises InputError `values-invalid`: a ratio that is not above zero.
        """
        if not 0 < ci95[0] <= ci95[1] or not value > 0 or not isfinite(value * ci95[1]):
            raise _invalid(f"a ratio of {value:g}, {ci95[0]:g} to {ci95[1]:g}", "ratios are above zero and finite")
        middle = log(value)
        below, above = (hypot(middle - log(end), log1p(spread)) for end in ci95)
        return cls(middle, (middle - below, middle + above), degrees)


KNOWN = MeasuredValue(0.0, (0.0, 0.0))


@dataclass(frozen=True)
class Apart:
    """Difference of two measurements, as `Evidence`; `degrees`, `logarithm`: see `MeasuredValue`, `Resampled`."""

    effect: float
    ci95: Interval
    degrees: int
    margin: float
    alarm: float = 0.0
    logarithm: bool = False
    doubt: Doubt = ""

    def p_above(self, effect: float) -> float:
        """See `Evidence`."""
        return self._p(self.effect - effect, self._error(0 if self.effect > effect else 1))

    def p_below(self, effect: float) -> float:
        """See `Evidence`."""
        return self._p(effect - self.effect, self._error(1 if effect > self.effect else 0))

    def interval(self, level: float) -> Interval:
        """See `Evidence`."""
        t = student(level, self.degrees)
        return self.effect - t * self._error(0), self.effect + t * self._error(1)

    def detectable(self, alpha: float, power: float) -> float:
        """See `Evidence`."""
        error, degrees = max(self._error(0), self._error(1)), self.degrees
        called, sure, missed = (student(1 - 2 * p, degrees) for p in (alpha, EACH_WAY, 1 - power))
        return float(max(self.alarm + (called + missed) * error, self.margin + (missed - sure) * error))

    def told(self, effect: float) -> float:
        """See `Evidence`."""
        # with few groups, effects far out in the tail overflow a float
        return expm1(min(effect, _LARGEST)) if self.logarithm else effect

    def _error(self, end: int) -> float:
        """Return the standard error behind one reach of the interval: 0 below, 1 above."""
        return abs(self.ci95[end] - self.effect) / student(1 - 2 * EACH_WAY, self.degrees)

    def _p(self, distance: float, error: float) -> float:
        if error == 0:
            return 0.0 if distance > 0 else 1.0
        return float(special().stdtr(self.degrees, -distance / error))


def difference(
    candidate: MeasuredValue,
    baseline: MeasuredValue,
    *,
    margin: float,
    alarm: float = 0.0,
    lower_is_better: bool = True,
    logarithm: bool = False,
    doubt: Doubt = "",
) -> Apart:
    """Estimate how much worse the candidate is.

    Args:
        baseline: value to compare with; `KNOWN` if the candidate's value is already the difference.
        lower_is_better: False for speed-ups (`MeasuredValue.ratio`).
        logarithm: True for values of `MeasuredValue.ratio`; `margin` and `alarm` are then shares, 0.05 for 5 % slower.

    Raises InputError `values-invalid`: a value that is NaN, infinite, or outside of its interval.
    """
    for side in (candidate, baseline):
        if not side.ci95[0] <= side.value <= side.ci95[1] or not all(map(isfinite, side.ci95)):
            raise _invalid(f"{side.value}, {side.ci95[0]} to {side.ci95[1]}", "a value lies in its interval, finite")
    worse, other = (candidate, baseline) if lower_is_better else (baseline, candidate)
    effect = worse.value - other.value
    below = hypot(worse.value - worse.ci95[0], other.ci95[1] - other.value)
    above = hypot(worse.ci95[1] - worse.value, other.value - other.ci95[0])
    return Apart(
        effect=effect,
        ci95=(effect - below, effect + above),
        degrees=min(candidate.degrees, baseline.degrees),
        margin=log1p(margin) if logarithm else margin,
        alarm=log1p(alarm) if logarithm else alarm,
        logarithm=logarithm,
        doubt=doubt,
    )


def _invalid(value: str, rule: str) -> InputError:
    return InputError("values-invalid", value=value, rule=rule, remedy="measure again")


@dataclass(frozen=True)
class SpeedUp:
    """A ratio of times, above 1 where the subject is faster.

    Args:
        ci95: interval of the ratio, from one run; `spread`: the A/A spread of that run, as a share.
        most: largest ratio that bytes and operations allow; infinite where unknown.
        noisy: True if the machine was busy (`stats.abba`).
    """

    ratio: float
    ci95: Interval
    spread: float = 0.0
    most: float = inf
    noisy: bool = False

    @property
    def interval(self) -> Interval:
        """Credible interval: `ci95` widened by the spread, and on a busy machine by its own width too."""
        width = max(self.ci95[1] / self.ci95[0] - 1, NOISY) if self.noisy else 0.0
        low, high = MeasuredValue.ratio(self.ratio, self.ci95, spread=max(self.spread, width)).ci95
        return exp(low), exp(high)

    @property
    def busy(self) -> bool:
        """Tell whether the machine was too busy for the ratio to decide."""
        low, high = self.interval
        return self.noisy and low <= 1 <= high

    @property
    def doubt(self) -> Doubt:
        """Reason for not reporting the ratio as a result."""
        if self.ratio > max(self.most, 1.0):
            return "ceiling"
        return "noise" if self.busy or is_hidden(log(self.ratio), self.spread) else ""

    @property
    def open(self) -> bool:
        """Tell whether the ratio decides nothing, whatever its interval."""
        return self.busy or self.doubt == "ceiling"


def is_hidden(effect: float, spread: float) -> bool:
    """Tell whether two measurements of one side (A/A spread, a share) differ by as much as the two sides do.

    `effect`: logarithm of the ratio.
    """
    return spread > 0 and log1p(spread) >= abs(effect)
