"""Plans: for each recipe whether it fits, how fast it can be, what it costs; and which one to take, for a workload.

Numbers with their units in the names; what is not known is None, and `because` or `notes` say why. A page, a table and
`--json` all show these. A plan is a forecast: only a measurement decides.

    seconds a request    devices · (prefill + output · step) / batch, at the batch of the workload where it is least
    tied                 recipes whose interval reaches the best one's; on bounds, within a tenth of it
    the choice           of those that are tied, on the fewest devices, since nothing is counted for what they tell each
                         other; of these the one that stores the most bits, which changes the model least

Like is set against like: as soon as one of them has no forecast, the bounds of all are compared, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.compiling import Compiling
from quantkit.planning.cost import Bill
from quantkit.planning.forecast import Served, TimedStep
from quantkit.planning.load import Load
from quantkit.planning.traffic import Traffic
from quantkit.target import State, Target

# bounds know nothing of kernels: what differs by less is no difference
_TIED = 1.1
_WHOLE = 16.0


@dataclass(frozen=True)
class Workload:
    """Requests to serve.

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
    """Times and memory of a batch.

    Args:
        prefill: of its prompts; None for a model that does not decode, whose pass is `step`.
        step: one token of each sequence, halfway through the output.
        parts: name -> bytes, of one device, with all sequences at the full context.
        fits: whether weights and cache fit into the devices; None where the target does not say how much they hold.
        cost: what tokens cost at this batch; None where no time is known.
    """

    batch: int
    prefill: TimedStep | None
    step: TimedStep
    parts: Mapping[str, float]
    fits: bool | None
    cost: Bill | None = None

    def _total(self, output: int, seconds: Sequence[float | None]) -> float | None:
        """Add up the seconds of (step, prefill) over an output: None as soon as one is."""
        step, prefill = seconds
        if self.prefill is None:
            return step
        return None if step is None or prefill is None else output * step + prefill

    def tokens_per_s(self, output: int) -> float | None:
        """Count the tokens that come out each second, of requests that all begin together."""
        first = self.prefill.seconds if self.prefill is not None else 0.0
        if first is None or self.step.seconds is None:
            return None
        steps = output if self.prefill is not None else 1
        return self.batch * steps / (first + steps * self.step.seconds)

    def rate(self, output: int) -> Rate:
        """Count the same of bounds alone, and of forecasts alone: a mixture is neither.

        Of a model that does not decode: passes each second, times the batch.
        """
        done = self.batch * (output if self.prefill is not None else 1)
        pair = (self.step, self.prefill or self.step)

        def per_second(seconds: Sequence[float | None]) -> float | None:
            total = self._total(output, seconds)
            return done / total if total else None

        low = per_second([timed.interval and timed.interval[1] for timed in pair])
        high = per_second([timed.interval and timed.interval[0] for timed in pair])
        return Rate(
            per_second([timed.least for timed in pair]),
            per_second([timed.forecast for timed in pair]),
            (low, high) if low is not None and high is not None else None,
        )


@dataclass(frozen=True)
class PlannedMemory:
    """Memory on the target, at the context of the workload.

    Args:
        parts: name -> bytes, of one device: `weights`, `embeddings`, `cache`, `activations`, `runtime`, ...
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
    """What the target's runtime makes of something that the recipe stores: a cell of the matrix."""

    format: str
    what: str
    state: State
    source: str


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe, planned.

    Args:
        label: as it was asked for: `int4-best`, `bf16`; `recipe` is what it stands for.
        bits: of a quantized weight, on average; None where none is quantized.
        bytes: of all weights as they are stored.
        served: what times any other step.
        load: simulated at the workload's rate; None without one.
        cost: of a million tokens, and energy, at the batch where a request takes least, and under the load where there
            is one; None where no time is known.
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
        times = [timed for row in self.rows for timed in (row.step, row.prefill) if timed is not None]
        return bool(times) and all(timed.forecast is not None for timed in times)


@dataclass(frozen=True)
class Recommendation:
    """Choice of a candidate.

    Args:
        label: None where none fits or runs.
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


@dataclass(frozen=True)
class PerRequest:
    """A request on a candidate.

    Args:
        batch: at which it takes least.
        seconds: of one device for a request; of all that share the model, added up.
        low, high: of the interval; `seconds` for a bound.
    """

    candidate: PlannedRecipe
    batch: int
    seconds: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Seconds for people."""
        return f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"


