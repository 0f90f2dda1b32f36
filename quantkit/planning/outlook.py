"""Plans: whether each recipe fits, its speed and cost, and the recommended one, for a workload.

Units are in the names; unknown numbers are None, and `because` or `notes` explain why. A page, a table and `--json`
show
the same plan. A plan is a forecast: only a measurement decides.

    seconds a request    devices · (prefill + output · step) / batch, at the batch of the workload with the minimum
    tied                 recipes whose interval reaches the best one's; for bounds, within a tenth of it
    the choice           among the tied ones, those on the fewest devices, since communication is not counted; among
                         these, the one that stores the most bits, which changes the model least

If one candidate has no forecast, the bounds of all are compared, and the plan says so.
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

# bounds ignore kernels: smaller differences do not count
_TIED = 1.1
_WHOLE = 16.0


@dataclass(frozen=True)
class Workload:
    """Requests to serve.

    Args:
        batches: batch sizes to time.
        prompt: mean tokens of a prompt.
        output: mean tokens of an output; 0 for a model that does not decode.
        context: tokens per sequence for memory; by default the longest request.
        traffic: lengths of all requests, and their rate.
        assumed: assumptions, in words.
    """

    batches: Sequence[int]
    prompt: int
    output: int
    context: int
    traffic: Traffic
    assumed: Sequence[str] = ()

    @property
    def rate(self) -> float | None:
        """Requests a second; None without a simulated load."""
        return self.traffic.rate


@dataclass(frozen=True)
class Rate:
    """Output tokens a second, for requests that begin together.

    Args:
        most: upper bound for every runtime; None if a bound is unknown.
        forecast: forecast; None if a time has none.
        interval: ends of its interval.
    """

    most: float | None
    forecast: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class PlannedBatch:
    """Times and memory of a batch.

    Args:
        batch: number of sequences.
        prefill: step of its prompts; None for a model that does not decode, whose single pass is `step`.
        step: one token of each sequence, halfway through the output.
        parts: name -> bytes on one device, with all sequences at the full context.
        fits: True if it fits the devices; None if the target has no capacity.
        cost: cost of tokens at this batch; None without times.
    """

    batch: int
    prefill: TimedStep | None
    step: TimedStep
    parts: Mapping[str, float]
    fits: bool | None
    cost: Bill | None = None

    def _total(self, output: int, seconds: Sequence[float | None]) -> float | None:
        """Add up the seconds of (step, prefill) over an output; None if one is unknown."""
        step, prefill = seconds
        if self.prefill is None:
            return step
        return None if step is None or prefill is None else output * step + prefill

    def tokens_per_s(self, output: int) -> float | None:
        """Return output tokens a second, for requests that begin together."""
        first = self.prefill.seconds if self.prefill is not None else 0.0
        if first is None or self.step.seconds is None:
            return None
        steps = output if self.prefill is not None else 1
        return self.batch * steps / (first + steps * self.step.seconds)

    def rate(self, output: int) -> Rate:
        """Return the same rate from bounds alone and from forecasts alone, never mixed.

        For a model that does not decode: passes a second, times the batch.
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
        parts: name -> bytes on one device: `weights`, `embeddings`, `cache`, `activations`, `runtime`, ...
        batch: batch of these bytes: the largest of the workload that fits, else the smallest.
        capacity: usable bytes of one device; None if the target has no figure.
        cache_per_token: bytes of keys and values per additional token, over all layers.
        largest_batch: largest batch at the context; None without a limit.
        largest_context: longest context at that batch, up to the model's own.
        devices: number of devices.
        needed: devices for one sequence at the context; None if 64 do not suffice.
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
        """Bytes on one device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlannedCell:
    """Support of one stored format by the target's runtime: a cell of the matrix."""

    format: str
    what: str
    state: State
    source: str


