"""The drawings of the site, as SVG that stretches to its place: for the grid, nights in lanes, one respect, raw times.

Words stand beside them in HTML, where they keep their shape. Points are lines of no length with round ends, so that
they stay round however the drawing is stretched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from quantkit.nightly.page import say
from quantkit.nightly.page.data import ANSWERS, NONE
from quantkit.nightly.records import What
from quantkit.report.kit import words
from quantkit.stats.changes import Change

Array = Any
# nights that a small drawing shows; of fewer than so many, intervals are drawn apart
SHORT, _FEW = 90, 60
# how high an answer stands in a strip: it can be told without its colour
_HEIGHTS = (1.0, 0.8, 0.45, 0.6, 0.3, 0.12)
# height of the drawing of a chart, in its own units; one unit across is a night
TALL = 100.0
# of an axis: how many times longer the last night may make it
_FAR = 4.0


class Label(NamedTuple):
    """Words at a place: `left` and `top` in percent of the drawing."""

    text: str
    left: float = 0.0
    top: float = 0.0
    kind: str = ""


class Chart(NamedTuple):
    """A drawing with labels at its left (`ticks`), within it and under it.

    Args:
        alt: what it shows, in a sentence.
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


class Scale(NamedTuple):
    """The upright axis of a drawing, from its lower edge to its upper, in the drawing's own units."""

    low: float
    high: float
    height: float = TALL

    def places(self, values: Any) -> Array:
        """Place heights from the top, NaN for what is not finite; what lies beyond the axis stands at its end."""
        values = np.asarray(values, float)
        found = np.clip(self.height * (self.high - values) / (self.high - self.low), 0.0, self.height)
        return np.where(np.isfinite(values), found, np.nan)

    def rule(self, value: float, width: float, kind: str) -> str:
        """Draw a line across the drawing."""
        return path(f"M0 {number(float(self.places(value)))}H{width}", kind)

    def band(self, margin: float, width: float) -> str:
        """Draw the effects within the margin."""
        top, bottom = self.places([margin, -margin])
        size = f'width="{width}" height="{number(bottom - top)}"'
        return f'<rect class="band" x="0" y="{number(top)}" {size}/>'

    def labels(self, form: Callable[[float], str]) -> list[Label]:
        """Label it with round numbers."""
        return [Label(form(tick), 0, float(self.places(tick))) for tick in ticks(self.low, self.high)]

    def beyond(self, values: Array) -> int:
        """Count how many values lie outside of it."""
        return int((np.isfinite(values) & ((values > self.high) | (values < self.low))).sum())


def svg(width: float, height: float, *shapes: str, kind: str = "") -> Markup:
    """Make a drawing of shapes. They are made of numbers and this package's own words alone."""
    size = f"0 0 {number(width)} {number(height)}"
    body = "".join(shapes)
    return Markup(f'<svg class="{kind}" viewBox="{size}" preserveAspectRatio="none" aria-hidden="true">{body}</svg>')  # noqa: S704


def number(value: float) -> str:
    """Write it as short as a coordinate may be."""
    return f"{value:.1f}".removesuffix(".0")


def merged(labels: Sequence[Label], apart: float) -> list[Label]:
    """Merge labels in order, those that would stand on each other in one."""
    found: list[Label] = []
    for label in labels:
        if found and label.left - found[-1].left < apart:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}, {label.text}")
        else:
            found.append(label)
    return found


def path(d: str, kind: str) -> str:
    """Draw a path, if there is anything on it."""
    return f'<path class="{kind}" d="{d}"/>' if d else ""


def line(x: Iterable[float], y: Iterable[float]) -> str:
    """Write the `d` of a line with a gap wherever a value is NaN; a value with gaps at both sides is a point."""
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
    """Write the `d` of points."""
    return "".join(f"M{number(a)} {number(b)}h0" for a, b in zip(x, y, strict=True) if math.isfinite(a + b))


def bars(x: Iterable[float], low: Iterable[float], high: Iterable[float]) -> str:
    """Write the `d` of upright lines."""
    ends = zip(x, low, high, strict=True)
    return "".join(f"M{number(at)} {number(a)}V{number(b)}" for at, a, b in ends if math.isfinite(a + b))


def strip(codes: Array, bottom: float, height: float) -> str:
    """Draw what was answered, night by night: a bar of its own height and colour each, like neighbours in one."""
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
    lower, upper = (max(each, low - far) for each in last), (min(each, high + far) for each in last)
    low, high = min([low, *lower]), max([high, *upper])
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
    """Label where months begin among days `2026-01-02 03:04`, or days where there are few; as many as fit."""
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


