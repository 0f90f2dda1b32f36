"""Figures of a plan in words, for terminal and page.

Bounds and forecasts look different. `≥ 12.1 ms` is a bound: no runtime is faster; a rate has `≤`. `19 ms (15–26)` is a
forecast with the interval of the measurements behind it. Forecasts have two digits, as they are no more precise.

A bill is computed for one time t of each phase: the forecast if there is one, else the bound. For another time u of
the phase it is scaled by u / t, so a bound stays a bound and a forecast gets the interval of its time. Energy is power
times time, for the boards' maximal power.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit import content
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.source.alias import ALIASES, on_hub
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
WAITS = "Waiting from arrival to the first token, between tokens, and to the last one; load: share of the capacity."
_BOUND = "≥ and ≤ mark bounds: no runtime is faster."
_UNTIMED = "the time of a compile is known after its first block, or with --rehearse"
_FORECAST = "A figure with an interval, such as 19 ms (15–26), is a forecast from measurements."
_ASSUMED = "assumed: "
_OUTPUT = {"decoder": "tokens", "encoder": "sequences", "network": "images"}
_WORST: Sequence[State] = ("native", "emulated", "absent")
_MILLION = 1e6
_WAITS = {"ttft": "first", "tpot": "next", "latency": "all"}


def decodes(outlook: Outlook) -> bool:
    """Tell if the model generates token by token."""
    return outlook.architecture.kind == "decoder"


def unit(outlook: Outlook) -> str:
    """Name the unit of output: `tokens`, `sequences` or `images`."""
    return _OUTPUT[outlook.architecture.kind]


def step(outlook: Outlook) -> str:
    """Name the timed work of a batch: a decode `step`, or a `pass`."""
    return "step" if decodes(outlook) else "pass"


def per_second(outlook: Outlook) -> str:
    """Name the unit of rates, such as `tokens/s`; for one device if a recipe needs several, so that recipes compare."""
    shared = any(candidate.memory is not None and candidate.memory.devices > 1 for candidate in outlook.candidates)
    return f"{unit(outlook)}/s{' a device' if shared else ''}"


def model(architecture: Architecture) -> str:
    """Describe a model: `llama-3-8b: decoder, 8.03 B parameters in bfloat16, 32 layers, contexts up to 8,192`."""
    active = ""
    if architecture.active_parameters != architecture.parameters:
        active = f" ({_count(architecture.active_parameters)} of them active)"
    parameters = f"{_count(architecture.parameters)} parameters{active} in {architecture.dtype}"
    layers = words.plural(len(architecture.layers), "layer")
    longest = f"contexts up to {architecture.max_context:,}" if architecture.max_context else ""
    return f"{architecture.name}: {words.joined(architecture.kind, parameters, layers, longest)}"


def _count(parameters: int) -> str:
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= factor:
            return f"{words.short(parameters / factor)} {suffix}"
    return str(parameters)


def target(outlook: Outlook) -> str:
    """Describe the target: its memory, and the rates of the compute types in use."""
    figures = outlook.target.figures()
    named = {"memory.capacity": "holds", "memory.read_bandwidth": "reads"}
    named |= {f"compute.{kind}": kind for kind in computed(outlook)}
    known = [(name, figures[place]) for place, name in named.items() if place in figures]
    parts = [f"{name} {words.rate(figure.number, figure.unit)}" for name, figure in known if figure.number is not None]
    return f"{outlook.target.name}: {words.joined(outlook.target.summary, ', '.join(parts), by='; ')}"


def computed(outlook: Outlook) -> list[str]:
    """List the compute types of all candidates, in the target's order."""
    used = {op.compute for row in _rows(outlook) for op in row.step.bound.ops}
    return [*(kind for kind in outlook.target.compute if kind in used), *sorted(used - set(outlook.target.compute))]


def _rows(outlook: Outlook) -> list[PlannedBatch]:
    return [row for candidate in outlook.candidates for row in candidate.rows]


