"""A plan's figures in words; terminal and page share them.

A bound is never read as a forecast: `≥ 12.1 ms` is what no runtime beats, `19 ms (15–26)` is what to expect, with the
interval of what was measured. A rate has `≤`. Forecasts have two digits, as they know no more.

A bill is reckoned with one time t of each phase: the forecast where there is one, else the bound. What it says at
another time u of that phase is the same times u / t, so that here too a bound stays a bound, and a forecast gets the
interval of its time. Energy is power times time, and the power is the most that boards draw: both are said.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit import content
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.source.alias import ALIASES
from quantkit.planning.cost import Bill, RequestCost
from quantkit.planning.forecast import TimedStep
from quantkit.planning.load import METRICS
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedMemory, PlannedRecipe, Rate, Workload
from quantkit.report.kit import words
from quantkit.report.kit.tree import Sheet
from quantkit.report.kit.words import Interval
from quantkit.target import State

NONE = "–"
FITS = {True: "fits", False: "does not fit", None: NONE}
WAITS = "From arrival to the first token, from one token to the next, and to the last one; load: of what it can serve."
_BOUND = "≥ and ≤ mark bounds, which no runtime beats."
_UNTIMED = "a compile's time is known after its first block, or by --rehearse"
_FORECAST = "What has an interval behind it, like 19 ms (15–26), is a forecast from measurements."
_ASSUMED = "assumed: "
_OUTPUT = {"decoder": "tokens", "encoder": "sequences", "network": "images"}
_WORST: Sequence[State] = ("native", "emulated", "absent")
_MILLION = 1e6
_WAITS = {"ttft": "first", "tpot": "next", "latency": "all"}


def decodes(outlook: Outlook) -> bool:
    """Tell if the model writes token by token."""
    return outlook.architecture.kind == "decoder"


def unit(outlook: Outlook) -> str:
    """Name its output: `tokens`, `sequences`, `images`."""
    return _OUTPUT[outlook.architecture.kind]


def step(outlook: Outlook) -> str:
    """Name the timed work at each batch: a `step` of decoding, or a whole `pass`."""
    return "step" if decodes(outlook) else "pass"


def per_second(outlook: Outlook) -> str:
    """Name the unit of rates: `tokens/s`; of one device where several share a model, so that recipes compare."""
    shared = any(each.memory is not None and each.memory.devices > 1 for each in outlook.candidates)
    return f"{unit(outlook)}/s{' a device' if shared else ''}"


def model(architecture: Architecture) -> str:
    """`llama-3-8b: decoder, 8.03 B parameters in bfloat16, 32 layers, contexts up to 8,192`."""
    active = ""
    if architecture.active_parameters != architecture.parameters:
        active = f" ({_count(architecture.active_parameters)} of them active)"
    parameters = f"{_count(architecture.parameters)} parameters{active} in {architecture.dtype}"
    layers = words.plural(len(architecture.layers), "layer")
    longest = f"contexts up to {architecture.max_context:,}" if architecture.max_context else ""
    return f"{architecture.name}: {words.joined(architecture.kind, parameters, layers, longest)}"


def _count(parameters: int) -> str:
    """`8.03 B` for 8,030,261,248."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= factor:
            return f"{words.short(parameters / factor)} {suffix}"
    return str(parameters)


def target(outlook: Outlook) -> str:
    """Say its memory, and the rates of what the candidates compute in."""
    figures = outlook.target.figures()
    named = {"memory.capacity": "holds", "memory.read_bandwidth": "reads"}
    named |= {f"compute.{kind}": kind for kind in computed(outlook)}
    known = [(name, figures[place]) for place, name in named.items() if place in figures]
    parts = [f"{name} {words.rate(each.number, each.unit)}" for name, each in known if each.number is not None]
    return f"{outlook.target.name}: {words.joined(outlook.target.summary, ', '.join(parts), by='; ')}"


def computed(outlook: Outlook) -> list[str]:
    """List the compute types of all candidates, in the order of the target."""
    used = {op.compute for row in _rows(outlook) for op in row.step.bound.ops}
    return [*(kind for kind in outlook.target.compute if kind in used), *sorted(used - set(outlook.target.compute))]


def _rows(outlook: Outlook) -> list[PlannedBatch]:
    return [row for each in outlook.candidates for row in each.rows]


def notes(outlook: Outlook) -> tuple[list[str], list[str]]:
    """Split into (assumptions, other notes on all candidates)."""
    assumed = [note.removeprefix(_ASSUMED) for note in outlook.notes if note.startswith(_ASSUMED)]
    return assumed, [note for note in outlook.notes if not note.startswith(_ASSUMED)]


