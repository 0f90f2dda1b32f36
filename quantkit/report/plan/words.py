"""A plan's figures in words; terminal and page share them.

A bound is never read as a forecast: `≥ 12.1 ms` is what no runtime beats, `19 ms (15–26)` is what to expect, with the
interval of what was measured. A rate has `≤`. Forecasts have two digits, as they know no more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from quantkit import content
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.source.alias import ALIASES
from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedMemory, PlannedRecipe, Rate, Workload
from quantkit.report.kit import words
from quantkit.report.kit.tree import Sheet
from quantkit.target import State

NONE = "–"
_BOUND = "≥ and ≤ mark bounds, which no runtime beats."
_UNTIMED = "a compile's time is known after its first block, or by --rehearse"
_FORECAST = "What has an interval behind it, like 19 ms (15–26), is a forecast from measurements."
# what a model puts out, and what one step of it is called
_OUTPUT = {"decoder": "tokens", "encoder": "sequences", "network": "images"}
_WORST: Sequence[State] = ("native", "emulated", "absent")


def unit(architecture: Architecture) -> str:
    """What comes out of it: `tokens`, `sequences`, `images`."""
    return _OUTPUT[architecture.kind]


def per_second(outlook: Outlook) -> str:
    """What rates are in: `tokens/s`; of one device where several share a model, so that recipes can be compared."""
    shared = any(each.memory is not None and each.memory.devices > 1 for each in outlook.candidates)
    return f"{unit(outlook.architecture)}/s{' a device' if shared else ''}"


def rate(candidate: PlannedRecipe, row: PlannedBatch, work: Workload) -> Rate:
    """What comes out each second, of one device."""
    found, devices = row.rate(work.output), candidate.memory.devices if candidate.memory is not None else 1

    def share(value: float | None) -> float | None:
        return value / devices if value is not None else None

    interval = (found.interval[0] / devices, found.interval[1] / devices) if found.interval is not None else None
    return Rate(share(found.most), share(found.forecast), interval)


def step(architecture: Architecture) -> str:
    """What is timed at each batch: a `step` of decoding, or a whole `pass`."""
    return "step" if architecture.kind == "decoder" else "pass"


def model(architecture: Architecture) -> str:
    """`llama-3-8b: decoder, 8.03 B parameters in bfloat16, 32 layers, contexts up to 8,192`."""
    found = f"{architecture.name}: {architecture.kind}, {count(architecture.parameters)} parameters"
    if architecture.active_parameters != architecture.parameters:
        found += f" ({count(architecture.active_parameters)} of them active)"
    found += f" in {architecture.dtype}, {words.plural(len(architecture.layers), 'layer')}"
    return found + (f", contexts up to {architecture.max_context:,}" if architecture.max_context else "")


def count(parameters: int) -> str:
    """`count(8_030_261_248)` is `8.03 B`."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= factor:
            return f"{words.figure(parameters / factor, 3)} {suffix}"
    return str(parameters)


def target(outlook: Outlook) -> str:
    """Its memory, and the rates of what the candidates compute in."""
    figures = outlook.target.figures()
    named = {"memory.capacity": "holds", "memory.read_bandwidth": "reads"}
    named |= {f"compute.{kind}": kind for kind in computed(outlook)}
    known = [(name, figures[place]) for place, name in named.items() if place in figures]
    parts = [f"{name} {words.rate(each.number, each.unit)}" for name, each in known if each.number is not None]
    return f"{outlook.target.name}: {'; '.join([outlook.target.summary, *[', '.join(parts)][: len(parts)]])}"


def computed(outlook: Outlook) -> list[str]:
    """The compute types that any candidate's operations are done in, in the order of the target."""
    used = {op.compute for each in outlook.candidates for row in each.rows for op in row.step.bound.ops}
    return [*(kind for kind in outlook.target.compute if kind in used), *sorted(used - set(outlook.target.compute))]


def notes(outlook: Outlook) -> tuple[list[str], list[str]]:
    """(what was assumed, what else holds for all candidates)."""
    begin = "assumed: "
    assumed = [note.removeprefix(begin) for note in outlook.notes if note.startswith(begin)]
    return assumed, [note for note in outlook.notes if not note.startswith(begin)]


