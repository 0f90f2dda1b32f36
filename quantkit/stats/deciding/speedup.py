"""What may be said of a ratio of times: the one rule behind every verdict on speed.

A bootstrap interval shows how much steps of one run differ. It does not show what lasts as long as a run, or a load of
the weights, does; what two measurements of one side differ by (the A/A spread a, `stats.abba`) shows some of that. So
each reach of the interval, on the logarithm, grows by it, as of two runs that are set against each other
(`stats.deciding.apart`):

    reach' = √(reach² + log(1 + a)²)

A spread as large as the effect leaves 1 inside, whatever the interval says. Where times of one side differ by more than
a tenth, the machine was busy, and what it did to the other side is not known. And a speed-up above what bytes and
operations allow, S* = R_hp / R_f of the roofline with the ceilings' own uncertainty, is no speed-up: one of the times,
or a ceiling, is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.stats.deciding.apart import MeasuredValue
from quantkit.stats.deciding.evidence import Doubt, Interval


@dataclass(frozen=True)
class SpeedUp:
    """A ratio of times, above 1 where the subject is faster.

    Args:
        ratio: above zero.
        ci95: of it, from one run.
        spread: the A/A spread of that run, as a share.
        most: the largest ratio that bytes and operations allow; infinite where that is not known.
        noisy: whether the machine was busy (`stats.abba`).
    """

    ratio: float
    ci95: Interval
    spread: float = 0.0
    most: float = math.inf
    noisy: bool = False

    @property
    def interval(self) -> Interval:
        """The interval that is believed: `ci95` with the spread."""
        low, high = MeasuredValue.ratio(self.ratio, self.ci95, spread=self.spread).ci95
        return math.exp(low), math.exp(high)

    @property
    def doubt(self) -> Doubt:
        """Why the ratio is not to be told as a result."""
        if self.ratio > max(self.most, 1.0):
            return "ceiling"
        return "noise" if self.noisy or is_hidden(math.log(self.ratio), self.spread) else ""

    @property
    def open(self) -> bool:
        """Tell whether it decides nothing, whatever its interval says."""
        return self.noisy or self.doubt == "ceiling"


def is_hidden(effect: float, spread: float) -> bool:
    """Whether two measurements of one side differ by as much as the two sides do.

    Args:
        effect: the logarithm of the ratio.
        spread: the A/A spread, as a share.
    """
    return spread > 0 and math.log1p(spread) >= abs(effect)
