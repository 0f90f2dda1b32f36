"""Times of a bundle as curves, and their description in words, for page, terminal and card.

A latency row has both sides. The bounds of a cell are in its `tax.total` row; win intervals and both break-even points
of a curve are in its `tax.break_even` row. `timing.latency` writes all of these in one run.
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
# flag of a row -> text
_FLAGS = {
    "aa-exceeds-effect": "the difference is smaller than between two measurements of the same side",
    "noisy": "the machine was noisy",
    "few-steps": "fewer steps than planned",
    "negative-tax": "faster than its limit: the cache helped, or the ceiling is wrong",
    "weights-near-cache": "part of the weights may have stayed in the cache, so the limit does not hold",
    "no-ceiling": "no limit: a ceiling could not be measured",
}
EVERY = "at every size"
# such times are marked with `~` and win nothing (`measurement.verdict`)
NOISY = {"noisy", "aa-exceeds-effect"}
_NOT_MEASURED = {
    "out-of-memory": "does not fit into memory",
    "out-of-memory-baseline": "the original does not fit into memory",
    "prompt-too-long": "longer than the model's context",
    "prompt-too-long-baseline": "longer than the original's context",
    "too-slow": "would exceed the time limit",
    "no-baseline": "the original was not timed",
    "wrong-result": "the runtime gives wrong numbers, so it was not timed",
    "group-indivisible": "the group does not divide the shape",
}


@dataclass(frozen=True)
class CurvePoint:
    """One size of a curve, with times in seconds; None for an unknown value.

    Args:
        doubtful: True if the speed-up is within noise, or more than bytes and operations allow.
        bound: least possible time of the quantized side; `original_bound`: of the original.
        ratio: speed-up, the original's time over the quantized side's.
        ratio_ci95: interval of the speed-up that decides; it includes the A/A spread.
        promised: speed-up at the limits, `original_bound / bound`.
        gain: share of the promised gain that was measured; None if the speed-up is doubtful or the weights may have
            been
            in a cache.
        excess: time of the original beyond its own limit.
        share_read: effective bandwidth as a share of the machine's read bandwidth.
        flags: flags of all its rows, without repetition.
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
    """Combine the rows of one size."""
    base, op, speed = row.baseline, tax.op if tax is not None else None, speed_up(row)
    flags = list(dict.fromkeys([*row.flags, *(tax.flags if tax is not None else [])]))
    marks = NOISY if speed is None else NOISY - {"noisy"}  # its interval decides
    doubtful = bool(marks & set(row.flags)) or (speed is not None and bool(speed.doubt))
    bound, least = (op.bound_s, op.hp_bound_s) if op is not None else (None, None)
    original = base.value if base is not None and base.value > 0 else None
    sure = speed.interval if speed is not None and speed.ci95[0] > 0 else None
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
        ratio_ci95=sure,
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
        title: name of the timed work.
        points: all points, in ascending order.
        even: the `tax.break_even` row.
        this: short name of the quantized side.
        other: short name of the original.
        over: meaning of x: `batch` or `tokens`.
        unit: unit of timing: `step`, `prompt` or `pass`.
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
        """(factor, unit) for the times of both sides."""
        return words.time_unit(min(value for cell in self.cells for value in (cell.row.value, cell.original) if value))

    def label(self, x: str) -> str:
        """Format a value of x: `batch 8`, `64 tokens`."""
        return f"batch {x}" if self.over == "batch" else f"{x} tokens"

    @property
    def counted(self) -> str:
        """Unit of work: `token`, or `sample` for a graph without tokens."""
        return "sample" if self.unit == "pass" and tokens(self.points[0].row) == 1 else "token"

    @property
    def per_x(self) -> int:
        """Factor between the break-even row's M and x: a prefill's row counts the tokens of all sequences."""
        return 1 if self.over == "batch" else self.points[0].row.batch or 1

    @property
    def spread(self) -> float | None:
        """Largest A/A spread of its cells."""
        return max((cell.row.aa_spread for cell in self.cells if cell.row.aa_spread is not None), default=None)

    @property
    def ideal(self) -> float | None:
        """Largest x with a gain at the roofline limits."""
        ideal = self.even.settings.get("ideal") if self.even is not None else None
        return ideal / self.per_x if isinstance(ideal, int | float) and ideal > 0 else None


