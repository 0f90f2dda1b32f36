"""Figures of the reports, as plain data in plotly's schema; nothing here needs plotly.

Colours are names of CSS properties, such as `var(--quantized)`. The page resolves them when it draws, so one figure
serves light theme, dark theme and paper. Foreign text is escaped, because plotly interprets some HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.kit import words
from quantkit.report.kit.words import Form, Interval

Figure = dict[str, Any]

QUANTIZED, ORIGINAL = "quantized", "original"
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 88, 14, 44
# height of a line chart on a telephone
_NARROW = 230
# characters of a label that fit on a telephone
_ROOM = 52
# least distance between lines of text, in pixels
_LINE = 15
# marks this far apart (share of the axis) have their labels side by side
_APART = 0.6
# look of labels on top of grid lines
_OPAQUE = {"bgcolor": "var(--surface)", "borderpad": 1}
_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
# least ratio of the ends of a logarithmic axis: on a shorter one noise would look like a result
_LEAST_SPAN = 2.0
# labels that fit side by side in the narrowest figure
_LABELS = 9.5


@dataclass(frozen=True)
class Axis:
    """One axis: title, tick positions (`ticks`) with their labels (`texts`), ends, and whether it is logarithmic."""

    title: str
    ticks: Sequence[float]
    texts: Sequence[str]
    range: Interval
    log: bool = True

    def place(self, value: float) -> float:
        """Return the position of an annotation: plotly expects the logarithm for annotations only."""
        return math.log10(value) if self.log else value

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        low, high = (self.place(end) for end in self.range)
        return (self.place(value) - low) / (high - low) if high != low else 0.5


def log_axis(title: str, values: Sequence[float], *, form: Form = words.plain) -> Axis:
    """Make a logarithmic axis for positive values, with three to eight round labels."""
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
    return Axis(title, ticks, [form(value) for value in ticks], (low, high))


def straight_axis(title: str, values: Sequence[float], *, form: Form = words.plain) -> Axis:
    """Make a linear axis for values, with three to six round labels."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(step * power for step in (0.2, 0.5, 1.0, 2.0) if span / (step * power) <= 5)
    first, last = math.ceil(low / step - 1e-9), math.floor((high + span * 0.06) / step)
    ticks = [round(step * i, 12) for i in range(first, last + 1)]
    # room at both ends, but none below zero
    start = low if low == 0 else low - span * 0.06
    return Axis(title, ticks, [form(value) for value in ticks], (start, high + span * 0.06), log=False)


def points_axis(title: str, values: Iterable[float]) -> Axis:
    """Make a logarithmic axis with a label at each value (a batch); labels too close to the last one are dropped."""
    known = sorted(set(values))
    apart, ticks = math.log(known[-1] / known[0]) / _LABELS, known[:1]
    for value in known[1:]:
        if math.log(value / ticks[-1]) > apart:
            ticks.append(value)
    return Axis(title, ticks, [words.plain(value) for value in ticks], (known[0] / 1.18, known[-1] * 1.18))


