"""Mixed precision on the page: harm against bytes as layers are kept high, and what each layer harms alone."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.accuracy.harm import MixedPoint, MixedSearch
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.charts import QUANTIZED, BarPart, Curve, Mark
from quantkit.report.kit.tree import Exhibit, Plot, Sheet

# layers that are drawn; the table has all
_SHOWN = 6
# room for ticks such as 0.0001
_LEFT = 76


def sections(mixed: MixedSearch | None) -> list[Exhibit]:
    """The curve, and the layers behind it."""
    if mixed is None:
        return []
    panels = [_curve(mixed)]
    if mixed.layers:
        panels.append(_alone(mixed))
    keys = [(QUANTIZED, "compiled and scored")] + (
        [("ink", "the choice, and what it keeps high")] if mixed.chosen is not None else []
    )
    how = (
        "A point keeps the layers before it high as well, in the order of their harm for what quantizing them saves. "
        f"Scored on {mixed.scored}, which guided this choice and no other figure of this page."
    )
    sheet = Sheet(["kept high", "weights", mixed.what, "95 % interval", "layer"], _steps(mixed), remarks=1)
    found = [Exhibit(said(mixed), panels, [how], sheet, keys=keys, title="Mixed precision")]
    if len(mixed.layers) > _SHOWN:
        rows = [[each.name, words.figure(each.harm, 3), words.size(each.bytes)] for each in mixed.layers]
        found.append(Exhibit([], [], [], Sheet(["layer", f"alone: {mixed.alone or mixed.what}", "saves"], rows)))
    return found


def said(mixed: MixedSearch) -> list[str]:
    """What was chosen, what it costs, and what all of it in low precision would have harmed."""
    first = mixed.steps[0]
    low = f"With nothing kept high, {mixed.what}: {words.figure(first.harm, 3)} at {words.size(first.bytes)}."
    if mixed.chosen is None:
        limit = f" of {mixed.limit:g}" if mixed.limit is not None else ""
        return [low, f"No point of the curve meets the gate{limit}."]
    step = mixed.steps[mixed.chosen]
    if mixed.chosen == 0:
        return [
            low,
            "That meets the gate, so nothing was kept high." if mixed.limit is not None else "That was chosen.",
        ]
    more = words.percent(step.bytes / first.bytes - 1) if first.bytes else "–"
    what = words.plural(len(step.kept), "layer")
    return [low, f"Keeping {what} high brings it to {words.figure(step.harm, 3)}, for {more} more bytes."]


def _curve(mixed: MixedSearch) -> Plot:
    steps = mixed.steps
    sizes = [step.bytes / 1e6 for step in steps]
    hover = [f"{len(step.kept)} kept high, {words.size(step.bytes)}, {words.figure(step.harm, 3)}" for step in steps]
    curves = [Curve("", QUANTIZED, sizes, [step.harm for step in steps], hover, band=[step.ci95 for step in steps])]
    x = axes.straight_axis("weights, MB", sizes)
    marks = []
    if mixed.chosen is not None:
        step = steps[mixed.chosen]
        curves.append(Curve("", "ink", [step.bytes / 1e6], [step.harm], [hover[mixed.chosen]]))
        marks.append(Mark(step.bytes / 1e6, f"chosen: {words.plural(len(step.kept), 'layer')} kept high"))
    ends = [end for step in steps for end in (step.harm, *(step.ci95 or ()))]
    if mixed.limit is not None:
        curves.append(Curve(f"gate {mixed.limit:g}", "muted", list(x.range), [mixed.limit] * 2, bound=True))
        ends.append(mixed.limit)
    # a logarithm shows the fall by orders of magnitude; where it reaches 0 there is none
    log = min(ends) > 0 and max(ends) > 4 * min(ends)
    y = axes.log_axis(mixed.what, ends) if log else axes.straight_axis(mixed.what, [0.0, *ends])
    figure = charts.lines(curves, x, y, marks=marks)
    figure["layout"]["margin"]["l"] = _LEFT
    return Plot("Harm against bytes", f"{mixed.what}, falling as more layers are kept high", figure)


def _alone(mixed: MixedSearch) -> Plot:
    kept = set(mixed.steps[mixed.chosen].kept) if mixed.chosen is not None else set()
    shown, what = mixed.layers[:_SHOWN], mixed.alone or mixed.what
    parts = [
        BarPart("kept high", [each.harm if each.name in kept else 0.0 for each in shown], "ink"),
        BarPart("quantized", [0.0 if each.name in kept else each.harm for each in shown], QUANTIZED),
    ]

    def form(value: float) -> str:
        return words.figure(value, 3)

    bars, totals = [each.name for each in shown], [form(each.harm) for each in shown]
    figure = charts.stacked(bars, [part for part in parts if any(part.values)], totals, what, form=form)
    many = len(mixed.layers)
    title = f"The {len(shown)} worst of {many} layers, each alone" if many > len(shown) else "Each layer alone"
    return Plot(title, f"{what} with one layer quantized", figure)


def _steps(mixed: MixedSearch) -> list[list[str]]:
    """Each step as text, with the layers that it keeps and the one before it did not."""
    before: Sequence[str] = ()
    found = []
    for number, step in enumerate(mixed.steps):
        new = [name for name in step.kept if name not in before]
        chosen = " (chosen)" if number == mixed.chosen else ""
        found.append([f"{len(step.kept)}{chosen}", *_figures(step), ", ".join(new) or "–"])
        before = step.kept
    return found


def _figures(step: MixedPoint) -> list[str]:
    sure = words.between(step.ci95, lambda value: words.figure(value, 3))
    return [words.size(step.bytes), words.figure(step.harm, 3), sure or "–"]