def notes(outlook: Outlook) -> tuple[list[str], list[str]]:
    """Split the notes on all candidates into (assumptions, others)."""
    assumed = [note.removeprefix(_ASSUMED) for note in outlook.notes if note.startswith(_ASSUMED)]
    return assumed, [note for note in outlook.notes if not note.startswith(_ASSUMED)]


def workload(work: Workload, architecture: Architecture) -> str:
    """Describe a workload: `prompts of 1,024 and outputs of 256 tokens, context 1,280, batches 1 to 64`."""
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
    """Format the bound of a time, without a sign: `12.1 ms`."""
    return words.moment(timed.least) if timed is not None and timed.least is not None else NONE


def forecast(timed: TimedStep | None) -> str:
    """Format a forecast: `19 ms (15–26)`, all in one unit."""
    if timed is None or timed.forecast is None:
        return NONE
    factor, name = words.time_unit(timed.forecast)
    return with_interval(timed.forecast, timed.interval, factor, f"\u00a0{name}")


def at(row: PlannedBatch | None, *, prefill: bool = False) -> str:
    """Format the time of a batch's step, or of its prompts: the forecast, else the bound with its sign.

    A batch that does not fit has no time: the text says so.
    """
    if row is None:
        return NONE
    timed = row.prefill if prefill else row.step
    if row.fits is False:
        return FITS[False]
    bounded = timed is not None and timed.forecast is None and timed.least is not None
    return f"≥ {bound(timed)}" if bounded else forecast(timed)


def in_full(timed: TimedStep) -> str:
    """Format bound and forecast: `at best 12.1 ms, forecast 19 ms (15–26)`."""
    least = f"at best {bound(timed)}" if timed.least is not None else ""
    expected = f"forecast {forecast(timed)}" if timed.forecast is not None else ""
    return words.joined(least, expected) or f"not known: {timed.because}"


def limit(timed: TimedStep) -> str:
    """Name the limit of a step: `memory` or `compute`."""
    return NONE if timed.least is None else "memory" if timed.bound.memory_bound else "compute"


def rate(candidate: PlannedRecipe, row: PlannedBatch, work: Workload) -> Rate:
    """Compute the output a second of one device."""
    whole, devices = row.rate(work.output), candidate.memory.devices if candidate.memory is not None else 1
    most, expected = (value / devices if value is not None else None for value in (whole.most, whole.forecast))
    interval = (whole.interval[0] / devices, whole.interval[1] / devices) if whole.interval is not None else None
    return Rate(most, expected, interval)


def most(rate: Rate) -> str:
    """Format the bound of a rate: `≤ 3,400`."""
    return f"≤ {words.short(rate.most)}" if rate.most is not None else NONE


def expected(rate: Rate) -> str:
    """Format the forecast of a rate: `1,900 (1,500–2,300)`, with two digits."""
    return with_interval(rate.forecast, rate.interval) if rate.forecast is not None else NONE


def with_interval(value: float, interval: Interval | None, factor: float = 1.0, suffix: str = "") -> str:
    """Format a forecast: `with_interval(0.019, (0.015, 0.026), 1000, " ms")` is `19 ms (15–26)`."""
    ends = f"{_two(interval[0] * factor)}–{_two(interval[1] * factor)}" if interval is not None else ""
    return f"{_two(value * factor)}{suffix}{words.bracketed(ends)}"


def _two(value: float) -> str:
    return words.figure(float(f"{value:.1e}"), 2)


def fitting(candidate: PlannedRecipe) -> list[PlannedBatch]:
    """Drop the batches known not to fit."""
    return [row for row in candidate.rows if row.fits is not False]


def best(candidate: PlannedRecipe, work: Workload) -> tuple[PlannedBatch, Rate] | None:
    """Find the fitting batch with the most output: by forecasts if all have one, else by bounds."""
    rates = [(row, rate(candidate, row, work)) for row in fitting(candidate)]
    values = [(output.forecast if candidate.forecast else output.most, row, output) for row, output in rates]
    known = [(value, row, output) for value, row, output in values if value is not None]
    return max(known, key=lambda entry: entry[0])[1:] if known else None


