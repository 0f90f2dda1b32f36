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

Two things measured apart from each other, each with its own 95 % interval, as evidence for a decision.

Where nothing was drawn together there is nothing to draw again: what is known of x (the candidate) and of y (the
baseline) is (value, low, high) of each. Of the difference d = x − y,

    low  = d − √((x − x_low)² + (y_high − y)²) ,   high = d + √((x_high − x)² + (y − y_low)²) ,

which keeps intervals that are not symmetric as they are (MOVER). Farther out the two reaches grow as Student's t does.
It takes x and y for independent: of things measured on the same items, which go up and down together, the interval is
too wide, never too narrow.

Two ratios to one baseline, from runs of their own, are a ratio of ratios: x and y are their logarithms. What a run's
interval does not show is how much the next run differs from it, since where a load lies in memory lasts as long as the
load does; so each reach grows by the A/A spread a of its run, √(reach² + log(1 + a)²). Of 24 pairs of runs of one
bundle (`benchmarks/repeat.py`, recorded) 4 lie outside of the interval without that, and 1 with it.

**What may be said of a ratio of times** (`SpeedUp`) goes by the same reach': one rule for every verdict on speed. A
spread as large as the effect leaves 1 inside, whatever the interval says. Where times of one side differ by more than a
tenth, the machine was busy, and what it did to the other side is not known. And a speed-up above what bytes and
operations allow, S* = R_hp / R_f of the roofline with the ceilings' own uncertainty, is no speed-up: one of the times,
or a ceiling, is wrong.

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
from quantkit.stats.clustered import special, student

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
    """An estimate with its bootstrap, as `Evidence`.

    Args:
        draws: `[resamples]`, the estimate of each resample.
        groups: that were drawn from; two at least.
        logarithm: effects are logarithms of a ratio, and told as ratio − 1.
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


# degrees of freedom beyond which Student's t is the normal distribution
MANY = 1000
_LARGEST = 700.0


@dataclass(frozen=True)
class MeasuredValue:
    """A value with its 95 % interval: of what is known exactly the value is both of its ends.

    `degrees`: of the Student's t behind the interval; as many as there were groups, less one.
    """

    value: float
    ci95: Interval
    degrees: int = MANY

    @classmethod
    def ratio(cls, value: float, ci95: Interval, *, spread: float = 0.0, degrees: int = MANY) -> MeasuredValue:
        """Take the logarithm of a ratio of times; `spread`: the A/A spread, 0 where both sides were in one run.

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
    """The difference of two measurements, as `Evidence`; `degrees`, `logarithm`: see `MeasuredValue`, `Resampled`."""

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
        found, sure, missed = (student(1 - 2 * p, degrees) for p in (alpha, EACH_WAY, 1 - power))
        return float(max(self.alarm + (found + missed) * error, self.margin + (missed - sure) * error))

    def told(self, effect: float) -> float:
        """See `Evidence`."""
        # few groups, far out in the tail, ask for effects beyond what a float holds
        return expm1(min(effect, _LARGEST)) if self.logarithm else effect

    def _error(self, end: int) -> float:
        """The standard error that one reach of the interval stands for: 0 below, 1 above."""
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
    """Tell how much worse the candidate is.

    Args:
        baseline: what it is set against; `KNOWN` where the candidate's value is the difference itself.
        lower_is_better: which way is better; of speed-ups (`MeasuredValue.ratio`), higher is.
        logarithm: of `MeasuredValue.ratio`; `margin` and `alarm` are then shares, 0.05 for 5 % slower.

    Raises InputError `values-invalid`: a value that is NaN or infinite, or outside of its interval.
    """
    for each in (candidate, baseline):
        if not each.ci95[0] <= each.value <= each.ci95[1] or not all(map(isfinite, each.ci95)):
            raise _invalid(f"{each.value}, {each.ci95[0]} to {each.ci95[1]}", "a value lies in its interval, finite")
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
        ci95: of it, from one run; `spread`: the A/A spread of that run, as a share.
        most: the largest ratio that bytes and operations allow; infinite where that is not known.
        noisy: whether the machine was busy (`stats.abba`).
    """

    ratio: float
    ci95: Interval
    spread: float = 0.0
    most: float = inf
    noisy: bool = False

    @property
    def interval(self) -> Interval:
        """The interval that is believed: `ci95` with the spread."""
        low, high = MeasuredValue.ratio(self.ratio, self.ci95, spread=self.spread).ci95
        return exp(low), exp(high)

    @property
    def doubt(self) -> Doubt:
        """Why the ratio is not to be told as a result."""
        if self.ratio > max(self.most, 1.0):
            return "ceiling"
        return "noise" if self.noisy or is_hidden(log(self.ratio), self.spread) else ""

    @property
    def open(self) -> bool:
        """Whether it decides nothing, whatever its interval says."""
        return self.noisy or self.doubt == "ceiling"


def is_hidden(effect: float, spread: float) -> bool:
    """Tell whether two measurements of one side (A/A spread, a share) differ by as much as the two sides do.

    `effect`: the logarithm of the ratio.
    """
    return spread > 0 and log1p(spread) >= abs(effect)
