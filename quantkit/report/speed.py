"""The times of the report page: both sides against batch or prompt, their ratio, the roofline, and where it wins.

A row of latency holds both sides. The bounds stand in the `tax.total` row of the same cell, win intervals and both
break-even points in the `tax.break_even` row of the curve (`measure.latency` writes all of them in one run).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quantkit.bundle import Manifest
from quantkit.measure.rows import Row
from quantkit.measure.tax import captured_gain
from quantkit.report import charts, words
from quantkit.report.charts import ORIGINAL, QUANTIZED, Curve, Interval, Mark
from quantkit.report.sections import Form, Panel, Section, Sheet, between, flags, grouped, times, variant

_PROMISED = "muted"
_SURE = "95\u00a0% "
# what a row may say of itself, for a reader
_FLAGS = {
    "aa-exceeds-effect": "the difference is smaller than that between two measurements of one thing",
    "noisy": "the machine was noisy",
    "few-steps": "fewer steps than planned",
    "negative-tax": "faster than its limit: the cache helped, or the ceiling is wrong",
    "weights-near-cache": "part of the weights may have stayed in the cache, so the limit is no limit",
    "no-ceiling": "no limit: a ceiling could not be measured",
}
_TOO_LARGE = {"out-of-memory": "does not fit into memory", "out-of-memory-baseline": "the original does not fit"}


@dataclass(frozen=True)
class _Cell:
    """One size of a curve: what was measured there, and what bounds it."""

    x: int
    row: Row
    tax: Row | None
    bandwidth: Row | None = None

    @property
    def bound(self) -> float | None:
        return self.tax.op.bound_s if self.tax is not None and self.tax.op is not None else None

    @property
    def original_bound(self) -> float | None:
        return self.tax.op.hp_bound_s if self.tax is not None and self.tax.op is not None else None

    @property
    def original(self) -> float | None:
        base = self.row.baseline
        return base.value if base is not None and base.value > 0 else None

    @property
    def ratio(self) -> float | None:
        base = self.row.baseline
        return base.ratio if base is not None and (base.ratio or 0) > 0 else None

    @property
    def ratio_ci95(self) -> Interval | None:
        base = self.row.baseline
        return base.ratio_ci95 if base is not None and base.ratio_ci95 and base.ratio_ci95[0] > 0 else None

    @property
    def flags(self) -> list[str]:
        return list(dict.fromkeys([*self.row.flags, *(self.tax.flags if self.tax is not None else [])]))


@dataclass(frozen=True)
class _Series:
    """One curve.

    Args:
        cells: measured, ascending.
        skipped: sizes without a value.
        even: its `tax.break_even` row.
        this: short name of the quantized side.
        other: of the original.
        axis: what x is.
        unit: what one measurement is: `step`, `prompt`, `pass`.
        said: an x in words: `batch 8`.
    """

    cells: Sequence[_Cell]
    skipped: Sequence[_Cell]
    even: Row | None
    this: str
    other: str
    axis: str
    unit: str
    said: Callable[[str], str]


def sections(manifest: Manifest, rows: Sequence[Row]) -> list[Section]:
    """Decode by runtime and context, then prefill by runtime and batch."""
    this, other = names(manifest)
    found = []
    for (_, context), group in grouped(
        _timed(rows, "latency.decode_step"), lambda r: (variant(r), _context(r))
    ).items():
        series = _series(rows, group, lambda row: row.batch or 0)
        if series.cells:
            series = replace(series, this=this, other=other, axis="batch (sequences at once)", unit="step")
            title = f"Decode with {context:,} tokens of context" if context is not None else "Decode"
            found.append(_section(rows, series, title))
    one = "prompt" if manifest.model.kind == "decoder" else "pass"
    for (_, batch), group in grouped(_timed(rows, "latency.prefill"), lambda r: (variant(r), r.batch)).items():
        series = _series(rows, group, tokens)
        if series.cells:
            series = replace(series, this=this, other=other, axis="length (tokens a sequence)", unit=one)
            series = replace(series, said=lambda x: f"{x} tokens")
            title = "Prefill" if one == "prompt" else "Forward pass"
            found.append(_section(rows, series, f"{title} at batch {batch}" if batch else title))
    return found


def names(manifest: Manifest) -> tuple[str, str]:
    """Short names of the two sides; a bundle of several formats is `quantized`."""
    formats = {str(layer.scheme.get("format")) for layer in manifest.layers}
    this = formats.pop() if len(formats) == 1 else "quantized" if formats else "this"
    other = manifest.model.source.dtype
    return this, other if other != this else "original"


def tokens(row: Row) -> int:
    """A prompt's length."""
    shape = row.shape or {}
    return shape.get("new_tokens") or shape.get("tokens") or 0