def legend(outlook: Outlook) -> str:
    """Explain the marks of bounds and forecasts, if there are any."""
    timed = [phase for row in _rows(outlook) for phase in (row.step, row.prefill) if phase is not None]
    least = _BOUND if any(phase.least is not None for phase in timed) else ""
    return words.joined(least, _FORECAST if any(phase.forecast is not None for phase in timed) else "", by=" ")


def timed(outlook: Outlook) -> bool:
    """Tell if any time is known."""
    return any(row.step.seconds is not None for row in _rows(outlook))


# --- candidates ------------------------------------------------------------------------------------------------------


def state(candidate: PlannedRecipe) -> str:
    """Name the worst support of a candidate: `native`, `emulated`, `absent` or `cannot run`."""
    if candidate.problem is not None and not candidate.cells:
        return "cannot run"
    return max((cell.state for cell in candidate.cells), key=_WORST.index, default=NONE)


def takes(memory: PlannedMemory) -> str:
    """Format the memory: `21.3 GB`, or `2 × 71.0 GB` for two devices."""
    size = words.size(memory.total)
    return f"{memory.devices} × {size}" if memory.devices > 1 else size


def fits(memory: PlannedMemory) -> bool | None:
    """Tell if the memory of each device suffices; None if its capacity is unknown."""
    return None if memory.capacity is None else memory.total <= memory.capacity


def largest(number: int | None, memory: PlannedMemory) -> str:
    """Format the largest batch or context; `any` without a limit."""
    if number is not None:
        return f"{number:,}"
    return NONE if memory.capacity is None else "any"


def because(candidates: Sequence[PlannedRecipe]) -> list[tuple[str, str]]:
    """Return (scope, reason) of the times, each reason once: for all recipes, some of them, or some batches."""
    reasons: dict[str, dict[str, dict[str, list[int]]]] = {}
    runs = [candidate for candidate in candidates if candidate.rows]
    for candidate in runs:
        for row in candidate.rows:
            for what, timed in (("prompts", row.prefill), ("steps", row.step)):
                if timed is not None:
                    about = reasons.setdefault(timed.because, {}).setdefault(candidate.label, {})
                    about.setdefault(what, []).append(row.batch)
    return [(_about(runs, about) if len(reasons) > 1 else "all times", reason) for reason, about in reasons.items()]


def _about(runs: Sequence[PlannedRecipe], about: dict[str, dict[str, list[int]]]) -> str:
    """Name recipes, with batches if not all: `int4, bf16`, or `int4 (prompts of batch 1 and 8)`."""
    named = []
    for candidate in (candidate for candidate in runs if candidate.label in about):
        own, batches = about[candidate.label], [row.batch for row in candidate.rows]
        kinds = [what for what, there in (("prompts", candidate.rows[0].prefill), ("steps", True)) if there]
        whole = {what: own.get(what) == batches for what in kinds}
        parts = [what if whole[what] else f"{what} of batch {words.listed(own[what])}" for what in kinds if what in own]
        named.append(candidate.label if all(whole.values()) else f"{candidate.label} ({', '.join(parts)})")
    return ", ".join(named)


def cautions(outlook: Outlook) -> dict[str, list[str]]:
    """Return caution -> candidates: not computed as stored, cannot run, does not fit."""
    told: dict[str, list[str]] = {}
    for candidate in outlook.candidates:
        texts = [
            f"{cell.what}: {cell.state} in {candidate.runtime} ({cell.source})"
            for cell in candidate.cells
            if cell.state != "native"
        ]
        texts += [f"cannot run: {candidate.problem}"] if candidate.problem is not None else []
        texts += candidate.notes
        if (memory := candidate.memory) is not None:
            short_of = fits(memory) is False and memory.needed is not None and memory.needed > memory.devices
            texts += [f"a sequence needs {memory.needed} devices"] if short_of else []
            texts += memory.notes
        for text in dict.fromkeys(texts):
            told.setdefault(text, []).append(candidate.label)
    return told


