"""Accuracy section of a bundle's report: every export against the original, with intervals.

Each measure has a forest plot with every export, a mark for no change, and the recipe's gate. Shares of right answers
(top-1, top-5, recall) stand beside the original's; a second plot shows their paired changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.report.kit import charts, words
from quantkit.report.kit.charts import ChartPoint, Mark, Plot
from quantkit.report.kit.tree import Exhibit, Sheet
from quantkit.report.kit.words import Form, Interval

_HEAD = ("measure", "export", "value", "95 % interval", "")


class _Measure(NamedTuple):
    """Look of one measure: `same` is its value for an unchanged model, `gate` the recipe's key."""

    title: str
    axis: str
    same: float
    gate: str
    form: Form
    tick: Form


def _three(value: float) -> str:
    return f"{value:.3f}×"


def _five(value: float) -> str:
    return words.figure(value, 5)


def _hundredth(value: float) -> str:
    return words.percent(value, 2)


_PART, _TICK, _PLAIN = words.percent, words.whole_tick, "{:g}".format
_MORE, _LESS = "(higher is better)", "(lower is better)"
_WORD, _CLASS = "Same most likely word as the original", "Same class as the original"
_BOXES = "Same boxes and values as the original"
_MEASURES = {
    "accuracy.perplexity": _Measure(
        "Perplexity over the original's", f"ratio {_LESS}", 1.0, "perplexity_ratio_max", _three, words.ratio
    ),
    "accuracy.kl": _Measure("KL divergence from the original", f"nats {_LESS}", 0.0, "kl_max", words.short, _PLAIN),
    "accuracy.top1_agreement": _Measure(_WORD, f"of positions {_MORE}", 1.0, "top1_agreement_min", _PART, _TICK),
    "classes": _Measure(_CLASS, f"of samples {_MORE}", 1.0, "agreement_min", _PART, _TICK),
    "accuracy.cosine": _Measure("Cosine to the original", f"cosine {_MORE}", 1.0, "cosine_min", _five, _PLAIN),
    "accuracy.relative_error": _Measure(
        "Error relative to the original", f"of the outputs' size {_LESS}", 0.0, "", _hundredth, _TICK
    ),
    "accuracy.same": _Measure(_BOXES, f"of both sides' {_MORE}", 1.0, "", _PART, _TICK),
}
# gates on changes of shares, in percentage points
_DROPS = {"accuracy.top1": "top1_drop_max", "accuracy.recall_at_1": "recall_drop_max"}


