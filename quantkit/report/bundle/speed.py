"""The times of the report page: both sides against batch or prompt, their ratio, the roofline, and where it wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, figures
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve, Mark
from quantkit.report.kit.tree import Exhibit, Plot, Sheet
from quantkit.report.kit.words import Form, Interval

_PROMISED = "muted"
# of the runtimes' curves, one each
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")


def sections(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """One for each curve; what to beware of in all of them is not told in each."""
    found = curves.series(manifest, rows)
    shared = curves.shared_cautions(found)
    made = [section(rows, series) for series in found]
    return [replace(each, cautions=[text for text in each.cautions if text not in shared]) for each in made]


def overview(found: Sequence[Series]) -> list[Exhibit]:
    """Decode and prefill of every runtime in one place, each with its original beside it; none of a single curve.

    Of several contexts, or batches of prompts, the first of each runtime: the others have figures of their own.
    """
    first: dict[tuple[str, str], Series] = {}
    for series in found:
        if len(series.cells) > 1:
            first.setdefault((series.unit, figures.variant(series.cells[0].row)), series)
    if len(first) < 2:
        return []
    by_unit = figures.by(first.items(), lambda entry: entry[0][0])
    panels = [_together([series for _, series in entries]) for entries in by_unit.values()]
    head = ["", "runtime", "at", "this", "original", "speed-up"]
    body = [
        [
            series.title,
            variant,
            series.said(f"{cell.x:,}"),
            words.figure(cell.tokens_per_s, 3),
            words.or_dash(cell.original_tokens_per_s, lambda v: words.figure(v, 3)),
            words.or_dash(cell.ratio, words.times),
        ]
        for (_, variant), series in first.items()
        for cell in series.cells
    ]
    title = "Every runtime at once" if len({variant for _, variant in first}) > 1 else "Decode and prefill at once"
    counted = f"{next(iter(first.values())).counted.capitalize()}s a second, of all sequences together."
    return [Exhibit([counted], panels, [], Sheet(head, body), title=title)]


def _together(found: Sequence[Series]) -> Plot:
    """Curves of one kind; those of a runtime have a symbol of their own."""
    drawn = []
    for series, symbol in zip(found, cycle(_SYMBOLS), strict=False):
        runtime = f", {figures.variant(series.cells[0].row)}" if len(found) > 1 else ""
        sides = [
            (series.this, QUANTIZED, [(cell.x, cell.tokens_per_s) for cell in series.cells]),
            (series.other, ORIGINAL, [(cell.x, rate) for cell in series.cells if (rate := cell.original_tokens_per_s)]),
        ]
        for name, colour, points in sides:
            if points:
                label, rates = f"{name}{runtime}", [rate for _, rate in points]
                hover = [f"{label} {words.figure(rate, 3)} {series.counted}s/s" for rate in rates]
                drawn.append(Curve(label, colour, [x for x, _ in points], rates, hover, symbol=symbol))
    one = found[0]
    values = [y for curve in drawn for y in curve.y]
    form = f"{one.counted}s a second"
    axis = axes.log_axis(f"{form}, p50", values, form=lambda v: f"{v:g}" if v < 1e4 else f"{v / 1e3:g}k")
    across = axes.points_axis(_axis(one), [cell.x for series in found for cell in series.cells])
    what = one.title.partition(",")[0] if len(found) > 1 else one.title
    lines = words.listed([curve.label for curve in drawn])
    alt = f"{what}: {form} against {_axis(one)}, of {lines}; both axes logarithmic"
    return Plot(what, alt, charts.lines(drawn, across, axis))


def section(rows: Sequence[Row], series: Series) -> Exhibit:
    """The times of one curve, and their ratios; of a single size a sentence says as much."""
    said, cautions = curves.results(series), curves.cautions(series)
    if len(series.cells) == 1:
        return Exhibit(
            [single(series), *said], [], _measured(series), _sheet(series), cautions=cautions, title=series.title
        )
    panels = [_rates(series) if series.unit == "prompt" else _durations(series)]
    if any(cell.ratio for cell in series.cells):
        panels.append(_ratios(series))
    return Exhibit(said, panels, _measured(series), _sheet(series), cautions=cautions, title=series.title)


def single(series: Series) -> str:
    """One size in words: `At 256 tokens 397 ms against 335 ms of float32: 0.843× the speed (0.783× to 0.902×).`"""
    cell = series.cells[0]
    text = f"At {series.said(f'{cell.x:,}')} a {series.unit} takes {words.moment(cell.row.value or 0.0)}"
    text += f" against {words.moment(cell.original)} of {series.other}" if cell.original else ""
    if cell.ratio is None:
        return f"{text}."
    sure = curves.bracketed(words.between(cell.ratio_ci95, words.times))
    promised = f"; {words.times(cell.promised)} is what the limits promise" if cell.promised else ""
    ratio = words.times(cell.ratio)
    said = f"{ratio} measured{sure}, which is not believed" if cell.doubtful else f"{ratio} the speed{sure}"
    return f"{text}: {said}{promised}."


def explained(rows: Sequence[Row], found: Sequence[Series]) -> list[str]:
    """How to read the figures of all curves, each thing once."""
    said = ["Bands in the colour of a line: 95\u00a0% intervals."]
    if any(cell.bound for series in found for cell in series.cells):
        said.append(
            f"Dotted: the roofline, what the bytes and operations take at least{_ceilings(rows)}; the gap above it is"
            " the tax. The runtime is a black box: only the sum is known."
        )
    if few := curves.few_steps(found):
        said.append(few)
    if any(series.spread is not None for series in found):
        said.append("Grey band: what two measurements of one thing differ by (A/A).")
    if any(_wins(series) for series in found):
        said.append("Shaded: where the whole interval lies above 1.")
    return said


# --- figures ---------------------------------------------------------------------------------------------------------


def _curves(series: Series, form: Form, scale: Callable[[CurvePoint, float], float]) -> list[Curve]:
    """Both sides and their bounds; `scale(cell, seconds)` is the figure's value, `form` shows it."""
    cells, found = series.cells, []
    values = [scale(cell, cell.row.value or 0.0) for cell in cells]
    bands = [_scaled(cell, scale) for cell in cells]
    hover = [
        f"{series.this} {form(v)}{curves.bracketed(words.between(b, form))}" for v, b in zip(values, bands, strict=True)
    ]
    found.append(Curve(series.this, QUANTIZED, [cell.x for cell in cells], values, hover, bands))
    sides = [
        (series.other, ORIGINAL, [(cell, cell.original) for cell in cells], False),
        (f"{series.this} limit", QUANTIZED, [(cell, cell.bound) for cell in cells], True),
        (f"{series.other} limit", ORIGINAL, [(cell, cell.original_bound) for cell in cells], True),
    ]
    for label, colour, pairs, bound in sides:
        known = [(cell.x, scale(cell, seconds)) for cell, seconds in pairs if seconds]
        if known:
            xs, ys = [x for x, _ in known], [y for _, y in known]
            found.append(Curve(label, colour, xs, ys, [f"{label} {form(y)}" for y in ys], bound=bound))
    return found