def workload(work: Workload, architecture: Architecture) -> str:
    """`prompts of 1,024 and outputs of 256 tokens, context 1,280, batches 1 to 64`."""
    first, last = work.batches[0], work.batches[-1]
    batches = f"batches {first:,} to {last:,}" if len(work.batches) > 1 else f"batch {first:,}"
    if architecture.kind != "decoder":
        length = f"sequences of {work.prompt:,} tokens, " if architecture.kind == "encoder" else ""
        return f"{length}{batches}"
    rate = f", {work.rate:g} requests/s" if work.rate is not None else ""
    lengths = f"prompts of {work.prompt:,} and outputs of {work.output:,} tokens, context {work.context:,}"
    return f"{lengths}, {batches}{rate}"


# --- times and rates -------------------------------------------------------------------------------------------------


def bound(timed: TimedStep | None) -> str:
    """Format a bound: `12.1 ms`; the column's title calls it a bound."""
    return words.moment(timed.least) if timed is not None and timed.least is not None else NONE


def forecast(timed: TimedStep | None) -> str:
    """`19 ms (15–26)`, all in one unit."""
    if timed is None or timed.forecast is None:
        return NONE
    factor, name = words.time_unit(timed.forecast)
    return with_interval(timed.forecast, timed.interval, factor, f"\u00a0{name}")


def at(row: PlannedBatch | None, *, prefill: bool = False) -> str:
    """Write the time of a batch's step, or of its prompts: the forecast, else the bound, marked as one.

    Where it does not fit, it says that instead.
    """
    if row is None:
        return NONE
    timed = row.prefill if prefill else row.step
    if row.fits is False:
        return FITS[False]
    bounded = timed is not None and timed.forecast is None and timed.least is not None
    return f"≥ {bound(timed)}" if bounded else forecast(timed)


def in_full(timed: TimedStep) -> str:
    """Write both, as a sentence has them: `at best 12.1 ms, forecast 19 ms (15–26)`."""
    least = f"at best {bound(timed)}" if timed.least is not None else ""
    expected = f"forecast {forecast(timed)}" if timed.forecast is not None else ""
    return words.joined(least, expected) or f"not known: {timed.because}"


def limit(timed: TimedStep) -> str:
    """Name the dominant roof."""
    return NONE if timed.least is None else "memory" if timed.bound.memory_bound else "compute"


def rate(candidate: PlannedRecipe, row: PlannedBatch, work: Workload) -> Rate:
    """Compute the output a second of one device."""
    whole, devices = row.rate(work.output), candidate.memory.devices if candidate.memory is not None else 1
    most, expected = (value / devices if value is not None else None for value in (whole.most, whole.forecast))
    interval = (whole.interval[0] / devices, whole.interval[1] / devices) if whole.interval is not None else None
    return Rate(most, expected, interval)


def most(rate: Rate) -> str:
    """`≤ 3,400`."""
    return f"≤ {words.short(rate.most)}" if rate.most is not None else NONE


def expected(rate: Rate) -> str:
    """Format `1,900 (1,500–2,300)`, two digits each."""
    return with_interval(rate.forecast, rate.interval) if rate.forecast is not None else NONE


def with_interval(value: float, interval: Interval | None, factor: float = 1.0, suffix: str = "") -> str:
    """Write a forecast: `with_interval(0.019, (0.015, 0.026), 1000, " ms")` is `19 ms (15–26)`."""
    ends = f"{_two(interval[0] * factor)}–{_two(interval[1] * factor)}" if interval is not None else ""
    return f"{_two(value * factor)}{suffix}{words.bracketed(ends)}"


def _two(value: float) -> str:
    """Round to two digits: `393` is `390`."""
    return words.figure(float(f"{value:.1e}"), 2)


def fitting(candidate: PlannedRecipe) -> list[PlannedBatch]:
    """Drop batches too large for the device."""
    return [row for row in candidate.rows if row.fits is not False]


def best(candidate: PlannedRecipe, work: Workload) -> tuple[PlannedBatch, Rate] | None:
    """Find the fitting batch with most output: by forecasts if all have one, else by bounds."""
    rates = [(row, rate(candidate, row, work)) for row in fitting(candidate)]
    values = [(each.forecast if candidate.forecast else each.most, row, each) for row, each in rates]
    known = [(value, row, each) for value, row, each in values if value is not None]
    return max(known, key=lambda entry: entry[0])[1:] if known else None


