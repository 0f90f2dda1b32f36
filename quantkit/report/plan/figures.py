"""The figures of a plan: the roofline, memory against the card, time and output against the batch.

    roofline    operations a second against operations a byte of memory traffic, both logarithmic
                the roof of a compute type    min(π, β · intensity)      β: read bandwidth, π: rate
                a step                        at its operations / its bytes, operations / seconds

A bound is dotted with rings, a forecast is a full line with its interval. Every candidate keeps its colour throughout.
Batches that do not fit are in the figures of memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe
from quantkit.report.kit import words
from quantkit.report.kit.axes import Form, log_axis, points_axis
from quantkit.report.kit.charts import BarPart, Curve, Mark, lines, stacked
from quantkit.report.kit.tree import Plot
from quantkit.report.plan import costs as plan_costs
from quantkit.report.plan import words as say

# the page has so many colours for series; more candidates than these are alike, and told apart by their labels
_SERIES = 6
_PARTS = ("quantized", "quantized-soft", "original", "good", "muted", "bad", "rest")
_ROOM = 1.6

Times = Callable[[PlannedBatch], TimedStep | None]


def colours(outlook: Outlook) -> dict[str, str]:
    """Label -> colour of the page, of all candidates that run."""
    runs = [each.label for each in outlook.candidates if each.problem is None]
    return {label: f"series-{min(i + 1, _SERIES)}" for i, label in enumerate(runs)}


def keys(outlook: Outlook) -> list[tuple[str, str]]:
    """(colour, label) for under a figure."""
    return [(colour, label) for label, colour in colours(outlook).items()]


def parts(candidates: Iterable[PlannedRecipe]) -> dict[str, str]:
    """Part of memory -> colour, of all candidates, in their order."""
    named = dict.fromkeys(name for each in candidates for row in each.rows for name, size in row.parts.items() if size)
    return {name: _PARTS[min(i, len(_PARTS) - 1)] for i, name in enumerate(named)}


# --- roofline --------------------------------------------------------------------------------------------------------


def roofline(outlook: Outlook) -> Plot | None:
    """All candidates under the target's roofs; None where the target lacks the figures for them."""
    drawn: list[Curve] = []
    for each in outlook.candidates:
        for name, symbol, of in _phases(outlook):
            drawn += _points(each, colours(outlook).get(each.label, "muted"), name, symbol, of)
    beta = outlook.target.memory.read_bandwidth.number
    if not drawn or beta is None:
        return None
    rates = _rates(outlook)
    seen = [x for curve in drawn for x in curve.x]
    left, right = min(seen) / _ROOM, max([*seen, *(rate / beta for rate in rates)]) * _ROOM
    roofs = [
        Curve("", "ink", [left, rate / beta, right], [left * beta, rate, rate], symbol="", texts=["", label, ""])
        for rate, label in rates.items()
    ]
    x = log_axis("operations per byte read or written", [left * 1.12, right / 1.12])
    values = _values([*drawn, *roofs])
    # room for the label of the highest roof
    y = log_axis("operations per second", [*values, _ROOM * max(values)], form=_round_rate)
    figure = lines([*roofs, *drawn], x, y, height=460, right=14, hover="closest")
    alt = "Operations per second against operations per byte for each recipe and batch, under the target's roofs"
    return Plot(
        f"The roofs of {outlook.target.name}, and where each recipe and batch lies under them", alt, figure, True
    )


def _rates(outlook: Outlook) -> dict[float, str]:
    """Operations a second -> what is computed so, of all that the candidates compute in."""
    found: dict[float, list[str]] = {}
    units: dict[float, str] = {}
    for kind, figure in outlook.target.compute.items():
        if kind in say.computed(outlook) and figure.number is not None:
            found.setdefault(figure.number, []).append(kind)
            # floats and integers at one rate: operations
            units[figure.number] = figure.unit if units.get(figure.number, figure.unit) == figure.unit else "op/s"
    return {rate: f"{', '.join(kinds)} {words.rate(rate, units[rate])}" for rate, kinds in found.items()}


def _phases(outlook: Outlook) -> list[tuple[str, str, Times]]:
    """(what, symbol, of a row): decoding and prompts; of a model that does not decode, its passes."""
    found: list[tuple[str, str, Times]] = [(say.step(outlook.architecture), "circle", lambda row: row.step)]
    if outlook.architecture.kind == "decoder":
        found.append(("prompts", "diamond", lambda row: row.prefill))
    return found


