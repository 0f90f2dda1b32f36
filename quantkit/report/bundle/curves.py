"""The times of a bundle as curves, and what they say in words. Page, terminal and card share them.

A row of latency holds both sides. The bounds stand in the `tax.total` row of the same cell, win intervals and both
break-even points in the `tax.break_even` row of the curve (`timing.latency` writes all of them in one run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.bundle import Manifest
from quantkit.measurement.operators.tax import captured_gain
from quantkit.measurement.rows import Row
from quantkit.measurement.verdict import speed_up
from quantkit.report.bundle import figures
from quantkit.report.kit import words
from quantkit.report.kit.words import Interval

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
# marked with `~`; neither wins (`measurement.verdict`)
NOISY = {"noisy", "aa-exceeds-effect"}
_NOT_MEASURED = {
    "out-of-memory": "does not fit into memory",
    "out-of-memory-baseline": "the original does not fit into memory",
    "prompt-too-long": "longer than the model's context",
    "prompt-too-long-baseline": "longer than the original's context",
    "too-slow": "would take too long for the time that was given",
    "no-baseline": "the original was not timed",
    "wrong-result": "the runtime gives wrong numbers, so it was not timed",
    "group-indivisible": "the group does not divide the shape",
}


@dataclass(frozen=True)
class CurvePoint:
    """One size of a curve; times in seconds, None where something is not known.

    Args:
        doubtful: whether its speed-up is noise, or more than bytes and operations allow.
        bound: the least time of the quantized side; `original_bound` of the original.
        ratio: how many times as fast the quantized side is.
        promised: how many times as fast it could be, by the limits.
        gain: how much of the promised gain arrives; None also where the speed-up is not believed, or the weights may
            have been in a cache.
        excess: what the original takes beyond its own limit.
        share_read: the effective bandwidth as a share of what the machine reads.
        flags: of all its rows, each once.
    """

    x: int
    row: Row
    tax: Row | None
    bandwidth: Row | None
    doubtful: bool
    bound: float | None
    original_bound: float | None
    original: float | None
    ratio: float | None
    ratio_ci95: Interval | None
    promised: float | None
    gain: float | None
    excess: float | None
    tokens_per_s: float
    original_tokens_per_s: float | None
    share_read: float | None
    flags: Sequence[str]

    @property
    def tax_share(self) -> float | None:
        """Tax as a share of the original's time."""
        tax = self.tax.value if self.tax is not None else None
        return tax / self.original if tax is not None and self.original else None

    @property
    def faster(self) -> str:
        """Speed-up as text: `2.40×`, or `~1.02×` within noise."""
        return words.or_dash(self.ratio, lambda ratio: f"{'~' if self.doubtful else ''}{words.times(ratio)}")


def point(x: int, row: Row, tax: Row | None, bandwidth: Row | None = None) -> CurvePoint:
    """Read the rows of one size."""
    base, op, speed = row.baseline, tax.op if tax is not None else None, speed_up(row)
    flags = list(dict.fromkeys([*row.flags, *(tax.flags if tax is not None else [])]))
    doubtful = bool(NOISY & set(row.flags)) or (speed is not None and bool(speed.doubt))
    bound, least = (op.bound_s, op.hp_bound_s) if op is not None else (None, None)
    original = base.value if base is not None and base.value > 0 else None
    sure = base.ratio_ci95 if base is not None else None
    counted = tokens(row) * (row.batch or 1)
    share = bandwidth.settings.get("share_of_ceiling") if bandwidth is not None else None
    void = tax is None or doubtful or "weights-near-cache" in flags
    return CurvePoint(
        x,
        row,
        tax,
        bandwidth,
        doubtful,
        bound,
        least,
        original,
        ratio=base.ratio if base is not None and (base.ratio or 0) > 0 else None,
        ratio_ci95=sure if sure and sure[0] > 0 else None,
        promised=least / bound if bound and least else None,
        gain=None if void or tax is None else captured_gain(tax),
        excess=original - least if original and least else None,
        tokens_per_s=counted / (row.value or 1.0),
        original_tokens_per_s=counted / original if original else None,
        share_read=share if isinstance(share, float) else None,
        flags=flags,
    )


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        title: what was timed.
        points: all of them, ascending.
        even: its `tax.break_even` row.
        this: short name of the quantized side.
        other: of the original.
        over: what x is: `batch` or `tokens`.
        unit: what one measurement is: `step`, `prompt`, `pass`.
    """

    title: str
    points: Sequence[CurvePoint]
    even: Row | None
    this: str
    other: str
    over: str
    unit: str

    @property
    def cells(self) -> list[CurvePoint]:
        """Measured points."""
        return [cell for cell in self.points if (cell.row.value or 0) > 0]

    @property
    def skipped(self) -> list[CurvePoint]:
        """Points without a value."""
        return [cell for cell in self.points if (cell.row.value or 0) <= 0]

    @property
    def time_unit(self) -> tuple[float, str]:
        """(factor, unit) of its times, both sides'."""
        return words.time_unit(min(value for cell in self.cells for value in (cell.row.value, cell.original) if value))

    def said(self, x: str) -> str:
        """Name an x: `batch 8`, `64 tokens`."""
        return f"batch {x}" if self.over == "batch" else f"{x} tokens"

    @property
    def counted(self) -> str:
        """Unit of work: a graph takes whole samples, not tokens."""
        return "sample" if self.unit == "pass" and tokens(self.points[0].row) == 1 else "token"

    @property
    def per_x(self) -> int:
        """M a unit of x: the break-even row of a prefill counts the tokens of all sequences."""
        return 1 if self.over == "batch" else self.points[0].row.batch or 1

    @property
    def spread(self) -> float | None:
        """Largest A/A spread of its cells."""
        return max((cell.row.aa_spread for cell in self.cells if cell.row.aa_spread is not None), default=None)

    @property
    def ideal(self) -> float | None:
        """Largest x with a gain promised by the roofline."""
        ideal = self.even.settings.get("ideal") if self.even is not None else None
        return ideal / self.per_x if isinstance(ideal, int | float) and ideal > 0 else None


