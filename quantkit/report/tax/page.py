"""The page of `quantkit tax`: one offline file, with time, speed-up and the split of each bar against the batch."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, speed
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import shell, words
from quantkit.report.kit.axes import log_axis, points_axis
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, Curve, stacked
from quantkit.report.kit.charts import lines as drawn_lines
from quantkit.report.kit.parts import Panel, Section, Sheet
from quantkit.report.tax import screen
from quantkit.report.tax.screen import Panelled, Taxed

# of the lines of an overview, a colour each; more variants than these share the last
_LINES = (QUANTIZED, ORIGINAL, "good", "bad", "muted", "quantized-soft", "rest")
# the parts of a bar, from the bottom, with their colours; the rest is what no twin splits
_SPLIT = {
    "bound": ("limit", "quantized"),
    "activation": ("quantizing the input", "original"),
    "launch": ("launch", "muted"),
    "streaming": ("streaming loss", "quantized-soft"),
    "decode": ("decoding", "bad"),
    "rest": ("rest of the tax", "rest"),
}
_HEAD = ("faster", "95 % interval", "ideal", "gain", "tax", "share", "slack", "A/A")


def page(data: Taxed) -> str:
    """The page as HTML. Raises MissingDependency: plotly, extra `report`."""
    advice = [(screen.on(threads), *screen.said(verdict), verdict.because) for threads, verdict in data.advice.items()]
    found = screen.groups(data)
    timed = [series for group in found for series in group.series if series.cells]
    return shell.rendered(
        "tax.html.j2",
        title=f"{data.title}: the dequantization tax",
        baseline=data.baseline,
        source=data.shapes.source,
        device=next((_device(row) for row in data.rows if row.device is not None), ""),
        advice=advice,
        traffic=sorted((data.traffic or {}).items()),
        verdicts=_verdicts(data, found),
        notes=list(data.notes),
        wholes=[_group(group, data) for group in found if group.whole or not data.shapes.name],
        singles=[_group(group, data) for group in found if not group.whole and data.shapes.name],
        ceilings=screen.ceilings(data),
        threaded=any(data.advice),
        cache=words.size(screen.last_level_cache(data)),
        explained=[*screen.explained(data), *speed.explained(data.rows, timed)],
        facts=_facts(data),
        version=data.version,
    )


def _verdicts(data: Taxed, groups: Sequence[Panelled]) -> list[tuple[str, str, str, str, str, list[str]]]:
    """Threads, answer, tone, where it wins, the rows that decided; for each format."""
    curves_ = {
        (group.threads, series.title): (screen.wins(series), curves.ideal_end(series))
        for group in groups
        for series in group.series
        if group.whole or len(data.shapes.linears) == 1
    }
    found = []
    for threads, verdicts in data.verdicts.items():
        for verdict in verdicts:
            where, ideal = curves_.get((threads, verdict.format or ""), ("", ""))
            found.append((screen.on(threads), *screen.said(verdict), where, ideal, verdict.because))
    return found


def _group(group: Panelled, data: Taxed) -> tuple[str, list[Section]]:
    """(title, an overview, then a section a variant)."""
    sections = [_overview(group, data.baseline)] if any(series.cells for series in group.series) else []
    return group.title, sections + [_section(data, series) for series in group.series]


def _overview(group: Panelled, baseline: str) -> Section:
    """Delivered speed-up of all variants over the batch, where they win and where they lose."""
    known = [series for series in group.series if any(cell.ratio for cell in series.cells)]
    drawn: list[Curve] = []
    for i, series in enumerate(known):
        cells = [cell for cell in series.cells if cell.ratio]
        hover = [f"{series.title} {words.times(cell.ratio or 0)}" for cell in cells]
        colour = _LINES[min(i, len(_LINES) - 1)]
        drawn.append(Curve(series.title, colour, [c.x for c in cells], [c.ratio or 0.0 for c in cells], hover))
    values = [y for curve in drawn for y in curve.y]
    axis = log_axis(f"{baseline} time / its time", [*values, 1.0], form=lambda v: f"{v:g}×")
    across = points_axis("batch (rows of the activation)", [x for curve in drawn for x in curve.x])
    alt = f"How many times as fast each format is as {baseline}, by batch, both axes logarithmic"
    figure = drawn_lines(drawn, across, axis, height=360, even=1.0)
    panels = [Panel(f"Delivered speed-up over {baseline}", alt, figure, wide=True)]
    if all(len(curve.x) == 1 for curve in drawn):
        panels = []
    body = []
    for series in known:
        factor, unit = words.time_unit(min(cell.row.value or 1.0 for cell in series.cells))
        for cell in series.cells:
            batch, times, *ratios, tax, share, slack, spread = screen.line(cell, factor)
            times, tax, slack = (each if each == "–" else f"{each} {unit}" for each in (times, tax, slack))
            body.append([series.title, batch, times, *ratios, tax, share, slack, spread])
    best = [f"{series.title}: {' '.join(screen.outcomes(series))}" for series in known]
    return Section(best, panels, [], Sheet(("format", "batch", f"{baseline} → this", *_HEAD), body))


def _section(data: Taxed, series: Series) -> Section:
    """Time over the roofline, promised against delivered, and the split of each bar."""
    if not series.cells:
        return Section(curves.skipped(series), [], [], Sheet(["batch", ""], [], 1), title=series.title)
    found = speed.section(data.rows, series)
    kernel = series.cells[0].row.settings.get("kernel")
    ran = [f"It ran as {kernel}."] if kernel else []
    keys = [(shade, label) for label, shade in _parts(series).values()]
    panels = [*found.panels, _split(series)] if found.panels else []
    return Section(found.said, panels, [*ran, *found.captions], found.sheet, found.cautions, keys, series.title)


def _split(series: Series) -> Panel:
    """Bars of the limit and the tax, as shares of the baseline's time: absolute ones would hide small batches."""
    cells = [cell for cell in series.cells if cell.bound and cell.original]
    parts = [
        BarPart(label, [_shares(cell)[part] for cell in cells], shade)
        for part, (label, shade) in _parts(series).items()
    ]
    names = [f"batch {cell.x:,}" for cell in cells]
    times = [(cell.row.value or 0.0, cell.original or 1.0) for cell in cells]
    totals = [f"{words.moment(own)}, {words.percent(own / other, 0)}" for own, other in times]
    figure = stacked(names, parts, totals, f"share of {series.other}'s time", form=lambda v: words.percent(v, 0))
    alt = f"Limit and tax of {series.title} at each batch, as shares of {series.other}'s time"
    return Panel("What its time is made of", alt, figure)