@dataclass(frozen=True)
class PlannedRecipe:
    """A plan of one recipe.

    Args:
        label: name under which it was requested: `int4-best`, `bf16`.
        recipe: name of the recipe.
        runtime: name of the runtime.
        cells: support of each stored format.
        bits: mean bits of a quantized weight; None without any.
        bytes: bytes of all stored weights.
        memory: memory on the target.
        rows: times at each batch.
        served: source of the time of any other step.
        load: simulation at the workload's rate; None without one.
        cost: cost of a million tokens, and energy, at the batch with the least time per request, and under the load if
            there is one; None without times.
        compiling: resources of the compile.
        problem: reason why it cannot run there; nothing else is computed then.
        code: True if one of its passes is in a file of the user's, which must be allowed.
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
        """True if every time is a forecast, not only a bound."""
        times = [timed for row in self.rows for timed in (row.step, row.prefill) if timed is not None]
        return bool(times) and all(timed.forecast is not None for timed in times)


@dataclass(frozen=True)
class Recommendation:
    """Recommended candidate.

    Args:
        label: its label; None if none fits or runs.
        because: reasons, the decisive one first.
    """

    label: str | None
    because: Sequence[str]


@dataclass(frozen=True)
class Outlook:
    """The whole plan.

    Args:
        candidates: plans, in the order of the request.
        notes: remarks on all of them.
        reference: name by which the model was requested: `./my-model`; "" if unknown.
        aimed: name by which the target was requested; "" for its own name.
    """

    architecture: Architecture
    target: Target
    workload: Workload
    candidates: Sequence[PlannedRecipe]
    recommendation: Recommendation
    notes: Sequence[str] = ()
    reference: str = ""
    aimed: str = ""


@dataclass(frozen=True)
class PerRequest:
    """Time of a request on a candidate.

    Args:
        batch: batch with the least time.
        seconds: device seconds of a request, summed over the devices.
        low: lower end of the interval; `seconds` for a bound.
        high: upper end, likewise.
    """

    candidate: PlannedRecipe
    batch: int
    seconds: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Seconds in words."""
        return f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"


def recommend(candidates: Sequence[PlannedRecipe], workload: Workload) -> Recommendation:
    """Choose the recommended candidate; a pure function of the plans."""
    runs = [one for one in candidates if one.problem is None]
    if not runs:
        return Recommendation(None, [f"{one.label}: {one.problem}" for one in candidates])
    fitting = [one for one in runs if one.memory is None or any(row.fits is not False for row in one.rows)]
    if not fitting:
        return Recommendation(None, [_does_not_fit(one) for one in runs])
    keeps = [one for one in fitting if one.load is None or one.load.stable]
    because = []
    if not keeps:
        because.append(f"none sustains {workload.rate:g} requests a second: this is the fastest")
        keeps = fitting
    forecasts = all(one.forecast for one in keeps)
    served = [request for one in keeps if (request := serve(one, workload, forecasts=forecasts)) is not None]
    if not served:
        reason = "no time is known, since the target lacks figures: of those that fit, this stores the most bits"
        return Recommendation(max(keeps, key=_bits).label, [*because, reason])
    best = min(served, key=lambda request: request.seconds)
    tied = [one for one in served if (one.low <= best.high if forecasts else one.seconds <= best.seconds * _TIED)]
    choice = max(tied, key=lambda one: (-_devices(one.candidate), _bits(one.candidate), -one.seconds))
    because += _reasons(choice, best, tied, served, workload, "" if forecasts else "≥ ")
    left = [one.label for one in runs if one not in fitting]
    because += [f"{', '.join(left)} {'does' if len(left) == 1 else 'do'} not fit"] if left else []
    late = [one.label for one in fitting if one not in keeps]
    if late:
        because.append(f"{', '.join(late)} would not sustain {workload.rate:g} requests a second")
    if not forecasts:
        because.append("by bounds alone, since not all were measured: they exclude unpacking; see `quantkit tax`")
    return Recommendation(choice.candidate.label, because)


def serve(candidate: PlannedRecipe, workload: Workload, *, forecasts: bool) -> PerRequest | None:
    """Return the least time of a request over the batches that fit; None without times."""
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
        reasons.append(f"others take about as long on more devices ({named}), without counting communication")
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
