"""Draw the site's charts as stretchable SVG: grid cells, lanes of nights, one comparison, raw times.

Text stands beside them in HTML, where it keeps its shape. Points are zero-length lines with round ends, which stay
round when the drawing is stretched.
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
# most nights in a small drawing; below this number, intervals are drawn separately
SHORT, _FEW = 90, 60
# height of each answer in a strip, so that it can be read without colour
_HEIGHTS = (1.0, 0.8, 0.45, 0.6, 0.3, 0.12)
# height of a chart, in drawing units; one unit of width is a night
TALL = 100.0
# most times that the last night may lengthen an axis
_FAR = 4.0


class Label(NamedTuple):
    """Text at a place; `left` and `top` in percent of the drawing."""

    text: str
    left: float = 0.0
    top: float = 0.0
    kind: str = ""


class Chart(NamedTuple):
    """A drawing with labels at its left (`ticks`), within it and below it.

    Args:
        alt: description in a sentence.
        readout: text for each place across it, for the script.
        tall: CSS class of its height.
    """

    svg: Markup
    alt: str
    ticks: Sequence[Label] = ()
    marks: Sequence[Label] = ()
    below: Sequence[Label] = ()
    readout: Any = None
    tall: str = ""


class Scale(NamedTuple):
    """Vertical axis of a drawing, from its lower to its upper edge, in drawing units."""

    low: float
    high: float
    height: float = TALL

    def places(self, values: Any) -> Array:
        """Return distances from the top, NaN for a value that is not finite; values beyond the axis are put at its
        end."""
        values = np.asarray(values, float)
        heights = np.clip(self.height * (self.high - values) / (self.high - self.low), 0.0, self.height)
        return np.where(np.isfinite(values), heights, np.nan)

    def rule(self, value: float, width: float, kind: str) -> str:
        """Draw a line across the drawing."""
        return path(f"M0 {number(float(self.places(value)))}H{width}", kind)

    def band(self, margin: float, width: float) -> str:
        """Draw the band of effects within the margin."""
        top, bottom = self.places([margin, -margin])
        size = f'width="{width}" height="{number(bottom - top)}"'
        return f'<rect class="band" x="0" y="{number(top)}" {size}/>'

    def labels(self, form: Callable[[float], str]) -> list[Label]:
        """Return labels at round numbers."""
        return [Label(form(tick), 0, float(self.places(tick))) for tick in ticks(self.low, self.high)]

    def beyond(self, values: Array) -> int:
        """Count the values outside of the axis."""
        return int((np.isfinite(values) & ((values > self.high) | (values < self.low))).sum())


def svg(width: float, height: float, *shapes: str, kind: str = "") -> Markup:
    """Return a drawing of shapes. Shapes contain only numbers and this package's own words."""
    size = f"0 0 {number(width)} {number(height)}"
    body = "".join(shapes)
    return Markup(f'<svg class="{kind}" viewBox="{size}" preserveAspectRatio="none" aria-hidden="true">{body}</svg>')  # noqa: S704


def number(value: float) -> str:
    """Format a coordinate as briefly as possible."""
    return f"{value:.1f}".removesuffix(".0")


def merged(labels: Sequence[Label], apart: float) -> list[Label]:
    """Merge overlapping labels, in order."""
    kept: list[Label] = []
    for label in labels:
        if kept and label.left - kept[-1].left < apart:
            kept[-1] = kept[-1]._replace(text=f"{kept[-1].text}, {label.text}")
        else:
            kept.append(label)
    return kept


def path(d: str, kind: str) -> str:
    """Draw a path, unless it is empty."""
    return f'<path class="{kind}" d="{d}"/>' if d else ""


def line(x: Iterable[float], y: Iterable[float]) -> str:
    """Return the `d` of a line with a gap at each NaN; a value between two gaps is a point."""
    commands, drawn = [], False
    for at, value in zip(x, y, strict=True):
        if not math.isfinite(value):
            drawn = False
            continue
        commands.append(f"{'L' if drawn else 'M'}{number(at)} {number(value)}")
        if not drawn:
            commands.append("h0")
        drawn = True
    return "".join(commands)


def dots(x: Iterable[float], y: Iterable[float]) -> str:
    """Return the `d` of points."""
    return "".join(f"M{number(a)} {number(b)}h0" for a, b in zip(x, y, strict=True) if math.isfinite(a + b))


def bars(x: Iterable[float], low: Iterable[float], high: Iterable[float]) -> str:
    """Return the `d` of vertical lines."""
    ends = zip(x, low, high, strict=True)
    return "".join(f"M{number(at)} {number(a)}V{number(b)}" for at, a, b in ends if math.isfinite(a + b))


def strip(codes: Array, bottom: float, height: float) -> str:
    """Draw the answers, night by night: bars with their own height and colour; equal neighbours form one."""
    bars_of: dict[int, list[str]] = {}
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, end in itertools.pairwise(edges):
        code = int(codes[start])
        if code != NONE:
            tall = number(_HEIGHTS[code] * height)
            bars_of.setdefault(code, []).append(f"M{start} {number(bottom)}v-{tall}h{end - start}v{tall}z")
    return "".join(path("".join(parts), f"a-{ANSWERS[code]}") for code, parts in sorted(bars_of.items(), reverse=True))