def spark(values: Array, codes: Array, margin: float) -> Markup:
    """Draw a cell in the grid: its effect over the last nights within the margin, and below it what was answered."""
    values, codes = values[-SHORT:], codes[-SHORT:]
    width = max(len(codes), 2)
    far = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
    most = min(max(far * 1.1, 1.6 * margin), 6 * margin) or 1.0
    scale = Scale(-most, most, 24)
    x, y = np.arange(len(values)) + 0.5, scale.places(values)
    shapes = [scale.band(margin, width), path(line(x, y), "line"), strip(codes, 34, 8)]
    if len(codes) < _FEW / 4:
        shapes.append(path(dots(x, y), "point"))
    return svg(width, 34, *shapes, kind="spark")


def lanes(days: Sequence[str], counts: Mapping[str, Array], alt: str) -> Chart:
    """Draw counts over nights (name -> how many, `[nights]`), a lane a name, each to its own height."""
    shapes, labels, height = [], [], 20.0
    for i, (name, values) in enumerate(counts.items()):
        bottom, most = (i + 1) * height - 1, max(int(values.max()), 1)
        tall = np.where(values > 0, np.maximum((height - 5) * values / most, 1.5), 0)
        parts = [f"M{x} {number(bottom)}v-{number(t)}h1v{number(t)}z" for x, t in enumerate(tall) if t]
        shapes += [path("".join(parts), f"a-{name}")]
        shapes += [path(f"M0 {number(bottom)}H{len(days)}", "grid")]
        labels.append(Label(name, 0, 100 * (i + 0.5) / len(counts), str(int(values.max()))))
    told = [[name, ["" if not v else f"{int(v):,}" for v in values]] for name, values in counts.items()]
    readout = {"rows": told, "none": "nothing but same"}
    whole = svg(len(days), len(counts) * height, *shapes)
    return Chart(whole, alt, ticks=labels, below=months(days), readout=readout, tall="lanes")


def spread(
    days: Sequence[str], low: Array, middle: Array, high: Array, called: Array, measured: Array, wrong: Array
) -> Chart:
    """Draw how far ratios of things to themselves were spread, night by night, and on which nights one was called."""
    scale = Scale(*reach([low, high], 0.005))
    x = np.arange(len(days)) + 0.5
    a, b, c = map(scale.places, (low, middle, high))
    shapes = [path(bars(x, a, c), _interval(len(days))), scale.rule(0.0, len(days), "zero")]
    shapes.append(path(dots(x, b), "point"))
    marks = [Label("◆", 100 * float(x[i]) / len(days), 4.0, "called") for i in np.flatnonzero(called).tolist()]
    told = [
        f"{words.plural(int(n), 'cell')} against itself, {say.interval('latency', lo, hi) or 'no times'}; "
        f"{int(k)} called different"
        for n, lo, hi, k in zip(measured, low, high, wrong, strict=True)
    ]
    labels = scale.labels(partial(say.tick, "latency"))
    alt = f"For each of {len(days)} nights, the range that holds 9 of 10 ratios of cells to themselves."
    readout = {"rows": [["", told]]}
    whole = svg(len(days), TALL, *shapes)
    return Chart(whole, alt, labels, marks, months(days), readout, "low")


def respect(
    what: What,
    days: Sequence[str],
    codes: Array,
    values: Array,
    low: Array,
    high: Array,
    margin: float,
    found: Sequence[Change],
    updates: Sequence[int] = (),
    first: int = 1,
) -> Chart:
    """Draw one respect of a cell over its nights: effects with their intervals, the margin, levels, what was answered.

    Args:
        codes: numbers of their answers.
        margin: the least effect that counts.
        updates: nights on which versions changed.
        first: number of the first change.
    """
    count, finite = len(days), np.isfinite(values)
    scale = Scale(*reach([values, low, high], 1.3 * margin))
    x = np.arange(count) + 0.5
    y, a, b = map(scale.places, (values, low, high))
    shapes = [scale.band(margin, count)] if margin else []
    rules = ticks(scale.low, scale.high)
    shapes += [scale.rule(tick, count, "zero" if abs(tick) < 1e-12 else "grid") for tick in rules]
    shapes += [path(f"M{update} 0V{number(TALL)}", "update") for update in updates]
    shapes.append(path(bars(x, a, b), _interval(count)))
    shapes.append(path(line(x, y), "line"))
    if count < _FEW:
        shapes.append(path(dots(x, y), "point"))
    marks = []
    if found:
        edges = [0, *(change.index for change in found), count]
        means = [found[0].before, *(change.after for change in found)]
        heights = scale.places(means)
        levels = "".join(f"M{i} {number(h)}H{j}" for h, i, j in zip(heights, edges, edges[1:], strict=False))
        shapes.append(path(levels, "level"))
        for place, change in enumerate(found, first):
            marks.append(Label(str(place), 100 * change.index / count, 0.0, "change"))
            shapes.append(path(f"M{change.index} 0V{number(TALL)}", "step"))
    for code in range(3):
        here = np.flatnonzero((codes == code) & finite)
        shapes.append(path(dots(x[here], y[here]), f"point p-{ANSWERS[code]}"))
    told = []
    for i in range(count):
        name = ANSWERS[codes[i]] if codes[i] != NONE else "not decided"
        between = say.interval(what, low[i], high[i])
        told.append(f"{name}, {say.value(what, values[i])}{f' ({between})' if between else ''}")
    alt = f"{say.TITLES[what]} over {words.plural(count, 'night')}"
    if beyond := scale.beyond(values):
        alt += f"; {words.plural(beyond, 'night')} beyond the axis at its end"
    whole = svg(count, TALL, *shapes)
    labels = scale.labels(partial(say.tick, what))
    readout = {"rows": [["", told]]}
    return Chart(whole, alt, labels, merged(marks, 3.0), months(days), readout, "" if what == "latency" else "low")