def _parts(series: Series) -> dict[str, tuple[str, str]]:
    """The parts of the bars that any of them has, with label and colour."""
    shares = [_shares(cell) for cell in series.cells if cell.bound and cell.original]
    return {part: look for part, look in _SPLIT.items() if any(each[part] > 0 for each in shares)}


def _shares(cell: CurvePoint) -> dict[str, float]:
    """The parts' seconds over the baseline's time; what a negative part leaves is nothing.

    Quantizing the input and launching happen in the twin as well: they are taken off the streaming loss, or off the
    rest where there is no twin.
    """
    time_s, bound, whole = cell.row.value or 0.0, cell.bound or 0.0, cell.original or 1.0
    raw = cell.row.op.raw_s if cell.row.op is not None else None

    def known(name: str) -> float:
        value = cell.row.settings.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    undecoded = time_s if raw is None else min(max(raw, bound), time_s)
    over = max(undecoded - bound, 0.0)
    activation = min(known("activation_s"), over)
    launch = min(known("launch_s"), over - activation)
    left = over - activation - launch
    seconds = {
        "bound": min(bound, time_s),
        "activation": activation,
        "launch": launch,
        "streaming": left if raw is not None else 0.0,
        "decode": max(time_s - max(undecoded, bound), 0.0) if raw is not None else 0.0,
        "rest": left if raw is None else 0.0,
    }
    return {part: taken / whole for part, taken in seconds.items()}


def _device(row: Row) -> str:
    """`Cortex-A76, pi5`: of one that was reached from another machine also what it is called there."""
    return ", ".join(part for part in (row.device.name, row.on) if part) if row.device is not None else ""


def _facts(data: Taxed) -> list[tuple[str, str]]:
    first = next((row for row in data.rows if row.runtime), data.rows[0])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
    found = [("linears", f"{words.plural(sum(x.count for x in data.shapes.linears), 'linear')}, {data.shapes.source}")]
    found += [("device", _device(first)), ("runtime", first.runtime or "")]
    found += [("target", data.target.name), ("versions", versions)]
    return found