def series(manifest: Manifest, rows: Sequence[Row]) -> list[Series]:
    """Make the curves: decode by runtime and context over the batch, then prefill by runtime and batch over the length.

    A model that does not decode has its forward passes by runtime and length, over the batch.
    """
    decodes = manifest.model.kind == "decoder"
    timed = {name: [row for row in rows if row.name == f"latency.{name}"] for name in ("decode_step", "prefill")}
    several = len({figures.variant(row) for own in timed.values() for row in own}) > 1
    groups = []
    by_context = words.by(timed["decode_step"], lambda row: (figures.variant(row), (row.shape or {}).get("context")))
    for (variant, context), group in by_context.items():
        title = "Decode" if context is None else f"Decode with {context:,} tokens of context"
        groups.append((variant, title, group, "batch", "step"))

    def fixed_of(row: Row) -> int | None:
        return row.batch if decodes else tokens(row)

    for (variant, fixed), group in words.by(
        timed["prefill"], lambda row: (figures.variant(row), fixed_of(row))
    ).items():
        title = "Prefill" if decodes else "Forward pass"
        if fixed and (decodes or fixed > 1):
            title += f" at batch {fixed}" if decodes else f" of {fixed:,} tokens"
        groups.append((variant, title, group, *(("tokens", "prompt") if decodes else ("batch", "pass"))))
    drawn = []
    for variant, title, group, over, unit in groups:
        at = _batch if over == "batch" else tokens
        points = [
            point(at(row), row, _of(rows, row, "tax.total"), _of(rows, row, "bandwidth.effective"))
            for row in sorted(group, key=at)
            if at(row)
        ]
        named = f"{title}, {variant}" if several else title
        drawn.append(Series(named, points, _even(rows, group[0], over), *names(manifest, group[0]), over, unit))
    return [curve for curve in drawn if curve.cells]


def names(manifest: Manifest, row: Row | None = None) -> tuple[str, str]:
    """Name the two sides shortly; a bundle of several formats is `quantized`.

    Runtimes compute the float side in float32, so a source in another dtype is just the `original`; where its weights
    were stored otherwise to be timed, a row says so.
    """
    formats = {str(layer.scheme.get("format")) for layer in manifest.layers}
    this = formats.pop() if len(formats) == 1 else "quantized" if formats else "this"
    stored = row.settings.get("baseline_format") if row is not None else None
    if isinstance(stored, str) and stored != "float32":
        return this, stored
    return this, "float32" if manifest.model.source.dtype == "float32" else "original"


def tokens(row: Row) -> int:
    """Count the new tokens of a sequence: a prompt's length, 1 in a decode step."""
    shape = row.shape or {}
    return shape.get("new_tokens") or shape.get("tokens") or (1 if row.name == "latency.decode_step" else 0)


def _batch(row: Row) -> int:
    return row.batch or 0


