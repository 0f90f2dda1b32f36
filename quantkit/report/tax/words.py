"""What `quantkit tax` found, as curves and words: where each format wins, what its verdict says, the ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.bundle import Verdict
from quantkit.measurement.rows import Row
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.report.bundle import curves, figures
from quantkit.report.bundle.curves import CurvePoint, Series
from quantkit.report.kit import words
from quantkit.report.kit.tree import Sheet
from quantkit.target import Target

# what a verdict says, and in which tone
_ANSWERS = {
    "ship_it": ("ship {format}", "good"),
    "ship_up_to": ("ship {format} up to batch {batch}", "good"),
    "use_instead": ("use {format} instead{upto}", "good"),
    "intervals": ("{format} wins at some batches only", "open"),
    "inconclusive": ("not decided about {format}", "inconclusive"),
    "do_not_quantize": ("do not quantize{about} here", "bad"),
    "not_measured": ("{format} was not timed", "open"),
}
# of the figures of a target that a ceiling can be held against
_STATED = {"ceiling.read": "memory.read_bandwidth"}
_CEILINGS = {"ceiling.read": "read", "ceiling.copy": "copy", "ceiling.compute": "products", "ceiling.launch": "launch"}


@dataclass(frozen=True)
class Taxed:
    """What was asked and found.

    Args:
        shapes: the linears.
        target: whose figures stand beside the measured ceilings.
        rows: of all thread counts.
        verdicts: threads -> the verdict on each variant; 0 is a GPU.
        advice: threads -> what to do.
        traffic: batch -> share of the steps, if it was given.
        notes: what a reader must know.
        baseline: the high-precision variant.
        version: of quantkit.
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

    @property
    def title(self) -> str:
        """The model, or the shapes."""
        return self.shapes.name or ", ".join(linear.label for linear in self.shapes.linears)


@dataclass(frozen=True)
class CurveGroup:
    """The curves of one shape, or of the sum over a model's linears, with one number of threads."""

    title: str
    threads: int
    whole: bool
    series: Sequence[Series]


def groups(data: Taxed) -> list[CurveGroup]:
    """The sum over a model first, then shape by shape; each with every number of threads."""
    timed = [row for row in data.rows if row.name == "latency.op" and row.op is not None and row.batch]
    keyed = figures.by(sorted(timed, key=lambda row: _shape(row) != ""), lambda row: (_shape(row), _threads(row)))
    named = {linear.label: linear for linear in data.shapes.distinct()}
    found = []
    for (label, threads), rows in keyed.items():
        title = data.title
        if label:
            linear = named[label]
            often = f": {linear.name}, {words.plural(linear.count, 'time')}" if data.shapes.name else ""
            title = f"{label}{often}"
        variants = dict.fromkeys(str(row.settings["variant"]) for row in rows if row.baseline or row.value is None)
        series = [_series(data, rows, variant) for variant in variants]
        of = [each for each in series if each.cells or each.skipped]
        found.append(CurveGroup(f"{title}, {on(threads)}", threads, not label, of))
    return found


def on(threads: int) -> str:
    """`2 threads`, or `GPU`."""
    return words.plural(threads, "thread") if threads else "GPU"


def _threads(row: Row) -> int:
    threads = row.settings.get("threads")
    return int(threads) if isinstance(threads, int | float) else 0


def _shape(row: Row) -> str:
    """`768x768`; empty of the sum over a model."""
    return f"{row.op.K}x{row.op.N}" if row.op is not None and row.op.layer is None else ""


def _series(data: Taxed, timed: Sequence[Row], variant: str) -> Series:
    mine = sorted((row for row in timed if row.settings["variant"] == variant), key=lambda row: row.batch or 0)
    label, threads = _shape(mine[0]), _threads(mine[0])
    beside = {
        (row.name, row.batch): row
        for row in reversed(data.rows)
        if row.op is not None and (row.settings.get("variant"), _threads(row), _shape(row)) == (variant, threads, label)
    }
    cells = [CurvePoint(row.batch or 0, row, beside.get(("tax.total", row.batch))) for row in mine]
    # the title has the whole name; at the ends of lines there is room for the format alone
    names = variant.partition(".")[0], data.baseline
    return Series.of(variant, cells, beside.get(("tax.break_even", None)), names, "batch", "pass")


def said(verdict: Verdict) -> tuple[str, str]:
    """(the answer in words, its tone)."""
    text, tone = _ANSWERS.get(verdict.answer, (verdict.answer.replace("_", " "), "open"))
    upto = f", up to batch {verdict.batch}" if verdict.batch else ""
    about = f" to {verdict.format}" if verdict.format else ""
    return text.format(format=verdict.format or "it", batch=verdict.batch, upto=upto, about=about), tone