def accuracy(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """Build the charts: right answers and their changes, then the differences of the outputs."""
    gates = {gate: v for gate, v in (manifest.recipe.get("gates") or {}).items() if isinstance(v, int | float)}
    known = [row for row in rows if row.value is not None]
    exhibits: list[Exhibit] = []
    answers = [row for name in figures.SHARES for row in known if row.name == name]
    if answers:
        sides = [(charts.QUANTIZED, "this model"), (charts.ORIGINAL, "the original")]
        keys = sides if any(row.baseline is not None for row in answers) else []
        # one answer needs no chart: the table below has it
        panels = [_right(answers), *_changes(answers, gates)] if len(answers) > 1 else []
        exhibits.append(Exhibit([], panels, [], Sheet(_HEAD, _as_text(answers), 1), keys=keys))
    panels, body, sentences = [], [], []
    for name, measure in _MEASURES.items():
        of_it = [row for row in known if _measure_of(row) == name]
        panel, lines = _moved(measure, of_it, gates.get(measure.gate))
        body += lines
        if panel is not None:
            panels.append(panel)
        elif lines:
            sentences.append(_sentence(lines[0], gates.get(measure.gate), measure.tick))
    repeats = not panels and len(sentences) == len(body)  # the sentences are the data
    table = Sheet([], []) if repeats else Sheet(_HEAD, body, remarks=1)
    return [*exhibits, *([Exhibit(sentences, panels, [], table)] if body else [])]


def _sentence(line: Sequence[str], gate: int | float | None, form: Form) -> str:
    """Format `KL divergence from the original: 0.0671 (0.06 to 0.074), gate 0.25.`"""
    title, _, value, sure, _ = line
    limit = f", gate {form(gate)}" if gate is not None else ""
    return f"{title}: {value}{words.bracketed(sure if sure != '–' else '')}{limit}."


def _measure_of(row: Row) -> str:
    return "classes" if row.name == "accuracy.top1_agreement" and figures.of_classes(row) else row.name


def _value(row: Row) -> tuple[float, Interval | None] | None:
    """Return a measure and its interval. Perplexity is returned over the original's; a row's ratio is the inverse."""
    if row.name != "accuracy.perplexity":
        return row.value or 0.0, row.ci95
    base = row.baseline
    if base is None or not base.ratio or base.ratio <= 0:
        return None
    sure = base.ratio_ci95
    return 1 / base.ratio, (1 / sure[1], 1 / sure[0]) if sure and sure[0] > 0 else None


def _moved(measure: _Measure, rows: Sequence[Row], limit: int | float | None) -> tuple[Plot | None, list[list[str]]]:
    points, body = [], []
    for row in rows:
        if (known := _value(row)) is None:
            continue
        (value, interval), sure = known, row.settings.get("surer_than")
        among = f"original over {words.whole(sure)} sure" if isinstance(sure, float) else ""
        label, shown = words.joined(figures.variant(row), among), measure.form(value)
        points.append(ChartPoint(label, value, interval, shown))
        between = words.between(interval, measure.form) or "–"
        body.append([measure.title, label, shown, between, figures.flags(row)])
    if len(points) < 2:
        return None, body
    marks = [Mark(measure.same, "no change")]
    if limit is not None:
        marks.append(Mark(float(limit), f"gate {measure.tick(limit)}", dotted=True))
    alt = f"{measure.title}, by export, with 95 % intervals"
    return _forest(measure.title, alt, measure.axis, points, measure.tick, marks), body


def _forest(
    title: str, alt: str, axis: str, points: Sequence[ChartPoint], tick: Form, marks: Sequence[Mark] = ()
) -> Plot:
    ends = [end for point in points for end in (*(point.interval or ()), point.value, point.beside or point.value)]
    across = charts.straight_axis(axis, [*ends, *(mark.x for mark in marks)], form=tick)
    return Plot(title, alt, charts.forest(points, across, marks=marks))


# --- shares of right answers -----------------------------------------------------------------------------------------


def _short(row: Row) -> str:
    return figures.SHARES[row.name].removesuffix(" accuracy")


def _right(rows: Sequence[Row]) -> Plot:
    points = []
    for row in rows:
        form, base, value = figures.share_form(row), row.baseline, row.value or 0.0
        text = form(value) + (f", original {form(base.value)}" if base is not None else "")
        label = words.joined(_short(row), figures.variant(row))
        points.append(ChartPoint(label, value, row.ci95, text, beside=base.value if base else None))
    paired = rows[0].name in figures.RECALL
    title, unit = ("Right partner found", "pairs") if paired else ("Right answers", "samples")
    alt = f"{title}, by export, with 95 % intervals"
    return _forest(title, alt, f"of {unit} {_MORE}", points, words.whole_tick)


def _changes(rows: Sequence[Row], gates: dict[str, int | float]) -> list[Plot]:
    points, marks = [], [Mark(0.0, "no change")]
    for row in rows:
        base = row.baseline
        if base is None or base.difference is None:
            continue
        form = figures.points_form(row)
        test = f", p {words.chance(base.p_value)}" if base.p_value is not None else ""
        text = f"{form(base.difference)}{words.bracketed(words.between(base.difference_ci95, form))}{test}"
        label = words.joined(_short(row), figures.variant(row))
        points.append(ChartPoint(label, base.difference, base.difference_ci95, text))
        if (limit := gates.get(_DROPS.get(row.name, ""))) is not None:
            mark = Mark(-limit / 100, f"gate of {_short(row)} {words.points(-limit / 100, 2)}", dotted=True)
            marks += [mark] if mark not in marks else []
    if not points:
        return []
    alt = "Changes in the share of right answers, by export, with paired 95 % intervals"
    axis, title = f"percentage points {_MORE}", "Change against the original"
    return [_forest(title, alt, axis, points, lambda v: f"{100 * v:g}".replace("-", "−"), marks)]


def _as_text(rows: Sequence[Row]) -> list[list[str]]:
    body = []
    for row in rows:
        form, base, label = figures.share_form(row), row.baseline, figures.SHARES[row.name]
        sure, of = words.between(row.ci95, form) or "–", figures.variant(row)
        body.append([label, of, form(row.value or 0.0), sure, figures.flags(row)])
        if base is not None and base.difference is not None:
            points = figures.points_form(row)
            test = f"McNemar p {words.chance(base.p_value)}" if base.p_value is not None else ""
            paired = words.between(base.difference_ci95, points) or "–"
            body.append([f"change of {label}, points", of, points(base.difference), paired, test])
    return body


def traps(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """Return a warning for each flag about the source, unless a note mentions it already."""
    sentences = []
    for flag in dict.fromkeys(flag for row in rows for flag in row.flags if flag.startswith("source-was-")):
        was = flag.removeprefix("source-was-").replace("-", " ")
        if not any(was in note.lower().replace("-", " ") for note in notes):
            rest = "the original, the reference of all figures here, contains its rounding already"
            sentences.append(f"The source was converted from {was}: {rest}")
    return sentences