def legend(outlook: Outlook) -> str:
    """Say how to read the figures, of what there is."""
    timed = [each for row in _rows(outlook) for each in (row.step, row.prefill) if each is not None]
    least = _BOUND if any(each.least is not None for each in timed) else ""
    return words.joined(least, _FORECAST if any(each.forecast is not None for each in timed) else "", by=" ")


def timed(outlook: Outlook) -> bool:
    """Tell if any time is known."""
    return any(row.step.seconds is not None for row in _rows(outlook))


# --- candidates ------------------------------------------------------------------------------------------------------


def state(candidate: PlannedRecipe) -> str:
    """Name the worst of its cells: `native`, `emulated`, `absent`."""
    if candidate.problem is not None and not candidate.cells:
        return "cannot run"
    return max((cell.state for cell in candidate.cells), key=_WORST.index, default=NONE)


def takes(memory: PlannedMemory) -> str:
    """`21.3 GB`, or `2 × 71.0 GB`."""
    size = words.size(memory.total)
    return f"{memory.devices} × {size}" if memory.devices > 1 else size


def fits(memory: PlannedMemory) -> bool | None:
    """Tell if it fits into each device; None if the target states no capacity."""
    return None if memory.capacity is None else memory.total <= memory.capacity


def largest(number: int | None, memory: PlannedMemory) -> str:
    """Write a batch or a context, as far as anything bounds it."""
    if number is not None:
        return f"{number:,}"
    return NONE if memory.capacity is None else "any"


def because(candidates: Sequence[PlannedRecipe]) -> list[tuple[str, str]]:
    """Return (scope, basis of its times), each reason once: for all, some recipes, or some of their batches."""
    reasons: dict[str, dict[str, dict[str, list[int]]]] = {}
    runs = [each for each in candidates if each.rows]
    for each in runs:
        for row in each.rows:
            for what, timed in (("prompts", row.prefill), ("steps", row.step)):
                if timed is not None:
                    about = reasons.setdefault(timed.because, {}).setdefault(each.label, {})
                    about.setdefault(what, []).append(row.batch)
    return [(_about(runs, about) if len(reasons) > 1 else "all times", reason) for reason, about in reasons.items()]


def _about(runs: Sequence[PlannedRecipe], about: dict[str, dict[str, list[int]]]) -> str:
    """Name recipes, with batches: `int4, bf16`, or `int4 (prompts of batch 1 and 8)`."""
    named = []
    for each in (each for each in runs if each.label in about):
        own, batches = about[each.label], [row.batch for row in each.rows]
        kinds = [what for what, there in (("prompts", each.rows[0].prefill), ("steps", True)) if there]
        whole = {what: own.get(what) == batches for what in kinds}
        parts = [what if whole[what] else f"{what} of batch {words.listed(own[what])}" for what in kinds if what in own]
        named.append(each.label if all(whole.values()) else f"{each.label} ({', '.join(parts)})")
    return ", ".join(named)


def cautions(outlook: Outlook) -> dict[str, list[str]]:
    """Return caution -> candidates: not computed as stored, cannot run, does not fit."""
    told: dict[str, list[str]] = {}
    for each in outlook.candidates:
        texts = [
            f"{cell.what}: {cell.state} in {each.runtime} ({cell.source})"
            for cell in each.cells
            if cell.state != "native"
        ]
        texts += [f"cannot run: {each.problem}"] if each.problem is not None else []
        texts += each.notes
        if (memory := each.memory) is not None:
            short_of = fits(memory) is False and memory.needed is not None and memory.needed > memory.devices
            texts += [f"a sequence needs {memory.needed} devices"] if short_of else []
            texts += memory.notes
        for text in dict.fromkeys(texts):
            told.setdefault(text, []).append(each.label)
    return told


def compiling(candidates: Sequence[PlannedRecipe]) -> tuple[Sheet, list[str]]:
    """Describe each compile's cost: peak memory, disk, and time from a rehearsal."""
    body, said = [], []
    for each in candidates:
        if (need := each.compiling) is not None:
            body.append([each.label, words.size(need.peak), need.at_peak, words.size(need.disk.most)])
            rehearsed = ", ".join(f"{stage} {words.duration(value)}" for stage, value in (need.seconds or {}).items())
            said += [f"by the block that was run: {rehearsed}" if rehearsed else _UNTIMED, *need.notes]
    return Sheet(["recipe", "memory", "at", "disk"], body), list(dict.fromkeys(said))


def short(label: str, longest: int = 16) -> str:
    """Shorten a label for the end of a line: of a path the name, of a long one its end.

    >>> short("./recipes/mine.yaml"), short("int4-best")
    ('mine', 'int4-best')
    """
    if "/" in label or "\\" in label:
        label = re.split(r"[/\\]", label.rstrip("/\\"))[-1].removesuffix(".yaml")
    return label if len(label) <= longest else f"…{label[1 - longest :]}"