def wins(series: Series) -> str:
    """The ranges of batches in which it surely wins, with the 95 % intervals of their ends: `1 to 13.5 (12.9–14.2)`."""
    if series.even is None:
        return ""
    settings, found = series.even.settings, []
    for i in range(1, int(settings.get("wins") or 0) + 1):
        ends = []
        for end, edge in (("from", "measured_from"), ("to", "measured_to")):
            value, low, high = (settings.get(f"win_{i}_{end}{part}") for part in ("", "_low", "_high"))
            text = words.figure(float(value or settings.get(edge) or 0), 3).removesuffix(".00")
            if isinstance(low, int | float) and isinstance(high, int | float):
                text += f" ({words.figure(low, 3)}–{words.figure(high, 3)})"
            ends.append(text if value is not None else f"{text} (the {'first' if end == 'from' else 'last'} measured)")
        found.append(" to ".join(ends))
    return "; ".join(found) or "nowhere"


def ceilings(data: Taxed) -> Sheet:
    """Threads, what, measured, its interval, by what, and the target's own figure."""
    body = []
    for row in data.rows:
        if row.name not in _CEILINGS:
            continue
        kind = str(row.settings.get("compute_type") or "")
        place = _STATED.get(row.name, f"compute.{kind}" if row.name == "ceiling.compute" else "")
        figure, stated = data.target.figures().get(place), "–"
        if figure is not None:
            stated = words.rate(figure.number, figure.unit) if figure.number is not None else "not measured yet"

        def form(value: float, unit: str = row.unit) -> str:
            return words.moment(value) if unit == "s" else words.rate(value, unit)

        value = form(row.value) if row.value is not None else "not measured"
        what = f"{_CEILINGS[row.name]} {kind}".strip()
        by = str(row.settings.get("kernel") or "–")
        body.append([str(_threads(row) or "–"), what, value, words.between(row.ci95, form) or "–", by, stated])
    return Sheet(["threads", "ceiling", "measured", "95 % interval", "by", "target says"], body, 2, words=2)


def last_level_cache(data: Taxed) -> float:
    """Bytes, as the run took them; 0 where it does not say."""
    sizes = (row.settings.get("last_level_cache") for row in data.rows)
    return next((float(size) for size in sizes if isinstance(size, int | float)), 0.0)


def explained(data: Taxed) -> list[str]:
    """Say what the columns are, a sentence each."""
    cache = last_level_cache(data)
    beyond, name = f" ({words.size(cache)})" if cache else "", data.baseline
    split = (
        " Where the kernel is ours, a twin with the same loads and no decoding splits it: see the page."
        if any(row.name == "tax.decode" for row in data.rows)
        else " The runtime is a black box: only the sum is known."
    )
    return [
        f"p50: {name} → this, of a product (of a model: of all its linears, each as often as it occurs). ideal: the"
        " ratio of their limits, which the format promises; gain: how much of the promised gain arrives.",
        f"tax: what it takes beyond its limit, also as a share of {name}'s time; slack: {name}'s excess over its own"
        f" limit.{split}",
        f"Weights rotate through copies of at least three times the last-level cache{beyond}; sides are interleaved"
        " (ABBA); A/A: what two measurements of one side differ by; ~ marks noise.",
    ]


def line(cell: CurvePoint, factor: float) -> list[str]:
    """Write the cells of one batch; times in the unit of `factor`."""

    def time_(seconds: float | None) -> str:
        return words.figure(seconds * factor, 3) if seconds is not None else "–"

    tax, sure = cell.tax.value if cell.tax is not None else None, cell.ratio_ci95
    share = tax / cell.original if tax is not None and cell.original else None
    noisy = "~" if cell.doubtful else ""
    return [
        f"{cell.x:,}",
        f"{time_(cell.original)} → {time_(cell.row.value)}",
        words.or_dash(cell.ratio, lambda ratio: f"{noisy}{words.times(ratio)}"),
        f"{words.figure(sure[0], 2)}–{words.figure(sure[1], 2)}" if sure else "–",
        words.or_dash(cell.promised, words.times),
        words.or_dash(cell.gain, lambda gain: words.percent(gain, 0) if gain <= 1 else "?"),
        time_(tax),
        words.or_dash(share, lambda v: words.percent(v, 0)),
        time_(cell.excess),
        words.or_dash(cell.row.aa_spread, lambda v: words.percent(v, 0)),
    ]


def outcomes(series: Series) -> list[str]:
    """Say where it wins, its break-even point, what was left out."""
    return [*curves.outcomes(series), *(text for text in [curves.break_even(series)] if text), *curves.skipped(series)]