def names_axis(title: str, names: Sequence[str]) -> Axis:
    """Make an axis of the places 0, 1, ..., labelled with at most ten of the names."""
    shown = list(range(0, len(names), max(1, -(-len(names) // 10))))
    return Axis(title, shown, [names[i] for i in shown], (-0.5, len(names) - 0.5), log=False)


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Args:
        label: text at the end of the line.
        colour: colour of the page, such as `quantized`.
        x: ascending positions.
        hover: text for each point.
        band: interval at each point; empty for none.
        bound: True for a limit: thin and dotted, without points.
        hollow: True to draw the points of a bound as rings.
        symbol: symbol of the points; empty for a line without points.
        texts: labels over the points; empty for none.
    """

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    hover: Sequence[str] = ()
    band: Sequence[Interval | None] = ()
    bound: bool = False
    hollow: bool = False
    symbol: str = "circle"
    texts: Sequence[str] = ()


def curve(
    label: str, colour: str, x: Iterable[float], y: Iterable[float | None], form: Callable[[float], str], **look: Any
) -> list[Curve]:
    """Make a curve of the points with a value, in a list; an empty list without any.

    Args:
        form: format of a value, for the hover texts.
    """
    known = [(at, value) for at, value in zip(x, y, strict=True) if value]
    xs, ys = [at for at, _ in known], [value for _, value in known]
    return [Curve(label, colour, xs, ys, [form(value) for value in ys], **look)] if known else []


@dataclass(frozen=True)
class Mark:
    """Vertical line with a label."""

    x: float
    label: str
    dotted: bool = False


@dataclass(frozen=True)
class ChartPoint:
    """One line of a forest plot: a value and its interval; `beside` is the original's value."""

    label: str
    value: float
    interval: Interval | None
    text: str
    beside: float | None = None


@dataclass(frozen=True)
class BarPart:
    """One part of stacked bars: a value for every bar; `shade` is a colour of the page."""

    label: str
    values: Sequence[float]
    shade: str


@dataclass(frozen=True)
class Plot:
    """Figure with a title and an alternative text for screen readers."""

    title: str
    alt: str
    figure: Figure
    wide: bool = False


def over(
    title: str,
    alt: str,
    curves: Sequence[Curve],
    across: str,
    up: str,
    *,
    form: Form = words.plain,
    also: Sequence[float] = (),
    wide: bool = False,
    **look: Any,
) -> Plot:
    """Plot curves against batches or lengths, on two logarithmic axes.

    Args:
        across: title of the horizontal axis.
        up: title of the vertical axis.
        also: further values that the vertical axis has to include.
        look: options for `lines`.
    """
    x = points_axis(across, [x for curve in curves for x in curve.x])
    y = log_axis(up, [*heights(curves), *also], form=form)
    return Plot(title, f"{alt}, both axes logarithmic", lines(curves, x, y, **look), wide)


def heights(curves: Iterable[Curve]) -> list[float]:
    """List all vertical values, with the ends of the intervals."""
    return [y for curve in curves for y in (*curve.y, *(end for band in curve.band if band for end in band))]


def plain(text: object) -> str:
    """Escape text for plotly.

    >>> plain("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(str(text), quote=False)


def lines(
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    *,
    height: int = 330,
    left: int = _LEFT,
    right: int = _RIGHT,
    noise: Interval | None = None,
    even: float | None = None,
    wins: Sequence[Interval] = (),
    marks: Sequence[Mark] = (),
    hover: str = "x unified",
) -> Figure:
    """Draw lines with their intervals, each labelled at its end.

    Args:
        curves: the curves; measurements are drawn last, on top of the bounds.
        height: height in CSS pixels.
        right: margin for the labels at the ends.
        noise: band of y between two measurements of the same thing.
        even: value of y without a difference between the sides.
        wins: ranges of x to shade.
        hover: plotly's hover mode.
    """
    ordered = sorted(curves, key=lambda curve: (bool(curve.symbol), not curve.bound))
    shapes = [_rectangle(x0, x1, 0, 1, "win", yref="paper") for x0, x1 in wins]
    if noise is not None:
        shapes.append(_rectangle(0, 1, *noise, "noise", xref="paper"))
    if even is not None:
        shapes.append(_line({"xref": "paper", "x0": 0, "x1": 1, "y0": even, "y1": even}, "ink", 1.2))
    top = max(_TOP, _LINE * len(marks) + 6)
    across, over = _marks(marks, x)
    longest = max((len(curve.label) for curve in curves), default=0)
    right = max(right, 12 + 7 * longest) if right == _RIGHT else right
    # spread for the low figure of a narrow page too
    notes = [*_end_labels(ordered, y, min(height, _NARROW) - top - _BOTTOM), *over]
    layout = _layout(height, left=left, right=right, top=top) | {"xaxis": _axis(x), "yaxis": _axis(y)}
    layout |= {"shapes": [*shapes, *across], "annotations": notes, "hovermode": hover}
    layout["meta"] = {"narrow": min(height, _NARROW)}
    return {"data": [trace for curve in ordered for trace in _curve(curve)], "layout": layout}


def forest(points: Sequence[ChartPoint], x: Axis, *, marks: Sequence[Mark] = ()) -> Figure:
    """Draw values with their intervals below each other, on one axis."""
    # labels of marks: side by side if there is room, else stacked
    shares = [x.share(mark.x) for mark in marks]
    levels = len(marks) if shares and max(shares) - min(shares) < _APART else 1
    # if one label is too long for a telephone, all labels take two lines
    parted = any(len(point.label) + len(point.text) > _ROOM for point in points)
    places = list(range(len(points)))[::-1]
    ends = [point.interval or (point.value, point.value) for point in points]
    arms = {
        "array": [max(0.0, high - point.value) for point, (_, high) in zip(points, ends, strict=True)],
        "arrayminus": [max(0.0, point.value - low) for point, (low, _) in zip(points, ends, strict=True)],
    }
    bar = {"type": "data", "symmetric": False, **arms, "color": _colour(QUANTIZED), "thickness": 2, "width": 5}
    told = [f"{plain(point.label)}: {plain(point.text)}" for point in points]
    own = _points([point.value for point in points], places, told, QUANTIZED, size=9) | {"error_x": bar}
    beside = [(point, place) for point, place in zip(points, places, strict=True) if point.beside is not None]
    told = [f"original: {plain(point.text)}" for point, _ in beside]
    look = {"size": 11, "symbol": "line-ns-open", "line": {"width": 2}}
    others = _points([point.beside for point, _ in beside], [place for _, place in beside], told, ORIGINAL, **look)
    notes = []
    for place, point in zip(places, points, strict=True):
        where = {"xref": "paper", "yref": "y", "xanchor": "left", "yanchor": "bottom", "yshift": 5}
        note = _note(0, place, f"{point.label}: {point.text}", colour="ink") | _OPAQUE | where
        two = {"text": f"{plain(point.label)}<br>{plain(point.text)}", "align": "left"}
        notes.append(note | (two if parted else {}))
    shapes = []
    for number, mark in enumerate(marks):
        shapes.append(_line({"yref": "paper", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1}, "muted", 1.2, mark.dotted))
        far = x.share(mark.x) > 0.5
        where = {"xref": "x", "yref": "paper", "yanchor": "bottom", "xanchor": "right" if far else "left"}
        where |= {"xshift": -4 if far else 4, "yshift": float(_LINE) * number if levels > 1 else 0}
        notes.append(_note(x.place(mark.x), 0, mark.label) | where)
    rows = {"visible": False, "range": [-0.75 - (levels - 1) * _LINE / 40, len(points) - 0.15], "fixedrange": True}
    height = 78 + (40 + _LINE * parted) * len(points) + _LINE * (levels - 1)
    layout = _layout(height, left=10, right=14) | {"xaxis": _axis(x), "yaxis": rows}
    return {"data": [others, own] if beside else [own], "layout": layout | {"shapes": shapes, "annotations": notes}}


def heat(columns: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float | None]]) -> Figure:
    """Draw a table of numbers as colours: one row for each name, one column for each block.

    Args:
        columns: names of the blocks.
        names: names of the rows, from the top.
        values: `[names][columns]`; None for an empty cell.
    """
    hover = [
        [
            "" if value is None else f"{plain(name)}, block {plain(column)}: {words.figure(value, 3)}"
            for column, value in zip(columns, row, strict=True)
        ]
        for name, row in zip(names, values, strict=True)
    ]
    font = {"color": _colour("muted"), "size": 12}
    bar: dict[str, Any] = {"tickfont": font, "tickformat": ".2~p", "thickness": 10, "outlinewidth": 0}
    data: dict[str, Any] = {"type": "heatmap", "x": list(range(len(columns))), "y": list(range(len(names)))}
    data |= {"z": [list(row) for row in values], "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)]}
    data |= {"xgap": 1, "ygap": 1, "hoverinfo": "text", "hovertext": hover}
    data |= {"colorbar": bar | {"nticks": 5 if len(names) > 2 else 2}}
    layout = _layout(86 + 26 * len(names), left=22 + 7 * max(map(len, names), default=0), right=10)
    down = Axis("", range(len(names)), list(names), (len(names) - 0.5, -0.5), log=False)
    layout |= {
        name: _axis(a) | {"showgrid": False} for name, a in (("xaxis", names_axis("block", columns)), ("yaxis", down))
    }
    return {"data": [data], "layout": layout}


def stacked(
    bars: Sequence[str],
    parts: Sequence[BarPart],
    totals: Sequence[str],
    title: str,
    *,
    form: Form | None = None,
    marks: Sequence[Mark] = (),
) -> Figure:
    """Draw horizontal stacked bars, each below its name and total; the page lists the colours.

    Args:
        form: format of a value; None for bytes.
        marks: vertical lines across all bars.
    """
    full = max((sum(part.values[i] for part in parts) for i in range(len(bars))), default=1.0) or 1.0
    full = max([full, *(mark.x for mark in marks)])
    places, starts = list(range(len(bars)))[::-1], [0.0] * len(bars)
    data = []
    for part in parts:
        both = zip(bars, part.values, strict=True)
        told = [f"{plain(bar)}: {plain(part.label)} {(form or words.size)(value)}" for bar, value in both]
        marker = {"color": _colour(part.shade), "line": {"color": _colour("surface"), "width": 1}}
        trace = {"type": "bar", "orientation": "h", "x": list(part.values), "y": places, "base": list(starts)}
        data.append(trace | {"width": 0.42, "marker": marker, "hoverinfo": "text", "hovertext": told})
        starts = [start + value for start, value in zip(starts, part.values, strict=True)]
    where = {"xref": "x", "yref": "y", "xanchor": "left", "yanchor": "bottom", "yshift": 13}
    named = zip(places, bars, totals, strict=True)
    notes = [_note(0, place, f"{bar}: {total}", colour="ink") | _OPAQUE | where for place, bar, total in named]
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if full >= f), (1.0, "B"))
    title, shown = (title, form) if form else (f"{title}, {unit}", lambda value: words.plain(value / factor))
    axis, top = straight_axis(title, [0.0, full], form=shown), _LINE * len(marks)
    rows = {"visible": False, "range": [-0.5, len(bars) - 0.3], "fixedrange": True}
    layout = _layout(62 + 58 * len(bars) + top, left=10, right=14, top=_TOP + top)
    shapes, over = _marks(marks, axis)
    # marks are drawn over the bars
    layout |= {"shapes": [shape | {"layer": "above"} for shape in shapes], "annotations": [*notes, *over]}
    return {"data": data, "layout": layout | {"xaxis": _axis(axis), "barmode": "overlay", "yaxis": rows}}


def _points(x: Sequence[float | None], y: Sequence[int], told: list[str], colour: str, **marker: Any) -> dict[str, Any]:
    look = {"mode": "markers", "marker": {"color": _colour(colour), **marker}}
    return {"type": "scatter", "x": list(x), "y": y, **look, "hoverinfo": "text", "hovertext": told}


def _curve(curve: Curve) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    if pairs := [(x, band) for x, band in zip(curve.x, curve.band, strict=False) if band is not None]:
        xs, (lows, highs) = [x for x, _ in pairs], zip(*(band for _, band in pairs), strict=True)
        outline = {"x": xs + xs[::-1], "y": [*highs, *lows[::-1]], "line": {"width": 0}, "hoverinfo": "skip"}
        fill = {"fill": "toself", "fillcolor": _colour(f"{curve.colour}-band")}
        traces.append({"type": "scatter", "mode": "lines", **outline, **fill})
    line = {"color": _colour(curve.colour), "width": 1.4 if curve.bound or not curve.symbol else 2.4}
    line |= {"dash": "dot"} if curve.bound else {}
    hollow = curve.hollow or (curve.bound and len(curve.x) == 1)
    mode = "lines" if not curve.symbol or (curve.bound and not hollow) else "lines+markers"
    trace: dict[str, Any] = {"type": "scatter", "mode": mode, "x": list(curve.x), "y": list(curve.y), "line": line}
    trace |= {"marker": {"size": 7, "color": _colour(curve.colour)}, "name": plain(curve.label)}
    trace |= {"hoverinfo": "text" if curve.hover else "skip", "hovertext": [plain(text) for text in curve.hover]}
    if curve.symbol and (hollow or curve.symbol != "circle"):
        trace["marker"]["symbol"] = f"{curve.symbol}-open" if hollow else curve.symbol
    if any(curve.texts):
        # above a point; beside the corner of a line without points
        font, place = {"size": 11.5, "color": _colour(curve.colour)}, "top center" if curve.symbol else "top left"
        trace |= {"mode": f"{mode}+text", "text": [plain(text) for text in curve.texts]}
        trace |= {"textposition": place, "textfont": font}
    return [*traces, trace]


def _marks(marks: Sequence[Mark], x: Axis) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes, notes = [], []
    for level, mark in enumerate(marks):
        shapes.append(_line({"yref": "paper", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1}, "muted", 1, mark.dotted))
        where: dict[str, Any] = {"xref": "x", "yref": "paper", "xanchor": "right" if x.share(mark.x) > 0.5 else "left"}
        where |= {"yanchor": "bottom", "yshift": float(_LINE) * (len(marks) - 1 - level)}
        notes.append(_note(x.place(mark.x), 1, mark.label) | where)
    return shapes, notes


def _end_labels(curves: Sequence[Curve], y: Axis, inner: int) -> list[dict[str, Any]]:
    ends = sorted(((y.share(curve.y[-1]), curve) for curve in curves if curve.label), key=lambda end: end[0])
    places = spread([share for share, _ in ends], _LINE / inner)
    where = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "middle", "xshift": 4}
    both = zip(places, ends, strict=True)
    return [_note(1, place, curve.label, colour=curve.colour) | where for place, (_, curve) in both]


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places (0 to 1) at least `gap` apart, none above 1.

    >>> spread([0.5, 0.5, 0.9], 0.25)
    [0.5, 0.75, 1.0]
    """
    moved, top = list(places), 1.0
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], top)
        top = moved[i] - gap
    return moved


def _colour(name: str) -> str:
    return f"var(--{name})"


def _axis(axis: Axis) -> dict[str, Any]:
    title = {"text": plain(axis.title), "font": {"size": 13, "color": _colour("muted")}, "standoff": 8}
    ticks = {"tickvals": list(axis.ticks), "ticktext": [plain(text) for text in axis.texts], "tickangle": 0}
    ticks |= {"tickfont": {"size": 12, "color": _colour("muted")}, "gridcolor": _colour("line"), "zeroline": False}
    ends = [axis.place(end) for end in axis.range]
    return {"type": "log" if axis.log else "linear", "range": ends, "title": title, **ticks, "fixedrange": True}


def _layout(height: int, *, left: int = _LEFT, right: int = _RIGHT, top: int = _TOP) -> dict[str, Any]:
    ink = {"color": _colour("ink")}
    label = {"bgcolor": _colour("surface"), "bordercolor": _colour("line"), "font": ink, "align": "left"}
    layout: dict[str, Any] = {"height": height, "margin": {"l": left, "r": right, "t": top, "b": _BOTTOM}}
    layout |= dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    layout |= {"font": {"family": _colour("font"), "size": 13, **ink}, "hoverlabel": label}
    return layout | {"showlegend": False, "dragmode": False}


def _note(x: float, y: float, text: str, *, colour: str = "muted") -> dict[str, Any]:
    font = {"size": 12.5, "color": _colour(colour)}
    return {"x": x, "y": y, "text": plain(text), "showarrow": False, "font": font}


def _rectangle(x0: float, x1: float, y0: float, y1: float, colour: str, **refs: str) -> dict[str, Any]:
    corners = {"x0": x0, "x1": x1, "y0": y0, "y1": y1}
    return {"type": "rect", "layer": "below", "fillcolor": _colour(colour), "line": {"width": 0}} | corners | refs


def _line(ends: dict[str, Any], colour: str, width: float, dotted: bool = False) -> dict[str, Any]:
    line = {"color": _colour(colour), "width": width, "dash": "dot" if dotted else "solid"}
    return {"type": "line", "layer": "below", "line": line} | ends
