"""Charts of a plan: roofline, memory, times and output.

    roofline    operations a second against operations a byte of memory traffic, both logarithmic
                the roof of a compute type    min(π, β · intensity)      β: read bandwidth, π: rate
                a step                        at its operations / its bytes, operations / seconds

A bound is dotted with rings, a forecast is a full line with its interval. Every candidate keeps its colour in all
charts. Batches that do not fit are in the memory charts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe
from quantkit.report.kit import words
from quantkit.report.kit.charts import BarPart, Curve, Mark, Plot, heights, lines, log_axis, over, stacked
from quantkit.report.kit.words import Form, Interval
from quantkit.report.plan import words as say

# number of series colours; further candidates share the last one, and differ by their labels
_SERIES = 6
_PARTS = ("quantized", "quantized-soft", "original", "good", "muted", "bad", "rest")
_ROOM = 1.6

Times = Callable[[PlannedBatch], TimedStep | None]


def colours(outlook: Outlook) -> dict[str, str]:
    """Assign a colour to the label of each candidate that runs."""
    runs = [candidate.label for candidate in outlook.candidates if candidate.problem is None]
    return {label: f"series-{min(i + 1, _SERIES)}" for i, label in enumerate(runs)}


def keys(outlook: Outlook) -> list[tuple[str, str]]:
    """List (colour, label), for the key below a chart."""
    return [(colour, label) for label, colour in colours(outlook).items()]


def parts(candidates: Iterable[PlannedRecipe]) -> dict[str, str]:
    """Assign a colour to each part of memory, in the order of the candidates' parts."""
    rows = (row for candidate in candidates for row in candidate.rows)
    named = dict.fromkeys(name for row in rows for name, size in row.parts.items() if size)
    return {name: _PARTS[min(i, len(_PARTS) - 1)] for i, name in enumerate(named)}


# --- roofline --------------------------------------------------------------------------------------------------------


def roofline(outlook: Outlook) -> Plot | None:
    """Plot all candidates below the target's roofs; None if the target lacks the figures."""
    phases, beta = _phases(outlook), outlook.target.memory.read_bandwidth.number
    known = [(candidate, phase) for candidate in outlook.candidates for phase in phases]
    drawn = [curve for candidate, phase in known for curve in _points(outlook, candidate, *phase)]
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
    values = heights([*drawn, *roofs])
    # room for the label of the highest roof
    y = log_axis("operations per second", [*values, _ROOM * max(values)], form=_round_rate)
    figure = lines([*roofs, *drawn], x, y, height=460, right=14, hover="closest")
    alt = "Operations per second against operations per byte for each recipe and batch, under the target's roofs"
    title = f"Recipes and batches under the roofs of {outlook.target.name}"
    return Plot(title, alt, figure, wide=True)


def _rates(outlook: Outlook) -> dict[float, str]:
    kinds: dict[float, list[str]] = {}
    units: dict[float, set[str]] = {}
    for kind, figure in outlook.target.compute.items():
        if kind in say.computed(outlook) and figure.number is not None:
            kinds.setdefault(figure.number, []).append(kind)
            units.setdefault(figure.number, set()).add(figure.unit)
    # floats and integers with the same rate share the unit op/s
    named = {rate: min(own) if len(own) == 1 else "op/s" for rate, own in units.items()}
    return {rate: f"{', '.join(own)} {words.rate(rate, named[rate])}" for rate, own in kinds.items()}


def _phases(outlook: Outlook) -> list[tuple[str, str, Times]]:
    """List (phase, symbol, function to read its time): steps and prompts, or passes."""
    phases: list[tuple[str, str, Times]] = [(say.step(outlook), "circle", lambda row: row.step)]
    return [*phases, *([("prompts", "diamond", lambda row: row.prefill)] if say.decodes(outlook) else [])]