def workload(work: Workload, architecture: Architecture) -> str:
    """`prompts of 1,024 and outputs of 256 tokens, context 1,280, batches 1 to 64`."""
    batches = f"batch {work.batches[0]:,}"
    if len(work.batches) > 1:
        batches = f"batches {work.batches[0]:,} to {work.batches[-1]:,}"
    if architecture.kind != "decoder":
        length = f"sequences of {work.prompt:,} tokens, " if architecture.kind == "encoder" else ""
        return f"{length}{batches}"
    rate = f", {work.rate:g} requests/s" if work.rate is not None else ""
    return (
        f"prompts of {work.prompt:,} and outputs of {work.output:,} tokens, context {work.context:,}, {batches}{rate}"
    )


# --- times -----------------------------------------------------------------------------------------------------------


def bound(timed: TimedStep | None) -> str:
    """`12.1 ms`; the column says that it is a bound."""
    return words.moment(timed.least) if timed is not None and timed.least is not None else NONE


def forecast(timed: TimedStep | None) -> str:
    """`19 ms (15–26)`, all in one unit."""
    if timed is None or timed.forecast is None:
        return NONE
    factor, unit_ = words.time_unit(timed.forecast)
    return with_interval(timed.forecast, timed.interval, factor, f"\u00a0{unit_}")


def time(timed: TimedStep | None) -> str:
    """The forecast where there is one; else the bound, marked as one."""
    if timed is not None and timed.forecast is None and timed.least is not None:
        return f"≥ {bound(timed)}"
    return forecast(timed)


def at(row: PlannedBatch | None, *, prefill: bool = False) -> str:
    """The time of a batch's step, or of its prompts; that it does not fit, where it does not."""
    if row is None:
        return NONE
    return FITS[False] if row.fits is False else time(row.prefill if prefill else row.step)


def waited(seconds: float, *, forecast: bool) -> str:
    """`8.9 ms`, marked where it stands on bounds; two digits, as a simulation knows no more."""
    factor, unit_ = words.time_unit(seconds)
    return f"{'' if forecast else '≥ '}{_two(seconds * factor)}\u00a0{unit_}"


def in_full(timed: TimedStep) -> str:
    """Both, as a sentence has them: `at best 12.1 ms, forecast 19 ms (15–26)`."""
    parts = [f"at best {bound(timed)}"] if timed.least is not None else []
    parts += [f"forecast {forecast(timed)}"] if timed.forecast is not None else []
    return ", ".join(parts) or f"not known: {timed.because}"


def limit(timed: TimedStep) -> str:
    """Which roof most of the time goes under."""
    return NONE if timed.least is None else "memory" if timed.bound.memory_bound else "compute"


def most(rate: Rate) -> str:
    """`≤ 3,400`."""
    return f"≤ {words.figure(rate.most, 3)}" if rate.most is not None else NONE


def expected(rate: Rate) -> str:
    """`1,900 (1,500–2,300)`, two digits each."""
    return with_interval(rate.forecast, rate.interval) if rate.forecast is not None else NONE


def given(rate: Rate) -> str:
    """The forecast where there is one; else the bound, marked as one."""
    return expected(rate) if rate.forecast is not None else most(rate)


def with_interval(value: float, interval: tuple[float, float] | None, factor: float = 1.0, suffix: str = "") -> str:
    """A forecast: `with_interval(0.019, (0.015, 0.026), 1000, " ms")` is `19 ms (15–26)`."""
    text = f"{_two(value * factor)}{suffix}"
    return text if interval is None else f"{text} ({_two(interval[0] * factor)}–{_two(interval[1] * factor)})"


def _two(value: float) -> str:
    """Two digits: `393` is `390`."""
    return words.figure(float(f"{value:.1e}"), 2)


def fitting(candidate: PlannedRecipe) -> list[PlannedBatch]:
    """Its batches, without those that are known not to fit."""
    return [row for row in candidate.rows if row.fits is not False]


