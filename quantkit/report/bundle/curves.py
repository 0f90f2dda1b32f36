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
    """One size of a curve: what was measured there, and what bounds it."""

    x: int
    row: Row
    tax: Row | None
    bandwidth: Row | None = None

    @property
    def bound(self) -> float | None:
        """The least time of the quantized side, in seconds."""
        return self.tax.op.bound_s if self.tax is not None and self.tax.op is not None else None

    @property
    def original_bound(self) -> float | None:
        """The least time of the original, in seconds."""
        return self.tax.op.hp_bound_s if self.tax is not None and self.tax.op is not None else None

    @property
    def original(self) -> float | None:
        """The time of the original, in seconds."""
        base = self.row.baseline
        return base.value if base is not None and base.value > 0 else None

    @property
    def ratio(self) -> float | None:
        """How many times as fast the quantized side is."""
        base = self.row.baseline
        return base.ratio if base is not None and (base.ratio or 0) > 0 else None

    @property
    def ratio_ci95(self) -> Interval | None:
        """The interval of that."""
        base = self.row.baseline
        return base.ratio_ci95 if base is not None and base.ratio_ci95 and base.ratio_ci95[0] > 0 else None

    @property
    def doubtful(self) -> bool:
        """Whether its speed-up is noise, or more than bytes and operations allow."""
        speed = speed_up(self.row)
        return bool(NOISY & set(self.row.flags)) or (speed is not None and bool(speed.doubt))

    @property
    def gain(self) -> float | None:
        """How much of the promised gain arrives; None where nothing was promised, the weights may be in a cache, or
        the speed-up is not believed."""
        void = "weights-near-cache" in self.flags or self.doubtful
        return None if self.tax is None or void else captured_gain(self.tax)

    @property
    def promised(self) -> float | None:
        """The ratio of the limits: how many times as fast the format could be."""
        return self.original_bound / self.bound if self.bound and self.original_bound else None

    @property
    def excess(self) -> float | None:
        """What the original takes beyond its own limit, in seconds."""
        return self.original - self.original_bound if self.original and self.original_bound else None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences, a second."""
        return tokens(self.row) * (self.row.batch or 1) / (self.row.value or 1.0)

    @property
    def original_tokens_per_s(self) -> float | None:
        """The same of the original."""
        return tokens(self.row) * (self.row.batch or 1) / self.original if self.original else None

    @property
    def share_read(self) -> float | None:
        """The effective bandwidth as a share of what the machine reads."""
        share = self.bandwidth.settings.get("share_of_ceiling") if self.bandwidth is not None else None
        return share if isinstance(share, float) else None

    @property
    def flags(self) -> list[str]:
        """Of all its rows, each once."""
        return list(dict.fromkeys([*self.row.flags, *(self.tax.flags if self.tax is not None else [])]))


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        title: what was timed.
        cells: measured, ascending.
        skipped: sizes without a value.
        even: its `tax.break_even` row.
        this: short name of the quantized side.
        other: of the original.
        over: what x is: `batch` or `tokens`.
        unit: what one measurement is: `step`, `prompt`, `pass`.
    """

    title: str
    cells: Sequence[CurvePoint]
    skipped: Sequence[CurvePoint]
    even: Row | None
    this: str
    other: str
    over: str
    unit: str

    @classmethod
    def of(
        cls, title: str, cells: Sequence[CurvePoint], even: Row | None, names: tuple[str, str], over: str, unit: str
    ) -> Series:
        """The curve of all its cells, those without a value apart."""
        known = [(cell.row.value or 0) > 0 for cell in cells]
        measured = [cell for cell, there in zip(cells, known, strict=True) if there]
        skipped = [cell for cell, there in zip(cells, known, strict=True) if not there]
        return cls(title, measured, skipped, even, *names, over, unit)

    @property
    def time_unit(self) -> tuple[float, str]:
        """(factor, unit) of its times, both sides'."""
        return words.time_unit(min(value for cell in self.cells for value in (cell.row.value, cell.original) if value))

    def said(self, x: str) -> str:
        """An x in words: `batch 8`, `64 tokens`."""
        return f"batch {x}" if self.over == "batch" else f"{x} tokens"

    @property
    def counted(self) -> str:
        """What a second's worth of work is counted in: a graph takes whole samples, not tokens."""
        return "sample" if self.unit == "pass" and tokens(self.cells[0].row) == 1 else "token"

    @property
    def per_x(self) -> int:
        """M a unit of x: the break-even row of a prefill counts the tokens of all sequences."""
        return 1 if self.over == "batch" else self.cells[0].row.batch or 1

    @property
    def spread(self) -> float | None:
        """The largest A/A spread of its cells."""
        return max((cell.row.aa_spread for cell in self.cells if cell.row.aa_spread is not None), default=None)

    @property
    def ideal(self) -> float | None:
        """The x up to which the roofline promises a gain."""
        ideal = self.even.settings.get("ideal") if self.even is not None else None
        return ideal / self.per_x if isinstance(ideal, int | float) and ideal > 0 else None