def compiling(candidates: Sequence[PlannedRecipe]) -> tuple[Sheet, list[str]]:
    """Return (table, notes) on the cost of each compile: peak memory, disk, and time after a rehearsal."""
    body, sentences = [], []
    for candidate in candidates:
        if (need := candidate.compiling) is not None:
            body.append([candidate.label, words.size(need.peak), need.at_peak, words.size(need.disk.most)])
            rehearsed = ", ".join(f"{stage} {words.duration(value)}" for stage, value in (need.seconds or {}).items())
            sentences += [f"by the block that was run: {rehearsed}" if rehearsed else _UNTIMED, *need.notes]
    return Sheet(["recipe", "memory", "at", "disk"], body), list(dict.fromkeys(sentences))


def short(label: str, longest: int = 16) -> str:
    """Shorten a label for the end of a line: a path to its name, a long label to its end.

    >>> short("./recipes/mine.yaml"), short("int4-best")
    ('mine', 'int4-best')
    """
    if "/" in label or "\\" in label:
        label = re.split(r"[/\\]", label.rstrip("/\\"))[-1].removesuffix(".yaml")
    return label if len(label) <= longest else f"…{label[1 - longest :]}"


# --- what to do ------------------------------------------------------------------------------------------------------


def answer(outlook: Outlook) -> str:
    """Write the recommendation as a sentence."""
    label, several = outlook.recommendation.label, len(outlook.candidates) > 1
    if label is None:
        return "none of them fits or runs" if several else "it does not fit or run"
    return f"take {label}" if several else f"{label} fits and runs"


def chosen(outlook: Outlook) -> list[PlannedRecipe]:
    """List the recommended candidate; [] without a recommendation."""
    return [candidate for candidate in outlook.candidates if candidate.label == outlook.recommendation.label]


def reasons(outlook: Outlook) -> list[str]:
    """List the reasons of the recommendation, and the load at which another price becomes cheaper."""
    bills = [(candidate.cost, candidate.forecast) for candidate in chosen(outlook) if candidate.cost is not None]
    even = [point.line(bound=not forecast) for cost, forecast in bills for point in cost.break_even]
    return [*outlook.recommendation.because, *even]


def standing(outlook: Outlook) -> str:
    """Name the basis of a recommendation: `forecast`, `by bounds`, or `by size` without times."""
    if not timed(outlook):
        return f"by size{' and KL' if decodes(outlook) else ''}"
    runs = [candidate for candidate in outlook.candidates if candidate.problem is None]
    return "forecast" if runs and all(candidate.forecast for candidate in runs) else "by bounds"


def confirm(outlook: Outlook) -> list[str]:
    """Return the commands to confirm the recommendation on the target; [] without one."""
    if not (recommended := chosen(outlook)):
        return []
    best_ = recommended[0]
    # the label of a recipe file is its path
    recipe = shlex.quote(best_.label if content.is_path(best_.label) else best_.recipe)
    batches = ",".join(map(str, outlook.workload.batches))
    named = outlook.reference or outlook.architecture.name
    weights = named in ALIASES or named.startswith("hf:") or content.is_path(named)
    # a config has no weights: the user fills in MODEL
    of = named if weights and not named.endswith(".json") else on_hub(named) or "MODEL"
    allowed = " --allow-code" if best_.code else ""
    bundle = shlex.quote(f"./{Path(of.partition('@')[0]).name}--{Path(recipe).stem}")
    merged = "".join(f" --adapter {shlex.quote(adapter)}" for adapter in outlook.adapters)
    compile_ = f"quantkit compile {shlex.quote(of)}{merged} --recipe {recipe}"
    return [
        f"{compile_} --target {shlex.quote(outlook.aimed or outlook.target.name)}{allowed} --out {bundle}",
        f"quantkit measure {bundle} --batch {batches}",
    ]


