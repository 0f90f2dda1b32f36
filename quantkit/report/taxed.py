"""Report of the dequantization tax: recommendation, winning batches of each format, time by batch, parts of the
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.bundle import Verdict
from quantkit.measurement.rows import Row
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.report.bundle import curves, speed
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, Curve, Plot, curve, over, stacked
from quantkit.report.kit.tree import Cell, Conclusion, Document, Exhibit, On, Part, Remark, Section, Sheet, Styled
from quantkit.target import Target

# verdict -> (text, tone)
_ANSWERS = {
    "ship_it": ("ship {format}", "good"),
    "ship_up_to": ("ship {format} up to batch {batch}", "good"),
    "use_instead": ("use {format} instead{upto}", "good"),
    "intervals": ("{format} wins at some batches only", "open"),
    "inconclusive": ("not decided about {format}", "inconclusive"),
    "do_not_quantize": ("do not quantize{about} here", "bad"),
    "not_measured": ("{format} was not timed", "open"),
}
_CEILINGS = {"ceiling.read": "read", "ceiling.copy": "copy", "ceiling.compute": "products", "ceiling.launch": "launch"}
# colours of the lines in an overview; further variants share the last one
_LINES = (QUANTIZED, ORIGINAL, "good", "bad", "muted", "quantized-soft", "rest")
# parts of a bar in order, with label and colour; `rest` is the tax without a twin kernel to split it
_SPLIT = {
    "bound": ("limit", "quantized"),
    "activation": ("quantizing the input", "original"),
    "launch": ("launch", "muted"),
    "streaming": ("streaming loss", "quantized-soft"),
    "decode": ("decoding", "bad"),
    "rest": ("rest of the tax", "rest"),
}
_HEAD = ("faster", "95 % interval", "ideal", "gain", "tax", "share", "slack", "A/A")


@dataclass(frozen=True)
class Taxed:
    """Result of a tax run.

    Args:
        shapes: the linears.
        target: target with the published figures, shown beside the measured ceilings.
        rows: measurements with all thread counts.
        verdicts: threads -> the verdict on each variant; 0 is a GPU.
        advice: threads -> recommendation.
        traffic: batch -> share of the steps, if known.
        notes: notes for the reader.
        baseline: the high-precision variant.
        version: version of quantkit.
    """

    shapes: LinearShapes
    target: Target
    rows: Sequence[Row]
    verdicts: Mapping[int, Sequence[Verdict]]
    advice: Mapping[int, Verdict]
    traffic: Mapping[int, float] | None = None
    notes: Sequence[str] = ()
    baseline: str = "float32"
    version: str = ""


@dataclass(frozen=True)
class CurveGroup:
    """Curves of one shape, or of the sum over a model's linears, with one number of threads."""

    title: str
    threads: int
    whole: bool
    series: Sequence[Series]


def groups(data: Taxed) -> list[CurveGroup]:
    """Group the rows into curves: the sum over a model first, then shape by shape, each with every number of
    threads."""
    timed = [row for row in data.rows if row.name == "latency.op" and row.op is not None and row.batch]
    keyed = words.by(sorted(timed, key=lambda row: _shape(row) != ""), lambda row: (_shape(row), _threads(row)))
    named = {linear.label: linear for linear in data.shapes.distinct()}
    curve_groups = []
    for (label, threads), rows in keyed.items():
        title = _title(data)
        if label:
            often = words.plural(named[label].count, "time")
            title = f"{label}: {named[label].name}, {often}" if data.shapes.name else label
        variants = dict.fromkeys(str(row.settings["variant"]) for row in rows if row.baseline or row.value is None)
        series = [_series(data, rows, variant) for variant in variants]
        curve_groups.append(CurveGroup(f"{title}, {on(threads)}", threads, not label, series))
    return curve_groups


def on(threads: int) -> str:
    """Format a thread count: `2 threads`; `GPU` for 0."""
    return words.plural(threads, "thread") if threads else "GPU"


def _title(data: Taxed) -> str:
    return data.shapes.name or ", ".join(linear.label for linear in data.shapes.linears)


def _source(data: Taxed) -> str:
    return data.shapes.source if data.shapes.name else ""  # shapes on the command line have no source


def _threads(row: Row) -> int:
    threads = row.settings.get("threads")
    return int(threads) if isinstance(threads, int | float) else 0


def _shape(row: Row) -> str:
    return f"{row.op.K}x{row.op.N}" if row.op is not None and row.op.layer is None else ""