# --- what to do ------------------------------------------------------------------------------------------------------


def answer(outlook: Outlook) -> str:
    """Write the recommendation as a sentence, called what it is."""
    label, several = outlook.recommendation.label, len(outlook.candidates) > 1
    if label is None:
        return "none of them fits or runs" if several else "it does not fit or run"
    return f"take {label}" if several else f"{label} fits and runs"


def chosen(outlook: Outlook) -> list[PlannedRecipe]:
    """Find the recommended candidate; None without one."""
    return [each for each in outlook.candidates if each.label == outlook.recommendation.label]


def reasons(outlook: Outlook) -> list[str]:
    """Say why it is recommended, and from when on one way to pay is cheaper; by bounds where not all are forecasts."""
    bills = [(each.cost, each.forecast) for each in chosen(outlook) if each.cost is not None]
    even = [each.line(bound=not forecast) for cost, forecast in bills for each in cost.break_even]
    return [*outlook.recommendation.because, *even]


def standing(outlook: Outlook) -> str:
    """Name the basis of a recommendation."""
    runs = [each for each in outlook.candidates if each.problem is None]
    return "forecast" if runs and all(each.forecast for each in runs) else "by bounds"


def confirm(outlook: Outlook) -> list[str]:
    """Return commands to confirm the recommendation on the target; none without one."""
    if not (recommended := chosen(outlook)):
        return []
    best_ = recommended[0]
    # of a recipe in a file the candidate's label is its path
    recipe = shlex.quote(best_.label if content.is_path(best_.label) else best_.recipe)
    batches = ",".join(map(str, outlook.workload.batches))
    # of a config alone there are no weights: the user knows where they are
    named = outlook.reference or outlook.architecture.name
    weights = named in ALIASES or named.startswith("hf:") or content.is_path(named)
    of = shlex.quote(named) if weights and not named.endswith(".json") else "MODEL"
    # of a target in a file of the user's own, the plan knows the stem alone
    for_ = outlook.target.name if outlook.target.name in content.names("export") else "TARGET"
    # a bundle holds no path of its model
    baseline = f" --baseline {of}" if content.is_path(named) or of == "MODEL" else ""
    allowed = " --allow-code" if best_.code else ""
    return [
        f"quantkit compile {of} --recipe {recipe} --target {for_}{allowed} --out BUNDLE",
        f"quantkit measure BUNDLE --batch {batches}{baseline}",
    ]


# --- money, energy and waiting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """An amount: `least` at the bounds, None where one is not known; the forecast, None as soon as one is missing."""

    least: float | None = None
    forecast: float | None = None
    interval: Interval | None = None

    @property
    def bound(self) -> str:
        """`≥ 0.123`."""
        return f"≥ {words.short(self.least)}" if self.least is not None else NONE

    def __str__(self) -> str:
        return with_interval(self.forecast, self.interval) if self.forecast is not None else self.bound


def together(row: PlannedBatch, output: int, value: float) -> Priced:
    """Compute an amount proportional to the time of whole requests."""
    rate, used = row.rate(output), row.tokens_per_s(output)

    def at(other: float | None) -> float | None:
        return value * used / other if used is not None and other else None

    low, high = (at(end) for end in rate.interval[::-1]) if rate.interval is not None else (None, None)
    return Priced(at(rate.most), at(rate.forecast), (low, high) if low is not None and high is not None else None)


def _of(timed: TimedStep | None, value: float) -> Priced:
    """Compute an amount proportional to the time of the prompts, or of the steps."""
    if timed is None or not timed.seconds:
        return Priced()
    share = value / timed.seconds
    interval = (share * timed.interval[0], share * timed.interval[1]) if timed.interval is not None else None
    least, forecast = (share * each if each is not None else None for each in (timed.least, timed.forecast))
    return Priced(least, forecast, interval)


def _paid(bill: Bill | None) -> RequestCost | None:
    """Find the cheapest way."""
    return bill.cheapest if bill is not None else None


def currency(outlook: Outlook) -> str:
    """Name the currency of all amounts; empty where nothing has a price."""
    bills = [bill for each in outlook.candidates for bill in (each.cost, *(row.cost for row in each.rows))]
    return next((cost.currency for bill in bills if (cost := _paid(bill)) is not None), "")


