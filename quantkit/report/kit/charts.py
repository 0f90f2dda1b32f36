"""The figures of the report, as plain data in plotly's schema; nothing here needs plotly.

Colours are names of CSS properties, `var(--quantized)`: the page resolves them when it draws, so one figure serves
light, dark and paper. Text that others wrote is escaped, because plotly reads some HTML in it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.kit import words
from quantkit.report.kit.axes import Axis, Form, Interval, straight_axis

Figure = dict[str, Any]

QUANTIZED, ORIGINAL = "quantized", "original"
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 88, 14, 44
# the height of a figure of lines where the page is as narrow as a telephone
_NARROW = 230
# characters of a label that fit there
_ROOM = 52
# lines of text further apart than this do not overlap
_LINE = 15.0
# and so are labels of marks that are this share of the axis apart
_APART = 0.6
# of labels that lie on grid lines
_OPAQUE = {"bgcolor": "var(--surface)", "borderpad": 1}


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Args:
        label: stands at its end.
        colour: `quantized` or `original`.
        x: ascending.
        y: as many.
        hover: what to show at each point.
        band: an interval at each point; empty for none.
        bound: a limit, not a measurement: thin, dotted, without points.
        hollow: a limit at points of its own, which are drawn as rings; with `bound`.
        symbol: of its points; empty for a line without any.
        texts: over its points; empty for none.
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


@dataclass(frozen=True)
class Mark:
    """A vertical line with its label."""

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
    """One part of stacked bars: a value for every bar; `shade` is one of the page's colours."""

    label: str
    values: Sequence[float]
    shade: str