def _timed(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.name == name]


def _context(row: Row) -> int | None:
    return (row.shape or {}).get("context")


def _series(rows: Sequence[Row], group: Sequence[Row], at: Callable[[Row], int]) -> _Series:
    cells = [
        _Cell(at(row), row, _of(rows, row, "tax.total"), _of(rows, row, "bandwidth.effective"))
        for row in sorted(group, key=at)
        if at(row)
    ]
    measured = [cell for cell in cells if (cell.row.value or 0) > 0]
    skipped = [cell for cell in cells if cell not in measured]
    return _Series(measured, skipped, _even(rows, group[0]), "", "", "", "", lambda x: f"batch {x}")


def _of(rows: Sequence[Row], cell: Row, name: str) -> Row | None:
    """The row of that name about the whole step of the same cell."""
    for row in rows:
        same = (row.batch, row.shape, variant(row)) == (cell.batch, cell.shape, variant(cell))
        if same and row.name == name and (row.op is None or row.op.layer is None):
            return row
    return None


def _even(rows: Sequence[Row], of: Row) -> Row | None:
    for row in rows:
        if row.name == "tax.break_even" and variant(row) == variant(of):
            over = "tokens" if of.name == "latency.prefill" else "batch"
            same = all((of.shape or {}).get(key) == value for key, value in (row.shape or {}).items())
            if same and row.batch in {None, of.batch} and row.settings.get("over", over) == over:
                return row
    return None


