"""What a plan says: for each recipe whether it fits, how fast it can be, what it costs; and which one to take.

Numbers with their units in the names; what is not known is None, and `because` or `notes` say why. A page, a table and
`--json` all show these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import QuantkitError
from quantkit.planning.bound.forecast import Served, TimedStep
from quantkit.planning.compiling.result import Compiling
from quantkit.planning.model.architecture import Architecture
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
