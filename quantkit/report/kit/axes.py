"""Axes of figures: what they span, and the round values that get a label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
Form = Callable[[float], str]

_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
# a logarithmic axis never shows less than this, or noise would look like a result
_LEAST_SPAN = 2.0
# labels that the narrowest figure has room for side by side
_LABELS = 9.5


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        title: with its unit.
        ticks: values that get a label, in the figure's unit.
        texts: their labels.
        range: ends, in the figure's unit.
        log: whether equal ratios are equal lengths.
    """

    title: str
    ticks: Sequence[float]
    texts: Sequence[str]
    range: Interval
    log: bool = True

    def place(self, value: float) -> float:
        """Where an annotation stands: plotly wants the logarithm there, and nowhere else."""
        return math.log10(value) if self.log else value

    def share(self, value: float) -> float:
        """How far along it a value lies, from 0 to 1."""
        low, high = (self.place(end) for end in self.range)
        return (self.place(value) - low) / (high - low) if high != low else 0.5


def log_axis(title: str, values: Sequence[float], *, form: Form | None = None) -> Axis:
    """A logarithmic axis that holds all (positive) values, with three to eight round labels."""
    low, high = min(values) / 1.12, max(values) * 1.12
    if high / low < _LEAST_SPAN:
        middle = math.sqrt(high * low)
        low, high = middle / math.sqrt(_LEAST_SPAN), middle * math.sqrt(_LEAST_SPAN)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _STEPS:
        ticks = [round(step * 10.0**power, 12 - power) for power in powers for step in steps]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) > 2:
            break
    return Axis(title, ticks, [(form or _plain_number)(value) for value in ticks], (low, high))


def straight_axis(title: str, values: Sequence[float], *, form: Form | None = None) -> Axis:
    """A linear axis that holds all values, with three to six round labels."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(step * power for step in (0.2, 0.5, 1.0, 2.0) if span / (step * power) <= 5)
    first, last = math.ceil(low / step - 1e-9), math.floor((high + span * 0.06) / step)
    ticks = [round(step * i, 12) for i in range(first, last + 1)]
    # room at the ends, but none beyond a natural zero
    start = low if low == 0 else low - span * 0.06
    return Axis(title, ticks, [(form or _plain_number)(v) for v in ticks], (start, high + span * 0.06), log=False)


def points_axis(title: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis with a label at each of the values, as batches have; none where the last one is too near."""
    known = sorted(set(values))
    apart, ticks = math.log(known[-1] / known[0]) / _LABELS, known[:1]
    for value in known[1:]:
        if math.log(value / ticks[-1]) > apart:
            ticks.append(value)
    return Axis(title, ticks, [f"{value:,g}" for value in ticks], (known[0] / 1.18, known[-1] * 1.18))


def _plain_number(value: float) -> str:
    return f"{value:,g}"