def _points(candidate: PlannedRecipe, colour: str, name: str, symbol: str, of: Times) -> list[Curve]:
    """The bounds of all batches, and the forecasts of those that have one."""
    known = [
        (row.batch, timed) for row in say.fitting(candidate) if (timed := of(row)) is not None and timed.bound.bytes
    ]
    found = []
    for forecast in (False, True):
        points = [(batch, timed, timed.forecast if forecast else timed.least) for batch, timed in known]
        points = [(batch, timed, seconds) for batch, timed, seconds in points if seconds]
        # rising intensity: bands are drawn along it
        points.sort(key=lambda point: point[1].bound.operations / point[1].bound.bytes)
        if not points:
            continue
        ends = (
            {min(batch for batch, _, _ in points), max(batch for batch, _, _ in points)} if name != "prompts" else set()
        )
        work = [(timed.bound.operations, timed.interval) for _, timed, _ in points]
        found.append(
            Curve(
                "",
                colour,
                [timed.bound.operations / timed.bound.bytes for _, timed, _ in points],
                [timed.bound.operations / seconds for _, timed, seconds in points if seconds],
                [f"{candidate.label}, {name}, batch {batch:,}: {say.in_full(timed)}" for batch, timed, _ in points],
                [(done / sure[1], done / sure[0]) if sure else None for done, sure in work] if forecast else (),
                bound=not forecast,
                hollow=not forecast,
                symbol=symbol,
                texts=[f"{batch:,}" if batch in ends else "" for batch, _, _ in points] if not forecast else (),
            )
        )
    return found


def _round_rate(value: float) -> str:
    power = next(power for power in (15, 12, 9, 0) if value >= 10**power * 0.999)
    return f"{value / 10**power:g} {({15: 'P', 12: 'T', 9: 'G'}).get(power, '')}"


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_bars(outlook: Outlook) -> Plot | None:
    """What memory goes into at the largest batch that fits, a bar a candidate, against the capacity."""
    found = [(each.label, each.memory) for each in outlook.candidates if each.memory is not None]
    if not found:
        return None
    shades = parts(outlook.candidates)
    stack = [
        BarPart(name, [memory.parts.get(name, 0.0) for _, memory in found], shade) for name, shade in shades.items()
    ]
    totals = [f"{say.takes(memory)}{', does not fit' if say.fits(memory) is False else ''}" for _, memory in found]
    labels = [f"{say.short(label, 24)}, batch {memory.batch:,}" for label, memory in found]
    figure = stacked(labels, stack, totals, "memory of one device", marks=_capacity(outlook))
    alt = f"Parts of memory of each recipe, against what a runtime uses of {outlook.target.name}"
    return Plot("At the largest batch asked for that fits, else at the smallest", alt, figure)


def memory_lines(outlook: Outlook) -> Plot | None:
    """All that one device holds over the batch."""
    drawn = []
    for each in outlook.candidates:
        if each.memory is None or len(each.rows) < 2:
            continue
        held = [sum(row.parts.values()) for row in each.rows]
        hover = [f"{each.label}: {words.size(size)}" for size in held]
        colour = colours(outlook).get(each.label, "muted")
        drawn.append(Curve(say.short(each.label), colour, [row.batch for row in each.rows], held, hover))
    if not drawn:
        return None
    batches = [x for curve in drawn for x in curve.x]
    ends = [min(batches), max(batches)]
    drawn += [Curve(mark.label, "ink", ends, [mark.x] * 2, symbol="") for mark in _capacity(outlook)]
    y = log_axis("", [size for curve in drawn for size in curve.y], form=_round_size)
    figure = lines(drawn, points_axis("batch", batches), y, height=360)
    return Plot("Against the batch", "Memory of each recipe by batch, against the capacity, both logarithmic", figure)


def _capacity(outlook: Outlook) -> list[Mark]:
    """What runtimes use of a device, each once; of several with their names."""
    found: dict[float, list[str]] = {}
    for each in outlook.candidates:
        if each.memory is not None and each.memory.capacity:
            runtimes = found.setdefault(each.memory.capacity, [])
            runtimes += [each.runtime] if each.runtime not in runtimes else []
    name = say.short(outlook.target.name)
    return [
        Mark(size, f"{', '.join(runtimes) if len(found) > 1 else name} {words.size(size)}")
        for size, runtimes in sorted(found.items())
    ]


# --- against the batch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _At:
    """A figure at a batch, as bound and as forecast, and what to show at either."""

    batch: int
    bound: float | None
    forecast: float | None
    interval: tuple[float, float] | None
    said: tuple[str, str]