def series(manifest: Manifest, rows: Sequence[Row]) -> list[Series]:
    """Make the curves: decode steps against the batch, then prefill against the length.

    Each runtime and context (decode), or runtime and batch (prefill), has its own curve. For a model without decoding,
    the forward passes of each runtime and length are plotted against the batch.
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
    """Return short names of both sides, such as (`int4`, `float32`); a bundle of several formats is `quantized`.

    Runtimes compute the float side in float32. A source with another dtype is therefore called `original`, unless the
    row names the format of its timed weights.
    """
    formats = {str(layer.scheme.get("format")) for layer in manifest.layers}
    this = formats.pop() if len(formats) == 1 else "quantized" if formats else "this"
    stored = row.settings.get("baseline_format") if row is not None else None
    if isinstance(stored, str) and stored != "float32":
        return this, stored
    return this, "float32" if manifest.model.source.dtype == "float32" else "original"


def tokens(row: Row) -> int:
    """Count the new tokens of a sequence: the length of a prompt, or 1 for a decode step."""
    shape = row.shape or {}
    return shape.get("new_tokens") or shape.get("tokens") or (1 if row.name == "latency.decode_step" else 0)


def _batch(row: Row) -> int:
    return row.batch or 0


def _of(rows: Sequence[Row], cell: Row, name: str) -> Row | None:
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
    """Describe a curve: wins and losses, break-even, tax, bandwidth, and skipped sizes."""
    sentences = [*outcomes(curve), *filter(None, (break_even(curve), first_tax(curve)))]
    first = curve.cells[0]
    if first.bandwidth is not None and first.bandwidth.value is not None:
        moved = words.rate(first.bandwidth.value, first.bandwidth.unit)
        share = first.share_read or 0.0
        ceiling = f", {words.percent(share, 0)} of what the machine reads" if share else ""
        if share > 1:
            ceiling = ", more than the machine reads from memory: a cache holds part of the weights"
        sentences.append(f"The effective bandwidth at {curve.label(str(first.x))} is {moved}{ceiling}.")
    return sentences + skipped(curve)


def outcomes(curve: Series) -> list[str]:
    """List the sizes with a win, with a loss, and without a difference."""
    where: dict[str, list[int]] = {"Faster": [], "Slower": [], "unsure": [], "busy": [], "beyond": []}
    for cell in curve.cells:
        if (speed := speed_up(cell.row)) is not None:
            low, high = speed.interval
            known = "busy" if speed.busy else "Faster" if low > 1 else "Slower" if high < 1 else "unsure"
            where["beyond" if speed.doubt == "ceiling" else known].append(cell.x)
    at = {key: curve.label(words.listed(xs)) for key, xs in where.items() if xs}
    sentences = [f"{verb} at {at[verb]}." for verb in ("Faster", "Slower") if verb in at]
    if "unsure" in at:
        sentences.append(f"At {at['unsure']} no difference shows above the noise.")
    if "busy" in at:
        sentences.append(f"At {at['busy']} nothing is decided: the machine was busy.")
    if "beyond" in at:
        sentences.append(
            f"At {at['beyond']} the speed-up is more than bytes and operations allow: a time or a ceiling is wrong."
        )
    return sentences


def ideal_end(curve: Series) -> str:
    """Return the largest x with a gain at the roofline limits, as text; "" if unknown."""
    if curve.ideal is not None:
        return f"to {words.figure(curve.ideal, 2)}"
    ends = {"ideal-wins-everywhere": "everywhere", "ideal-wins-nowhere": "nowhere"}
    flags = curve.even.flags if curve.even is not None else []
    return next((ends[flag] for flag in flags if flag in ends), "")


def break_even(curve: Series) -> str:
    """Describe the measured and the ideal break-even point; "" if both are unknown."""
    ideal = f"ideal {words.figure(curve.ideal, 2)}" if curve.ideal is not None else ""
    if curve.even is None or curve.even.value is None:
        return f"No break-even in the measured range; {ideal}." if ideal else ""
    ends = words.between(curve.even.ci95, lambda m: words.figure(m / curve.per_x, 2))
    inner = words.joined(ends and _SURE + ends, ideal)
    return f"Break-even at {curve.label(words.figure(curve.even.value / curve.per_x, 2))}{words.bracketed(inner)}."


def first_tax(curve: Series) -> str:
    """Describe the tax at the smallest size; "" if unknown or negative (`cautions` reports that)."""
    first = curve.cells[0]
    if first.tax is None or (first.tax.value or 0) <= 0 or not first.original:
        return ""
    what = f"{words.moment(first.tax.value or 0.0)}, {words.percent(first.tax_share or 0.0, 0)} of {curve.other}'s time"
    arrives = first.gain is not None and 0 < first.gain <= 1
    took = f"; {words.percent(first.gain or 0.0, 0)} of the ideal gain was measured" if arrives else ""
    return f"The tax at {curve.label(str(first.x))} is {what}{took}."


def skipped(curve: Series) -> list[str]:
    """List the sizes without a value, with the reason."""
    sentences = []
    for cell in curve.skipped:
        why = next((_NOT_MEASURED[flag] for flag in cell.row.flags if flag in _NOT_MEASURED), "not measured")
        sentences.append(f"{words.sentence(curve.label(f'{cell.x:,}'))}: {why}.")
    return sentences


def cautions(curve: Series) -> list[str]:
    """Describe the flags of a curve's cells, once each, with their sizes."""
    return [f"{at}: {text}" for flag, text in _FLAGS.items() if (at := _flagged(curve, flag))]


