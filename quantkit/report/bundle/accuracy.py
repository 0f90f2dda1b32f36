"""The page's section on accuracy: what a bundle's exports get right, with intervals, beside the original.

Forest plots, one a measure, each with every export, no change, and the gate of the recipe. Shares of right answers
(top-1, top-5, recall) stand beside the original's, and their changes, which are paired, have a plot of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.report.kit import axes, charts, shares, words
from quantkit.report.kit.charts import ChartPoint, Mark
from quantkit.report.kit.tree import Exhibit, Plot, Sheet
from quantkit.report.kit.words import Form, Interval

_HEAD = ("measure", "export", "value", "95 % interval", "")


@dataclass(frozen=True)
class _Measure:
    """How one measure of accuracy is drawn: `same` is its value where nothing has changed, `gate` the recipe's key."""

    title: str
    axis: str
    same: float
    gate: str
    form: Form
    tick: Form
    read: Callable[[Row], tuple[float, Interval | None] | None]


def _itself(row: Row) -> tuple[float, Interval | None] | None:
    return None if row.value is None else (row.value, row.ci95)


def _against_original(row: Row) -> tuple[float, Interval | None] | None:
    """How many times the original's, from a ratio that says how many times better."""
    base = row.baseline
    if base is None or not base.ratio or base.ratio <= 0:
        return None
    sure = base.ratio_ci95
    return 1 / base.ratio, (1 / sure[1], 1 / sure[0]) if sure and sure[0] > 0 else None


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


_MEASURES = {
    "accuracy.perplexity": _Measure(
        "Perplexity, times the original's",
        "ratio (lower is better)",
        1.0,
        "perplexity_ratio_max",
        lambda v: f"{v:.3f}×",
        lambda v: f"{v:g}×",
        _against_original,
    ),
    "accuracy.kl": _Measure(
        "KL divergence from the original",
        "nats (lower is better)",
        0.0,
        "kl_max",
        lambda v: words.figure(v, 3),
        lambda v: f"{v:g}",
        _itself,
    ),
    "accuracy.top1_agreement": _Measure(
        "Same most likely word as the original",
        "of positions (higher is better)",
        1.0,
        "top1_agreement_min",
        words.percent,
        _percent,
        _itself,
    ),
    "classes": _Measure(
        "Same class as the original",
        "of samples (higher is better)",
        1.0,
        "agreement_min",
        words.percent,
        _percent,
        _itself,
    ),
    "accuracy.cosine": _Measure(
        "Cosine to the original",
        "cosine (higher is better)",
        1.0,
        "cosine_min",
        lambda v: words.figure(v, 5),
        lambda v: f"{v:g}",
        _itself,
    ),
    "accuracy.relative_error": _Measure(
        "Error relative to the original",
        "of the outputs' size (lower is better)",
        0.0,
        "",
        lambda v: words.percent(v, 2),
        _percent,
        _itself,
    ),
    "accuracy.same": _Measure(
        "Same boxes and values as the original",
        "of both sides' (higher is better)",
        1.0,
        "",
        words.percent,
        _percent,
        _itself,
    ),
}
# gates on changes of shares, in points of percent
_DROPS = {"accuracy.top1": "top1_drop_max", "accuracy.recall_at_1": "recall_drop_max"}


def accuracy(manifest: Manifest, rows: Sequence[Row]) -> list[Exhibit]:
    """Right answers and their change, then how far the outputs have moved."""
    gates = {gate: v for gate, v in (manifest.recipe.get("gates") or {}).items() if isinstance(v, int | float)}
    known = [row for row in rows if row.value is not None]
    found: list[Exhibit] = []
    answers = [row for name in shares.NAMES for row in known if row.name == name]
    if answers:
        sides = [(charts.QUANTIZED, "this model"), (charts.ORIGINAL, "the original")]
        keys = sides if any(row.baseline is not None for row in answers) else []
        panels = [_right(answers), *_changes(answers, gates)]
        # of one answer the table below says as much
        found.append(Exhibit([], panels if len(answers) > 1 else [], [], Sheet(_HEAD, _as_text(answers), 1), keys=keys))
    panels, body, said = [], [], []
    for name, measure in _MEASURES.items():
        among = [row for row in known if _measure_of(row) == name]
        drawn = _moved(measure, among, gates)
        if drawn is not None:
            panel, lines = drawn
            body += lines
            if len(lines) > 1:
                panels.append(panel)
            else:
                said.append(_sentence(lines[0], gates.get(measure.gate), measure.tick))
    if body:
        found.append(Exhibit(said, panels, [], Sheet(_HEAD, body, remarks=1)))
    return found


def _sentence(line: Sequence[str], gate: int | float | None, form: Form) -> str:
    """A measure of a single export: `KL divergence from the original: 0.0671 (0.06 to 0.074), gate 0.25.`"""
    title, _, value, sure, _ = line
    limit = f", gate {form(gate)}" if gate is not None else ""
    return f"{title}: {value}{f' ({sure})' if sure != '–' else ''}{limit}."