def series(manifest: Manifest, rows: Sequence[Row]) -> list[Series]:
    """Decode by runtime and context over the batch, then prefill by runtime and batch over the length.

    A model that does not decode has its forward passes by runtime and length, over the batch.
    """
    decodes = manifest.model.kind == "decoder"
    steps = [row for row in rows if row.name == "latency.decode_step"]
    passes = [row for row in rows if row.name == "latency.prefill"]
    several = len({figures.variant(row) for row in [*steps, *passes]}) > 1
    found = []
    for (variant, context), group in figures.by(steps, lambda row: (figures.variant(row), _context(row))).items():
        title = "Decode" if context is None else f"Decode with {context:,} tokens of context"
        title += f", {variant}" if several else ""
        found.append(_series(manifest, rows, group, title, "batch", "step"))
    for (variant, fixed), group in figures.by(
        passes, lambda row: (figures.variant(row), row.batch if decodes else tokens(row))
    ).items():
        title = "Prefill" if decodes else "Forward pass"
        title += (
            (f" at batch {fixed}" if decodes else f" of {fixed:,} tokens") if fixed and (decodes or fixed > 1) else ""
        )
        title += f", {variant}" if several else ""
        over, unit = ("tokens", "prompt") if decodes else ("batch", "pass")
        found.append(_series(manifest, rows, group, title, over, unit))
    return [curve for curve in found if curve.cells]


def names(manifest: Manifest, row: Row | None = None) -> tuple[str, str]:
    """Short names of the two sides; a bundle of several formats is `quantized`.

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
    """New tokens of a sequence: a prompt's length, 1 in a decode step."""
    shape = row.shape or {}
    return shape.get("new_tokens") or shape.get("tokens") or (1 if row.name == "latency.decode_step" else 0)


def _context(row: Row) -> int | None:
    return (row.shape or {}).get("context")


def _series(manifest: Manifest, rows: Sequence[Row], group: Sequence[Row], title: str, over: str, unit: str) -> Series:
    def at(row: Row) -> int:
        return (row.batch or 0) if over == "batch" else tokens(row)

    cells = [
        CurvePoint(at(row), row, _of(rows, row, "tax.total"), _of(rows, row, "bandwidth.effective"))
        for row in sorted(group, key=at)
        if at(row)
    ]
    return Series.of(title, cells, _even(rows, group[0], over), names(manifest, group[0]), over, unit)


def _of(rows: Sequence[Row], cell: Row, name: str) -> Row | None:
    """The row of that name about the whole step of the same cell."""
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
    """Where the quantized side wins and loses, the break-even point, the tax, the bandwidth, what was not measured."""
    found = outcomes(curve)
    if even := break_even(curve):
        found.append(even)
    if tax := first_tax(curve):
        found.append(tax)
    first = curve.cells[0]
    if first.bandwidth is not None and first.bandwidth.value is not None:
        moved = words.rate(first.bandwidth.value, first.bandwidth.unit)
        ceiling = f", {words.percent(first.share_read, 0)} of what the machine reads" if first.share_read else ""
        found.append(f"The effective bandwidth at {curve.said(str(first.x))} is {moved}{ceiling}.")
    return found + skipped(curve)