def plain(text: object) -> str:
    """Text that plotly shows as it is.

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
    right: int = _RIGHT,
    noise: Interval | None = None,
    even: float | None = None,
    wins: Sequence[Interval] = (),
    marks: Sequence[Mark] = (),
    hover: str = "x unified",
) -> Figure:
    """Lines with their intervals, each labelled at its end.

    Args:
        curves: lines without points are drawn first, then bounds, under the measurements.
        height: in CSS pixels.
        right: margin for the labels at the ends.
        noise: the band of y within which two measurements of one thing lie.
        even: y where neither side is better.
        wins: ranges of x to shade.
        marks: vertical lines.
        hover: which points are told of at once, as plotly calls it.
    """
    data: list[dict[str, Any]] = []
    ordered = sorted(curves, key=lambda curve: (bool(curve.symbol), not curve.bound))
    for curve in ordered:
        data += _curve(curve)
    shapes = [_rectangle(x0, x1, 0, 1, "win", yref="paper") for x0, x1 in wins]
    if noise is not None:
        shapes.append(_rectangle(0, 1, *noise, "noise", xref="paper"))
    if even is not None:
        shapes.append(_line({"xref": "paper", "x0": 0, "x1": 1, "y0": even, "y1": even}, "ink", 1.2))
    top = max(_TOP, int(_LINE) * len(marks) + 6)
    # apart even where the page is narrow and the figure low
    notes = _end_labels(ordered, y, min(height, _NARROW) - top - _BOTTOM)
    across, over = _marks(marks, x)
    shapes, notes = [*shapes, *across], [*notes, *over]
    longest = max((len(curve.label) for curve in curves), default=0)
    layout = _layout(height, right=max(right, 12 + 7 * longest) if right == _RIGHT else right) | {
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        "shapes": shapes,
        "annotations": notes,
        "hovermode": hover,
    }
    layout["margin"]["t"] = top
    layout["meta"] = {"narrow": min(height, _NARROW)}
    return {"data": data, "layout": layout}


def forest(points: Sequence[ChartPoint], x: Axis, *, marks: Sequence[Mark] = ()) -> Figure:
    """Values with their intervals, one under the other, on one axis."""
    # labels of marks stand side by side where there is room, else one over the other
    shares = [x.share(mark.x) for mark in marks]
    levels = len(marks) if shares and max(shares) - min(shares) < _APART else 1
    # a label that a telephone has no room for takes two lines; so do all of them then
    parted = any(len(point.label) + len(point.text) > _ROOM for point in points)
    height = 78 + (40 + int(_LINE) * parted) * len(points) + int(_LINE) * (levels - 1)
    places = list(range(len(points)))[::-1]
    arms = [
        (point.value - low, high - point.value)
        for point in points
        for low, high in [point.interval or (point.value,) * 2]
    ]
    data = {
        "type": "scatter",
        "mode": "markers",
        "x": [point.value for point in points],
        "y": places,
        "marker": {"color": _colour(QUANTIZED), "size": 9},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, high) for _, high in arms],
            "arrayminus": [max(0.0, low) for low, _ in arms],
            "color": _colour(QUANTIZED),
            "thickness": 2,
            "width": 5,
        },
        "hoverinfo": "text",
        "hovertext": [f"{plain(point.label)}: {plain(point.text)}" for point in points],
    }
    beside = [(point, place) for point, place in zip(points, places, strict=True) if point.beside is not None]
    others = {
        "type": "scatter",
        "mode": "markers",
        "x": [point.beside for point, _ in beside],
        "y": [place for _, place in beside],
        "marker": {"color": _colour(ORIGINAL), "size": 11, "symbol": "line-ns-open", "line": {"width": 2}},
        "hoverinfo": "text",
        "hovertext": [f"the original's: {plain(point.text)}" for point, _ in beside],
    }
    notes = [
        _note(0, place, f"{point.label}: {point.text}", colour="ink")
        | ({"text": f"{plain(point.label)}<br>{plain(point.text)}", "align": "left"} if parted else {})
        | _OPAQUE
        | {"xref": "paper", "yref": "y", "xanchor": "left", "yanchor": "bottom", "yshift": 5}
        for place, point in zip(places, points, strict=True)
    ]
    shapes = []
    for number, mark in enumerate(marks):
        shapes.append(_line({"yref": "paper", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1}, "muted", 1.2, mark.dotted))
        far = x.share(mark.x) > 0.5
        notes.append(
            _note(x.place(mark.x), 0, mark.label)
            | {"xref": "x", "yref": "paper", "yanchor": "bottom", "xanchor": "right" if far else "left"}
            | {"xshift": -4 if far else 4, "yshift": _LINE * number if levels > 1 else 0}
        )
    rows = {"visible": False, "range": [-0.75 - (levels - 1) * _LINE / 40, len(points) - 0.15], "fixedrange": True}
    layout = _layout(height, left=10, right=14) | {"xaxis": _axis(x), "yaxis": rows}
    traces = [others, data] if beside else [data]
    return {"data": traces, "layout": layout | {"shapes": shapes, "annotations": notes}}


def heat(columns: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float | None]]) -> Figure:
    """A table of numbers as colours: one row a name, one column a block.

    Args:
        columns: of the blocks.
        names: of the rows, the first on top.
        values: `[names][columns]`; None where there is none.
    """
    hover = [
        [
            "" if value is None else f"{plain(name)}, block {plain(column)}: {words.figure(value, 3)}"
            for column, value in zip(columns, row, strict=True)
        ]
        for name, row in zip(names, values, strict=True)
    ]
    data = {
        "type": "heatmap",
        "x": list(range(len(columns))),
        "y": list(range(len(names))),
        "z": [list(row) for row in values],
        "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)],
        "xgap": 1,
        "ygap": 1,
        "hoverinfo": "text",
        "hovertext": hover,
        "colorbar": {
            "tickfont": {"color": _colour("muted"), "size": 12},
            "tickformat": ".2~p",
            "thickness": 10,
            "outlinewidth": 0,
            "nticks": 5 if len(names) > 2 else 2,
        },
    }
    step = max(1, math.ceil(len(columns) / 10))
    shown = list(range(0, len(columns), step))
    longest = max((len(name) for name in names), default=0)
    layout = _layout(86 + 26 * len(names), left=22 + 7 * longest, right=10)
    layout["xaxis"] = _axis(Axis("block", shown, [columns[i] for i in shown], (-0.5, len(columns) - 0.5), log=False))
    layout["yaxis"] = _axis(Axis("", range(len(names)), list(names), (len(names) - 0.5, -0.5), log=False))
    for axis in (layout["xaxis"], layout["yaxis"]):
        axis["showgrid"] = False
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
    """Horizontal bars of several parts; each bar's name and total stand over it, the page names the shades.

    Values are bytes, unless `form` says how to show them; `marks` are lines across all bars.
    """
    full = max((sum(part.values[i] for part in parts) for i in range(len(bars))), default=1.0) or 1.0
    full = max([full, *(mark.x for mark in marks)])
    data, notes = [], []
    places = list(range(len(bars)))[::-1]
    starts = [0.0] * len(bars)
    for part in parts:
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "x": list(part.values),
                "y": places,
                "base": list(starts),
                "width": 0.42,
                "marker": {"color": _colour(part.shade), "line": {"color": _colour("surface"), "width": 1}},
                "hoverinfo": "text",
                "hovertext": [
                    f"{plain(bar)}: {plain(part.label)} {(form or words.size)(value)}"
                    for bar, value in zip(bars, part.values, strict=True)
                ],
            }
        )
        for i, value in enumerate(part.values):
            starts[i] += value
    for place, bar, total in zip(places, bars, totals, strict=True):
        notes.append(
            _note(0, place, f"{bar}: {total}", colour="ink")
            | _OPAQUE
            | {"xref": "x", "yref": "y", "xanchor": "left", "yanchor": "bottom", "yshift": 13}
        )
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if full >= f), (1.0, "B"))
    axis = straight_axis(
        title if form else f"{title}, {unit}", [0.0, full], form=form or (lambda v: f"{v / factor:,g}")
    )
    top = int(_LINE) * len(marks)
    layout = _layout(62 + 58 * len(bars) + top, left=10, right=14) | {"xaxis": _axis(axis), "barmode": "overlay"}
    layout["yaxis"] = {"visible": False, "range": [-0.5, len(bars) - 0.3], "fixedrange": True}
    layout["margin"]["t"] += top
    shapes, over = _marks(marks, axis)
    # a bar that reaches beyond a mark does not hide it
    shapes = [shape | {"layer": "above"} for shape in shapes]
    return {"data": data, "layout": layout | {"shapes": shapes, "annotations": [*notes, *over]}}


def _curve(curve: Curve) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    pairs = [(x, band) for x, band in zip(curve.x, curve.band, strict=False) if band is not None]
    if pairs:
        xs = [x for x, _ in pairs]
        found.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": xs + xs[::-1],
                "y": [band[1] for _, band in pairs] + [band[0] for _, band in pairs][::-1],
                "fill": "toself",
                "fillcolor": _colour(f"{curve.colour}-band"),
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
        )
    line = {"color": _colour(curve.colour), "width": 1.4 if curve.bound or not curve.symbol else 2.4}
    if curve.bound:
        line["dash"] = "dot"
    hollow = curve.hollow or (curve.bound and len(curve.x) == 1)
    mode = "lines" if not curve.symbol or (curve.bound and not hollow) else "lines+markers"
    found.append(
        {
            "type": "scatter",
            "mode": f"{mode}+text" if any(curve.texts) else mode,
            "x": list(curve.x),
            "y": list(curve.y),
            "line": line,
            "marker": {"size": 7, "color": _colour(curve.colour)},
            "name": plain(curve.label),
            "hoverinfo": "text" if curve.hover else "skip",
            "hovertext": [plain(text) for text in curve.hover],
        }
    )
    if curve.symbol and (hollow or curve.symbol != "circle"):
        found[-1]["marker"]["symbol"] = f"{curve.symbol}-open" if hollow else curve.symbol
    if any(curve.texts):
        # over a point; beside the corner of a line that has none
        place = "top center" if curve.symbol else "top left"
        font = {"size": 11.5, "color": _colour(curve.colour)}
        found[-1] |= {"text": [plain(text) for text in curve.texts], "textposition": place, "textfont": font}
    return found


def _marks(marks: Sequence[Mark], x: Axis) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Vertical lines, and their labels over the plot, where no line runs; one over the other."""
    shapes, notes = [], []
    for level, mark in enumerate(marks):
        shapes.append(_line({"yref": "paper", "x0": mark.x, "x1": mark.x, "y0": 0, "y1": 1}, "muted", 1, mark.dotted))
        side = "right" if x.share(mark.x) > 0.5 else "left"
        notes.append(
            _note(x.place(mark.x), 1, mark.label)
            | {"xref": "x", "yref": "paper", "xanchor": side, "yanchor": "bottom"}
            | {"yshift": _LINE * (len(marks) - 1 - level)}
        )
    return shapes, notes


