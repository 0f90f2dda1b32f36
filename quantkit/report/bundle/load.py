"""Section of a bundle's report about its load: latency and goodput against the rate, beside the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.bundle import Manifest
from quantkit.measurement.load import LATENCIES, QUANTILES, LoadVerdict, outcome
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves
from quantkit.report.kit import words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve, Plot, lines, over, points_axis, straight_axis
from quantkit.report.kit.tree import Exhibit, On, Part, Remark, Sheet, Styled
from quantkit.report.kit.words import Interval

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_RATES = {"requests": "requests/s", "tokens": "output tokens/s", "goodput": "goodput, requests/s"}
_ACROSS = "requests a second that arrive"


def parts(manifest: Manifest, rows: Sequence[Row]) -> list[Part]:
    """Build the section; nothing without rows of a load."""
    loaded = [row for row in rows if row.name.startswith("load.")]
    if not loaded:
        return []
    turns = "one server at a time, A B B A, the same prompts and arrivals for both"
    return _parts(loaded, *curves.names(manifest, loaded[0]), outcome(loaded), turns)


def against(loaded: Sequence[Row]) -> list[Part]:
    """Build the section of a comparison of two bundles."""
    turns = "each in a run of its own, beside its original, with the same prompts and arrivals"
    return _parts(loaded, "B", "A", outcome(loaded, "B", "A"), turns)


def _parts(loaded: Sequence[Row], this: str, other: str, judged: LoadVerdict | None, turns: str) -> list[Part]:
    rates = sorted({_rate(row) for row in loaded if "rate" in row.settings})
    head: list[Part] = []
    if judged is not None:
        tone = "inconclusive" if judged.better is None else "good" if judged.better else "bad"
        head.append(Remark((Styled(f"{words.sentence(judged.text)}.", tone),)))
    plots = [*_latencies(loaded, rates, this, other), *_goodput(loaded, rates, this, other)] if len(rates) > 1 else []
    how = [f"{words.sentence(text)}." for text in _how(loaded, turns)]
    brief = [_brief(loaded, rates), *(Remark(text, "caption") for text in how)]
    caution = [Remark("Some requests failed.", "caution")] if any("failed" in row.settings for row in loaded) else []
    several = Exhibit([], plots, how, _sheet(loaded, rates), title="Latency and goodput by rate")
    return [*head, *caution, *(_on_screen(part) for part in brief), several]


def _on_screen(part: Part) -> Part:
    match part:
        case Sheet(head, rows):
            return Sheet(head, rows, on=On.SCREEN | On.CARD)
        case Remark(text, kind):
            return Remark(text, kind, On.SCREEN | On.CARD)
    return part


def _how(rows: Sequence[Row], turns: str) -> list[str]:
    row, shape = rows[0], rows[0].shape or {}
    limits = {name: row.settings.get(f"slo_{name}") for name in LATENCIES}
    within = ", ".join(f"{name} {words.moment(float(most))}" for name, most in limits.items() if most)
    count = max((row.n or 0 for row in rows if row.name == "load.e2el"), default=0)
    told = [
        f"{shape.get('prompt')} prompt tokens and {shape.get('output')} output tokens a request, Poisson arrivals",
        f"runtime {row.runtime} {row.version}".strip() + (f", {row.device.name}" if row.device else ""),
        turns if row.baseline else "",
        f"up to {count} requests a side at a rate" if count else "",
        f"goodput counts requests within {within}" if within else "",
    ]
    for row in rows:
        before = f"{_form(row)(row.baseline.value)} → " if row.baseline else ""
        if row.name == "load.kv_blocks":
            fits = words.or_dash(row.settings.get("fits"), words.plain)
            told.append(f"KV cache {before}{_form(row)(row.value or 0)} blocks; this one holds {fits} such requests")
        elif row.name == "load.in_flight":
            told.append(f"at most {before}{_form(row)(row.value or 0)} requests at once")
        elif row.name == "load.memory":
            told.append(f"memory of the server's processes {before}{_form(row)(row.value or 0)}")
    return [text for text in told if text]


def _brief(rows: Sequence[Row], rates: Sequence[float]) -> Sheet:
    """Build a narrow table, a unit for each column."""
    head, columns = ["rate"], list[list[str]]()
    for name, quantile in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("goodput", None)):
        cells = [row for rate in rates if (row := _at(rows, rate, name, quantile)) is not None]
        if cells:
            times = [value for row in cells for value in (row.value, row.baseline and row.baseline.value) if value]
            factor, unit = words.time_unit(min(times)) if quantile else (1.0, "")
            head.append(f"{name}\n{quantile}, {unit}" if quantile else name)
            columns.append([_change(row, factor) for row in cells])
    return Sheet(head, [[f"{rate:g}", *line] for rate, line in zip(rates, zip(*columns, strict=True), strict=True)])


def _sheet(rows: Sequence[Row], rates: Sequence[float]) -> Sheet:
    head = [_ACROSS, "of", "original", "this", "95 % interval", "gain", "95 % interval", "A/A", "n", ""]
    body: list[list[str]] = []
    kinds = [(name, quantile) for name in LATENCIES for quantile in QUANTILES]
    for rate in rates:
        for name, quantile in [*kinds, *((name, None) for name in _RATES)]:
            if (row := _at(rows, rate, name, quantile)) is None:
                continue
            form, base = _form(row), row.baseline
            what = f"{_NAMES[name]}, {quantile}" if quantile else _RATES[name]
            line = [f"{rate:g}", what, form(base.value) if base else "–", form(row.value or 0.0)]
            line += [words.between(row.ci95, form) or "–", words.or_dash(base and base.ratio, words.times)]
            line += [words.between(base.ratio_ci95, words.times) or "–" if base else "–"]
            line += [words.or_dash(row.aa_spread, words.percent), f"{row.n:,}" if row.n else "–"]
            body.append([*line, ", ".join(flag.replace("-", " ") for flag in row.flags)])
    return Sheet(head, body, remarks=1, words=2)


def _latencies(rows: Sequence[Row], rates: Sequence[float], this: str, other: str) -> list[Plot]:
    plots = []
    for name in ("ttft", "tpot", "e2el"):
        drawn = _both(rows, rates, name, "p50", this, other)
        if drawn:
            factor, unit = words.time_unit(min(y for one in drawn for y in one.y))
            title, up = words.sentence(_NAMES[name]), f"median, {unit}"
            alt = f"{title} against the rate: {this} and {other}"
            plots.append(over(title, alt, drawn, _ACROSS, up, form=_ticks(factor)))
    return plots


def _ticks(factor: float) -> words.Form:
    return lambda value: f"{value * factor:,g}"


def _goodput(rows: Sequence[Row], rates: Sequence[float], this: str, other: str) -> list[Plot]:
    drawn = _both(rows, rates, "goodput", None, this, other)
    if not drawn:
        return []
    drawn.append(Curve("all", "muted", rates, rates, bound=True))
    top = max(y for one in drawn for y in (*one.y, *(band[1] for band in one.band if band)))
    x, y = points_axis(_ACROSS, rates), straight_axis(_RATES["goodput"], [0.0, top])
    alt = f"Goodput against the rate: {this} and {other}; the horizontal axis is logarithmic"
    return [Plot("Goodput", alt, lines(drawn, x, y))]


def _both(
    rows: Sequence[Row], rates: Sequence[float], name: str, quantile: str | None, this: str, other: str
) -> list[Curve]:
    known = [(rate, row) for rate in rates if (row := _at(rows, rate, name, quantile)) is not None]
    sides: list[tuple[str, str, Callable[[Row], tuple[float | None, Interval | None]]]] = [
        (this, QUANTIZED, lambda row: (row.value, row.ci95)),
        (other, ORIGINAL, lambda row: (row.baseline.value if row.baseline else None, _base_interval(row))),
    ]
    drawn: list[Curve] = []
    for label, colour, value in sides:
        points = [(rate, row, *value(row)) for rate, row in known]
        points = [point for point in points if point[2] is not None]
        if not points:
            continue
        hover = [f"{label} {_form(row)(at or 0.0)}" for _, row, at, _ in points]
        ys, bands = [at or 0.0 for _, _, at, _ in points], [band for *_, band in points]
        drawn.append(Curve(label, colour, [rate for rate, *_ in points], ys, hover, bands))
    return drawn


def _base_interval(row: Row) -> Interval | None:
    low, high = (row.settings.get(f"baseline_{end}") for end in ("low", "high"))
    return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None


def _at(rows: Sequence[Row], rate: float, name: str, quantile: str | None) -> Row | None:
    for row in rows:
        if row.name == f"load.{name}" and _rate(row) == rate and row.settings.get("quantile") == quantile:
            return row
    return None


def _rate(row: Row) -> float:
    rate = row.settings.get("rate")
    return float(rate) if isinstance(rate, int | float) else 0.0


def _change(row: Row, factor: float) -> str:
    both = ([row.baseline.value] if row.baseline else []) + [row.value or 0.0]
    return " → ".join(words.short(value * factor) for value in both)


def _form(row: Row) -> words.Form:
    return {"s": words.moment, "B": words.size}.get(row.unit, words.short)