def outcomes(curve: Series) -> list[str]:
    """Where it is faster, slower, or nothing can be said."""
    wins: list[int] = []
    losses: list[int] = []
    unsure: list[int] = []
    beyond: list[int] = []
    for cell in curve.cells:
        if (speed := speed_up(cell.row)) is not None:
            low, high = speed.interval
            known = unsure if speed.noisy else wins if low > 1 else losses if high < 1 else unsure
            (beyond if speed.doubt == "ceiling" else known).append(cell.x)
    found = []
    for xs, verb in ((wins, "Faster"), (losses, "Slower")):
        if xs:
            found.append(f"{verb} at {curve.said(words.listed(xs))}.")
    if unsure:
        found.append(f"At {curve.said(words.listed(unsure))} no difference shows above the noise.")
    if beyond:
        said = curve.said(words.listed(beyond))
        found.append(f"At {said} it is faster than bytes and operations allow: a time or a ceiling is wrong.")
    return found


def ideal_end(curve: Series) -> str:
    """The x up to which the roofline promises a gain, in words; empty where it is not known."""
    if curve.ideal is not None:
        return f"to {words.figure(curve.ideal, 2)}"
    flags = curve.even.flags if curve.even is not None else []
    return {"ideal-wins-everywhere": "everywhere", "ideal-wins-nowhere": "nowhere"}.get(
        next((flag for flag in flags if flag.startswith("ideal-wins")), ""), ""
    )


def break_even(curve: Series) -> str:
    """The first end of its gain, with the ideal one; empty where neither is known."""
    ideal = f"ideal {words.figure(curve.ideal, 2)}" if curve.ideal is not None else ""
    if curve.even is None or curve.even.value is None:
        return f"No break-even in what was measured; {ideal}." if ideal else ""
    ends = words.between(curve.even.ci95, lambda m: words.figure(m / curve.per_x, 2))
    inner = ", ".join(part for part in (ends and _SURE + ends, ideal) if part)
    return f"Break-even at {curve.said(words.figure(curve.even.value / curve.per_x, 2))}{bracketed(inner)}."


def first_tax(curve: Series) -> str:
    """The tax at the smallest size; empty where it is not known or negative, which a caution says."""
    first = curve.cells[0]
    if first.tax is None or (first.tax.value or 0) <= 0 or not first.original:
        return ""
    tax = first.tax.value or 0.0
    what = f"{words.moment(tax)}, {words.percent(tax / first.original, 0)} of {curve.other}'s time"
    gain = first.gain
    took = ""
    if gain is not None and 0 < gain <= 1:
        took = f"; {words.percent(gain, 0)} of the promised gain arrives"
    return f"The tax at {curve.said(str(first.x))} is {what}{took}."


def skipped(curve: Series) -> list[str]:
    """Sizes without a value, each with its reason."""
    found = []
    for cell in curve.skipped:
        why = next((_NOT_MEASURED[flag] for flag in cell.row.flags if flag in _NOT_MEASURED), "not measured")
        found.append(f"{words.sentence(curve.said(f'{cell.x:,}'))}: {why}.")
    return found


def cautions(curve: Series) -> list[str]:
    """What the flags of the cells say, each once, with where it holds."""
    found = []
    for flag, text in _FLAGS.items():
        xs = [cell.x for cell in curve.cells if flag in cell.flags]
        if xs:
            at = "at every size" if len(xs) == len(curve.cells) > 1 else f"at {curve.said(words.listed(xs))}"
            found.append(f"{at}: {text}")
    return found


def shared_cautions(found: Sequence[Series]) -> list[str]:
    """Cautions that hold for each of several curves: they are told once."""
    told = [cautions(curve) for curve in found]
    return [text for text in told[0] if all(text in others for others in told)] if len(told) > 1 else []