def _series(data: Taxed, timed: Sequence[Row], variant: str) -> Series:
    mine = sorted((row for row in timed if row.settings["variant"] == variant), key=lambda row: row.batch or 0)
    label, threads = _shape(mine[0]), _threads(mine[0])
    beside = {
        (row.name, row.batch): row
        for row in reversed(data.rows)
        if row.op is not None and (row.settings.get("variant"), _threads(row), _shape(row)) == (variant, threads, label)
    }
    points = [curves.point(row.batch or 0, row, beside.get(("tax.total", row.batch))) for row in mine]
    # line ends have room for the format only; the title has the whole name
    names = variant.partition(".")[0], data.baseline
    return Series(variant, points, beside.get(("tax.break_even", None)), *names, "batch", "pass")


def verdict_words(verdict: Verdict) -> tuple[str, str]:
    """Return (text of the verdict, its tone)."""
    text, tone = _ANSWERS.get(verdict.answer, (verdict.answer.replace("_", " "), "open"))
    upto = f", up to batch {verdict.batch}" if verdict.batch else ""
    about = f" to {verdict.format}" if verdict.format else ""
    return text.format(format=verdict.format or "it", batch=verdict.batch, upto=upto, about=about), tone


def wins(series: Series) -> str:
    """Format the ranges of batches with a proven win, with 95 % intervals of their ends: `1 to 13.5 (12.9–14.2)`."""
    if series.even is None:
        return ""
    settings, ranges = series.even.settings, []
    for i in range(1, int(settings.get("wins") or 0) + 1):
        ends = []
        for end, edge, place in (("from", "measured_from", "first"), ("to", "measured_to", "last")):
            value, low, high = (settings.get(f"win_{i}_{end}{part}") for part in ("", "_low", "_high"))
            text = words.short(float(value or settings.get(edge) or 0)).removesuffix(".00")
            if isinstance(low, int | float) and isinstance(high, int | float):
                text += f" ({words.short(low)}–{words.short(high)})"
            ends.append(text if value is not None else f"{text} (the {place} batch measured)")
        ranges.append(" to ".join(ends))
    return "; ".join(ranges) or "nowhere"


def _ceilings(data: Taxed) -> Sheet:
    body = []
    for row in data.rows:
        if row.name not in _CEILINGS:
            continue
        kind = str(row.settings.get("compute_type") or "")
        place = {"ceiling.read": "memory.read_bandwidth", "ceiling.compute": f"compute.{kind}"}.get(row.name, "")
        figure, stated = data.target.figures().get(place), "–"
        if figure is not None:
            stated = words.rate(figure.number, figure.unit) if figure.number is not None else "not measured yet"

        def form(value: float, unit: str = row.unit) -> str:
            return words.moment(value) if unit == "s" else words.rate(value, unit)

        value = form(row.value) if row.value is not None else "not measured"
        line = [str(_threads(row) or "–"), f"{_CEILINGS[row.name]} {kind}".strip(), value]
        line += [words.between(row.ci95, form) or "–", str(row.settings.get("kernel") or "–"), stated]
        body.append(line)
    return Sheet(["threads", "ceiling", "measured", "95 % interval", "by", "target says"], body, 2, words=2)


def _cache(data: Taxed) -> float:
    sizes = (row.settings.get("last_level_cache") for row in data.rows)
    return next((float(size) for size in sizes if isinstance(size, int | float)), 0.0)


def _explained(data: Taxed) -> list[str]:
    cache, name = _cache(data), data.baseline
    split = (
        " For quantkit's own kernels, a twin kernel with the same loads and no decoding splits the tax: see the page."
        if any(row.name == "tax.decode" for row in data.rows)
        else " The runtime is a black box: only the sum of its parts is known."
    )
    return [
        f"p50: median time of one product, {name} → this format (for a model: the sum over all its linears). ideal: the"
        " speed-up if both sides ran at their limits; gain: the share of the ideal gain that was measured.",
        f"tax: time beyond the limit, also as a share of {name}'s time; slack: the time of {name} beyond its own"
        f" limit.{split}",
        "Weights rotate through copies of at least three times the last-level cache"
        f"{words.bracketed(words.size(cache) if cache else '')}; both sides are timed in turns"
        " (ABBA); A/A: difference between two measurements of one side, included in the interval; ~ marks noise.",
    ]


def line(cell: CurvePoint, factor: float) -> list[str]:
    """Format the cells of one batch; times are multiplied by `factor` (seconds to the column's unit)."""

    def moment(seconds: float | None) -> str:
        return words.figure(seconds * factor, 3) if seconds is not None else "–"

    tax, sure = cell.tax.value if cell.tax is not None else None, cell.ratio_ci95
    return [
        f"{cell.x:,}",
        f"{moment(cell.original)} → {moment(cell.row.value)}",
        cell.faster,
        f"{words.figure(sure[0], 2)}–{words.figure(sure[1], 2)}" if sure else "–",
        words.or_dash(cell.promised, words.times),
        words.or_dash(cell.gain, lambda gain: words.whole(gain) if gain <= 1 else "?"),
        moment(tax),
        words.or_dash(cell.tax_share, words.whole),
        moment(cell.excess),
        words.or_dash(cell.row.aa_spread, words.whole),
    ]