def recommend(candidates: Sequence[PlannedRecipe], workload: Workload) -> Recommendation:
    """Choose the one to take; pure, so that two candidates whose times are swapped swap the answer."""
    runs = [one for one in candidates if one.problem is None]
    if not runs:
        return Recommendation(None, [f"{one.label}: {one.problem}" for one in candidates])
    fitting = [one for one in runs if one.memory is None or any(row.fits is not False for row in one.rows)]
    if not fitting:
        return Recommendation(None, [_does_not_fit(one) for one in runs])
    keeps = [one for one in fitting if one.load is None or one.load.stable]
    because = []
    if not keeps:
        because.append(f"none keeps up with {workload.rate:g} requests a second: the fastest is named")
        keeps = fitting
    forecasts = all(one.forecast for one in keeps)
    served = [request for one in keeps if (request := serve(one, workload, forecasts=forecasts)) is not None]
    if not served:
        reason = "no time is known: the target lacks figures; of those that fit, the one that stores the most bits"
        return Recommendation(max(keeps, key=_bits).label, [*because, reason])
    best = min(served, key=lambda request: request.seconds)
    tied = [one for one in served if (one.low <= best.high if forecasts else one.seconds <= best.seconds * _TIED)]
    choice = max(tied, key=lambda one: (-_devices(one.candidate), _bits(one.candidate), -one.seconds))
    because += _reasons(choice, best, tied, served, workload, "" if forecasts else "≥ ")
    left = [one.label for one in runs if one not in fitting]
    because += [f"{', '.join(left)} {'does' if len(left) == 1 else 'do'} not fit"] if left else []
    late = [one.label for one in fitting if one not in keeps]
    if late:
        because.append(f"{', '.join(late)} would not keep up with {workload.rate:g} requests a second")
    if not forecasts:
        because.append("by bounds alone, since not all were measured: unpacking is not in it; `quantkit tax` tells")
    return Recommendation(choice.candidate.label, because)


def serve(candidate: PlannedRecipe, workload: Workload, *, forecasts: bool) -> PerRequest | None:
    """Find the least time of a request over the batches that fit; None where no time is known."""
    devices, requests = _devices(candidate), []
    for row in candidate.rows:
        if row.fits is False:
            continue
        sums = [0.0, 0.0, 0.0]
        parts = [(row.step, workload.output if row.prefill is not None else 1)]
        parts += [(row.prefill, 1)] if row.prefill is not None else []
        for timed, times in parts:
            seconds = timed.forecast if forecasts else timed.least
            if seconds is None:
                break
            interval = timed.interval if forecasts and timed.interval else (seconds, seconds)
            for i, value in enumerate((seconds, *interval)):
                sums[i] += devices * value * times / row.batch
        else:
            requests.append(PerRequest(candidate, row.batch, *sums))
    return min(requests, key=lambda request: request.seconds, default=None)


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
    mark: str,
) -> list[str]:
    devices = _devices(choice.candidate)
    request = f"{workload.prompt:,} tokens" + (f" in, {workload.output:,} out" if workload.output else "")
    on = "the device" if devices == 1 else f"one device, of {devices}"
    reasons = [f"a request ({request}) takes {mark}{choice.words} of {on} at batch {choice.batch}"]
    shared = [one for one in tied if _devices(one.candidate) > devices]
    if shared:
        named = ", ".join(f"{one.candidate.label}: {_devices(one.candidate)}" for one in shared)
        reasons.append(f"others take about as long, on more devices ({named}), whose talk is not counted")
    if choice is not best and best not in shared:
        reasons.append(
            f"{best.candidate.label} may take less ({mark}{best.words}), but not surely, and stores fewer bits "
            f"({_bits(best.candidate):.3g} for {_bits(choice.candidate):.3g})"
        )
    reasons += [
        f"{one.candidate.label}: {mark}{one.words} at batch {one.batch}, {one.seconds / choice.seconds:.3g}×"
        for one in served
        if one not in tied
    ]
    return reasons


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