def _section(rows: Sequence[Row], series: _Series, title: str) -> Section:
    panels = [_rates(series) if series.unit == "prompt" else _durations(series)]
    if any(cell.ratio for cell in series.cells):
        panels.append(_ratios(series))
    return Section(
        _results(series), panels, _how(rows, series), _sheet(series), cautions=_warnings(series), title=title
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def _curves(series: _Series, form: Form, scale: Callable[[_Cell, float], float]) -> list[Curve]:
    """Both sides and their bounds; `scale(cell, seconds)` is the figure's value, `form` shows it."""
    cells, found = series.cells, []
    values = [scale(cell, cell.row.value or 0.0) for cell in cells]
    bands = [_scaled(cell, scale) for cell in cells]
    hover = [f"{series.this} {form(v)}{_bracketed(between(b, form))}" for v, b in zip(values, bands, strict=True)]
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


def _scaled(cell: _Cell, scale: Callable[[_Cell, float], float]) -> Interval | None:
    if cell.row.ci95 is None or cell.row.ci95[0] <= 0:
        return None
    low, high = sorted(scale(cell, end) for end in cell.row.ci95)
    return low, high


def _across(series: _Series) -> charts.Axis:
    return charts.points_axis(series.axis, [cell.x for cell in series.cells])


def _durations(series: _Series) -> Panel:
    curves = _curves(series, charts.moment, lambda _, seconds: seconds)
    values = [y for curve in curves for y in curve.y]
    factor, unit = charts.time_unit(min(values))
    axis = charts.log_axis(f"time of a {series.unit}, p50, {unit}", values, form=lambda v: f"{v * factor:,g}")
    alt = f"Time of a {series.unit} against {series.axis}: {series.this} and {series.other}, both axes logarithmic"
    return Panel(f"Time of a {series.unit}", alt, charts.lines(curves, _across(series), axis))


def _rates(series: _Series) -> Panel:
    def form(value: float) -> str:
        return f"{words.figure(value, 3)} tokens/s"

    curves = _curves(series, form, lambda cell, seconds: cell.x * (cell.row.batch or 1) / seconds)
    values = [y for curve in curves for y in curve.y]
    axis = charts.log_axis(
        "prompt tokens a second, p50", values, form=lambda v: f"{v:g}" if v < 1e4 else f"{v / 1e3:g}k"
    )
    alt = f"Prompt tokens a second against {series.axis}: {series.this} and {series.other}, both axes logarithmic"
    return Panel("Prompt tokens a second", alt, charts.lines(curves, _across(series), axis))


def _ratios(series: _Series) -> Panel:
    known = [(cell, cell.ratio, cell.ratio_ci95) for cell in series.cells if cell.ratio]
    hover = [f"measured {times(ratio)}{_bracketed(between(sure, times))}" for _, ratio, sure in known]
    bands = [sure for *_, sure in known]
    curves = [Curve("measured", QUANTIZED, [c.x for c, *_ in known], [r for _, r, _ in known], hover, bands)]
    promised = [(c.x, c.original_bound / c.bound) for c in series.cells if c.bound and c.original_bound]
    if promised:
        ys = [y for _, y in promised]
        texts = [f"promised {times(y)}" for y in ys]
        curves.append(Curve("promised", _PROMISED, [x for x, _ in promised], ys, texts, bound=True))
    spread = _spread(series)
    noise = (1 / (1 + spread), 1 + spread) if spread else None
    values = [y for curve in curves for y in curve.y] + [end for band in bands if band for end in band]
    title = f"{series.other} time / {series.this} time"
    axis = charts.log_axis(title, [*values, 1.0, *(noise or ())], form=lambda v: f"{v:g}×")
    across = _across(series)
    low, high = across.range
    marks = [mark for mark in _marks(series) if low <= mark.x <= high]
    alt = f"How many times as fast {series.this} is as {series.other}, with 95 % intervals, both axes logarithmic"
    wins = [(max(start, low), min(end, high)) for start, end in _wins(series)]
    figure = charts.lines(curves, across, axis, noise=noise, even=1.0, wins=wins, marks=marks)
    return Panel(f"Speed-up over {series.other}", alt, figure)


def _marks(series: _Series) -> list[Mark]:
    if series.even is None:
        return []
    per = _per_x(series)
    found = []
    if series.even.value:
        found.append(Mark(series.even.value / per, f"break-even {words.figure(series.even.value / per, 2)}"))
    ideal = series.even.settings.get("ideal")
    if isinstance(ideal, int | float) and ideal > 0:
        found.append(Mark(ideal / per, f"ideal {words.figure(ideal / per, 2)}", dotted=True))
    return found


def _wins(series: _Series) -> list[Interval]:
    """The win intervals of the break-even row; an end that the measured range cuts off is the end of the range."""
    if series.even is None or not series.cells:
        return []
    settings, per = series.even.settings, _per_x(series)
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


def _per_x(series: _Series) -> int:
    """M a unit of x: the break-even row of a prefill counts the tokens of all sequences."""
    return 1 if series.unit == "step" else series.cells[0].row.batch or 1


def _spread(series: _Series) -> float | None:
    return max((cell.row.aa_spread for cell in series.cells if cell.row.aa_spread is not None), default=None)


# --- words -----------------------------------------------------------------------------------------------------------


def _results(series: _Series) -> list[str]:
    """Where the quantized side wins and loses, and where nothing can be said."""
    wins: list[int] = []
    losses: list[int] = []
    unsure: list[int] = []
    for cell in series.cells:
        if (sure := cell.ratio_ci95) is not None:
            (wins if sure[0] > 1 else losses if sure[1] < 1 else unsure).append(cell.x)
    found = []
    for xs, verb in ((wins, "Faster"), (losses, "Slower")):
        if xs:
            found.append(f"{verb} at {series.said(_listed(xs))}.")
    if unsure:
        found.append(f"At {series.said(_listed(unsure))} no difference shows above the noise.")
    if series.even is not None and series.even.value is not None:
        per = _per_x(series)
        ends = between(series.even.ci95, lambda v: words.figure(v / per, 2))
        even = series.said(words.figure(series.even.value / per, 2))
        found.append(f"Break-even at {even}{_bracketed(ends and _SURE + ends)}.")
    first = series.cells[0]
    if first.tax is not None and (first.tax.value or 0) > 0 and first.original:
        tax = first.tax.value or 0.0
        share = words.percent(tax / first.original, 0)
        what = f"{charts.moment(tax)}, {share} of {series.other}'s time"
        gain = captured_gain(first.tax)
        took = f"; {words.percent(gain, 0)} of the promised gain arrives" if gain is not None and gain > 0 else ""
        found.append(f"The tax at {series.said(str(first.x))} is {what}{took}.")
    if first.bandwidth is not None and first.bandwidth.value is not None:
        moved = words.rate(first.bandwidth.value, first.bandwidth.unit)
        part = first.bandwidth.settings.get("share_of_ceiling")
        ceiling = f", {words.percent(part, 0)} of what the machine reads" if isinstance(part, float) else ""
        found.append(f"The effective bandwidth at {series.said(str(first.x))} is {moved}{ceiling}.")
    for cell in series.skipped:
        why = next((_TOO_LARGE[flag] for flag in cell.row.flags if flag in _TOO_LARGE), "not measured")
        found.append(f"{series.said(f'{cell.x:,}').capitalize()}: {why}.")
    return found


def _warnings(series: _Series) -> list[str]:
    """What the flags of the cells say, each once, with where it holds."""
    found = []
    for flag, text in _FLAGS.items():
        xs = [cell.x for cell in series.cells if flag in cell.flags]
        if xs:
            at = "at every size" if len(xs) == len(series.cells) > 1 else f"at {series.said(_listed(xs))}"
            found.append(f"{at}: {text}")
    return found


def _how(rows: Sequence[Row], series: _Series) -> list[str]:
    """How it was measured, for the caption."""
    row = series.cells[0].row
    parts = []
    if counts := sorted({cell.row.n for cell in series.cells if cell.row.n}):
        several = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
        plural = "passes" if series.unit == "pass" else f"{series.unit}s"
        parts.append(f"p50 of {several} {plural} a side at each size, interleaved (ABBA)")
    threads = row.settings.get("threads")
    if isinstance(threads, int | float):
        parts.append(words.plural(int(threads), "thread"))
    if row.runtime:
        version = row.versions.get(row.runtime, "")
        parts.append(" ".join(part for part in (row.runtime, version) if part))
    level = row.settings.get("accuracy_level")
    parts += [f"accuracy level {level}"] if level is not None else []
    parts += [row.device.name] if row.device is not None else []
    found = ["; ".join(parts) + ". Blue bands: 95\u00a0% intervals."]
    if any(cell.bound for cell in series.cells):
        found.append(
            f"Dotted: the roofline, what the bytes and operations of a {series.unit} take at least{_ceilings(rows)};"
            " the gap above it is the tax. The runtime is a black box: only the sum is known."
        )
    if any("p99-from-few" in cell.flags for cell in series.cells):
        found.append("The 99th percentiles rest on few steps.")
    if (spread := _spread(series)) is not None:
        found.append(f"Grey band: what two measurements of one thing differ by (A/A), {words.percent(spread)} at most.")
    if _wins(series):
        found.append("Shaded: where the whole interval lies above 1.")
    return found


def _ceilings(rows: Sequence[Row]) -> str:
    """The ceilings behind the bounds, measured in the same run."""
    parts = []
    for row in rows:
        if row.name in {"ceiling.read", "ceiling.compute"} and row.value is not None:
            kind = row.settings.get("compute_type") or row.name.removeprefix("ceiling.")
            parts.append(f"{words.rate(row.value, row.unit)} {kind}")
    return f" ({', '.join(dict.fromkeys(parts))}, measured in the same run)" if parts else ""


def _sheet(series: _Series) -> Sheet:
    this, other = series.this, series.other
    head = [series.axis, this, "p90", "p99", other, f"{other} p99", "speed-up", "95 % interval", "at p99"]
    head += [f"{this} limit", f"{other} limit", "tax", f"{other} excess", "effective bandwidth", "n", "A/A", ""]
    body = []
    for cell in series.cells:
        quantiles, settings = cell.row.quantiles or {}, cell.row.settings
        excess = cell.original - cell.original_bound if cell.original and cell.original_bound else None
        body.append(
            [
                f"{cell.x:,}",
                charts.moment(cell.row.value or 0.0),
                _or_dash(quantiles.get("p90"), charts.moment),
                _or_dash(quantiles.get("p99"), charts.moment),
                _or_dash(cell.original, charts.moment),
                _or_dash(settings.get("baseline_p99"), charts.moment),
                _or_dash(cell.ratio, times),
                between(cell.ratio_ci95, times) or "–",
                _or_dash(settings.get("p99_ratio"), times),
                _or_dash(cell.bound, charts.moment),
                _or_dash(cell.original_bound, charts.moment),
                _or_dash(cell.tax.value if cell.tax is not None else None, charts.moment),
                _or_dash(excess, charts.moment),
                _or_dash(cell.bandwidth and cell.bandwidth.value, lambda v: words.rate(v, "B/s")),
                f"{cell.row.n:,}" if cell.row.n else "–",
                _or_dash(cell.row.aa_spread, words.percent),
                ", ".join(flag.replace("-", " ") for flag in cell.flags),
            ]
        )
    body += [[f"{cell.x:,}", *["–"] * (len(head) - 2), flags(cell.row)] for cell in series.skipped]
    return Sheet(head, body, remarks=1)


def _or_dash(value: object, form: Form) -> str:
    return form(float(value)) if isinstance(value, int | float) else "–"


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""


def _listed(values: Sequence[int]) -> str:
    texts = [f"{value:,}" for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