def _flagged(curve: Series, flag: str) -> str:
    xs = [cell.x for cell in curve.cells if flag in cell.flags]
    return "" if not xs else EVERY if len(xs) == len(curve.cells) > 1 else f"at {curve.label(words.listed(xs))}"


def shared_cautions(several: Sequence[Series]) -> list[str]:
    """Describe the flags of all curves, once each, with the curves and their sizes."""
    texts = []
    for flag, text in _FLAGS.items():
        by_place = words.by([(at, curve) for curve in several if (at := _flagged(curve, flag))], lambda pair: pair[0])
        places = []
        for at, pairs in by_place.items():
            places.append(at if len(pairs) == len(several) else f"{_titles([curve for _, curve in pairs])}, {at}")
        texts += [f"{'; '.join(places)}: {text}"] if places else []
    return texts


def _titles(several: Sequence[Series]) -> str:
    titles = [curve.title for curve in several]
    return " and ".join([titles[0], *(title[:1].lower() + title[1:] for title in titles[1:])])


def measured(curve: Series) -> str:
    """Format `p50 of 60 steps a side at each size, interleaved (ABBA)`; "" if the count is unknown."""
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
    """Describe the method of a curve: number of measurements and noise."""
    noise = "~ marks noise" if any(cell.doubtful for cell in curve.cells) else ""
    return words.joined(measured(curve), spread(curve), noise, by="; ")


def few_steps(several: Sequence[Series]) -> str:
    """Name the 99th percentiles based on few steps, once for all curves; "" without any."""
    flags = [["p99-from-few" in cell.flags for cell in curve.cells] for curve in several]
    if not any(map(any, flags)):
        return ""
    return f"{'The' if all(map(all, flags)) else 'Some'} 99th percentiles rest on few steps."


def conditions(several: Sequence[Series], rows: Sequence[Row]) -> list[str]:
    """List the conditions of all curves, once each, and the reference of the bandwidth's share."""
    sentences = list(dict.fromkeys(text for curve in several if (text := setting(curve))))
    if few := few_steps(several):
        sentences.append(few[:1].lower() + few[1:].rstrip("."))
    read = next((row for row in rows if row.name == "ceiling.read" and row.value is not None), None)
    if read is not None and any(cell.share_read for curve in several for cell in curve.cells):
        rate = words.rate(read.value or 0.0, read.unit)
        sentences.append(f"of read: effective bandwidth, as a share of the read bandwidth in the same run, {rate}")
    return sentences


def brief(curve: Series) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of a narrow table for a terminal; times are `original → this`, `~` marks noise.

    Columns: size, p50, speed-up, its 95 % interval, p99, new tokens a second and, if known, the effective bandwidth as
    a share of the machine's read bandwidth.
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