def _points(outlook: Outlook, candidate: PlannedRecipe, name: str, symbol: str, of: Times) -> list[Curve]:
    known = [(row.batch, timed) for row in say.fitting(candidate) if (timed := of(row)) and timed.bound.bytes]
    # by intensity, the order of the bands
    known.sort(key=lambda point: point[1].bound.operations / point[1].bound.bytes)
    drawn = []
    for forecast in (False, True):
        points = [(batch, timed, timed.forecast if forecast else timed.least) for batch, timed in known]
        points = [(batch, timed, seconds) for batch, timed, seconds in points if seconds]
        if not points:
            continue
        batches = [batch for batch, _, _ in points]
        ends = {min(batches), max(batches)} if name != "prompts" and not forecast else set()
        x, y, hover = [], [], []
        bands: list[Interval | None] = []
        for batch, timed, seconds in points:
            done, sure = timed.bound.operations, timed.interval
            x.append(done / timed.bound.bytes)
            y.append(done / (seconds or 1.0))
            hover.append(f"{candidate.label}, {name}, batch {batch:,}: {say.in_full(timed)}")
            bands.append((done / sure[1], done / sure[0]) if sure and forecast else None)
        texts = [f"{batch:,}" if batch in ends else "" for batch in batches]
        look = {"bound": not forecast, "hollow": not forecast}
        colour = colours(outlook).get(candidate.label, "muted")
        drawn.append(Curve("", colour, x, y, hover, bands, symbol=symbol, texts=texts, **look))
    return drawn


def _round_rate(value: float) -> str:
    power = next(power for power in (15, 12, 9, 0) if value >= 10**power * 0.999)
    return f"{value / 10**power:g} {({15: 'P', 12: 'T', 9: 'G'}).get(power, '')}"


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_bars(outlook: Outlook) -> Plot | None:
    """Plot the parts of memory at the largest fitting batch, one bar for each candidate, against the capacity."""
    known = [(candidate.label, candidate.memory) for candidate in outlook.candidates if candidate.memory is not None]
    if not known:
        return None
    shades = parts(outlook.candidates)
    bars = [
        BarPart(name, [memory.parts.get(name, 0.0) for _, memory in known], shade) for name, shade in shades.items()
    ]
    totals = [f"{say.takes(memory)}{', does not fit' if say.fits(memory) is False else ''}" for _, memory in known]
    labels = [f"{say.short(label, 24)}, batch {memory.batch:,}" for label, memory in known]
    figure = stacked(labels, bars, totals, "memory of one device", marks=_capacity(outlook))
    alt = f"Parts of memory of each recipe, against what a runtime uses of {outlook.target.name}"
    return Plot("At the largest requested batch that fits, else at the smallest", alt, figure)


def memory_lines(outlook: Outlook) -> Plot | None:
    """Plot the memory of one device against the batch."""
    drawn = []
    for candidate in outlook.candidates:
        if candidate.memory is not None and len(candidate.rows) > 1:
            held = [sum(row.parts.values()) for row in candidate.rows]
            label, batches = candidate.label, [row.batch for row in candidate.rows]
            hover = [f"{label}: {words.size(size)}" for size in held]
            drawn.append(Curve(say.short(label), colours(outlook).get(label, "muted"), batches, held, hover))
    if not drawn:
        return None
    across = [x for curve in drawn for x in curve.x]
    ends = [min(across), max(across)]
    drawn += [Curve(mark.label, "ink", ends, [mark.x] * 2, symbol="") for mark in _capacity(outlook)]
    alt = "Memory of each recipe by batch, against the capacity"
    return over("Against the batch", alt, drawn, "batch", "", form=_round_size, height=360)


def _capacity(outlook: Outlook) -> list[Mark]:
    sizes: dict[float, dict[str, None]] = {}
    for candidate in outlook.candidates:
        if candidate.memory is not None and candidate.memory.capacity:
            sizes.setdefault(candidate.memory.capacity, {})[candidate.runtime] = None
    named = {
        size: ", ".join(runtimes) if len(sizes) > 1 else say.short(outlook.target.name)
        for size, runtimes in sizes.items()
    }
    return [Mark(size, f"{named[size]} {words.size(size)}") for size in sorted(sizes)]


# --- against the batch -----------------------------------------------------------------------------------------------