def _scaled(cell: CurvePoint, scale: Callable[[CurvePoint, float], float]) -> Interval | None:
    if cell.row.ci95 is None or cell.row.ci95[0] <= 0:
        return None
    low, high = sorted(scale(cell, end) for end in cell.row.ci95)
    return low, high


def _across(series: Series) -> axes.Axis:
    return axes.points_axis(_axis(series), [cell.x for cell in series.cells])


def _axis(series: Series) -> str:
    return (
        f"batch ({'samples' if series.counted == 'sample' else 'sequences'} at once)"
        if series.over == "batch"
        else "length (tokens a sequence)"
    )


def _durations(series: Series) -> Plot:
    drawn = _curves(series, words.moment, lambda _, seconds: seconds)
    values = [y for curve in drawn for y in curve.y]
    factor, unit = words.time_unit(min(values))
    axis = axes.log_axis(f"time of a {series.unit}, p50, {unit}", values, form=lambda v: f"{v * factor:,g}")
    alt = f"Time of a {series.unit} against {_axis(series)}: {series.this} and {series.other}, both axes logarithmic"
    return Plot(f"Time of a {series.unit}", alt, charts.lines(drawn, _across(series), axis))


def _rates(series: Series) -> Plot:
    def form(value: float) -> str:
        return f"{words.figure(value, 3)} {series.counted}s/s"

    what = "Samples a second" if series.counted == "sample" else "Prompt tokens a second"
    drawn = _curves(series, form, lambda cell, seconds: cell.x * (cell.row.batch or 1) / seconds)
    values = [y for curve in drawn for y in curve.y]
    axis = axes.log_axis(f"{what.lower()}, p50", values, form=lambda v: f"{v:g}" if v < 1e4 else f"{v / 1e3:g}k")
    alt = f"{what} against {_axis(series)}: {series.this} and {series.other}, both axes logarithmic"
    return Plot(what, alt, charts.lines(drawn, _across(series), axis))