def best(candidate: PlannedRecipe, work: Workload) -> tuple[PlannedBatch, Rate] | None:
    """The batch that gives the most of those that fit: by forecasts where all have one, else by bounds."""
    found = [(row, rate(candidate, row, work)) for row in fitting(candidate)]
    by = [(each.forecast if candidate.forecast else each.most, row, each) for row, each in found]
    known = [(value, row, each) for value, row, each in by if value is not None]
    return max(known, key=lambda each: each[0])[1:] if known else None


def legend(outlook: Outlook) -> str:
    """How to read the figures, of what there is."""
    timed = [each for row in _rows(outlook) for each in (row.step, row.prefill) if each is not None]
    parts = [_BOUND] if any(each.least is not None for each in timed) else []
    known = any(each.forecast is not None for each in timed)
    return " ".join([*parts, _FORECAST] if known else parts)


def timed(outlook: Outlook) -> bool:
    """Whether any time is known."""
    return any(row.step.seconds is not None for row in _rows(outlook))


def _rows(outlook: Outlook) -> list[PlannedBatch]:
    return [row for each in outlook.candidates for row in each.rows]


# --- candidates ------------------------------------------------------------------------------------------------------


def state(candidate: PlannedRecipe) -> str:
    """The worst of its cells: `native`, `emulated`, `absent`."""
    if candidate.problem is not None and not candidate.cells:
        return "cannot run"
    worst = max((_WORST.index(cell.state) for cell in candidate.cells), default=None)
    return NONE if worst is None else _WORST[worst]


def takes(memory: PlannedMemory) -> str:
    """`21.3 GB`, or `2 × 71.0 GB`."""
    size = words.size(memory.total)
    return f"{memory.devices} × {size}" if memory.devices > 1 else size


def fits(memory: PlannedMemory) -> bool | None:
    """Whether it all goes into each device; None where the target does not say how much they hold."""
    return None if memory.capacity is None else memory.total <= memory.capacity


FITS = {True: "fits", False: "does not fit", None: NONE}


def largest(number: int | None, memory: PlannedMemory) -> str:
    """A batch or a context, as far as anything bounds it."""
    if number is not None:
        return f"{number:,}"
    return NONE if memory.capacity is None else "any"


def needs(memory: PlannedMemory) -> str:
    """What would hold it, where these devices do not."""
    if fits(memory) is not False or memory.needed is None or memory.needed <= memory.devices:
        return ""
    return f"a sequence needs {memory.needed} devices"


def because(candidates: Sequence[PlannedRecipe]) -> list[tuple[str, str]]:
    """(what, what its times stand on), each reason once: of all, of some recipes, or of some of their batches."""
    by: dict[str, dict[str, dict[str, list[int]]]] = {}
    runs = [each for each in candidates if each.rows]
    for each in runs:
        for row in each.rows:
            for what, timed in (("prompts", row.prefill), ("steps", row.step)):
                if timed is not None:
                    about = by.setdefault(timed.because, {}).setdefault(each.label, {})
                    about.setdefault(what, []).append(row.batch)
    return [(_about(runs, about) if len(by) > 1 else "all times", reason) for reason, about in by.items()]


def _about(runs: Sequence[PlannedRecipe], about: dict[str, dict[str, list[int]]]) -> str:
    """`int4, bf16`, or with what of them: `int4 (prompts of batch 1 and 8)`."""
    found = []
    for each in (each for each in runs if each.label in about):
        kinds = [what for what, has in (("prompts", each.rows[0].prefill), ("steps", True)) if has]
        whole = [about[each.label].get(what) == [row.batch for row in each.rows] for what in kinds]
        parts = [
            what if done else f"{what} of batch {words.listed(about[each.label][what])}"
            for what, done in zip(kinds, whole, strict=True)
            if what in about[each.label]
        ]
        found.append(each.label if all(whole) else f"{each.label} ({', '.join(parts)})")
    return ", ".join(found)


def cautions(candidate: PlannedRecipe) -> list[str]:
    """What is not computed as it is stored, what cannot run, and its own notes."""
    found = [
        f"{cell.what}: {cell.state} in {candidate.runtime} ({cell.source})"
        for cell in candidate.cells
        if cell.state != "native"
    ]
    if candidate.problem is not None:
        found.append(f"cannot run: {candidate.problem}")
    return [*found, *candidate.notes]