def _outcomes(series: Series) -> str:
    return " ".join(filter(None, [*curves.outcomes(series), curves.break_even(series), *curves.skipped(series)]))


def document(data: Taxed) -> Document:
    """Build the report of a tax run."""
    curve_groups, several = groups(data), len(data.advice) > 1
    timed = [series for group in curve_groups for series in group.series if series.cells]
    device = next((_device(row) for row in data.rows if row.device is not None), "")
    head: list[Part] = []
    for threads, advice in data.advice.items():
        answer, tone = verdict_words(advice)
        head.append(Conclusion(answer, tone, advice.because, aside=f" {on(threads)}." if several else ""))
    if data.traffic:
        shares = sorted(data.traffic.items())
        mix = ", ".join(f"{100 * share:.0f} % of the steps at batch {batch}" for batch, share in shares)
        head.append(Remark(f"Traffic: {mix}.", "caption"))
    whole = [part for group in curve_groups if group.whole or not data.shapes.name for part in _whole(data, group)]
    single = [part for group in curve_groups if not group.whole and data.shapes.name for part in _single(data, group)]
    where = "with the same threads" if any(data.advice) else "on the same device"
    about = f"Measured before and after everything else, {where}; the limits are computed from them."
    about += f" The last-level cache holds {words.size(_cache(data))}."
    how = [Remark(text, "caption") for text in _explained(data)]
    how += [Remark(text, "caption", On.PAGE) for text in speed.explained(data.rows, timed)]
    reading = Section("How to read it", how, folded=True)
    chapters: list[tuple[str, str, list[Part]]] = [
        ("verdicts", "Each format", [_verdicts(data, curve_groups)] if any(data.verdicts.values()) else []),
        ("whole", "The whole model" if single else "Batch by batch", [*whole, reading]),
        ("layers", "Layer by layer", single),
        ("ceilings", "Ceilings", [Remark(about, "caption", On.PAGE), _ceilings(data)]),
    ]
    first = next((row for row in data.rows if row.runtime), data.rows[0])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
    linears = words.plural(sum(linear.count for linear in data.shapes.linears), "linear")
    facts = [("linears", words.joined(linears, _source(data))), ("device", _device(first))]
    facts += [("runtime", first.runtime or ""), ("target", data.target.name), ("versions", versions)]
    return Document(
        f"{_title(data)}: the dequantization tax",
        [
            words.joined(
                f"Every linear in each format, timed against {data.baseline} on {device}.", _source(data), by=" "
            )
        ],
        [*head, *(Remark(note, "note") for note in data.notes)],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        facts,
        footer=f"Made by quantkit {data.version} from the rows of one run.",
    )


def _verdicts(data: Taxed, curve_groups: Sequence[CurveGroup]) -> Sheet:
    ranges = {
        (group.threads, series.title): (wins(series), curves.ideal_end(series))
        for group in curve_groups
        for series in group.series
        if group.whole or len(data.shapes.linears) == 1
    }
    several = len(data.verdicts) > 1
    rows: list[list[Cell]] = []
    for threads, verdicts in data.verdicts.items():
        for verdict in verdicts:
            where, ideal = ranges.get((threads, verdict.format or ""), ("", ""))
            of = [on(threads)] if several else []
            rows.append([Styled(*verdict_words(verdict)), *of, where, ideal, list(verdict.because)])
    head = ["verdict", *(["threads"] if several else []), "wins at batch (95 % intervals)", "ideal"]
    head.append("reasons")
    return Sheet(head, rows, words=len(head), stacked=True)


def _whole(data: Taxed, group: CurveGroup) -> list[Part]:
    variants = [part for series in group.series for part in _variant(series)]
    return [Section(group.title, [*_overview(group, data.baseline), *variants])]


def _single(data: Taxed, group: CurveGroup) -> list[Part]:
    batches = sorted({cell.x for series in group.series for cell in series.cells})
    rows = []
    for series in group.series:
        ratios = {cell.x: words.or_dash(cell.ratio, words.times) for cell in series.cells}
        rows.append([Styled(series.title, "name"), *(ratios.get(batch, "–") for batch in batches)])
    brief = Sheet(["", *(f"{batch:,}" for batch in batches)], rows, on=On.SCREEN)
    full = [part for series in group.series for part in _variant(series) if part.on == On.PAGE]
    return [Section(group.title, [brief, *_overview(group, data.baseline), *full], folded=True)]