def _interval(count: int) -> str:
    """The class of so many intervals beside each other."""
    return "interval apart" if count < _FEW else "interval"


def answers(codes: Array) -> Markup:
    """Draw what a cell was answered, over all of its nights."""
    return svg(max(len(codes), 1), 12, strip(codes, 12, 12), kind="strip")


def between(low: float | None, value: float | None, high: float | None, margin: float | None) -> Markup | None:
    """Draw one interval against its margin, small enough for a table."""
    ends = (low, value, high, margin)
    low, value, high, margin = (end if end is not None and np.isfinite(end) else None for end in ends)
    known = [end for end in (low, value, high) if end is not None]
    if not known:
        return None
    most = max(*(abs(each) for each in known), 1.6 * (margin or 0.0), 1e-9) * 1.05

    def at(v: float) -> str:
        return number(50 + 50 * v / most)

    shapes = []
    if margin:
        width = number(100 * margin / most)
        shapes.append(f'<rect class="band" x="{at(-margin)}" y="0" width="{width}" height="16"/>')
    shapes.append(path("M50 0V16", "zero"))
    if low is not None and high is not None:
        shapes.append(path(f"M{at(low)} 8H{at(high)}", "interval apart"))
    if value is not None:
        shapes.append(path(f"M{at(value)} 8h0", "point"))
    return svg(100, 16, *shapes, kind="between")


def raw(sides: Mapping[str, tuple[Array, Array]], rounds: Sequence[int], count: int) -> Chart:
    """Draw the times of one night as they were taken: side -> (places in the night's order, seconds).

    Args:
        rounds: places at which a round begins.
    """
    every = np.concatenate([seconds for _, seconds in sides.values()])
    factor, unit = words.time_unit(float(np.median(every)))
    # a few that something else held up must not hide how the two differ
    low, third, high = np.quantile(every, (0.0, 0.75, 0.97))
    high = min(high, 1.5 * third)
    room = 0.15 * (high - low) or 0.05 * high
    scale = Scale(float(low - room), float(high + room))
    shapes = [path("".join(f"M{at} 0V{TALL}" for at in rounds[1:]), "grid")]
    for side, (x, seconds) in sides.items():
        shapes.append(path(dots(x + 0.5, scale.places(seconds)), f"raw {side}"))
    alt = f"{words.plural(count, 'step')} in the order in which they were taken"
    if beyond := int((every > scale.high).sum()):
        alt += f"; {beyond:,} above {words.moment(scale.high)} stand at the upper end"
    labels = scale.labels(lambda seconds: words.figure(factor * seconds, 3))
    whole = svg(count, TALL, *shapes)
    places = zip(rounds, [*rounds[1:], count], strict=True)
    below = [Label(str(i + 1), 100 * (a + b) / 2 / count, kind="middle") for i, (a, b) in enumerate(places)]
    return Chart(whole, f"{alt}, in {unit}", labels, [], below, None)


def ratios(found: Array, margin: float) -> Chart:
    """Draw the candidate's fastest step of each block over the baseline's fastest, in the order of the blocks."""
    values = found - 1
    first, third = np.quantile(values, (0.25, 0.75))
    far = 5 * (third - first) + margin
    scale = Scale(*reach([np.clip(values, first - far, third + far)], 1.3 * margin))
    count, middle = len(values), float(np.median(values))
    shapes = [
        scale.band(margin, count),
        scale.rule(0.0, count, "zero"),
        scale.rule(middle, count, "level"),
        path(dots(np.arange(count) + 0.5, scale.places(values)), "raw candidate"),
    ]
    alt = f"{words.plural(count, 'block')}; their median is {say.value('latency', middle)}"
    if beyond := scale.beyond(values):
        alt += f"; {beyond:,} beyond the axis at its end"
    labels = scale.labels(partial(say.tick, "latency"))
    return Chart(svg(count, TALL, *shapes), alt, labels, tall="low")
