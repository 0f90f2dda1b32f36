"""A tax as a tree: what to do, each format's verdict, time and speed-up against the batch, what each bar is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, speed
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import words
from quantkit.report.kit.axes import log_axis, points_axis
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, Curve, stacked
from quantkit.report.kit.charts import lines as drawn_lines
from quantkit.report.kit.tree import Cell, Conclusion, Document, Exhibit, On, Part, Plot, Remark, Section, Sheet, Styled
from quantkit.report.tax import words as say
from quantkit.report.tax.words import CurveGroup, Taxed

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
_BRIEF = ("batch", "p50, {unit}", "faster", "95 %", "ideal", "gain", "tax", "share", "slack", "A/A")


def document(data: Taxed) -> Document:
    """Build the tree of a tax."""
    groups, several = say.groups(data), len(data.advice) > 1
    timed = [series for group in groups for series in group.series if series.cells]
    device = next((_device(row) for row in data.rows if row.device is not None), "")
    head: list[Part] = []
    for threads, advice in data.advice.items():
        answer, tone = say.said(advice)
        aside = f" {say.on(threads)}." if several else ""
        head.append(Conclusion(answer, tone, advice.because, aside=aside))
    if data.traffic:
        mix = ", ".join(
            f"{100 * share:.0f} % of the steps at batch {batch}" for batch, share in sorted(data.traffic.items())
        )
        head.append(Remark(f"Traffic: {mix}.", "caption"))
    whole = [part for group in groups if group.whole or not data.shapes.name for part in _whole(data, group)]
    single = [part for group in groups if not group.whole and data.shapes.name for part in _single(data, group)]
    cache = f" The last-level cache holds {words.size(say.last_level_cache(data))}."
    where = "with the same threads" if any(data.advice) else "on the same device"
    about = f"Measured before and after everything else, {where}; the limits stand on them.{cache}"
    how = [Remark(text, "caption") for text in say.explained(data)]
    how += [Remark(text, "caption", On.PAGE) for text in speed.explained(data.rows, timed)]
    reading = Section("How to read it", how, folded=True)
    chapters: list[tuple[str, str, list[Part]]] = [
        ("verdicts", "Each format", [_verdicts(data, groups)] if any(data.verdicts.values()) else []),
        ("whole", "The whole model" if single else "Batch by batch", [*whole, reading]),
        ("layers", "Layer by layer", single),
        ("ceilings", "Ceilings", [Remark(about, "caption", On.PAGE), say.ceilings(data)]),
    ]
    first = next((row for row in data.rows if row.runtime), data.rows[0])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
    linears = words.plural(sum(linear.count for linear in data.shapes.linears), "linear")
    return Document(
        f"{data.title}: the dequantization tax",
        [f"Every linear in each format, timed against {data.baseline} on {device}. {data.shapes.source}".rstrip()],
        [*head, *(Remark(note, "note") for note in data.notes)],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        [
            ("linears", f"{linears}, {data.shapes.source}"),
            ("device", _device(first)),
            ("runtime", first.runtime or ""),
            ("target", data.target.name),
            ("versions", versions),
        ],
        made=f"Made by quantkit {data.version} from the rows of one run.",
    )


def _verdicts(data: Taxed, groups: Sequence[CurveGroup]) -> Sheet:
    """Build the verdict on each format: where it wins, the rows that decided."""
    ranges = {
        (group.threads, series.title): (say.wins(series), curves.ideal_end(series))
        for group in groups
        for series in group.series
        if group.whole or len(data.shapes.linears) == 1
    }
    rows: list[list[Cell]] = []
    for threads, verdicts in data.verdicts.items():
        for verdict in verdicts:
            where, ideal = ranges.get((threads, verdict.format or ""), ("", ""))
            of = [say.on(threads)] if len(data.verdicts) > 1 else []
            rows.append([Styled(*say.said(verdict)), *of, where, ideal, list(verdict.because)])
    threaded = ["threads"] if len(data.verdicts) > 1 else []
    head = ["verdict", *threaded, "wins at batch (95 % of the ends)", "ideally", "the rows that decided"]
    return Sheet(head, rows, words=len(head), stacked=True)


def _whole(data: Taxed, group: CurveGroup) -> list[Part]:
    """Build an overview and a line a batch of every variant."""
    parts = [_overview(group, data.baseline)] if any(series.cells for series in group.series) else []
    return [Section(group.title, [*parts, *(part for each in group.series for part in _variant(data, each))])]


def _single(data: Taxed, group: CurveGroup) -> list[Part]:
    """Build the speed-up at each batch, a line a variant; on a page as much as of the whole."""
    batches = sorted({cell.x for series in group.series for cell in series.cells})
    rows = []
    for series in group.series:
        ratios = {cell.x: words.or_dash(cell.ratio, words.times) for cell in series.cells}
        rows.append([Styled(series.title, "name"), *(ratios.get(batch, "–") for batch in batches)])
    brief = Sheet(["", *(f"{batch:,}" for batch in batches)], rows, on=On.SCREEN)
    parts = [_overview(group, data.baseline)] if any(series.cells for series in group.series) else []
    full = [part for series in group.series for part in _variant(data, series) if part.on == On.PAGE]
    return [Section(group.title, [brief, *parts, *full], folded=True)]


def _variant(data: Taxed, series: Series) -> list[Part]:
    """Build one variant: for a screen a line a batch, for a page its figures."""
    if not series.cells:
        return [Section(series.title, [Remark(" ".join(curves.skipped(series)))])]
    factor, unit = series.time_unit
    kernel = str(series.cells[0].row.settings.get("kernel") or "")
    title = (Styled(series.title, "name"), Styled(f"  {kernel}" if kernel else "", "dim"))
    brief = Sheet(
        [name.format(unit=unit) for name in _BRIEF], [say.line(cell, factor) for cell in series.cells], words=0
    )
    cautions = [Remark(text, "caution") for text in curves.cautions(series)]
    screen: list[Part] = [Remark(title), brief, Remark(" ".join(say.outcomes(series))), *cautions]
    made = speed.section(data.rows, series)
    keys = [(shade, label) for label, shade in _parts(series).values()]
    panels = [*made.charts, split(series)] if made.charts else []
    captions = [*([f"It ran as {kernel}."] if kernel else []), *made.captions]
    page = replace(made, charts=panels, captions=captions, keys=keys, title=series.title)
    return [Section("", screen, on=On.SCREEN), page]


def _overview(group: CurveGroup, baseline: str) -> Exhibit:
    """Draw the delivered speed-up of all variants over the batch, where they win and where they lose."""
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
    panels = [Plot(f"Delivered speed-up over {baseline}", alt, figure, wide=True)]
    body = []
    for series in known:
        factor, unit = words.time_unit(min(cell.row.value or 1.0 for cell in series.cells))
        for cell in series.cells:
            batch, times, *ratios, tax, share, slack, spread = say.line(cell, factor)
            times, tax, slack = (each if each == "–" else f"{each} {unit}" for each in (times, tax, slack))
            body.append([series.title, batch, times, *ratios, tax, share, slack, spread])
    best = [f"{series.title}: {' '.join(say.outcomes(series))}" for series in known]
    table = Sheet(("format", "batch", f"{baseline} → this", *_HEAD), body)
    return Exhibit(best, [] if all(len(curve.x) == 1 for curve in drawn) else panels, [], table)


def split(series: Series) -> Plot:
    """Bars of the limit and the tax, as shares of the baseline's time: absolute ones would hide small batches."""
    cells = [cell for cell in series.cells if cell.bound and cell.original]
    parts = [
        BarPart(label, [shares_of(cell)[part] for cell in cells], shade)
        for part, (label, shade) in _parts(series).items()
    ]
    names = [f"batch {cell.x:,}" for cell in cells]
    times = [(cell.row.value or 0.0, cell.original or 1.0) for cell in cells]
    totals = [f"{words.moment(own)}, {words.percent(own / other, 0)}" for own, other in times]
    figure = stacked(names, parts, totals, f"share of {series.other}'s time", form=lambda v: words.percent(v, 0))
    alt = f"Limit and tax of {series.title} at each batch, as shares of {series.other}'s time"
    return Plot("What its time is made of", alt, figure)


def _parts(series: Series) -> dict[str, tuple[str, str]]:
    """The parts of the bars that any of them has, with label and colour."""
    shares = [shares_of(cell) for cell in series.cells if cell.bound and cell.original]
    return {part: look for part, look in _SPLIT.items() if any(each[part] > 0 for each in shares)}


def shares_of(cell: CurvePoint) -> dict[str, float]:
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