def reach(values: Sequence[Array], least: float) -> tuple[float, float]:
    """Return (low, high) of an axis for nearly all values and the last ones; a few outliers must not flatten the
    rest."""
    every = np.concatenate([np.ravel(series) for series in values]) if values else np.zeros(0)
    every = every[np.isfinite(every)]
    low, high = np.quantile(every, (0.01, 0.99)) if every.size else (0.0, 0.0)
    low, high = min(low, -least), max(high, least)
    last = [float(series[-1]) for series in values if len(series) and np.isfinite(series[-1])]
    far = _FAR * (high - low)
    lower, upper = (max(end, low - far) for end in last), (min(end, high + far) for end in last)
    low, high = min([low, *lower]), max([high, *upper])
    room = 0.08 * (high - low) or abs(high) or 1.0
    return float(low - room), float(high + room)


def ticks(low: float, high: float, least: int = 3) -> list[float]:
    """Return round numbers within an axis, at least `least`, as few as that allows."""
    power = 10.0 ** math.ceil(math.log10(high - low))
    for step in (factor * power / 10**digits for digits in range(3) for factor in (1, 0.5, 0.2)):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first + 1 >= least:
            return [step * i for i in range(first, last + 1)]
    return [low, high]


def months(days: Sequence[str], most: int = 7) -> list[Label]:
    """Return labels where months begin among days `2026-01-02 03:04`, or at days if there are few; as many as fit."""
    every = len(days)
    starts = [i for i in range(every) if i == 0 or days[i][:7] != days[i - 1][:7]]
    if every <= 45:
        step = max(1, -(-every // most))
        # several runs on one day are distinguished by the hour
        form = slice(5, 10) if len({day[:10] for day in days}) == every else slice(5, 16)
        return [Label(days[i][form], 100 * (i + 0.5) / every) for i in range(0, every, step)]
    step = max(1, -(-len(starts) // most))
    chosen = [i for i in starts[1:][::step] if i < 0.95 * every]
    return [Label(days[i][:7], 100 * i / every) for i in chosen]


def spark(values: Array, codes: Array, margin: float) -> Markup:
    """Draw a grid cell: its effect over the last nights within the margin, and its answers below."""
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
    """Draw counts over nights (name -> counts, `[nights]`), one lane a name, each scaled to its own height."""
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
    """Draw the spread of cells compared with themselves, night by night, and mark nights with a false call."""
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
    level_changes: Sequence[Change],
    updates: Sequence[int] = (),
    first: int = 1,
) -> Chart:
    """Draw one comparison of a cell over its nights: effects, intervals, margin, levels, answers.

    Args:
        codes: numbers of the answers.
        margin: smallest effect that matters.
        level_changes: changes of level.
        updates: nights with new versions.
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
    if level_changes:
        edges = [0, *(change.index for change in level_changes), count]
        means = [level_changes[0].before, *(change.after for change in level_changes)]
        heights = scale.places(means)
        levels = "".join(f"M{i} {number(h)}H{j}" for h, i, j in zip(heights, edges, edges[1:], strict=False))
        shapes.append(path(levels, "level"))
        for place, change in enumerate(level_changes, first):
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
    """Return the CSS class for this many intervals."""
    return "interval apart" if count < _FEW else "interval"


def answers(codes: Array) -> Markup:
    """Draw the answers of a cell, over all its nights."""
    return svg(max(len(codes), 1), 12, strip(codes, 12, 12), kind="strip")


def between(low: float | None, value: float | None, high: float | None, margin: float | None) -> Markup | None:
    """Draw one interval against its margin, small enough for a table."""
    ends = (low, value, high, margin)
    low, value, high, margin = (end if end is not None and np.isfinite(end) else None for end in ends)
    known = [end for end in (low, value, high) if end is not None]
    if not known:
        return None
    most = max(*(abs(end) for end in known), 1.6 * (margin or 0.0), 1e-9) * 1.05

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
    """Draw the times of one night in order of measurement: side -> (places in the night's order, seconds).

    Args:
        rounds: places where a round begins.
    """
    every = np.concatenate([seconds for _, seconds in sides.values()])
    factor, unit = words.time_unit(float(np.median(every)))
    # a few delayed steps must not hide the difference between the sides
    low, third, high = np.quantile(every, (0.0, 0.75, 0.97))
    high = min(high, 1.5 * third)
    room = 0.15 * (high - low) or 0.05 * high
    scale = Scale(float(low - room), float(high + room))
    shapes = [path("".join(f"M{at} 0V{TALL}" for at in rounds[1:]), "grid")]
    for side, (x, seconds) in sides.items():
        shapes.append(path(dots(x + 0.5, scale.places(seconds)), f"raw {side}"))
    alt = f"{words.plural(count, 'step')} in order of measurement"
    if beyond := int((every > scale.high).sum()):
        alt += f"; {beyond:,} above {words.moment(scale.high)} stand at the upper end"
    labels = scale.labels(lambda seconds: words.figure(factor * seconds, 3))
    whole = svg(count, TALL, *shapes)
    places = zip(rounds, [*rounds[1:], count], strict=True)
    below = [Label(str(i + 1), 100 * (a + b) / 2 / count, kind="middle") for i, (a, b) in enumerate(places)]
    return Chart(whole, f"{alt}, in {unit}", labels, [], below, None)


def ratios(of_blocks: Array, margin: float) -> Chart:
    """Draw the candidate's fastest step of each block divided by the baseline's, in the order of the blocks."""
    values = of_blocks - 1
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