def _variant(series: Series) -> list[Part]:
    if not series.cells:
        return [Section(series.title, [Remark(" ".join(curves.skipped(series)))])]
    factor, unit = series.time_unit
    kernel = str(series.cells[0].row.settings.get("kernel") or "")
    title = (Styled(series.title, "name"), Styled(f"  {kernel}" if kernel else "", "dim"))
    head = ["batch", f"p50, {unit}", "faster", "95 %", *_HEAD[2:]]
    brief = Sheet(head, [line(cell, factor) for cell in series.cells], words=0)
    cautions = [Remark(text, "caution") for text in curves.cautions(series)]
    exhibit = speed.section(series)
    keys = [(shade, label) for label, shade in _parts(series).values()]
    panels = [*exhibit.charts, split(series)] if exhibit.charts else []
    captions = [*([f"It ran as {kernel}."] if kernel else []), *exhibit.captions]
    screen = Section("", [Remark(title), brief, Remark(_outcomes(series)), *cautions], on=On.SCREEN)
    return [screen, replace(exhibit, charts=panels, captions=captions, keys=keys)]


def _overview(group: CurveGroup, baseline: str) -> list[Part]:
    if not any(series.cells for series in group.series):
        return []
    known = [series for series in group.series if any(cell.ratio for cell in series.cells)]
    drawn: list[Curve] = []
    body = []
    for i, series in enumerate(known):
        xs, ys = [cell.x for cell in series.cells], [cell.ratio for cell in series.cells]
        colour = _LINES[min(i, len(_LINES) - 1)]
        drawn += curve(series.title, colour, xs, ys, lambda y, of=series.title: f"{of} {words.times(y)}")  # type: ignore[misc]
        factor, unit = words.time_unit(min(cell.row.value or 1.0 for cell in series.cells))
        for cell in series.cells:
            batch, times, *ratios, tax, share, slack, spread = line(cell, factor)
            times, tax, slack = (text if text == "–" else f"{text} {unit}" for text in (times, tax, slack))
            body.append([series.title, batch, times, *ratios, tax, share, slack, spread])
    panels = []
    if any(len(curve.x) > 1 for curve in drawn):
        title, across = f"Delivered speed-up over {baseline}", "batch (rows of the activation)"
        alt, up = f"How many times as fast each format is as {baseline}, by batch", f"{baseline} time / its time"
        panels = [over(title, alt, drawn, across, up, form=words.ratio, also=[1.0], wide=True, height=360, even=1.0)]
    best = [f"{series.title}: {_outcomes(series)}" for series in known]
    return [Exhibit(best, panels, [], Sheet(("format", "batch", f"{baseline} → this", *_HEAD), body))]


def split(series: Series) -> Plot:
    """Draw each batch's limit and tax as shares of the baseline's time; absolute bars would hide small batches."""
    cells = [cell for cell in series.cells if cell.bound and cell.original]
    shares = [shares_of(cell) for cell in cells]
    parts = [BarPart(label, [own[name] for own in shares], shade) for name, (label, shade) in _parts(series).items()]
    times = [(cell.row.value or 0.0, cell.original or 1.0) for cell in cells]
    totals = [f"{words.moment(own)}, {words.whole(own / other)}" for own, other in times]
    names, title = [f"batch {cell.x:,}" for cell in cells], f"share of {series.other}'s time"
    alt = f"Limit and tax of {series.title} at each batch, as shares of {series.other}'s time"
    return Plot("What its time is made of", alt, stacked(names, parts, totals, title, form=words.whole))


def _parts(series: Series) -> dict[str, tuple[str, str]]:
    shares = [shares_of(cell) for cell in series.cells if cell.bound and cell.original]
    return {part: look for part, look in _SPLIT.items() if any(own[part] > 0 for own in shares)}


def shares_of(cell: CurvePoint) -> dict[str, float]:
    """Split the time into parts, as shares of the baseline's time; no part is negative.

    The twin kernel also quantizes the input and is launched. Both are therefore subtracted from the streaming loss, or
    from the rest without a twin.
    """
    time_s, bound, whole = cell.row.value or 0.0, cell.bound or 0.0, cell.original or 1.0
    raw = cell.row.op.raw_s if cell.row.op is not None else None

    def known(name: str) -> float:
        value = cell.row.settings.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    undecoded = time_s if raw is None else min(max(raw, bound), time_s)
    excess = max(undecoded - bound, 0.0)
    activation = min(known("activation_s"), excess)
    launch = min(known("launch_s"), excess - activation)
    left = excess - activation - launch
    seconds = {"bound": min(bound, time_s), "activation": activation, "launch": launch}
    seconds["streaming"] = left if raw is not None else 0.0
    seconds["decode"] = max(time_s - max(undecoded, bound), 0.0) if raw is not None else 0.0
    seconds["rest"] = left if raw is None else 0.0
    return {part: taken / whole for part, taken in seconds.items()}


def _device(row: Row) -> str:
    """Return the device's name, and its alias if it is another machine: `Cortex-A76, pi5`."""
    return words.joined(row.device.name, row.on or "") if row.device is not None else ""
