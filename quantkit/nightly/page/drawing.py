"""Drawings as SVG that stretches to its place: numbers in, paths out. Words stand beside them in HTML, where they keep
their shape. Points are lines of no length with round ends, so that they stay round however the drawing is stretched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from quantkit.nightly.page.history import ANSWERS, NONE

Array = Any
# how high an answer stands in a strip: it can be told without its colour
_HEIGHTS = (1.0, 0.8, 0.45, 0.6, 0.3, 0.12)
# height of the drawing of a chart, in its own units; one unit across is a night
TALL = 100.0
# of an axis: how many times longer the last night may make it
_FAR = 4.0


@dataclass(frozen=True)
class Label:
    """Words at a place: `left` and `top` in percent of the drawing."""

    text: str
    left: float = 0.0
    top: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with what stands around it.

    Args:
        svg: the drawing.
        alt: what it shows, in a sentence.
        ticks: at its left.
        marks: within it.
        below: under it.
        readout: what is told of every place across it, as the script wants it.
        tall: its class of height.
    """

    svg: Markup
    alt: str
    ticks: Sequence[Label] = ()
    marks: Sequence[Label] = ()
    below: Sequence[Label] = ()
    readout: Any = None
    tall: str = ""


@dataclass(frozen=True)
class Scale:
    """The upright axis of a drawing.

    Args:
        low: at the lower edge.
        high: at the upper edge.
        height: of the drawing, in its own units.
    """

    low: float
    high: float
    height: float = TALL

    def places(self, values: Any) -> Array:
        """Heights from the top, NaN for what is not finite; what lies beyond the axis stands at its end."""
        values = np.asarray(values, float)
        found = np.clip(self.height * (self.high - values) / (self.high - self.low), 0.0, self.height)
        return np.where(np.isfinite(values), found, np.nan)

    def rule(self, value: float, width: float, kind: str) -> str:
        """A line across the drawing."""
        return path(f"M0 {number(float(self.places(value)))}H{width}", kind)

    def band(self, margin: float, width: float) -> str:
        """The effects that are within the margin."""
        top, bottom = self.places([margin, -margin])
        size = f'width="{width}" height="{number(bottom - top)}"'
        return f'<rect class="band" x="0" y="{number(top)}" {size}/>'

    def labels(self, form: Callable[[float], str]) -> list[Label]:
        """Round numbers beside it."""
        return [Label(form(tick), 0, float(self.places(tick))) for tick in ticks(self.low, self.high)]

    def beyond(self, values: Array) -> int:
        """How many values lie outside of it."""
        return int((np.isfinite(values) & ((values > self.high) | (values < self.low))).sum())


def svg(width: float, height: float, *shapes: str, kind: str = "") -> Markup:
    """A drawing of shapes. They are made of numbers and this package's own words alone."""
    size = f"0 0 {number(width)} {number(height)}"
    body = "".join(shapes)
    return Markup(f'<svg class="{kind}" viewBox="{size}" preserveAspectRatio="none" aria-hidden="true">{body}</svg>')  # noqa: S704


def number(value: float) -> str:
    """As short as a coordinate may be."""
    return f"{value:.1f}".removesuffix(".0")


def merged(labels: Sequence[Label], apart: float) -> list[Label]:
    """Labels in order, those that would stand on each other in one."""
    found: list[Label] = []
    for label in labels:
        if found and label.left - found[-1].left < apart:
            found[-1] = replace(found[-1], text=f"{found[-1].text}, {label.text}")
        else:
            found.append(label)
    return found


def path(d: str, kind: str) -> str:
    """A path, if there is anything on it."""
    return f'<path class="{kind}" d="{d}"/>' if d else ""


def line(x: Iterable[float], y: Iterable[float]) -> str:
    """The `d` of a line with a gap wherever a value is NaN; a value with gaps at both sides is a point."""
    found, drawn = [], False
    for at, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            drawn = False
            continue
        found.append(f"{'L' if drawn else 'M'}{number(at)} {number(value)}")
        if not drawn:
            found.append("h0")
        drawn = True
    return "".join(found)


def dots(x: Iterable[float], y: Iterable[float]) -> str:
    """The `d` of points."""
    return "".join(
        f"M{number(a)} {number(b)}h0" for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)
    )


def bars(x: Iterable[float], low: Iterable[float], high: Iterable[float]) -> str:
    """The `d` of upright lines."""
    return "".join(
        f"M{number(at)} {number(a)}V{number(b)}"
        for at, a, b in zip(x, low, high, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    )


def strip(codes: Array, bottom: float, height: float) -> str:
    """What was answered, night by night: a bar of its own height and colour each, neighbours that are alike in one."""
    found: dict[int, list[str]] = {}
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, end in itertools.pairwise(edges):
        code = int(codes[start])
        if code != NONE:
            tall = number(_HEIGHTS[code] * height)
            found.setdefault(code, []).append(f"M{start} {number(bottom)}v-{tall}h{end - start}v{tall}z")
    return "".join(path("".join(parts), f"a-{ANSWERS[code]}") for code, parts in sorted(found.items(), reverse=True))


def reach(values: Sequence[Array], least: float) -> tuple[float, float]:
    """(low, high) of an axis that shows nearly all of the values, and the last ones; a few that are far must not make
    the rest flat.
    """
    every = np.concatenate([np.ravel(each) for each in values]) if values else np.zeros(0)
    every = every[np.isfinite(every)]
    low, high = np.quantile(every, (0.01, 0.99)) if every.size else (0.0, 0.0)
    low, high = min(low, -least), max(high, least)
    last = [float(each[-1]) for each in values if len(each) and np.isfinite(each[-1])]
    far = _FAR * (high - low)
    low, high = (
        min([low, *(max(each, low - far) for each in last)]),
        max([high, *(min(each, high + far) for each in last)]),
    )
    room = 0.08 * (high - low) or abs(high) or 1.0
    return float(low - room), float(high + room)


def ticks(low: float, high: float, least: int = 3) -> list[float]:
    """Round numbers within an axis, at least so many, as few as that allows."""
    power = 10.0 ** math.ceil(math.log10(high - low))
    for step in (factor * power / 10**digits for digits in range(3) for factor in (1, 0.5, 0.2)):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 >= least:
            return [step * i for i in range(first, last + 1)]
    return [low, high]


def months(days: Sequence[str], most: int = 7) -> list[Label]:
    """Where months begin among days `2026-01-02 03:04`, or days where there are few; as many as there is room for."""
    every = len(days)
    starts = [i for i in range(every) if i == 0 or days[i][:7] != days[i - 1][:7]]
    if every <= 45:
        step = max(1, -(-every // most))
        # several runs on one day are told apart by their hour
        form = slice(5, 10) if len({day[:10] for day in days}) == every else slice(5, 16)
        return [Label(days[i][form], 100 * (i + 0.5) / every) for i in range(0, every, step)]
    step = max(1, -(-len(starts) // most))
    chosen = [i for i in starts[1:][::step] if i < 0.95 * every]
    return [Label(days[i][:7], 100 * i / every) for i in chosen]