def _of(rows: Sequence[Row], cell: Row, name: str) -> Row | None:
    """Find the row with `name` about the whole step of the same cell."""
    for row in rows:
        same = (row.batch, row.shape, figures.variant(row)) == (cell.batch, cell.shape, figures.variant(cell))
        if same and row.name == name and (row.op is None or row.op.layer is None):
            return row
    return None


def _even(rows: Sequence[Row], of: Row, over: str) -> Row | None:
    for row in rows:
        if row.name == "tax.break_even" and figures.variant(row) == figures.variant(of):
            same = all((of.shape or {}).get(key) == value for key, value in (row.shape or {}).items())
            if same and row.batch in {None, of.batch} and row.settings.get("over", over) == over:
                return row
    return None


# --- words -----------------------------------------------------------------------------------------------------------


def results(curve: Series) -> list[str]:
    """Say where the quantized side wins and loses, the break-even, the tax, the bandwidth, what was not measured."""
    said = [*outcomes(curve), *filter(None, (break_even(curve), first_tax(curve)))]
    first = curve.cells[0]
    if first.bandwidth is not None and first.bandwidth.value is not None:
        moved = words.rate(first.bandwidth.value, first.bandwidth.unit)
        ceiling = f", {words.percent(first.share_read, 0)} of what the machine reads" if first.share_read else ""
        said.append(f"The effective bandwidth at {curve.said(str(first.x))} is {moved}{ceiling}.")
    return said + skipped(curve)


def outcomes(curve: Series) -> list[str]:
    """Say where it is faster, slower, or nothing is known."""
    where: dict[str, list[int]] = {"Faster": [], "Slower": [], "unsure": [], "beyond": []}
    for cell in curve.cells:
        if (speed := speed_up(cell.row)) is not None:
            low, high = speed.interval
            known = "unsure" if speed.noisy else "Faster" if low > 1 else "Slower" if high < 1 else "unsure"
            where["beyond" if speed.doubt == "ceiling" else known].append(cell.x)
    at = {key: curve.said(words.listed(xs)) for key, xs in where.items() if xs}
    said = [f"{verb} at {at[verb]}." for verb in ("Faster", "Slower") if verb in at]
    if "unsure" in at:
        said.append(f"At {at['unsure']} no difference shows above the noise.")
    if "beyond" in at:
        said.append(f"At {at['beyond']} it is faster than bytes and operations allow: a time or a ceiling is wrong.")
    return said


def ideal_end(curve: Series) -> str:
    """Name the x up to which the roofline promises a gain; empty where it is not known."""
    if curve.ideal is not None:
        return f"to {words.figure(curve.ideal, 2)}"
    ends = {"ideal-wins-everywhere": "everywhere", "ideal-wins-nowhere": "nowhere"}
    flags = curve.even.flags if curve.even is not None else []
    return next((ends[flag] for flag in flags if flag in ends), "")


def break_even(curve: Series) -> str:
    """Say the first end of its gain, with the ideal one; empty where neither is known."""
    ideal = f"ideal {words.figure(curve.ideal, 2)}" if curve.ideal is not None else ""
    if curve.even is None or curve.even.value is None:
        return f"No break-even in what was measured; {ideal}." if ideal else ""
    ends = words.between(curve.even.ci95, lambda m: words.figure(m / curve.per_x, 2))
    inner = words.joined(ends and _SURE + ends, ideal)
    return f"Break-even at {curve.said(words.figure(curve.even.value / curve.per_x, 2))}{words.bracketed(inner)}."


def first_tax(curve: Series) -> str:
    """Say the tax at the smallest size; empty where it is not known or negative, which a caution says."""
    first = curve.cells[0]
    if first.tax is None or (first.tax.value or 0) <= 0 or not first.original:
        return ""
    what = f"{words.moment(first.tax.value or 0.0)}, {words.percent(first.tax_share or 0.0, 0)} of {curve.other}'s time"
    arrives = first.gain is not None and 0 < first.gain <= 1
    took = f"; {words.percent(first.gain or 0.0, 0)} of the promised gain arrives" if arrives else ""
    return f"The tax at {curve.said(str(first.x))} is {what}{took}."


def skipped(curve: Series) -> list[str]:
    """List the sizes without a value, each with its reason."""
    said = []
    for cell in curve.skipped:
        why = next((_NOT_MEASURED[flag] for flag in cell.row.flags if flag in _NOT_MEASURED), "not measured")
        said.append(f"{words.sentence(curve.said(f'{cell.x:,}'))}: {why}.")
    return said