# --- money, energy and waiting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """Amount of money or energy: at the bounds (`least`) and at the forecasts; None if one of these times is
    unknown."""

    least: float | None = None
    forecast: float | None = None
    interval: Interval | None = None

    @property
    def bound(self) -> str:
        """Lower bound as text: `≥ 0.123`."""
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
    least, forecast = (share * seconds if seconds is not None else None for seconds in (timed.least, timed.forecast))
    return Priced(least, forecast, interval)


def _paid(bill: Bill | None) -> RequestCost | None:
    return bill.cheapest if bill is not None else None


def currency(outlook: Outlook) -> str:
    """Name the currency of all amounts; "" without prices."""
    bills = [
        bill for candidate in outlook.candidates for bill in (candidate.cost, *(row.cost for row in candidate.rows))
    ]
    return next((cost.currency for bill in bills if (cost := _paid(bill)) is not None), "")


def amounts_head(outlook: Outlook) -> list[str]:
    """List the column names for `amounts`."""
    money, head = currency(outlook), []
    if money and decodes(outlook):
        head = [f"{money}, in", f"{money}, out", f"{money}, both"]
    elif money:
        head = [f"{money} a million {unit(outlook)}"]
    if any(row.cost is not None and row.cost.energy is not None for row in _rows(outlook)):
        # for the boards' maximal power; the real power may be lower
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
    """List the source, date and assumptions of each price."""
    costs = [cost for row in _rows(outlook) if (cost := _paid(row.cost)) is not None]
    return list(dict.fromkeys("; ".join([cost.basis, *cost.notes]) for cost in costs))


def ways(candidate: PlannedRecipe) -> list[list[str]]:
    """List all prices of a candidate, at the batch with the cheapest request."""
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
    """List the warnings on prices, each once."""
    return list(
        dict.fromkeys(text for candidate in outlook.candidates if candidate.cost for text in candidate.cost.warnings)
    )


def loads(outlook: Outlook, quantiles: Sequence[str] = ("p50", "p99")) -> Sheet | None:
    """Build the waiting times of requests, a line for each candidate; None without a simulated load."""
    columns = [(metric, which) for metric in METRICS for which in quantiles]
    names = ["recipe", "load", *(f"{_WAITS[metric]},\n{which}" for metric, which in columns)]
    body = []
    for candidate in outlook.candidates:
        if (load := candidate.load) is None:
            continue
        waits = []
        for metric, which in columns:
            value = getattr(load, metric).get(which)
            factor, name = words.time_unit(value.value) if value is not None else (1.0, "")
            # a sign marks bounds; two digits are the precision of a simulation
            mark = "" if candidate.forecast else "≥ "
            waits.append(NONE if value is None else f"{mark}{_two(value.value * factor)}\u00a0{name}")
        body.append([candidate.label, words.whole(load.load), *waits])
    return Sheet(names, body) if body else None


def carried(outlook: Outlook) -> list[str]:
    """Describe each candidate's server under load, in a sentence."""
    sentences = []
    for candidate in outlook.candidates:
        if (load := candidate.load) is None:
            continue
        cost, (most_, least) = _paid(candidate.cost), ("", "") if candidate.forecast else ("at most ", "≥ ")
        parts = [f"{most_}{words.short(load.capacity)} requests/s can be served"]
        parts.append(f"{words.figure(load.batch, 2)} sequences in a step on average")
        if cost is not None:
            # a server with idle time pays for hours, so its speed does not change the price
            least = least if cost.utilisation >= 1 else ""
            parts.append(f"{least}{words.short(cost.blended)} {cost.currency} a million tokens, idle hours paid")
        sentences.append(f"{candidate.label}: {'; '.join([*parts, *load.notes])}")
    return sentences


def cost_curve(outlook: Outlook, candidate: PlannedRecipe) -> list[tuple[int, Priced]]:
    """Return (batch, cheapest price of a million of the traffic's tokens, or of passes)."""
    points = []
    for row in fitting(candidate):
        if (cost := _paid(row.cost)) is not None:
            value = cost.blended if decodes(outlook) else _MILLION * cost.request
            points.append((row.batch, together(row, outlook.workload.output, value)))
    return points