def times(outlook: Outlook) -> list[Plot]:
    """Time of a step, and of the prompts, by batch."""
    titles = {"step": "A step: one more token of each sequence", "pass": "A pass", "prompts": "The prompts of a batch"}
    phases, found = _phases(outlook), []
    for name, _, of in phases:
        drawn = []
        for each in outlook.candidates:
            known = [(row.batch, timed) for row in say.fitting(each) if (timed := of(row)) is not None]
            points = [
                _At(batch, timed.least, timed.forecast, timed.interval, (say.bound(timed), say.forecast(timed)))
                for batch, timed in known
            ]
            drawn += _both(outlook, each.label, points, "≥")
        panel = _over_batches(
            titles[name], f"Time of each recipe, {name}", drawn, form=_round_time, wide=len(phases) < 2
        )
        found += [panel] if panel is not None else []
    return found


def rates(outlook: Outlook, *, wide: bool = False) -> Plot | None:
    """What comes out each second, by batch."""
    drawn = []
    unit = say.per_second(outlook)
    for each in outlook.candidates:
        known = [(row.batch, say.rate(each, row, outlook.workload)) for row in say.fitting(each)]
        points = [
            _At(
                batch,
                rate.most,
                rate.forecast,
                rate.interval,
                (f"{say.most(rate)} {unit}", f"{say.expected(rate)} {unit}"),
            )
            for batch, rate in known
        ]
        drawn += _both(outlook, each.label, points, "≤")
    title = f"{words.sentence(unit)}{', prompts included' if outlook.architecture.kind == 'decoder' else ''}"
    return _over_batches(title, f"{title} of each recipe", drawn, unit, wide=wide)


def costs(outlook: Outlook) -> Plot | None:
    """What the traffic's tokens cost by the cheapest way, by batch; None where nothing has a price."""
    drawn, money = [], plan_costs.currency(outlook)
    for each in outlook.candidates:
        points = [
            _At(batch, cost.least, cost.forecast, cost.interval, (f"{cost.bound} {money}", f"{cost} {money}"))
            for batch, cost in plan_costs.curve(outlook, each)
        ]
        drawn += _both(outlook, each.label, points, "≥")
    unit = say.unit(outlook.architecture)
    title = f"{money} a million {unit}{', in and out together' if unit == 'tokens' else ''}"
    return _over_batches(title, f"{title}, of each recipe", drawn, money)


def _both(outlook: Outlook, label: str, points: Sequence[_At], sign: str) -> list[Curve]:
    """Bounds, and forecasts; the label stands at the forecasts, where there are any, else with the sign of a bound."""
    colour, name = colours(outlook).get(label, "muted"), say.short(label)
    least = [(each.batch, each.bound, f"{label}, bound: {each.said[0]}") for each in points if each.bound is not None]
    expected = [
        (each.batch, each.forecast, f"{label}, forecast: {each.said[1]}")
        for each in points
        if each.forecast is not None
    ]
    found = []
    if least:
        x, y, hover = zip(*least, strict=True)
        found.append(Curve("" if expected else f"{sign} {name}", colour, x, y, hover, bound=True, hollow=True))
    if expected:
        x, y, hover = zip(*expected, strict=True)
        found.append(Curve(name, colour, x, y, hover, [each.interval for each in points if each.forecast is not None]))
    return found


def _over_batches(
    title: str, alt: str, drawn: Sequence[Curve], unit: str = "", *, form: Form | None = None, wide: bool = False
) -> Plot | None:
    across = [x for curve in drawn for x in curve.x]
    if len(set(across)) < 2:  # one batch is no curve: its table says it
        return None
    axis = log_axis(unit, _values(drawn), form=form)
    batches = points_axis("batch", across)
    return Plot(title, f"{alt} by batch, both axes logarithmic", lines(drawn, batches, axis, height=360), wide)


def _values(drawn: Iterable[Curve]) -> list[float]:
    """All that an axis has to hold, ends of intervals too."""
    found = []
    for curve in drawn:
        found += [*curve.y, *(end for interval in curve.band if interval is not None for end in interval)]
    return found


def _round_size(value: float) -> str:
    """A label of an axis: round anyway."""
    number, _, unit = words.size(value).partition(" ")
    return f"{float(number):g} {unit}"


def _round_time(value: float) -> str:
    factor, unit = words.time_unit(value * 1.0001)
    return f"{value * factor:g} {unit}"