def cautions(curve: Series) -> list[str]:
    """Return the cautions for the cells' flags, once each, with their places."""
    said = []
    for flag, text in _FLAGS.items():
        xs = [cell.x for cell in curve.cells if flag in cell.flags]
        if xs:
            at = "at every size" if len(xs) == len(curve.cells) > 1 else f"at {curve.said(words.listed(xs))}"
            said.append(f"{at}: {text}")
    return said


def shared_cautions(several: Sequence[Series]) -> list[str]:
    """List cautions common to several curves, once each."""
    told = [cautions(curve) for curve in several]
    return [text for text in told[0] if all(text in others for others in told)] if len(told) > 1 else []


def measured(curve: Series) -> str:
    """`p50 of 60 steps a side at each size, interleaved (ABBA)`; empty where the rows do not say."""
    counts = sorted({cell.row.n for cell in curve.cells if cell.row.n})
    if not counts:
        return ""
    several = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
    plural = "passes" if curve.unit == "pass" else f"{curve.unit}s"
    return f"p50 of {several} {plural} a side at each size, interleaved (ABBA)"


def spread(curve: Series) -> str:
    """Format `A/A spread 1.3 % at most`; "" if unknown."""
    return f"A/A spread {words.percent(curve.spread)} at most" if curve.spread is not None else ""


def setting(curve: Series) -> str:
    """Describe threads, runtime with its version, accuracy level and device."""
    row = curve.cells[0].row
    threads, level = row.settings.get("threads"), row.settings.get("accuracy_level")
    return words.joined(
        words.plural(int(threads), "thread") if isinstance(threads, int | float) else "",
        f"{row.runtime} {row.version}".rstrip() if row.runtime else "",
        f"accuracy level {level}" if level is not None else "",
        row.device.name if row.device is not None else "",
        by="; ",
    )


def how(curve: Series) -> str:
    """Say how often one curve was measured, and what its noise is."""
    noise = "~ is noise" if any(cell.doubtful for cell in curve.cells) else ""
    return words.joined(measured(curve), spread(curve), noise, by="; ")


def few_steps(several: Sequence[Series]) -> str:
    """Name the 99th percentiles based on few steps, once for all curves; "" without any."""
    flags = [["p99-from-few" in cell.flags for cell in curve.cells] for curve in several]
    if not any(map(any, flags)):
        return ""
    return f"{'The' if all(map(all, flags)) else 'Some'} 99th percentiles rest on few steps."


def conditions(several: Sequence[Series], rows: Sequence[Row]) -> list[str]:
    """Describe the conditions of all curves, once each, and the base of the bandwidth's share."""
    said = list(dict.fromkeys(text for curve in several if (text := setting(curve))))
    if few := few_steps(several):
        said.append(few[:1].lower() + few[1:].rstrip("."))
    read = next((row for row in rows if row.name == "ceiling.read" and row.value is not None), None)
    if read is not None and any(cell.share_read for curve in several for cell in curve.cells):
        rate = words.rate(read.value or 0.0, read.unit)
        said.append(f"of read: effective bandwidth, as a share of the {rate} that was read in the same run")
    return said


def brief(curve: Series) -> tuple[list[str], list[list[str]]]:
    """Make (head, rows) of the few columns that a terminal has room for; times `original → this`, `~` marks noise.

    Columns: size, p50, speed-up, its 95 % interval, p99, new tokens a second and, where it is known, the effective
    bandwidth as a share of what the machine reads.
    """
    factor, unit = curve.time_unit
    read = any(cell.share_read is not None for cell in curve.cells)
    head = [curve.over, f"p50, {unit}", "speed-up", "95 %", f"p99, {unit}", f"{curve.counted}/s"]

    def change(before: object, after: object) -> str:
        known = [words.figure(value * factor, 3) for value in (before, after) if isinstance(value, int | float)]
        return " → ".join(known)

    body = []
    for cell in curve.cells:
        sure = words.between(cell.ratio_ci95, lambda ratio: words.figure(ratio, 3)) or "–"
        late = change(cell.row.settings.get("baseline_p99"), (cell.row.quantiles or {}).get("p99")) or "–"
        line = [f"{cell.x:,}", change(cell.original, cell.row.value), cell.faster, sure, late]
        share = [words.or_dash(cell.share_read, lambda share: words.percent(share, 0))] if read else []
        body.append([*line, words.figure(cell.tokens_per_s, 3), *share])
    return [*head, *(["of read"] if read else [])], body