def every_caution(outlook: Outlook) -> dict[str, list[str]]:
    """What a reader must know -> of which candidates."""
    found: dict[str, list[str]] = {}
    for each in outlook.candidates:
        memory = each.memory
        more = [needs(memory), *memory.notes] if memory is not None else []
        for text in (*cautions(each), *more):
            labels = found.setdefault(text, []) if text else []
            labels += [each.label] if each.label not in labels else []
    return found


def compiling(candidates: Sequence[PlannedRecipe]) -> tuple[Sheet, list[str]]:
    """Say what each compile takes: memory at its peak, disk; of time what a rehearsal measured."""
    body, notes = [], []
    for each in candidates:
        if (need := each.compiling) is not None:
            body.append([each.label, words.size(need.peak), need.at_peak, words.size(need.disk.most)])
            rehearsed = ", ".join(f"{stage} {words.duration(value)}" for stage, value in (need.seconds or {}).items())
            notes += [f"by the block that was run: {rehearsed}" if rehearsed else _UNTIMED, *need.notes]
    return Sheet(["recipe", "memory", "at", "disk"], body), list(dict.fromkeys(notes))


# --- what to do ------------------------------------------------------------------------------------------------------


def answer(outlook: Outlook) -> str:
    """The recommendation as a sentence, called what it is."""
    label = outlook.recommendation.label
    if label is None:
        return "none of them fits or runs" if len(outlook.candidates) > 1 else "it does not fit or run"
    return f"take {label}" if len(outlook.candidates) > 1 else f"{label} fits and runs"


def chosen(outlook: Outlook) -> list[PlannedRecipe]:
    """What is recommended; none where nothing is."""
    return [each for each in outlook.candidates if each.label == outlook.recommendation.label]


def reasons(outlook: Outlook) -> list[str]:
    """Why it is recommended, and from when on one way to pay is cheaper; by bounds where not all are forecasts."""
    bills = [(each.cost, each.forecast) for each in chosen(outlook) if each.cost is not None]
    even = [each.line(bound=not forecast) for cost, forecast in bills for each in cost.break_even]
    return [*outlook.recommendation.because, *even]


def standing(outlook: Outlook) -> str:
    """What a recommendation stands on."""
    runs = [each for each in outlook.candidates if each.problem is None]
    return "forecast" if runs and all(each.forecast for each in runs) else "by bounds"


def several(candidate: PlannedRecipe) -> str:
    """` (4×)` where four devices share a candidate."""
    devices = candidate.memory.devices if candidate.memory is not None else 1
    return f" ({devices}×)" if devices > 1 else ""


def confirm(outlook: Outlook) -> list[str]:
    """The commands that would confirm it, on the target; none where nothing is recommended."""
    if not (found := chosen(outlook)):
        return []
    # of a recipe in a file the candidate's label is its path
    recipe = shlex.quote(found[0].label if content.is_path(found[0].label) else found[0].recipe)
    batches = ",".join(str(batch) for batch in outlook.workload.batches)
    # of a config alone there are no weights: the user knows where they are
    named = outlook.reference or outlook.architecture.name
    weights = named in ALIASES or named.startswith("hf:") or content.is_path(named)
    model_ = shlex.quote(named) if weights and not named.endswith(".json") else "MODEL"
    # of a target in a file of the user's own, the plan knows the stem alone
    target_ = outlook.target.name if outlook.target.name in content.names("export") else "TARGET"
    # a bundle holds no path of its model
    baseline = f" --baseline {model_}" if content.is_path(named) or model_ == "MODEL" else ""
    allowed = " --allow-code" if found[0].code else ""
    return [
        f"quantkit compile {model_} --recipe {recipe} --target {target_}{allowed} --out BUNDLE",
        f"quantkit measure BUNDLE --batch {batches}{baseline}",
    ]


def short(label: str, longest: int = 16) -> str:
    """A label for the end of a line, where there is little room: of a path the name, of a long one its end.

    >>> short("./recipes/mine.yaml"), short("int4-best")
    ('mine', 'int4-best')
    """
    if "/" in label or "\\" in label:
        label = re.split(r"[/\\]", label.rstrip("/\\"))[-1].removesuffix(".yaml")
    return label if len(label) <= longest else f"…{label[1 - longest :]}"
