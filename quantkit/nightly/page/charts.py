"""The drawings of the site: small ones for the grid, nights in lanes, one respect over its nights, raw times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from quantkit.nightly.page import drawing, say
from quantkit.nightly.page.drawing import TALL, Chart, Label, Scale
from quantkit.nightly.page.history import ANSWERS, NONE
from quantkit.nightly.records import What
from quantkit.report.kit import words
from quantkit.stats.changes import Change

Array = Any
# nights that a small drawing shows; of fewer than so many, intervals are drawn apart
SHORT, _FEW = 90, 60


def spark(values: Array, codes: Array, margin: float) -> Markup:
    """A cell in the grid: its effect over the last nights within the margin, and below it what was answered."""
    values, codes = values[-SHORT:], codes[-SHORT:]
    width = max(len(codes), 2)
    far = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
    most = min(max(far * 1.1, 1.6 * margin), 6 * margin) or 1.0
    scale = Scale(-most, most, 24)
    x, y = np.arange(len(values)) + 0.5, scale.places(values)
    shapes = [scale.band(margin, width), drawing.path(drawing.line(x, y), "line"), drawing.strip(codes, 34, 8)]
    if len(codes) < _FEW / 4:
        shapes.append(drawing.path(drawing.dots(x, y), "point"))
    return drawing.svg(width, 34, *shapes, kind="spark")


def lanes(days: Sequence[str], counts: Mapping[str, Array], alt: str) -> Chart:
    """Counts over nights, a lane a name, each to its own height.

    Args:
        counts: name -> how many, `[nights]`.
    """
    shapes, labels, height = [], [], 20.0
    for i, (name, values) in enumerate(counts.items()):
        bottom, most = (i + 1) * height - 1, max(int(values.max()), 1)
        tall = np.where(values > 0, np.maximum((height - 5) * values / most, 1.5), 0)
        parts = [
            f"M{x} {drawing.number(bottom)}v-{drawing.number(t)}h1v{drawing.number(t)}z"
            for x, t in enumerate(tall)
            if t
        ]
        shapes += [drawing.path("".join(parts), f"a-{name}")]
        shapes += [drawing.path(f"M0 {drawing.number(bottom)}H{len(days)}", "grid")]
        labels.append(Label(name, 0, 100 * (i + 0.5) / len(counts), str(int(values.max()))))
    told = [[name, ["" if not v else f"{int(v):,}" for v in values]] for name, values in counts.items()]
    readout = {"rows": told, "none": "nothing but same"}
    whole = drawing.svg(len(days), len(counts) * height, *shapes)
    return Chart(whole, alt, ticks=labels, below=drawing.months(days), readout=readout, tall="lanes")


def spread(
    days: Sequence[str], low: Array, middle: Array, high: Array, called: Array, measured: Array, wrong: Array
) -> Chart:
    """How far ratios of things to themselves were spread, night by night, and on which nights one was called."""
    scale = Scale(*drawing.reach([low, high], 0.005))
    x = np.arange(len(days)) + 0.5
    a, b, c = map(scale.places, (low, middle, high))
    shapes = [drawing.path(drawing.bars(x, a, c), _interval(len(days))), scale.rule(0.0, len(days), "zero")]
    shapes.append(drawing.path(drawing.dots(x, b), "point"))
    marks = [Label("◆", 100 * float(x[i]) / len(days), 4.0, "called") for i in np.flatnonzero(called).tolist()]
    told = [
        f"{words.plural(int(n), 'cell')} against itself, {say.interval('latency', lo, hi) or 'no times'}; "
        f"{int(k)} called different"
        for n, lo, hi, k in zip(measured, low, high, wrong, strict=True)
    ]
    labels = scale.labels(partial(say.tick, "latency"))
    alt = f"For each of {len(days)} nights, the range that holds 9 of 10 ratios of cells to themselves."
    readout = {"rows": [["", told]]}
    whole = drawing.svg(len(days), TALL, *shapes)
    return Chart(whole, alt, labels, marks, drawing.months(days), readout, "low")


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
    """One respect of a cell over its nights: effects with their intervals, the margin, levels, what was answered.

    Args:
        codes: numbers of their answers.
        margin: the least effect that counts.
        updates: nights on which versions changed.
        first: number of the first change.
    """
    count, finite = len(days), np.isfinite(values)
    scale = Scale(*drawing.reach([values, low, high], 1.3 * margin))
    x = np.arange(count) + 0.5
    y, a, b = map(scale.places, (values, low, high))
    shapes = [scale.band(margin, count)] if margin else []
    ticks = drawing.ticks(scale.low, scale.high)
    shapes += [scale.rule(tick, count, "zero" if abs(tick) < 1e-12 else "grid") for tick in ticks]
    shapes += [drawing.path(f"M{update} 0V{drawing.number(TALL)}", "update") for update in updates]
    shapes.append(drawing.path(drawing.bars(x, a, b), _interval(count)))
    shapes.append(drawing.path(drawing.line(x, y), "line"))
    if count < _FEW:
        shapes.append(drawing.path(drawing.dots(x, y), "point"))
    marks = []
    if found:
        edges = [0, *(change.index for change in found), count]
        means = [found[0].before, *(change.after for change in found)]
        heights = scale.places(means)
        levels = "".join(f"M{i} {drawing.number(h)}H{j}" for h, i, j in zip(heights, edges, edges[1:], strict=False))
        shapes.append(drawing.path(levels, "level"))
        for number, change in enumerate(found, first):
            marks.append(Label(str(number), 100 * change.index / count, 0.0, "change"))
            shapes.append(drawing.path(f"M{change.index} 0V{drawing.number(TALL)}", "step"))
    for code in range(3):
        here = np.flatnonzero((codes == code) & finite)
        shapes.append(drawing.path(drawing.dots(x[here], y[here]), f"point p-{ANSWERS[code]}"))
    told = []
    for i in range(count):
        name = ANSWERS[codes[i]] if codes[i] != NONE else "not decided"
        between = say.interval(what, low[i], high[i])
        told.append(f"{name}, {say.value(what, values[i])}{f' ({between})' if between else ''}")
    alt = f"{say.TITLES[what]} over {words.plural(count, 'night')}"
    if beyond := scale.beyond(values):
        alt += f"; {words.plural(beyond, 'night')} beyond the axis at its end"
    whole = drawing.svg(count, TALL, *shapes)
    labels = scale.labels(partial(say.tick, what))
    readout = {"rows": [["", told]]}
    return Chart(
        whole,
        alt,
        labels,
        drawing.merged(marks, 3.0),
        drawing.months(days),
        readout,
        "" if what == "latency" else "low",
    )


def _interval(count: int) -> str:
    """The class of so many intervals beside each other."""
    return "interval apart" if count < _FEW else "interval"


def answers(codes: Array) -> Markup:
    """What a cell was answered, over all of its nights."""
    return drawing.svg(max(len(codes), 1), 12, drawing.strip(codes, 12, 12), kind="strip")


def between(low: float | None, value: float | None, high: float | None, margin: float | None) -> Markup | None:
    """One interval against its margin, small enough for a table."""
    given = (low, value, high, margin)
    low, value, high, margin = (each if each is not None and np.isfinite(each) else None for each in given)
    known = [each for each in (low, value, high) if each is not None]
    if not known:
        return None
    most = max(*(abs(each) for each in known), 1.6 * (margin or 0.0), 1e-9) * 1.05

    def at(v: float) -> str:
        return drawing.number(50 + 50 * v / most)

    shapes = []
    if margin:
        width = drawing.number(100 * margin / most)
        shapes.append(f'<rect class="band" x="{at(-margin)}" y="0" width="{width}" height="16"/>')
    shapes.append(drawing.path("M50 0V16", "zero"))
    if low is not None and high is not None:
        shapes.append(drawing.path(f"M{at(low)} 8H{at(high)}", "interval apart"))
    if value is not None:
        shapes.append(drawing.path(f"M{at(value)} 8h0", "point"))
    return drawing.svg(100, 16, *shapes, kind="between")


def raw(sides: Mapping[str, tuple[Array, Array]], rounds: Sequence[int], count: int) -> Chart:
    """The times of one night as they were taken.

    Args:
        sides: side -> (places in the order of the night, seconds).
        rounds: places at which a round begins.
    """
    every = np.concatenate([seconds for _, seconds in sides.values()])
    factor, unit = words.time_unit(float(np.median(every)))
    # a few that something else held up must not hide how the two differ
    low, third, high = np.quantile(every, (0.0, 0.75, 0.97))
    high = min(high, 1.5 * third)
    room = 0.15 * (high - low) or 0.05 * high
    scale = Scale(float(low - room), float(high + room))
    shapes = [drawing.path("".join(f"M{at} 0V{TALL}" for at in rounds[1:]), "grid")]
    for side, (x, seconds) in sides.items():
        shapes.append(drawing.path(drawing.dots(x + 0.5, scale.places(seconds)), f"raw {side}"))
    alt = f"{words.plural(count, 'step')} in the order in which they were taken"
    if beyond := int((every > scale.high).sum()):
        alt += f"; {beyond:,} above {words.moment(scale.high)} stand at the upper end"
    labels = scale.labels(lambda seconds: words.figure(factor * seconds, 3))
    whole = drawing.svg(count, TALL, *shapes)
    places = zip(rounds, [*rounds[1:], count], strict=True)
    below = [Label(str(i + 1), 100 * (a + b) / 2 / count, kind="middle") for i, (a, b) in enumerate(places)]
    return Chart(whole, f"{alt}, in {unit}", labels, [], below, None)


def ratios(found: Array, margin: float) -> Chart:
    """The candidate's fastest step of each block over the baseline's fastest, in the order of the blocks."""
    values = found - 1
    first, third = np.quantile(values, (0.25, 0.75))
    far = 5 * (third - first) + margin
    scale = Scale(*drawing.reach([np.clip(values, first - far, third + far)], 1.3 * margin))
    count, middle = len(values), float(np.median(values))
    shapes = [
        scale.band(margin, count),
        scale.rule(0.0, count, "zero"),
        scale.rule(middle, count, "level"),
        drawing.path(drawing.dots(np.arange(count) + 0.5, scale.places(values)), "raw candidate"),
    ]
    alt = f"{words.plural(count, 'block')}; their median is {say.value('latency', middle)}"
    if beyond := scale.beyond(values):
        alt += f"; {beyond:,} beyond the axis at its end"
    labels = scale.labels(partial(say.tick, "latency"))
    return Chart(drawing.svg(count, TALL, *shapes), alt, labels, tall="low")
