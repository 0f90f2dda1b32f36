"""Order in which to try recipes: the verdict of `quantkit plan`, and the table of `quantkit recommend`.

    seconds a request    devices · (prefill + output · step) / batch, at the judged batch with the minimum
    tied                 intervals that meet; for bounds and for bytes, within a tenth of the least

    first     what fits, keeps up with the load, and is computed natively in what it stores
    then      what beats the float model in seconds (in bytes if no time is known) at a KL that is known and at most
              `small`, by seconds. Of tied ones: the fewest devices, since communication is not counted; the least KL;
              within its interval, a server before torch
    then      what beats the float model at an unknown KL: the most bits first
    then      the float model, and what does not beat it
    at last   a larger KL

Without a float model in the plan, unknown KLs are ordered by seconds, of tied ones the most bits first. If one recipe
has no forecast, the bounds of all are compared. A KL counts where the recipe has as many bits a weight as where it was
measured, since mixtures of types depend on shapes. Nothing is opened or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import Field

from quantkit.content import Closed, read_yaml
from quantkit.planning.outlook import Outlook, PlannedBatch, PlannedRecipe, Recommendation, Workload

# KL in nats a token, up to and with
_CLASSES = {"none": 0.0, "tiny": 0.02, "small": 0.1, "moderate": 0.25, "large": math.inf}
_FLOAT = "float"
# bounds ignore kernels: smaller differences do not count
_TIED = 1.1
_WHOLE = 16.0
# a recipe of so much fewer bits than where its loss was measured is another one
_FEWER = 0.95
# more recipes than these are a table
_FEW = 4


class Loss(Closed):
    """KL of a recipe from the original, nats a token.

    Args:
        half: half of the 95 % interval.
        bits: of a quantized weight on average, where it was measured.
        record: file in `benchmarks/results/`.
    """

    kl: float
    half: float = 0.0
    bits: float = 0.0
    record: str = ""

    @property
    def name(self) -> str:
        """Class of the loss: `none`, `tiny`, `small`, `moderate`, `large`."""
        return next(name for name, most in _CLASSES.items() if self.kl <= most)


class Losses(Closed):
    """Losses that ship, by recipe, and the model that they were measured on."""

    schema_: Literal[1] = Field(alias="schema")
    model: str
    recipes: Mapping[str, Loss]

    @classmethod
    @cache
    def shipped(cls) -> Losses:
        """Read the shipped file."""
        return cls.model_validate(read_yaml(Path(__file__).with_name("losses.yaml")))


@dataclass(frozen=True)
class PerRequest:
    """Time of a request on a candidate.

    Args:
        batch: batch with the least time.
        seconds: device seconds of a request, summed over the devices.
        low: lower end of the interval; `seconds` for a bound.
        high: upper end, likewise.
        bound: True for a lower bound, without a forecast.
    """

    batch: int
    seconds: float
    low: float
    high: float
    bound: bool

    def __str__(self) -> str:
        words = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"
        return f"≥ {words}" if self.bound else words


@dataclass(frozen=True)
class Ranked:
    """Place of a recipe.

    Args:
        row: times and memory at the first batch that was asked about.
        loss: measured on another model; None where it was not.
        request: time of a request; None without figures of the target.
        fits: False if it does not fit at a judged batch.
        because: reasons for the place.
    """

    candidate: PlannedRecipe
    row: PlannedBatch
    loss: Loss | None
    request: PerRequest | None
    fits: bool = True
    because: Sequence[str] = ()

    @property
    def native(self) -> bool:
        """Tell whether the runtime computes in all that the recipe stores; else it is smaller, not faster."""
        return all(cell.state == "native" for cell in self.candidate.cells)

    @property
    def late(self) -> bool:
        """Tell whether it cannot keep up with the load."""
        return self.candidate.load is not None and not self.candidate.load.stable

    @property
    def bits(self) -> float:
        """Mean bits of a weight."""
        return self.candidate.bits if self.candidate.bits is not None else _WHOLE

    @property
    def effort(self) -> float:
        """Seconds of a request; bytes of the weights if no time is known."""
        return self.candidate.bytes if self.request is None else self.request.seconds

    @property
    def small(self) -> bool:
        """Tell whether its loss is known to be small."""
        return self.loss is not None and self.loss.kl <= _CLASSES["small"]

    def ties(self, best: Ranked) -> bool:
        """Tell whether it may take as little as the best one."""
        if self.request is None or best.request is None or self.request.bound:
            return self.effort <= _TIED * best.effort
        return self.request.low <= best.request.high


def rank(outlook: Outlook, losses: Losses | None = None) -> tuple[Outlook, list[Ranked]]:
    """Rank the recipes of a plan that run.

    Args:
        losses: of recipes on a decoder; None takes those that ship.

    Returns: the plan, recommending the first; and all that run, in their order.
    """
    decodes, work = outlook.architecture.kind == "decoder", outlook.workload
    losses = Losses.shipped() if losses is None else losses
    runs = [one for one in outlook.candidates if one.problem is None]
    judged = {one.label: [row for row in one.rows if not work.judged or row.batch in work.judged] for one in runs}
    fits = {one.label: one.memory is None or any(row.fits is not False for row in judged[one.label]) for one in runs}
    compared = [row for one in runs if fits[one.label] for row in judged[one.label] if row.fits is not False]
    bound = any(timed.forecast is None for row in compared for timed in (row.step, row.prefill) if timed is not None)
    ranked = [
        Ranked(
            one,
            next(row for row in one.rows if row.batch == work.batches[0]),
            _loss(one, losses) if decodes else None,
            _request(one, judged[one.label], work, bound=bound),
            fits[one.label],
        )
        for one in runs
    ]
    floats = next((one for one in ranked if one.candidate.recipe == _FLOAT), None)
    ranked = [one for alike in _groups(ranked, floats) for one in alike]
    ranked = [replace(one, because=_reasons(one, floats, losses.model)) for one in ranked]
    return replace(outlook, recommendation=_recommended(outlook, ranked, losses)), ranked


def _loss(one: PlannedRecipe, losses: Losses) -> Loss | None:
    if one.recipe == _FLOAT:
        return Loss(kl=0.0)
    loss = losses.recipes.get(one.recipe) if not one.changed else None
    return loss if loss is not None and (one.bits or 0.0) >= _FEWER * loss.bits else None


def _request(
    candidate: PlannedRecipe, rows: Sequence[PlannedBatch], work: Workload, *, bound: bool
) -> PerRequest | None:
    """Return the least time of a request over the batches that fit, or over all if none does; None without times."""
    requests = []
    for row in [row for row in rows if row.fits is not False] or rows:
        sums = [0.0, 0.0, 0.0]
        parts = [(row.step, work.output if row.prefill is not None else 1)]
        parts += [(row.prefill, 1)] if row.prefill is not None else []
        for timed, times in parts:
            seconds = timed.least if bound else timed.forecast
            if seconds is None:
                break
            interval = timed.interval if not bound and timed.interval else (seconds, seconds)
            for i, value in enumerate((seconds, *interval)):
                sums[i] += candidate.devices * value * times / row.batch
        else:
            requests.append(PerRequest(row.batch, sums[0], sums[1], sums[2], bound))
    return min(requests, key=lambda request: request.seconds, default=None)


def _groups(ranked: Sequence[Ranked], floats: Ranked | None) -> Iterator[list[Ranked]]:
    """Yield the groups of the head of this file, each in its order."""
    timed = any(one.request is not None for one in ranked)

    def kind(one: Ranked) -> int:
        if one.loss is not None and not one.small:
            return 3
        if floats is not None and not _beats(one, floats):
            return 2
        return 0 if one.small else 1

    def group(one: Ranked) -> tuple[bool | int, ...]:
        return (not one.fits, one.late, not one.native, timed and one.request is None, kind(one))

    for (*_, of), members in groupby(sorted(ranked, key=group), group):
        alike = list(members)
        if of == 3:
            yield sorted(alike, key=lambda one: (one.loss.kl if one.loss else 0.0, one.effort))
        elif of == 1 and floats is not None:
            yield sorted(alike, key=lambda one: (-round(one.bits), one.effort))
        elif of == 2 and floats in alike:
            others = [one for one in alike if one is not floats]
            yield [floats, *_settled(others, by_loss=False)]
        else:
            yield list(_settled(alike, by_loss=of == 0))


def _beats(one: Ranked, floats: Ranked) -> bool:
    """Tell whether a recipe takes less than the float model, or as little on fewer devices."""
    if one.candidate.devices < floats.candidate.devices and one.ties(floats):
        return True
    return one is not floats and one.effort < floats.effort and not floats.ties(one)


def _settled(alike: list[Ranked], *, by_loss: bool) -> Iterator[Ranked]:
    """Yield by effort; of tied ones, fewer devices, then the least loss, or the most bits where none is known."""
    left = sorted(alike, key=lambda one: one.effort)
    while left:
        tied = [one for one in left if one.ties(left[0])]
        tied = [one for one in tied if one.candidate.devices == min(other.candidate.devices for other in tied)]
        if by_loss:
            least = min((one.loss for one in tied if one.loss is not None), key=lambda loss: loss.kl)
            near = [(one.loss.kl, one) for one in tied if one.loss is not None and one.loss.kl <= least.kl + least.half]
            _, chosen = min(near, key=lambda pair: (pair[1].candidate.runtime == "torch", pair[1].effort, pair[0]))
        else:
            chosen = min(tied, key=lambda one: (-one.bits, one.effort, one.candidate.label))
        left.remove(chosen)
        yield chosen


def _reasons(one: Ranked, floats: Ranked | None, measured: str) -> list[str]:
    reasons = [] if one.fits else ["it does not fit"]
    if floats is not None and one is not floats:
        ratio = floats.candidate.bytes / one.candidate.bytes if one.candidate.bytes else 1.0
        times = ""
        if one.request is not None and floats.request is not None and floats.request.seconds:
            times = f", and a request {one.request.seconds / floats.request.seconds:.2g} times the time"
        reasons.append(f"its weights take {ratio:.3g} times fewer bytes than the float model{times}")
    reasons += [] if one.native else ["it is computed in floats there: smaller, not faster"]
    if one.loss is not None and one.loss.record:
        reasons.append(f"its KL on {measured} was {one.loss.kl:.3f} ± {one.loss.half:.3f} nats a token")
    if one.loss is None:
        reasons.append("its KL is not known: a compile measures it")
    return reasons


# --- the recommendation in words --------------------------------------------------------------------------------------


def _recommended(outlook: Outlook, ranked: Sequence[Ranked], losses: Losses) -> Recommendation:
    if not ranked:
        return Recommendation(None, [f"{one.label}: {one.problem}" for one in outlook.candidates])
    best, work = ranked[0], outlook.workload
    if not best.fits:
        few = ranked if len(ranked) <= _FEW else [min(ranked, key=lambda one: one.candidate.bytes)]
        return Recommendation(None, [_does_not_fit(one.candidate) for one in few])
    because = [f"none sustains {work.rate:g} requests a second"] if best.late else []
    if best.request is not None:
        lengths = f"{work.prompt:,} tokens" + (f" in, {work.output:,} out" if work.output else "")
        devices, batch = best.candidate.devices, best.request.batch
        # a request of a batch, or on several devices, waits longer than that
        of = f" of device time on {devices} devices" if devices > 1 else " of device time" if batch > 1 else ""
        because.append(f"a request ({lengths}) takes {best.request}{of} at batch {batch}")
    because += _others(best, ranked, losses)
    because += best.because
    left = [one.candidate.label for one in ranked if not one.fits]
    because += [f"{', '.join(left)} {'does' if len(left) == 1 else 'do'} not fit"] if left else []
    late = [one.candidate.label for one in ranked if one.fits and one.late]
    if late and not best.late:
        because.append(f"{', '.join(late)} would not sustain {work.rate:g} requests a second")
    if outlook.architecture.kind != "decoder":
        because.append("no KL was measured on models that do not generate: more bits come first")
    if best.request is None:
        by = "bytes and KL" if outlook.architecture.kind == "decoder" else "bits and bytes"
        because.append(f"ranked by {by}, since no time is known")
    elif best.request.bound:
        because.append("times are bounds, without unpacking weights: `quantkit tax` measures that")
    if best.candidate.recipe == _FLOAT and len(ranked) > 1:
        because.append("no recipe is expected to be faster at a small loss")
    return Recommendation(best.candidate.label, because)


def _others(best: Ranked, ranked: Sequence[Ranked], losses: Losses) -> list[str]:
    """Compare the first with faster recipes, and with the others if they are few."""
    rivals = [one for one in ranked if one is not best and one.fits and one.late == best.late and one.request]
    if best.request is None or len(ranked) > _FEW:
        return []
    reasons, seconds = [], best.request.seconds
    shared = [one for one in rivals if one.ties(best) and one.candidate.devices > best.candidate.devices]
    if shared:
        named = ", ".join(f"{one.candidate.label}: {one.candidate.devices}" for one in shared)
        reasons.append(f"others take about as long on more devices ({named}), without counting communication")
    for one in rivals:
        assert one.request is not None
        label = f"{one.candidate.label}: {one.request} at batch {one.request.batch}"
        ratio = f"{label}, {one.request.seconds / seconds:.3g}×"
        if one in shared:
            continue
        if one.request.seconds >= seconds:
            reasons += [] if one.ties(best) else [ratio]
        elif best.ties(one) and one.loss is None:
            reasons.append(
                f"{one.candidate.label} may take less ({one.request}), but not surely, and stores fewer bits "
                f"({one.bits:.3g} for {best.bits:.3g})"
            )
        elif one.loss is None:
            reasons.append(f"{ratio}, but its KL is not known")
        else:
            lost = f"{one.loss.kl:.3f} on {losses.model}"
            reasons.append(f"{ratio}, but its KL is {'larger' if one.small else 'large'}: {lost}")
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
