"""Speed section of a bundle's report: times of both sides, speed-up, roofline, and each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from quantkit.bundle import Manifest, Verdict
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, figures
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve, Mark, Plot, curve, over, points_axis
from quantkit.report.kit.tree import Conclusion, Exhibit, Part, Remark, Section, Sheet
from quantkit.report.kit.words import Form, Interval

HERE = "here"
# symbols for the curves of several runtimes or devices
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
_COLOURS = [f"series-{n}" for n in range(1, 7)]


@dataclass(frozen=True)
class DeviceRows:
    """Measurements on a device, with its local name and its verdict."""

    name: str
    rows: Sequence[Row]
    verdict: Verdict | None


def sections(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """Build an exhibit for each curve; `curves.shared_cautions` has the cautions of all curves."""
    return list(map(section, curves.series(manifest, rows)))


def overview(several: Sequence[Series]) -> list[Exhibit]:
    """Build decode and prefill of all runtimes in one chart each, beside the original; nothing for a single curve.

    Only the first context (decode) or batch (prefill) of each runtime is included.
    """
    first: dict[tuple[str, str], Series] = {}
    for series in several:
        if len(series.cells) > 1:
            first.setdefault((series.unit, figures.variant(series.cells[0].row)), series)
    if len(first) < 2:
        return []
    by_unit = words.by(first.items(), lambda entry: entry[0][0])
    panels = [_together([series for _, series in entries]) for entries in by_unit.values()]
    body = []
    for (_, variant), series in first.items():
        for cell in series.cells:
            rates = [words.or_dash(x, words.short) for x in (cell.tokens_per_s, cell.original_tokens_per_s)]
            ratio = words.or_dash(cell.ratio, words.times)
            body.append([series.title, variant, series.label(f"{cell.x:,}"), *rates, ratio])
    title = "All runtimes" if len({variant for _, variant in first}) > 1 else "Decode and prefill"
    counted = f"{next(iter(first.values())).counted.capitalize()}s a second, over all sequences."
    table = Sheet(["", "runtime", "at", "this", "original", "speed-up"], body)
    return [Exhibit([counted], panels, [], table, title=title)]


def _together(several: Sequence[Series]) -> Plot:
    drawn: list[Curve] = []
    for series, symbol in zip(several, cycle(_SYMBOLS), strict=False):
        runtime = f", {figures.variant(series.cells[0].row)}" if len(several) > 1 else ""
        ours = [cell.tokens_per_s for cell in series.cells]
        theirs = [cell.original_tokens_per_s for cell in series.cells]
        for name, colour, rates in ((series.this, QUANTIZED, ours), (series.other, ORIGINAL, theirs)):
            label, xs = f"{name}{runtime}", [cell.x for cell in series.cells]

            def hover(rate: float, of: str = label, unit: str = series.counted) -> str:
                return f"{of} {words.short(rate)} {unit}s/s"

            drawn += curve(label, colour, xs, rates, hover, symbol=symbol)
    one = several[0]
    form, what = f"{one.counted}s a second", one.title.partition(",")[0] if len(several) > 1 else one.title
    alt = f"{what}: {form} against {_axis(one)}, of {words.listed([curve.label for curve in drawn])}"
    return over(what, alt, drawn, _axis(one), f"{form}, p50", form=words.thousands)


def section(series: Series) -> Exhibit:
    """Build one curve: times and ratios; a single size needs a sentence only."""
    sentences = curves.results(series)
    text = words.joined(curves.measured(series), curves.spread(series), curves.setting(series), by="; ")
    panels: list[Plot] = []
    if len(series.cells) == 1:
        sentences = [single(series), *sentences]
    else:
        panels = [_rates(series) if series.unit == "prompt" else _durations(series)]
        panels += [_ratios(series)] if any(cell.ratio for cell in series.cells) else []
    return Exhibit(sentences, panels, [f"{text}."], _sheet(series), title=series.title)


def single(series: Series) -> str:
    """Describe one size: `At 256 tokens 397 ms against 335 ms of float32: 0.843× the speed (0.783× to 0.902×).`"""
    cell = series.cells[0]
    text = f"At {series.label(f'{cell.x:,}')} a {series.unit} takes {words.moment(cell.row.value or 0.0)}"
    text += f" against {words.moment(cell.original)} of {series.other}" if cell.original else ""
    if cell.ratio is None:
        return f"{text}."
    sure, ratio = words.bracketed(words.between(cell.ratio_ci95, words.times)), words.times(cell.ratio)
    promised = f"; the limits allow {words.times(cell.promised)}" if cell.promised else ""
    result = f"{ratio} measured{sure}, within noise or implausible" if cell.doubtful else f"{ratio} the speed{sure}"
    return f"{text}: {result}{promised}."


def explained(rows: Sequence[Row], several: Sequence[Series]) -> list[str]:
    """List how to read the figures, each hint once for all curves."""
    sentences = ["Bands in the colour of a line: 95\u00a0% intervals."]
    if any(cell.bound for series in several for cell in series.cells):
        sentences.append(
            f"Dotted: the roofline, the least time for the bytes and operations{_ceilings(rows)}; the gap above it is"
            " the tax. The runtime is a black box: only the sum of its parts is known."
        )
    sentences += [few] if (few := curves.few_steps(several)) else []
    if any(series.spread is not None for series in several):
        sentences.append("Grey band: difference between two measurements of one side (A/A); the intervals include it.")
    if any(_wins(series) for series in several):
        sentences.append("Shaded: sizes with the whole interval above 1.")
    return sentences


def _ceilings(rows: Sequence[Row]) -> str:
    parts = []
    for row in rows:
        if row.name in {"ceiling.read", "ceiling.compute"} and row.value is not None:
            kind = row.settings.get("compute_type") or row.name.removeprefix("ceiling.")
            parts.append(f"{words.rate(row.value, row.unit)} {kind}")
    return words.bracketed(f"{', '.join(dict.fromkeys(parts))}, measured in the same run") if parts else ""


# --- figures ---------------------------------------------------------------------------------------------------------


def _curves(series: Series, form: Form, scale: Callable[[CurvePoint, float], float]) -> list[Curve]:
    """Draw both sides and their bounds; `scale(cell, seconds)` returns the plotted value."""
    cells, xs = series.cells, [cell.x for cell in series.cells]
    values = [scale(cell, cell.row.value or 0.0) for cell in cells]
    bands: list[Interval | None] = []
    for cell in cells:
        low, high = cell.row.ci95 or (0.0, 0.0)
        ends = sorted((scale(cell, low), scale(cell, high))) if low > 0 else None
        bands.append((ends[0], ends[1]) if ends else None)
    both = zip(values, bands, strict=True)
    hover = [f"{series.this} {form(v)}{words.bracketed(words.between(band, form))}" for v, band in both]
    drawn = [Curve(series.this, QUANTIZED, xs, values, hover, bands)]
    sides = [
        (series.other, ORIGINAL, [cell.original for cell in cells], False),
        (f"{series.this} limit", QUANTIZED, [cell.bound for cell in cells], True),
        (f"{series.other} limit", ORIGINAL, [cell.original_bound for cell in cells], True),
    ]
    for label, colour, seconds, bound in sides:
        ys = [scale(cell, s) if s else None for cell, s in zip(cells, seconds, strict=True)]
        drawn += curve(label, colour, xs, ys, lambda y, of=label: f"{of} {form(y)}", bound=bound)  # type: ignore[misc]
    return drawn


def _axis(series: Series) -> str:
    if series.over != "batch":
        return "length (tokens a sequence)"
    return f"batch ({'samples' if series.counted == 'sample' else 'sequences'} at once)"


def _durations(series: Series) -> Plot:
    drawn, what = _curves(series, words.moment, lambda _, seconds: seconds), f"Time of a {series.unit}"
    factor, unit = words.time_unit(min(y for curve in drawn for y in curve.y))
    alt, up = f"{what} against {_axis(series)}: {series.this} and {series.other}", f"{what.lower()}, p50, {unit}"
    return over(what, alt, drawn, _axis(series), up, form=lambda v: f"{v * factor:,g}")


def _rates(series: Series) -> Plot:
    what = "Samples a second" if series.counted == "sample" else "Prompt tokens a second"

    def form(value: float) -> str:
        return f"{words.short(value)} {series.counted}s/s"

    def scale(cell: CurvePoint, seconds: float) -> float:
        return cell.x * (cell.row.batch or 1) / seconds

    drawn = _curves(series, form, scale)
    alt = f"{what} against {_axis(series)}: {series.this} and {series.other}"
    return over(what, alt, drawn, _axis(series), f"{what.lower()}, p50", form=words.thousands)


def _ratios(series: Series) -> Plot:
    known = [cell for cell in series.cells if cell.ratio]
    bands = [cell.ratio_ci95 for cell in known]
    sure = iter([words.bracketed(words.between(band, words.times)) for band in bands])
    measured = [cell.ratio for cell in known]
    drawn = curve(
        "measured",
        QUANTIZED,
        [cell.x for cell in known],
        measured,
        lambda ratio: f"measured {words.times(ratio)}{next(sure)}",
        band=bands,
    )
    promised, xs = [cell.promised for cell in series.cells], [cell.x for cell in series.cells]
    drawn += curve("promised", "muted", xs, promised, lambda y: f"promised {words.times(y)}", bound=True)
    noise = (1 / (1 + series.spread), 1 + series.spread) if series.spread else None
    low, high = points_axis("", xs).range
    marks = [mark for mark in _marks(series) if low <= mark.x <= high]
    return over(
        f"Speed-up over {series.other}",
        f"How many times as fast {series.this} is as {series.other}, with 95 % intervals",
        drawn,
        _axis(series),
        f"{series.other} time / {series.this} time",
        form=words.ratio,
        also=[1.0, *(noise or ())],
        noise=noise,
        even=1.0,
        wins=[(max(start, low), min(end, high)) for start, end in _wins(series)],
        marks=marks,
    )


def _marks(series: Series) -> list[Mark]:
    marks = []
    if series.even is not None and series.even.value:
        at = series.even.value / series.per_x
        marks.append(Mark(at, f"break-even {words.figure(at, 2)}"))
    return [*marks, *([Mark(series.ideal, f"ideal {words.figure(series.ideal, 2)}", True)] if series.ideal else [])]


def _wins(series: Series) -> list[Interval]:
    """Read the win intervals of the break-even row; an open end is replaced by the end of the measured range."""
    if series.even is None or not series.cells:
        return []
    settings, intervals, i = series.even.settings, [], 1
    while f"win_{i}_from" in settings:
        ends = []
        for side, edge in (("from", series.cells[0]), ("to", series.cells[-1])):
            at = settings.get(f"win_{i}_{side}")
            ends.append(float(at) / series.per_x if isinstance(at, int | float) else float(edge.x))
        intervals.append((ends[0], ends[1]))
        i += 1
    return [(start, end) for start, end in intervals if start < end]


def _sheet(series: Series) -> Sheet:
    this, other = series.this, series.other
    head = [_axis(series), this, "p90", "p99", other, f"{other} p99", "speed-up", "95 % interval", "at p99"]
    head += [f"{this} limit", f"{other} limit", "tax", f"{other} excess", "effective bandwidth", "n", "A/A", ""]
    body = []
    for cell in series.cells:
        quantiles, settings, tax = cell.row.quantiles or {}, cell.row.settings, cell.tax and cell.tax.value
        own = (cell.row.value, quantiles.get("p90"), quantiles.get("p99"), cell.original, settings.get("baseline_p99"))
        line = [f"{cell.x:,}", *(words.or_dash(seconds, words.moment) for seconds in own)]
        line += [words.or_dash(cell.ratio, words.times), words.between(cell.ratio_ci95, words.times) or "–"]
        line += [words.or_dash(settings.get("p99_ratio"), words.times)]
        limits = (cell.bound, cell.original_bound, tax, cell.excess)
        line += [words.or_dash(seconds, words.moment) for seconds in limits]
        line += [words.or_dash(cell.bandwidth and cell.bandwidth.value, lambda v: words.rate(v, "B/s"))]
        line += [f"{cell.row.n:,}" if cell.row.n else "–", words.or_dash(cell.row.aa_spread, words.percent)]
        body.append([*line, ", ".join(flag.replace("-", " ") for flag in cell.flags)])
    body += [[f"{cell.x:,}", *["–"] * (len(head) - 2), figures.flags(cell.row)] for cell in series.skipped]
    return Sheet(head, body, remarks=1)


# --- remote devices --------------------------------------------------------------------------------------------------


def on_devices(manifest: Manifest, rows: Sequence[Row], devices: Sequence[DeviceRows]) -> list[Part]:
    """Build a chart of all devices, then a tab for each; nothing without devices."""
    return [*all_devices(manifest, rows, devices), *(_tab(manifest, device) for device in devices)] if devices else []


def _tab(manifest: Manifest, of: DeviceRows) -> Section:
    judged = manifest.model_copy(update={"verdict": of.verdict})
    flags = {flag for row in of.rows for flag in row.flags}
    answer, because = figures.verdict(judged, of.rows) if of.verdict else ("no verdict", [])
    if of.verdict is None:
        because = ["its times are an emulator's"] if "emulated" in flags else ["its speed was not measured"]
    cautions = {
        "emulated": "An emulator: its results count, its times hold for no real machine",
        "throttled": "The processor lowered its clock during the timing: cool it, and measure again",
    }
    device = next(row.device for row in of.rows if row.device)
    scored = [row for row in of.rows if row.name.startswith("accuracy.")]
    parts: list[Part] = [
        Remark(words.joined(device.name, device.machine or "", device.isa or ""), "caption"),
        *(Remark(text, "note") for flag, text in cautions.items() if flag in flags),
        Conclusion(answer, figures.tone(judged) if of.verdict else "", because),
        *(Remark(text, "caution") for text in curves.shared_cautions(curves.series(judged, of.rows))),
        *sections(judged, of.rows),
        *([figures.results_table(scored)] if scored else []),
    ]
    return Section(of.name, parts, tab=True)


def all_devices(manifest: Manifest, rows: Sequence[Row], devices: Sequence[DeviceRows]) -> list[Exhibit]:
    """Build speed-up and tax against the batch, a line for each device; nothing for fewer than two devices.

    Args:
        rows: measurements of this machine, which is one of the devices.
    """
    named = [(HERE, rows), *((device.name, device.rows) for device in devices)]
    first = [(name, several[0]) for name, own in named if (several := curves.series(manifest, own))]
    if len(first) < 2 or len({series.unit for _, series in first}) > 1:
        return []
    one = first[0][1]
    across, other = "batch" if one.over == "batch" else "tokens", one.other
    panels = []
    for title, up, value, form, tick, even in (
        (f"Speed-up over {other}", "times as fast", lambda cell: cell.ratio, words.times, words.ratio, 1.0),
        (f"Tax, share of {other}'s time", "tax / time of the original", _taxed, words.whole, words.whole_tick, None),
    ):
        drawn: list[Curve] = []
        for (name, series), colour, symbol in zip(first, cycle(_COLOURS), cycle(_SYMBOLS), strict=False):
            xs, ys = [cell.x for cell in series.cells], [value(cell) for cell in series.cells]
            drawn += curve(name, colour, xs, ys, lambda y, of=name, form=form: f"{of} {form(y)}", symbol=symbol)  # type: ignore[misc]
        if drawn:
            alt = f"{title} against {across}, of {words.listed([curve.label for curve in drawn])}"
            panels.append(over(title, alt, drawn, across, up, form=tick, also=[even] if even else [], even=even))
    head = ["device", across, "speed-up", "95 % interval", "tax", "share of the original's time"]
    body = []
    for name, series in first:
        for cell in series.cells:
            sure, tax = words.between(cell.ratio_ci95, words.times) or "–", cell.tax and cell.tax.value
            line = [name, f"{cell.x:,}", words.or_dash(cell.ratio, words.times), sure]
            body.append([*line, words.or_dash(tax, words.moment), words.or_dash(_taxed(cell), words.whole)])
    sentences = [f"{one.title}: every device in its own runtime, against {other} on the same device."]
    return [Exhibit(sentences, panels, [], Sheet(head, body), title="All devices")]


def _taxed(cell: CurvePoint) -> float | None:
    return cell.tax_share if (cell.tax_share or 0) > 0 else None