def _end_labels(curves: Sequence[Curve], y: Axis, inner: int) -> list[dict[str, Any]]:
    """The labels at the ends of the lines, moved apart where they would overlap."""
    ends = sorted(((y.share(curve.y[-1]), curve) for curve in curves if curve.label), key=lambda end: end[0])
    gap = _LINE / inner
    places = spread([share for share, _ in ends], gap)
    return [
        _note(1, place, curve.label, colour=curve.colour)
        | {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "middle", "xshift": 4}
        for place, (_, curve) in zip(places, ends, strict=True)
    ]


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved up as far as needed to lie `gap` apart, and back below 1 at the top.

    >>> spread([0.5, 0.5, 0.9], 0.25)
    [0.5, 0.75, 1.0]
    """
    found = list(places)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    top = 1.0
    for i in range(len(found) - 1, -1, -1):
        found[i] = min(found[i], top)
        top = found[i] - gap
    return found


def _colour(name: str) -> str:
    return f"var(--{name})"


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "type": "log" if axis.log else "linear",
        "range": [axis.place(end) for end in axis.range],
        "title": {"text": plain(axis.title), "font": {"size": 13, "color": _colour("muted")}, "standoff": 8},
        "tickvals": list(axis.ticks),
        "ticktext": [plain(text) for text in axis.texts],
        "tickfont": {"size": 12, "color": _colour("muted")},
        "tickangle": 0,
        "gridcolor": _colour("line"),
        "zeroline": False,
        "fixedrange": True,
    }


def _layout(height: int, *, left: int = _LEFT, right: int = _RIGHT) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": left, "r": right, "t": _TOP, "b": _BOTTOM},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _colour("font"), "size": 13, "color": _colour("ink")},
        "hoverlabel": {
            "bgcolor": _colour("surface"),
            "bordercolor": _colour("line"),
            "font": {"color": _colour("ink")},
            "align": "left",
        },
        "showlegend": False,
        "dragmode": False,
    }


def _note(x: float, y: float, text: str, *, colour: str = "muted") -> dict[str, Any]:
    font = {"size": 12.5, "color": _colour(colour)}
    return {"x": x, "y": y, "text": plain(text), "showarrow": False, "font": font}


def _rectangle(x0: float, x1: float, y0: float, y1: float, colour: str, **refs: str) -> dict[str, Any]:
    corners = {"x0": x0, "x1": x1, "y0": y0, "y1": y1}
    return {"type": "rect", "layer": "below", "fillcolor": _colour(colour), "line": {"width": 0}} | corners | refs


def _line(ends: dict[str, Any], colour: str, width: float, dotted: bool = False) -> dict[str, Any]:
    line = {"color": _colour(colour), "width": width, "dash": "dot" if dotted else "solid"}
    return {"type": "line", "layer": "below", "line": line} | ends