class _At(NamedTuple):
    batch: int
    bound: float | None
    forecast: float | None
    interval: Interval | None
    shown: tuple[str, str]


def times(outlook: Outlook) -> list[Plot]:
    """Plot the time of a step, and of the prompts, against the batch."""
    titles = {"step": "A step: one more token of each sequence", "pass": "A pass", "prompts": "The prompts of a batch"}
    phases = _phases(outlook)
    plots = []
    for name, _, of in phases:

        def points(candidate: PlannedRecipe, of: Times = of) -> list[_At]:
            known = [(row.batch, timed) for row in say.fitting(candidate) if (timed := of(row)) is not None]
            return [_At(batch, t.least, t.forecast, t.interval, (say.bound(t), say.forecast(t))) for batch, t in known]

        alt, wide = f"Time of each recipe, {name}", len(phases) < 2
        plots.append(_over_batches(outlook, points, titles[name], alt, "≥", form=_round_time, wide=wide))
    return [plot for plot in plots if plot is not None]


def rates(outlook: Outlook, *, wide: bool = False) -> Plot | None:
    """Plot the output a second against the batch."""
    unit = say.per_second(outlook)

    def points(candidate: PlannedRecipe) -> list[_At]:
        known = [(row.batch, say.rate(candidate, row, outlook.workload)) for row in say.fitting(candidate)]
        return [
            _At(batch, r.most, r.forecast, r.interval, (f"{say.most(r)} {unit}", f"{say.expected(r)} {unit}"))
            for batch, r in known
        ]

    title = f"{words.sentence(unit)}{', prompts included' if say.decodes(outlook) else ''}"
    return _over_batches(outlook, points, title, f"{title} of each recipe", "≤", unit, wide=wide)


def costs(outlook: Outlook) -> Plot | None:
    """Plot the cheapest price of the traffic's tokens against the batch; None without prices."""
    money, unit = say.currency(outlook), say.unit(outlook)

    def points(candidate: PlannedRecipe) -> list[_At]:
        known = say.cost_curve(outlook, candidate)
        return [
            _At(batch, cost.least, cost.forecast, cost.interval, (f"{cost.bound} {money}", f"{cost} {money}"))
            for batch, cost in known
        ]

    title = f"{money} a million {unit}{', in and out together' if unit == 'tokens' else ''}"
    return _over_batches(outlook, points, title, f"{title}, of each recipe", "≥", money)


def _over_batches(
    outlook: Outlook,
    points_of: Callable[[PlannedRecipe], Sequence[_At]],
    title: str,
    alt: str,
    sign: str,
    unit: str = "",
    *,
    form: Form = words.plain,
    wide: bool = False,
) -> Plot | None:
    """Plot bounds and forecasts; a bound is labelled, with its sign, only if there is no forecast."""
    drawn: list[Curve] = []
    for candidate in outlook.candidates:
        points = points_of(candidate)
        colour, name = colours(outlook).get(candidate.label, "muted"), say.short(candidate.label)
        bounds = [at for at in points if at.bound is not None]
        least = [(at.batch, at.bound, f"{candidate.label}, bound: {at.shown[0]}") for at in bounds]
        known = [at for at in points if at.forecast is not None]
        if least:
            x, y, hover = zip(*least, strict=True)
            drawn.append(Curve("" if known else f"{sign} {name}", colour, x, y, hover, bound=True, hollow=True))
        if known:
            hover = tuple(f"{candidate.label}, forecast: {at.shown[1]}" for at in known)
            ys, bands = [at.forecast or 0.0 for at in known], [at.interval for at in known]
            drawn.append(Curve(name, colour, [at.batch for at in known], ys, hover, bands))
    if len({x for curve in drawn for x in curve.x}) < 2:  # a single batch needs no chart
        return None
    return over(title, f"{alt} by batch", drawn, "batch", unit, form=form, wide=wide, height=360)


def _round_size(value: float) -> str:
    number, _, unit = words.size(value).partition(" ")
    return f"{float(number):g} {unit}"


def _round_time(value: float) -> str:
    factor, unit = words.time_unit(value * 1.0001)
    return f"{value * factor:g} {unit}"