def _ratios(series: Series) -> Plot:
    known = [(cell, cell.ratio, cell.ratio_ci95) for cell in series.cells if cell.ratio]
    hover = [
        f"measured {words.times(ratio)}{curves.bracketed(words.between(sure, words.times))}" for _, ratio, sure in known
    ]
    bands = [sure for *_, sure in known]
    drawn = [Curve("measured", QUANTIZED, [c.x for c, *_ in known], [r for _, r, _ in known], hover, bands)]
    promised = [(cell.x, cell.promised) for cell in series.cells if cell.promised]
    if promised:
        ys = [y for _, y in promised]
        texts = [f"promised {words.times(y)}" for y in ys]
        drawn.append(Curve("promised", _PROMISED, [x for x, _ in promised], ys, texts, bound=True))
    spread = series.spread
    noise = (1 / (1 + spread), 1 + spread) if spread else None
    values = [y for curve in drawn for y in curve.y] + [end for band in bands if band for end in band]
    title = f"{series.other} time / {series.this} time"
    axis = axes.log_axis(title, [*values, 1.0, *(noise or ())], form=lambda v: f"{v:g}×")
    across = _across(series)
    low, high = across.range
    marks = [mark for mark in _marks(series) if low <= mark.x <= high]
    alt = f"How many times as fast {series.this} is as {series.other}, with 95 % intervals, both axes logarithmic"
    wins = [(max(start, low), min(end, high)) for start, end in _wins(series)]
    figure = charts.lines(drawn, across, axis, noise=noise, even=1.0, wins=wins, marks=marks)
    return Plot(f"Speed-up over {series.other}", alt, figure)


def _marks(series: Series) -> list[Mark]:
    if series.even is None:
        return []
    per = series.per_x
    found = []
    if series.even.value:
        found.append(Mark(series.even.value / per, f"break-even {words.figure(series.even.value / per, 2)}"))
    if series.ideal is not None:
        found.append(Mark(series.ideal, f"ideal {words.figure(series.ideal, 2)}", dotted=True))
    return found


def _wins(series: Series) -> list[Interval]:
    """The win intervals of the break-even row; an end that the measured range cuts off is the end of the range."""
    if series.even is None or not series.cells:
        return []
    settings, per = series.even.settings, series.per_x
    edges = {"from": float(series.cells[0].x), "to": float(series.cells[-1].x)}
    found, i = [], 1
    while f"win_{i}_from" in settings:
        start, end = (settings.get(f"win_{i}_{side}") for side in edges)
        found.append(
            (
                float(start) / per if isinstance(start, int | float) else edges["from"],
                float(end) / per if isinstance(end, int | float) else edges["to"],
            )
        )
        i += 1
    return [(start, end) for start, end in found if start < end]


# --- words -----------------------------------------------------------------------------------------------------------


def _measured(series: Series) -> list[str]:
    """How often, in and on what it was measured."""
    spread = f"A/A spread {words.percent(series.spread)} at most" if series.spread is not None else ""
    return [f"{'; '.join(part for part in (curves.measured(series), spread, curves.setting(series)) if part)}."]


def _ceilings(rows: Sequence[Row]) -> str:
    """The ceilings behind the bounds, measured in the same run."""
    parts = []
    for row in rows:
        if row.name in {"ceiling.read", "ceiling.compute"} and row.value is not None:
            kind = row.settings.get("compute_type") or row.name.removeprefix("ceiling.")
            parts.append(f"{words.rate(row.value, row.unit)} {kind}")
    return f" ({', '.join(dict.fromkeys(parts))}, measured in the same run)" if parts else ""


def _sheet(series: Series) -> Sheet:
    this, other = series.this, series.other
    head = [_axis(series), this, "p90", "p99", other, f"{other} p99", "speed-up", "95 % interval", "at p99"]
    head += [f"{this} limit", f"{other} limit", "tax", f"{other} excess", "effective bandwidth", "n", "A/A", ""]
    body = []
    for cell in series.cells:
        quantiles, settings = cell.row.quantiles or {}, cell.row.settings
        body.append(
            [
                f"{cell.x:,}",
                words.moment(cell.row.value or 0.0),
                words.or_dash(quantiles.get("p90"), words.moment),
                words.or_dash(quantiles.get("p99"), words.moment),
                words.or_dash(cell.original, words.moment),
                words.or_dash(settings.get("baseline_p99"), words.moment),
                words.or_dash(cell.ratio, words.times),
                words.between(cell.ratio_ci95, words.times) or "–",
                words.or_dash(settings.get("p99_ratio"), words.times),
                words.or_dash(cell.bound, words.moment),
                words.or_dash(cell.original_bound, words.moment),
                words.or_dash(cell.tax.value if cell.tax is not None else None, words.moment),
                words.or_dash(cell.excess, words.moment),
                words.or_dash(cell.bandwidth and cell.bandwidth.value, lambda v: words.rate(v, "B/s")),
                f"{cell.row.n:,}" if cell.row.n else "–",
                words.or_dash(cell.row.aa_spread, words.percent),
                ", ".join(flag.replace("-", " ") for flag in cell.flags),
            ]
        )
    body += [[f"{cell.x:,}", *["–"] * (len(head) - 2), figures.flags(cell.row)] for cell in series.skipped]
    return Sheet(head, body, remarks=1)
