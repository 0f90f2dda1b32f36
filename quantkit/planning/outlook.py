"""What a plan says: for each recipe whether it fits, how fast it can be, what it costs; and which one to take.

Numbers with their units in the names; what is not known is None, and `because` or `notes` say why. A page, a table and
`--json` all show these.

Which of several recipes to take, for a workload, and why. A forecast: only a measurement decides.

    seconds a request    devices · (prefill + output · step) / batch, at the batch of the workload where it is least
    tied                 recipes whose interval reaches the best one's; on bounds, within a tenth of it
    the choice           of those that are tied, on the fewest devices, since nothing is counted for what they tell each
                         other; of these the one that stores the most bits, which changes the model least

Like is set against like: as soon as one of them has no forecast, the bounds of all are compared, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.bound.forecast import Served, TimedStep
from quantkit.planning.compiling import Compiling
from quantkit.planning.serving.cost import Bill
from quantkit.planning.serving.load import Load
from quantkit.planning.serving.traffic import Traffic
from quantkit.target import State, Target


@dataclass(frozen=True)
class Workload:
    """What is to be served.

    Args:
        batches: sequences at once, whose steps are timed.
        prompt: tokens that come in with a request, on average.
        output: tokens that go out, on average; 0 for a model that does not decode.
        context: tokens that memory is reckoned for; the longest request, unless said.
        traffic: lengths of all requests, and how many of them a second.
        assumed: what was not said, and what was taken for it, in words.
    """

    batches: Sequence[int]
    prompt: int
    output: int
    context: int
    traffic: Traffic
    assumed: Sequence[str] = ()

    @property
    def rate(self) -> float | None:
        """Requests a second; None where no load is simulated."""
        return self.traffic.rate


@dataclass(frozen=True)
class Rate:
    """Tokens that come out each second, of requests that all begin together.

    Args:
        most: by the bounds: no runtime gives more; None where one of them is not known.
        forecast: None as soon as one of the times has none.
    """

    most: float | None
    forecast: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class PlannedBatch:
    """A batch.

    Args:
        prefill: of their prompts; None for a model that does not decode, whose pass is `step`.
        step: one token of each, halfway through the output.
        parts: what -> bytes, of one device, with all of them at the full context.
        fits: whether weights and cache fit into the devices; None where the target does not say how much they hold.
        cost: what tokens cost at this batch; None where no time is known.
    """

    batch: int
    prefill: TimedStep | None
    step: TimedStep
    parts: Mapping[str, float]
    fits: bool | None
    cost: Bill | None = None

    def tokens_per_s(self, output: int) -> float | None:
        """Tokens that come out each second, of requests that all begin together."""
        first = self.prefill.seconds if self.prefill is not None else 0.0
        if first is None or self.step.seconds is None:
            return None
        steps = output if self.prefill is not None else 1
        return self.batch * steps / (first + steps * self.step.seconds)

    def rate(self, output: int) -> Rate:
        """The same of bounds alone, and of forecasts alone: a mixture is neither.

        Of a model that does not decode: passes each second, times the batch.
        """
        steps = output if self.prefill is not None else 1
        parts = [(self.step, steps), *([(self.prefill, 1)] if self.prefill is not None else [])]

        def of(seconds: Callable[[TimedStep], float | None]) -> float | None:
            taken = [(seconds(timed), times) for timed, times in parts]
            total = sum(each * times for each, times in taken if each is not None)
            return self.batch * steps / total if total and all(each is not None for each, _ in taken) else None

        low, high = (
            of(lambda each: each.interval and each.interval[1]),
            of(lambda each: each.interval and each.interval[0]),
        )
        sure = (low, high) if low is not None and high is not None else None
        return Rate(of(lambda each: each.least), of(lambda each: each.forecast), sure)


@dataclass(frozen=True)
class PlannedMemory:
    """What it takes on the target, at the context of the workload.

    Args:
        parts: what -> bytes, of one device: `weights`, `embeddings`, `cache`, `activations`, `runtime`, ...
        batch: that they are of: the largest of the workload that fits, else the smallest.
        capacity: bytes of one device that the runtime uses; None where the target does not say.
        cache_per_token: bytes of keys and values that one more token takes, all layers together.
        largest_batch: sequences at the context; None where nothing bounds it.
        largest_context: tokens at that batch, as far as the model goes.
        needed: devices that one sequence at the context needs; None where no number up to 64 does.
    """

    parts: Mapping[str, float]
    batch: int
    capacity: float | None
    cache_per_token: float
    largest_batch: int | None
    largest_context: int | None
    devices: int
    needed: int | None
    notes: Sequence[str] = ()

    @property
    def total(self) -> float:
        """Bytes of one device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlannedCell:
    """How the target's runtime takes what the recipe stores: a cell of the matrix."""

    format: str
    what: str
    state: State
    source: str


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe, planned.

    Args:
        label: as it was asked for: `int4-best`, `bf16`.
        recipe: what it stands for.
        cells: how it takes what is stored.
        bits: of a quantized weight, on average; None where none is quantized.
        bytes: of all weights as they are stored.
        served: what times any other step.
        load: what the simulation of the workload's rate says; None without one.
        cost: of a million tokens, and energy, at the batch where a request takes least, and under the load where there
            is one; None where no time is known.
        compiling: what the compile takes; None where it is not known.
        problem: why it cannot run there; nothing else is reckoned then.
        code: whether a pass of it stands in a file of the user's, which has to be allowed.
    """

    label: str
    recipe: str
    runtime: str = ""
    cells: Sequence[PlannedCell] = ()
    bits: float | None = None
    bytes: float = 0.0
    memory: PlannedMemory | None = None
    rows: Sequence[PlannedBatch] = ()
    served: Served | None = None
    load: Load | None = None
    cost: Bill | None = None
    compiling: Compiling | None = None
    problem: QuantkitError | None = None
    notes: Sequence[str] = ()
    code: bool = False

    @property
    def forecast(self) -> bool:
        """Whether every time is a forecast, and not a bound alone."""
        times = [each for row in self.rows for each in (row.step, row.prefill) if each is not None]
        return bool(times) and all(each.forecast is not None for each in times)


@dataclass(frozen=True)
class Recommendation:
    """Which candidate to take.

    Args:
        label: its; None where none fits or runs.
        because: the reasons, the first one decided.
    """

    label: str | None
    because: Sequence[str]


@dataclass(frozen=True)
class Outlook:
    """The whole plan.

    Args:
        candidates: in the order in which they were asked for.
        notes: what holds for all of them.
        reference: how the model was named: `./my-model`; "" where that is not known.
    """

    architecture: Architecture
    target: Target
    workload: Workload
    candidates: Sequence[PlannedRecipe]
    recommendation: Recommendation
    notes: Sequence[str] = ()
    reference: str = ""


# bounds know nothing of kernels: what differs by less is no difference
_TIED = 1.1
_WHOLE = 16.0


@dataclass(frozen=True)
class PerRequest:
    """A request on a candidate.

    Args:
        batch: at which it takes least.
        seconds: of one device for a request; of all that share the model, added up.
        low: of the interval; `seconds` for a bound.
    """

    candidate: PlannedRecipe
    batch: int
    seconds: float
    low: float
    high: float


def recommend(candidates: Sequence[PlannedRecipe], workload: Workload) -> Recommendation:
    """The one to take; pure, so that two candidates whose times are swapped swap the answer."""
    runs = [each for each in candidates if each.problem is None]
    if not runs:
        return Recommendation(None, [f"{each.label}: {each.problem}" for each in candidates])
    fitting = [each for each in runs if each.memory is None or any(row.fits is not False for row in each.rows)]
    if not fitting:
        return Recommendation(None, [_does_not_fit(each) for each in runs])
    keeps = [each for each in fitting if each.load is None or each.load.stable]
    because = []
    if not keeps:
        because.append(f"none keeps up with {workload.rate:g} requests a second: the fastest is named")
        keeps = fitting
    forecasts = all(each.forecast for each in keeps)
    served = [found for each in keeps if (found := serve(each, workload, forecasts=forecasts)) is not None]
    if not served:
        reason = "no time is known: the target lacks figures; of those that fit, the one that stores the most bits"
        return Recommendation(max(keeps, key=_bits).label, [*because, reason])
    best = min(served, key=lambda each: each.seconds)
    tied = [each for each in served if _reaches(each, best, forecasts)]
    choice = max(tied, key=lambda each: (-_devices(each.candidate), _bits(each.candidate), -each.seconds))
    because += _reasons(choice, best, tied, served, workload, forecasts=forecasts)
    left = [each.label for each in runs if each not in fitting]
    because += [f"{', '.join(left)} {'does' if len(left) == 1 else 'do'} not fit"] if left else []
    late = [each.label for each in fitting if each not in keeps]
    if late:
        because.append(f"{', '.join(late)} would not keep up with {workload.rate:g} requests a second")
    if not forecasts:
        because.append("by bounds alone, since not all were measured: unpacking is not in it; `quantkit tax` tells")
    return Recommendation(choice.candidate.label, because)


def serve(candidate: PlannedRecipe, workload: Workload, *, forecasts: bool) -> PerRequest | None:
    """The least time of a request over the batches that fit; None where no time is known."""
    devices = _devices(candidate)
    fitting = [row for row in candidate.rows if row.fits is not False]
    found = [each for row in fitting if (each := _at(row, workload, devices, forecasts))]
    if not found:
        return None
    batch, (seconds, low, high) = min(found, key=lambda each: each[1][0])
    return PerRequest(candidate, batch, seconds, low, high)


def _at(
    row: PlannedBatch, workload: Workload, devices: int, forecasts: bool
) -> tuple[int, tuple[float, float, float]] | None:
    parts = [(row.step, workload.output if row.prefill is not None else 1)]
    parts += [(row.prefill, 1)] if row.prefill is not None else []
    sums = [0.0, 0.0, 0.0]
    for timed, times in parts:
        seconds = timed.forecast if forecasts else timed.least
        if seconds is None:
            return None
        low, high = timed.interval if forecasts and timed.interval else (seconds, seconds)
        for i, value in enumerate((seconds, low, high)):
            sums[i] += devices * value * times / row.batch
    return row.batch, (sums[0], sums[1], sums[2])


def _reaches(each: PerRequest, best: PerRequest, forecasts: bool) -> bool:
    return each.low <= best.high if forecasts else each.seconds <= best.seconds * _TIED


def _devices(candidate: PlannedRecipe) -> int:
    return candidate.memory.devices if candidate.memory is not None else 1


def _bits(candidate: PlannedRecipe) -> float:
    return candidate.bits if candidate.bits is not None else _WHOLE


def _reasons(
    choice: PerRequest,
    best: PerRequest,
    tied: Sequence[PerRequest],
    served: Sequence[PerRequest],
    workload: Workload,
    *,
    forecasts: bool,
) -> list[str]:
    mark = "" if forecasts else "≥ "
    what = (
        f"{workload.prompt:,} tokens in, {workload.output:,} out" if workload.output else f"{workload.prompt:,} tokens"
    )
    said = [f"a request ({what}) takes {mark}{_seconds(choice)} of {_of(choice)} at batch {choice.batch}"]
    shared = [each for each in tied if _devices(each.candidate) > _devices(choice.candidate)]
    if shared:
        named = ", ".join(f"{each.candidate.label}: {_devices(each.candidate)}" for each in shared)
        said.append(f"others take about as long, on more devices ({named}), whose talk is not counted")
    if choice is not best and best not in shared:
        said.append(
            f"{best.candidate.label} may take less ({mark}{_seconds(best)}), but not surely, and stores fewer bits "
            f"({_bits(best.candidate):.3g} for {_bits(choice.candidate):.3g})"
        )
    said += [
        f"{each.candidate.label}: {mark}{_seconds(each)} at batch {each.batch}, {each.seconds / choice.seconds:.3g}×"
        for each in served
        if each not in tied
    ]
    return said


def _of(served: PerRequest) -> str:
    devices = _devices(served.candidate)
    return "the device" if devices == 1 else f"one device, of {devices}"


def _seconds(served: PerRequest) -> str:
    value = served.seconds
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _does_not_fit(candidate: PlannedRecipe) -> str:
    memory = candidate.memory
    if memory is None or memory.capacity is None:
        return f"{candidate.label} does not fit"
    more = ""
    if memory.needed is not None and memory.needed > memory.devices:
        more = f"; {memory.needed} devices would hold it"
    elif memory.largest_batch:
        more = f" at batch {memory.batch:,}; batch {memory.largest_batch:,} would fit"
    return f"{candidate.label} takes {memory.total / 1e9:.3g} GB of {memory.capacity / 1e9:.3g}{more}"
