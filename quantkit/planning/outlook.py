"""Plans: whether each recipe fits, its speed and cost, and the recommended one, for a workload.

Units are in the names; unknown numbers are None, and `because` or `notes` explain why. A page, a table and `--json`
show the same plan. A plan is a forecast: only a measurement decides. `ranking.py` recommends a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.model.sizes.architecture import Architecture
from quantkit.planning.compiling import Compiling
from quantkit.planning.cost import Bill
from quantkit.planning.forecast import Served, TimedStep
from quantkit.planning.held import HeldFigure
from quantkit.planning.load import Load
from quantkit.planning.traffic import Traffic
from quantkit.target import State, Target


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
        judged: batches that the recommendation is for; () for the best of all.
    """

    batches: Sequence[int]
    prompt: int
    output: int
    context: int
    traffic: Traffic
    assumed: Sequence[str] = ()
    judged: Sequence[int] = ()

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
        changed: True for a user's file, or with `--set`: no loss of it was measured.
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
    changed: bool = False

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.memory.devices if self.memory is not None else 1

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
        adapters: adapters to merge first, as requested.
        held: figures of the plan beside the load that was measured of a bundle; () without one.
    """

    architecture: Architecture
    target: Target
    workload: Workload
    candidates: Sequence[PlannedRecipe]
    recommendation: Recommendation
    notes: Sequence[str] = ()
    reference: str = ""
    aimed: str = ""
    held: Sequence[HeldFigure] = ()
    adapters: Sequence[str] = ()