def amounts_head(outlook: Outlook) -> list[str]:
    """Name the columns of `amounts`; none where there are none."""
    money, head = currency(outlook), []
    if money and decodes(outlook):
        head = [f"{money}, in", f"{money}, out", f"{money}, both"]
    elif money:
        head = [f"{money} a million {unit(outlook)}"]
    if any(row.cost is not None and row.cost.energy is not None for row in _rows(outlook)):
        # with the power that the boards draw at most: in truth it may be less, however long it takes
        head.append(f"J a {unit(outlook).removesuffix('s')}, full power")
    return head


def amounts(outlook: Outlook, row: PlannedBatch) -> list[str]:
    """Format the cost of a million tokens at a batch: input, output, both; and joules a token."""
    cost, output, writes = _paid(row.cost), outlook.workload.output, decodes(outlook)
    texts: list[Priced | str] = []
    if cost is not None and writes:
        texts = [_of(row.prefill, cost.input), _of(row.step, cost.output), together(row, output, cost.blended)]
    elif cost is not None:
        texts = [together(row, output, _MILLION * cost.request)]
    elif currency(outlook):
        texts = [NONE] * (3 if writes else 1)
    energy, head = row.cost.energy if row.cost is not None else None, amounts_head(outlook)
    if head and head[-1].startswith("J "):
        texts.append(NONE if energy is None else _of(row.step, energy.output if writes else energy.request))
    return [str(text) for text in texts]


def bases(outlook: Outlook) -> list[str]:
    """Describe the price's source, date and further assumptions, once each."""
    costs = [cost for row in _rows(outlook) if (cost := _paid(row.cost)) is not None]
    return list(dict.fromkeys("; ".join([cost.basis, *cost.notes]) for cost in costs))


def ways(candidate: PlannedRecipe) -> list[list[str]]:
    """List every way to pay for it, at the batch where a request takes least."""
    if candidate.cost is None:
        return []
    every = [*candidate.cost.rented, *([candidate.cost.owned] if candidate.cost.owned is not None else [])]
    mark = "" if candidate.forecast else "≥ "
    lines = []
    for cost in every:
        prices = (f"{mark}{words.short(value)}" for value in (cost.blended, cost.request))
        line = [candidate.label, cost.basis, f"{words.short(cost.per_hour)} {cost.currency}", *prices]
        lines.append([*line, words.whole(cost.utilisation), cost.source])
    return lines


def price_warnings(outlook: Outlook) -> list[str]:
    """List the warnings of the prices, each once."""
    return list(dict.fromkeys(text for each in outlook.candidates if each.cost for text in each.cost.warnings))


def loads(outlook: Outlook, quantiles: Sequence[str] = ("p50", "p99")) -> Sheet | None:
    """Build the waiting times of requests, a line a candidate; None without a simulated load."""
    columns = [(metric, which) for metric in METRICS for which in quantiles]
    names = ["recipe", "load", *(f"{_WAITS[metric]},\n{which}" for metric, which in columns)]
    body = []
    for each in outlook.candidates:
        if (load := each.load) is None:
            continue
        waits = []
        for metric, which in columns:
            value = getattr(load, metric).get(which)
            factor, name = words.time_unit(value.value) if value is not None else (1.0, "")
            # marked where it stands on bounds; two digits, as a simulation knows no more
            mark = "" if each.forecast else "≥ "
            waits.append(NONE if value is None else f"{mark}{_two(value.value * factor)}\u00a0{name}")
        body.append([each.label, words.whole(load.load), *waits])
    return Sheet(names, body) if body else None


def carried(outlook: Outlook) -> list[str]:
    """Describe the servers under load, a sentence a candidate."""
    said = []
    for each in outlook.candidates:
        if (load := each.load) is None:
            continue
        cost, (most_, least) = _paid(each.cost), ("", "") if each.forecast else ("at most ", "≥ ")
        parts = [f"{most_}{words.short(load.capacity)} requests/s can be served"]
        parts.append(f"{words.figure(load.batch, 2)} sequences in a step on average")
        if cost is not None:
            # with hours to spare, tokens cost what the hours do, however fast they were
            least = least if cost.utilisation >= 1 else ""
            parts.append(f"{least}{words.short(cost.blended)} {cost.currency} a million tokens, idle hours paid")
        said.append(f"{each.label}: {'; '.join([*parts, *load.notes])}")
    return said


def cost_curve(outlook: Outlook, candidate: PlannedRecipe) -> list[tuple[int, Priced]]:
    """Reckon (batch, a million of the traffic's tokens, or of passes) by the cheapest way."""
    points = []
    for row in fitting(candidate):
        if (cost := _paid(row.cost)) is not None:
            value = cost.blended if decodes(outlook) else _MILLION * cost.request
            points.append((row.batch, together(row, outlook.workload.output, value)))
    return points