def measured(curve: Series) -> str:
    """`p50 of 60 steps a side at each size, interleaved (ABBA)`; empty where the rows do not say."""
    counts = sorted({cell.row.n for cell in curve.cells if cell.row.n})
    if not counts:
        return ""
    several = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
    plural = "passes" if curve.unit == "pass" else f"{curve.unit}s"
    return f"p50 of {several} {plural} a side at each size, interleaved (ABBA)"


def setting(curve: Series) -> str:
    """What it ran in and on: threads, runtime with its version, accuracy level, device."""
    row = curve.cells[0].row
    parts = []
    threads = row.settings.get("threads")
    if isinstance(threads, int | float):
        parts.append(words.plural(int(threads), "thread"))
    if row.runtime:
        parts.append(f"{row.runtime} {row.version}".rstrip())
    level = row.settings.get("accuracy_level")
    parts += [f"accuracy level {level}"] if level is not None else []
    parts += [row.device.name] if row.device is not None else []
    return "; ".join(parts)


def how(curve: Series) -> str:
    """How often one curve was measured, and what its noise is."""
    parts = [measured(curve)]
    if curve.spread is not None:
        parts.append(f"A/A spread {words.percent(curve.spread)} at most")
    if any(cell.doubtful for cell in curve.cells):
        parts.append("~ is noise")
    return "; ".join(part for part in parts if part)


def few_steps(found: Sequence[Series]) -> str:
    """Which 99th percentiles rest on few steps, once for all curves; empty where none does."""
    flags = [["p99-from-few" in cell.flags for cell in curve.cells] for curve in found]
    if not any(map(any, flags)):
        return ""
    which = "The" if all(map(all, flags)) else "Some"
    return f"{which} 99th percentiles rest on few steps."


def conditions(found: Sequence[Series], rows: Sequence[Row]) -> list[str]:
    """What all curves were measured in and on, each once, and what a share of the read bandwidth is a share of."""
    said = list(dict.fromkeys(text for curve in found if (text := setting(curve))))
    if few := few_steps(found):
        said.append(few[:1].lower() + few[1:].rstrip("."))
    if (rate := read_rate(rows)) and any(cell.share_read for curve in found for cell in curve.cells):
        said.append(f"of read: effective bandwidth, as a share of the {rate} that was read in the same run")
    return said


def read_rate(rows: Sequence[Row]) -> str:
    """The measured read bandwidth; empty where there is none."""
    row = next((row for row in rows if row.name == "ceiling.read" and row.value is not None), None)
    return words.rate(row.value, row.unit) if row is not None and row.value is not None else ""


def bracketed(text: str) -> str:
    """` (text)`; empty for nothing."""
    return f" ({text})" if text else ""


# --- a small table ---------------------------------------------------------------------------------------------------


def brief(curve: Series) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of the few columns that fit a terminal; times `original → this` in the unit that the head names.

    Columns: size, p50, speed-up, its 95 % interval, p99, new tokens a second and, where it is known, the effective
    bandwidth as a share of what the machine reads. `~` marks what noise swamps.
    """
    factor, unit = curve.time_unit
    shares = any(cell.share_read is not None for cell in curve.cells)
    head = [
        curve.over,
        f"p50, {unit}",
        "speed-up",
        "95 %",
        f"p99, {unit}",
        f"{curve.counted}/s",
        *(["of read"] if shares else []),
    ]

    def change(before: object, after: object) -> str:
        known = [words.figure(value * factor, 3) for value in (before, after) if isinstance(value, int | float)]
        return " → ".join(known)

    body = []
    for cell in curve.cells:
        noisy = "~" if cell.doubtful else ""
        body.append(
            [
                f"{cell.x:,}",
                change(cell.original, cell.row.value),
                words.or_dash(cell.ratio, lambda ratio, mark=noisy: f"{mark}{words.times(ratio)}"),  # type: ignore[misc]
                words.between(cell.ratio_ci95, lambda ratio: words.figure(ratio, 3)) or "–",
                change(cell.row.settings.get("baseline_p99"), (cell.row.quantiles or {}).get("p99")) or "–",
                words.figure(cell.tokens_per_s, 3),
                *([words.or_dash(cell.share_read, lambda share: words.percent(share, 0))] if shares else []),
            ]
        )
    return head, body
