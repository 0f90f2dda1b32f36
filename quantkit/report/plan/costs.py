"""What a plan says of money, energy and waiting: tables that the screen and the page share.

A bill is reckoned with one time t of each phase: the forecast where there is one, else the bound. What it says at
another time u of that phase is the same times u / t, so that here too a bound stays a bound, and a forecast gets the
interval of its time. Energy is power times time, and the power is the most that boards draw: both are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.planning.cost import Bill, RequestCost
from quantkit.planning.load import METRICS
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe
from quantkit.report.kit import words
from quantkit.report.kit.tree import Sheet
from quantkit.report.plan import words as say

_MILLION = 1e6
_WAITS = {"ttft": "first", "tpot": "next", "latency": "all"}
WAITS = "From arrival to the first token, from one token to the next, and to the last one; load: of what it can serve."


@dataclass(frozen=True)
class Priced:
    """An amount.

    Args:
        least: at the bounds; None where one is not known.
        forecast: at the forecasts; None as soon as one is missing.
        interval: of the forecast.
    """

    least: float | None
    forecast: float | None
    interval: tuple[float, float] | None

    @property
    def bound(self) -> str:
        """`≥ 0.123`."""
        return f"≥ {words.figure(self.least, 3)}" if self.least is not None else say.NONE

    def __str__(self) -> str:
        return say.with_interval(self.forecast, self.interval) if self.forecast is not None else self.bound


def together(row: PlannedBatch, output: int, value: float) -> Priced:
    """An amount that goes with the time of whole requests."""
    rate, used = row.rate(output), row.tokens_per_s(output)

    def at(other: float | None) -> float | None:
        return value * used / other if used is not None and other else None

    low, high = (at(end) for end in rate.interval[::-1]) if rate.interval is not None else (None, None)
    return Priced(at(rate.most), at(rate.forecast), (low, high) if low is not None and high is not None else None)


def _of(row: PlannedBatch, value: float, *, prompts: bool) -> Priced:
    """An amount that goes with the time of the prompts alone, or of the steps alone."""
    timed = row.prefill if prompts else row.step
    if timed is None or not timed.seconds:
        return Priced(None, None, None)
    share = value / timed.seconds
    interval = (share * timed.interval[0], share * timed.interval[1]) if timed.interval is not None else None
    least, forecast = (share * each if each is not None else None for each in (timed.least, timed.forecast))
    return Priced(least, forecast, interval)


def paid(bill: Bill | None) -> RequestCost | None:
    """The cheapest way."""
    return bill.cheapest if bill is not None else None


def currency(outlook: Outlook) -> str:
    """Of all amounts; empty where nothing has a price."""
    bills = [bill for each in outlook.candidates for bill in (each.cost, *(row.cost for row in each.rows))]
    return next((cost.currency for bill in bills if (cost := paid(bill)) is not None), "")


def head(outlook: Outlook) -> list[str]:
    """Of the amounts of `amounts`; empty where there are none."""
    bills = [row.cost for each in outlook.candidates for row in each.rows if row.cost is not None]
    unit, money = say.unit(outlook.architecture), currency(outlook)
    decodes = outlook.architecture.kind == "decoder"
    found = []
    if money:
        found = [f"{money}, in", f"{money}, out", f"{money}, both"] if decodes else [f"{money} a million {unit}"]
    if any(bill.energy is not None for bill in bills):
        # with the power that the boards draw at most: in truth it may be less, however long it takes
        found.append(f"J a {unit.removesuffix('s')}, full power")
    return found


def amounts(outlook: Outlook, row: PlannedBatch) -> list[str]:
    """What a million tokens cost at a batch, those that go in, that come out, and both together; joules of one."""
    cost, output = paid(row.cost), outlook.workload.output
    decodes = outlook.architecture.kind == "decoder"
    found: list[Priced] = []
    if currency(outlook):
        values = (cost.input, cost.output, cost.blended, cost.request) if cost is not None else (0.0,) * 4
        if decodes:
            found = [_of(row, values[0], prompts=True), _of(row, values[1], prompts=False)]
            found.append(together(row, output, values[2]))
        else:
            found = [together(row, output, _MILLION * values[3])]
    energy = row.cost.energy if row.cost is not None else None
    texts = [str(each) if cost is not None else say.NONE for each in found]
    if any(name.startswith("J ") for name in head(outlook)):
        value = 0.0 if energy is None else energy.output if decodes else energy.request
        texts.append(str(_of(row, value, prompts=False)) if energy is not None else say.NONE)
    return texts


def costs(outlook: Outlook) -> Sheet | None:
    """A line a candidate, at the batch that gives the most; None where there is neither a price nor a power."""
    names = head(outlook)
    if not names:
        return None
    best = [(each, found[0]) for each in outlook.candidates if (found := say.best(each, outlook.workload)) is not None]
    body = [[each.label, f"{row.batch:,}", *amounts(outlook, row)] for each, row in best]
    return Sheet(["recipe", "batch", *names], body)


def bases(outlook: Outlook) -> list[tuple[str, str]]:
    """(whose price, of when, and what else it takes; its source), each once."""
    found: dict[str, str] = {}
    for each in outlook.candidates:
        for bill in (row.cost for row in each.rows):
            cost = paid(bill)
            if cost is not None:
                found["; ".join([cost.basis, *cost.notes])] = cost.source
    return list(found.items())


def ways(candidate: PlannedRecipe) -> list[list[str]]:
    """Every way to pay for it, at the batch where a request takes least."""
    if candidate.cost is None:
        return []
    every = [*candidate.cost.rented, *([candidate.cost.owned] if candidate.cost.owned is not None else [])]
    mark = "" if candidate.forecast else "≥ "
    return [
        [
            candidate.label,
            cost.basis,
            f"{words.figure(cost.per_hour, 3)} {cost.currency}",
            f"{mark}{words.figure(cost.blended, 3)}",
            f"{mark}{words.figure(cost.request, 3)}",
            words.percent(cost.utilisation, 0),
            cost.source,
        ]
        for cost in every
    ]


def warnings(outlook: Outlook) -> list[str]:
    """Of the prices, each once."""
    found = [text for each in outlook.candidates if each.cost is not None for text in each.cost.warnings]
    return list(dict.fromkeys(found))


# --- under a load ----------------------------------------------------------------------------------------------------


def loads(outlook: Outlook, quantiles: Sequence[str] = ("p50", "p99")) -> Sheet | None:
    """What requests wait for, a line a candidate; None where no load was simulated."""
    found = [(each, each.load) for each in outlook.candidates if each.load is not None]
    if not found:
        return None
    names = ["recipe", "load", *(f"{_WAITS[metric]},\n{which}" for metric in METRICS for which in quantiles)]
    body = []
    for each, load in found:
        waits = [
            say.waited(several[which].value, forecast=each.forecast) if which in several else say.NONE
            for several in (getattr(load, metric) for metric in METRICS)
            for which in quantiles
        ]
        body.append([each.label, words.percent(load.load, 0), *waits])
    return Sheet(names, body)


def carried(outlook: Outlook) -> list[str]:
    """What servers do under the load, a sentence a candidate."""
    found = []
    for each in outlook.candidates:
        if each.load is None:
            continue
        load, cost = each.load, paid(each.cost)
        mark = ("", "") if each.forecast else ("at most ", "≥ ")
        parts = [f"{mark[0]}{words.figure(load.capacity, 3)} requests/s can be served"]
        parts.append(f"{words.figure(load.batch, 2)} sequences in a step on average")
        if cost is not None:
            # with hours to spare, tokens cost what the hours do, however fast they were
            mark = mark if cost.utilisation >= 1 else ("", "")
            parts.append(f"{mark[1]}{words.figure(cost.blended, 3)} {cost.currency} a million tokens, idle hours paid")
        found.append(f"{each.label}: {'; '.join([*parts, *load.notes])}")
    return found


def curve(outlook: Outlook, candidate: PlannedRecipe) -> list[tuple[int, Priced]]:
    """(batch, a million of the traffic's tokens, or of passes) by the cheapest way."""
    decodes = outlook.architecture.kind == "decoder"
    found = []
    for row in say.fitting(candidate):
        cost = paid(row.cost)
        if cost is not None:
            value = cost.blended if decodes else _MILLION * cost.request
            found.append((row.batch, together(row, outlook.workload.output, value)))
    return found
