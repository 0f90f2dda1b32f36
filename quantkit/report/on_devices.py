"""What a bundle does on each device that was reached from elsewhere: a tab each, and all of them in one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from quantkit.bundle import Manifest, Verdict
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves, figures, speed
from quantkit.report.bundle.curves import Series
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.charts import Curve
from quantkit.report.kit.tree import Conclusion, Exhibit, Part, Plot, Remark, Section, Sheet
from quantkit.report.kit.words import Form

HERE = "here"
_COLOURS, _SYMBOLS = [f"series-{n}" for n in range(1, 7)], ("circle", "square", "diamond", "triangle-up", "x")


@dataclass(frozen=True)
class DeviceRows:
    """Args: name: what the device is called; rows: measured there; verdict: on them."""

    name: str
    rows: Sequence[Row]
    verdict: Verdict | None


def parts(manifest: Manifest, rows: Sequence[Row], devices: Sequence[DeviceRows]) -> list[Part]:
    """Build all devices in one picture, then a tab for each; nothing where there are none."""
    return [*together(manifest, rows, devices), *(_tab(manifest, device) for device in devices)] if devices else []


def _tab(manifest: Manifest, of: DeviceRows) -> Section:
    judged = manifest.model_copy(update={"verdict": of.verdict})
    flags = {flag for row in of.rows for flag in row.flags}
    answer, because = figures.verdict(judged, of.rows) if of.verdict else ("no verdict", [])
    if of.verdict is None:
        because = ["its times are an emulator's"] if "emulated" in flags else ["its speed was not measured"]
    cautions = {
        "emulated": "An emulator: what it computes counts, how long it takes says nothing of any machine",
        "throttled": "Its processor lowered its clock while it was timed: cool it, and measure again",
    }
    device = next(row.device for row in of.rows if row.device)
    scored = [row for row in of.rows if row.name.startswith("accuracy.")]
    parts: list[Part] = [
        Remark(", ".join(part for part in (device.name, device.machine, device.isa) if part), "caption"),
        *(Remark(text, "note") for flag, text in cautions.items() if flag in flags),
        Conclusion(answer, figures.tone(judged) if of.verdict else "", because),
        *speed.sections(judged, of.rows),
        *([figures.results_table(scored)] if scored else []),
    ]
    return Section(of.name, parts, tab=True)


def together(manifest: Manifest, rows: Sequence[Row], devices: Sequence[DeviceRows]) -> list[Exhibit]:
    """Speed-up and tax against the batch, a line for each device; none of fewer than two.

    Args:
        rows: of this machine, which is one of them.
    """
    named = [(HERE, rows), *((each.name, each.rows) for each in devices)]
    first = [(name, found[0]) for name, own in named if (found := curves.series(manifest, own))]
    kinds = {curve.unit for _, curve in first}
    if len(first) < 2 or len(kinds) > 1:
        return []
    panels = [
        _panel(
            first,
            f"Speed-up over {first[0][1].other}",
            "times as fast",
            lambda cell: cell.ratio,
            words.times,
            lambda v: f"{v:g}×",
            even=1.0,
        ),
        _panel(
            [(name, curve) for name, curve in first if any(_tax(cell) for cell in curve.cells)],
            f"Tax, share of {first[0][1].other}'s time",
            "tax / time of the original",
            _tax,
            lambda v: words.percent(v, 0),
            lambda v: f"{100 * v:g} %",
        ),
    ]
    head = ["device", curves_axis(first[0][1]), "speed-up", "95 % interval", "tax", "share of the original's time"]
    body = [
        [
            name,
            f"{cell.x:,}",
            words.or_dash(cell.ratio, words.times),
            words.between(cell.ratio_ci95, words.times) or "–",
            words.or_dash(cell.tax.value if cell.tax else None, words.moment),
            words.or_dash(_tax(cell), lambda v: words.percent(v, 0)),
        ]
        for name, curve in first
        for cell in curve.cells
    ]
    said = [f"{first[0][1].title}: each device against its own {first[0][1].other}, in its own runtime."]
    return [Exhibit(said, [panel for panel in panels if panel], [], Sheet(head, body), title="All devices at once")]


def curves_axis(curve: Series) -> str:
    """What x is."""
    return "batch" if curve.over == "batch" else "tokens"


def _tax(cell: curves.CurvePoint) -> float | None:
    value = cell.tax.value if cell.tax is not None else None
    return value / cell.original if value and value > 0 and cell.original else None


def _panel(
    found: Sequence[tuple[str, Series]],
    title: str,
    axis: str,
    value: Callable[[curves.CurvePoint], float | None],
    form: Form,
    tick: Form,
    even: float | None = None,
) -> Plot | None:
    drawn = []
    for (name, curve), colour, symbol in zip(found, cycle(_COLOURS), cycle(_SYMBOLS), strict=False):
        known = [(cell.x, y) for cell in curve.cells if (y := value(cell))]
        if known:
            xs, ys = [x for x, _ in known], [y for _, y in known]
            drawn.append(Curve(name, colour, xs, ys, [f"{name} {form(y)}" for y in ys], symbol=symbol))
    if not drawn:
        return None
    values = [y for curve in drawn for y in curve.y]
    up = axes.log_axis(axis, [*values, *([even] if even else [])], form=tick)
    across = axes.points_axis(curves_axis(found[0][1]), [x for curve in drawn for x in curve.x])
    alt = f"{title} against {curves_axis(found[0][1])}, of {words.listed([curve.label for curve in drawn])}"
    return Plot(title, alt, charts.lines(drawn, across, up, even=even))
