"""Which of several recipes to take, for a workload, and why. A forecast: only a measurement decides.

    seconds a request    devices · (prefill + output · step) / batch, at the batch of the workload where it is least
    tied                 recipes whose interval reaches the best one's; on bounds, within a tenth of it
    the choice           of those that are tied, on the fewest devices, since nothing is counted for what they tell each
                         other; of these the one that stores the most bits, which changes the model least

Like is set against like: as soon as one of them has no forecast, the bounds of all are compared, and that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.planning.outlook import PlannedBatch, PlannedRecipe, Recommendation, Workload

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