def _measure_of(row: Row) -> str:
    return "classes" if row.name == "accuracy.top1_agreement" and shares.of_classes(row) else row.name


def _moved(
    measure: _Measure, rows: Sequence[Row], gates: dict[str, int | float]
) -> tuple[Plot, list[list[str]]] | None:
    """One measure of how far outputs have moved; None where no row has it."""
    known = [(row, found) for row in rows if (found := measure.read(row)) is not None]
    if not known:
        return None
    points, body = [], []
    for row, (value, interval) in known:
        label = ", ".join(part for part in (figures.variant(row), _among(row)) if part)
        points.append(ChartPoint(label, value, interval, measure.form(value)))
        shown = words.between(interval, measure.form) or "–"
        body.append([measure.title, label, measure.form(value), shown, figures.flags(row)])
    marks, limit = [Mark(measure.same, "no change")], gates.get(measure.gate)
    if limit is not None:
        marks.append(Mark(float(limit), f"gate {measure.tick(limit)}", dotted=True))
    ends = [end for _, (value, interval) in known for end in (interval or (value, value))]
    across = axes.straight_axis(measure.axis, [*ends, *(mark.x for mark in marks)], form=measure.tick)
    alt = f"{measure.title}, by export, with 95 % intervals"
    return Plot(measure.title, alt, charts.forest(points, across, marks=marks)), body


def _among(row: Row) -> str:
    sure = row.settings.get("surer_than")
    return f"original over {words.percent(sure, 0)} sure" if isinstance(sure, float) else ""


# --- shares of right answers -----------------------------------------------------------------------------------------


def _short(row: Row) -> str:
    return shares.NAMES[row.name].removesuffix(" accuracy")


def _named(row: Row) -> str:
    return ", ".join(part for part in (_short(row), figures.variant(row)) if part)


def _right(rows: Sequence[Row]) -> Plot:
    points = []
    for row in rows:
        form, base = shares.form(row), row.baseline
        text = form(row.value or 0.0) + (f", original {form(base.value)}" if base is not None else "")
        points.append(ChartPoint(_named(row), row.value or 0.0, row.ci95, text, beside=base.value if base else None))
    ends = [end for point in points for end in (*(point.interval or ()), point.value, point.beside or point.value)]
    title = "Right partner found" if rows[0].name in shares.RECALL else "Right answers"
    unit = "pairs" if rows[0].name in shares.RECALL else "samples"
    across = axes.straight_axis(f"of {unit} (higher is better)", ends, form=_percent)
    return Plot(title, f"{title}, by export, with 95 % intervals", charts.forest(points, across))


def _changes(rows: Sequence[Row], gates: dict[str, int | float]) -> list[Plot]:
    points, marks = [], [Mark(0.0, "no change")]
    for row in rows:
        base = row.baseline
        if base is None or base.difference is None:
            continue
        form, sure = shares.points_form(row), words.between(base.difference_ci95, shares.points_form(row))
        test = f", p {words.chance(base.p_value)}" if base.p_value is not None else ""
        text = f"{form(base.difference)}{f' ({sure})' if sure else ''}{test}"
        points.append(ChartPoint(_named(row), base.difference, base.difference_ci95, text))
        limit = gates.get(_DROPS.get(row.name, ""))
        if limit is not None:
            mark = Mark(-limit / 100, f"gate of {_short(row)} {words.points(-limit / 100, 2)}", dotted=True)
            marks += [mark] if mark not in marks else []
    if not points:
        return []
    ends = [end for point in points for end in (point.interval or (point.value, point.value))]
    across = axes.straight_axis(
        "points of percent (higher is better)",
        [*ends, *(mark.x for mark in marks)],
        form=lambda v: f"{100 * v:g}".replace("-", "−"),
    )
    title = "Change against the original"
    alt = "Changes of the shares of right answers, by export, with paired 95 % intervals"
    return [Plot(title, alt, charts.forest(points, across, marks=marks))]


def _as_text(rows: Sequence[Row]) -> list[list[str]]:
    body = []
    for row in rows:
        form, base, label = shares.form(row), row.baseline, shares.NAMES[row.name]
        sure = words.between(row.ci95, form) or "–"
        body.append([label, figures.variant(row), form(row.value or 0.0), sure, figures.flags(row)])
        if base is not None and base.difference is not None:
            points = shares.points_form(row)
            test = f"McNemar p {words.chance(base.p_value)}" if base.p_value is not None else ""
            paired = words.between(base.difference_ci95, points) or "–"
            change = [f"change of {label}, points", figures.variant(row), points(base.difference), paired, test]
            body.append(change)
    return body


# --- before and after ------------------------------------------------------------------------------------------------


def traps(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    """What the rows' flags say of the source that no note does."""
    found = []
    for flag in dict.fromkeys(flag for row in rows for flag in row.flags if flag.startswith("source-was-")):
        was = flag.removeprefix("source-was-").replace("-", " ")
        if not any(was in note.lower() for note in notes):
            rest = "the original that everything is held against has its rounding already"
            found.append(f"The source was converted from {was}: {rest}")
    return found
