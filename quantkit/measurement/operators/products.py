"""Single products timed side by side: every way to store a weight against the high-precision one, shape by shape.

Whatever runs them (`Bench`) prepares, for one shape, a side for each variant: products of [M, K] with weights [N, K]
that together are at least three times the last-level cache, visited in turn, so that none is still in the cache when
its turn comes again. All sides of a shape and a batch are timed in one randomised palindrome (`timing.schedule`), in
rounds over the batches, so that the machine's moods over minutes are inside the intervals. Nothing is timed whose
result was not right before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from quantkit.errors import InputError
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import (
    BASELINE,
    SUBJECT,
    Array,
    Clock,
    Step,
    Timing,
    Visit,
    interleave,
    timed,
    undisturbed,
    warm,
)
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes.child import Report
from quantkit.stats.abba import Comparison

# blocks of four visits a cell and round, at most; at least one, or two of short steps
_BLOCKS = 60
# a side this many times slower than the baseline is set against it alone, for a part of the time: in the palindrome of
# all it would leave the others few visits, and a ratio so far from 1 needs none of that precision
_SLOW, _SHARE = 4.0, 0.15
# of the figure with weights that stay in the cache: runs, and seconds at most
_HOT = (5, 40, 0.2)


class Runnable(Protocol):
    """One variant of one shape, ready to run. Raises InputError `out-of-memory` for an M that does not fit."""

    @property
    def cost(self) -> StepCost:
        """What a product must move and compute."""
        ...

    def products(self, M: int) -> int:
        """Products that one step at M rows runs, one after the other."""
        ...

    @property
    def resident_bytes(self) -> int | None:
        """What a weight takes in memory as it is run, where known; what a kernel packs besides may not be in it."""
        ...

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
        """How it runs at M rows, for the rows of measurements: kernel, block, accuracy level."""
        ...

    def step(self, M: int) -> Step:
        """One step at M rows; each call goes on to the next weights. What it returns: see `timing.schedule`."""
        ...

    def hot(self, M: int) -> Step | None:
        """One product whose weight is in the cache; None where it does not fit there."""
        ...


class Bench(Protocol):
    """What runs products: a runtime on a device."""

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> Mapping[str, Runnable | str]:
        """A side for each variant, checked; the flag why there is none: `wrong-result`, `group-indivisible`, ...

        `batches` are the M that will be asked for.
        """
        ...

    def quantizer(self, variant: str) -> str:
        """The side that does to x alone what this variant does; "" where it cannot be had apart."""
        ...

    def twin(self, variant: str) -> str:
        """The side with the loads of this variant and without its decoding; "" where the runtime is a black box."""
        ...


@dataclass(frozen=True)
class SweepPlan:
    """What is timed, and how long it may take.

    Args:
        batches: M, rows of the activation.
        seconds: for all cells together.
        rounds: over the batches of each shape.
        seed: of the order of the steps and of the resamples.
    """

    batches: Sequence[int]
    seconds: float = 300.0
    rounds: int = 8
    seed: int = 0


@dataclass(frozen=True)
class RanSide:
    """What ran at one batch, without what it holds: see `Runnable`."""

    cost: StepCost
    products: int
    resident_bytes: int | None
    settings: Mapping[str, str | bool | int | float | None]

    @classmethod
    def of(cls, side: Runnable, M: int) -> RanSide:
        """A side at M rows."""
        return cls(side.cost, side.products(M), side.resident_bytes, dict(side.settings(M)))


@dataclass(frozen=True)
class TimedVariant:
    """One variant of one shape at one batch. Times are of one product.

    Args:
        linear: the shape.
        M: rows of the activation.
        variant: its name.
        side: what ran; None where it could not be prepared.
        timing: of it, `SUBJECT`, and of the float product, `BASELINE`, in the same blocks.
        times: what that says; None where it was skipped, or until somebody compares it.
        hot: seconds with the weight in the cache.
        quantizing: seconds of quantizing x alone.
        raw: seconds of its twin, with the same loads and without decoding.
    """

    linear: LinearShape
    M: int
    variant: str
    side: RanSide | None = None
    timing: Timing = field(default_factory=Timing)
    times: Comparison | None = None
    hot: float | None = None
    quantizing: float | None = None
    raw: float | None = None

    @property
    def skipped(self) -> str:
        """The flag why there are no times."""
        return self.timing.skipped

    def compared(self, seed: int) -> TimedVariant:
        """Compare with the baseline. Raises MissingDependency: scipy is not installed."""
        return replace(self, times=self.timing.compared(SUBJECT, BASELINE, seed))


@dataclass
class _Cell:
    M: int
    visit: Visit | None = None  # settled in the first round
    slow: set[str] = field(default_factory=set)
    taken: dict[str, list[Timing]] = field(default_factory=dict)  # with the baseline's of the same palindromes
    skipped: dict[str, str] = field(default_factory=dict)


def measure(
    bench: Bench,
    linears: Sequence[LinearShape],
    baseline: str,
    variants: Sequence[str],
    plan: SweepPlan,
    *,
    progress: Report | None = None,
    clock: Clock = time.perf_counter,
) -> list[TimedVariant]:
    """Time every variant of every shape at every batch against the baseline.

    Args:
        linears: distinct shapes.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.

    Returns:
        Shape by shape, batch by batch, in the order of `variants`, the baseline itself first (compared with itself
        only in its A/A spread).

    Raises:
        InputError: what the bench says, if the baseline can be prepared for no shape at all.
        MissingDependency: scipy is not installed.
    """
    progress = progress or (lambda share, words: None)
    found: list[TimedVariant] = []
    for i, linear in enumerate(linears):

        def report(share: float, words: str, i: int = i) -> None:
            progress((i + share) / len(linears), words)

        share = plan.seconds / (len(linears) * len(plan.batches) or 1)
        for taken in take(bench, linear, baseline, variants, plan, seconds=share, progress=report, clock=clock):
            found.append(taken.compared(plan.seed + len(found)))
    demand_any(found, baseline)
    return found


def demand_any(found: Sequence[TimedVariant], baseline: str) -> None:
    """Refuse a sweep in which nothing ran. Raises InputError: the flag that says why."""
    if not any(each.side for each in found):
        flag = found[0].skipped if found else "no-shapes"
        where = ", ".join(dict.fromkeys(each.linear.label for each in found))
        raise InputError(flag, where=where, value=f"{baseline} cannot run")


def take(
    bench: Bench,
    linear: LinearShape,
    baseline: str,
    variants: Sequence[str],
    plan: SweepPlan,
    *,
    seconds: float,
    progress: Report,
    clock: Clock = time.perf_counter,
) -> list[TimedVariant]:
    """Raw times of one shape: what needs no more than NumPy.

    Args:
        plan: its own seconds are not looked at.
        seconds: for each batch.
        progress: told the share of this shape that is done.

    Returns:
        batch by batch, in the order of `variants`, the baseline itself first.
    """
    progress(0.0, f"{linear.label}: preparing")
    names = [baseline, *(name for name in variants if name != baseline)]
    parts = {name: (bench.quantizer(name), bench.twin(name)) for name in names}
    asked = [*names, *dict.fromkeys(each for pair in parts.values() for each in pair if each)]
    sides = bench.prepare(linear, asked, plan.batches)
    usable = {name: side for name, side in sides.items() if not isinstance(side, str)}
    if baseline not in usable:
        # nothing of this shape can be compared; the other shapes can
        flag = str(sides.get(baseline, "absent"))
        return [TimedVariant(linear, M, name, timing=Timing(skipped=flag)) for M in plan.batches for name in names]
    cells = [_Cell(M) for M in plan.batches]
    known: dict[str, tuple[int, float]] = {}
    generator = np.random.default_rng([plan.seed, linear.K, linear.N])
    with undisturbed():
        for turn in range(plan.rounds):
            for cell in cells:
                at = (turn * len(cells) + cells.index(cell)) / (plan.rounds * len(cells))
                progress(at, f"{linear.label}, batch {cell.M}")
                _visit(cell, usable, baseline, known, seconds, plan, generator, clock)
    found = []
    for cell in cells:
        progress(1.0, f"{linear.label}, batch {cell.M}: weights in the cache")
        for name in names:
            one, side = _of_cell(linear, name, sides, cell, baseline, parts[name]), usable.get(name)
            if not one.skipped and side is not None and (step := side.hot(cell.M)) is not None:
                one = replace(one, hot=_hot(step, clock))
            found.append(one)
    return found


def _visit(
    cell: _Cell,
    sides: Mapping[str, Runnable],
    baseline: str,
    known: dict[str, tuple[int, float]],
    share: float,
    plan: SweepPlan,
    generator: np.random.Generator,
    clock: Clock,
) -> None:
    """Take one round's times of one cell."""
    end = clock() + share / plan.rounds
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for name, side in sides.items():
        if cell.skipped.get(name) or cell.skipped.get(baseline):
            continue
        # two visits of each round: a step may take a tenth of its cell's time and no more
        expected = side.products(cell.M) * _expected(known.get(name), cell.M)
        if cell.visit is None and expected > max(share / 10, 0.25):
            cell.skipped[name] = "too-slow"
            continue
        try:
            step = side.step(cell.M)
            seconds[name] = warm(step, clock)
        except InputError as error:
            cell.skipped[name] = error.code
            continue
        steps[name] = step
        known[name] = (cell.M, seconds[name] / side.products(cell.M))
    if baseline not in steps or cell.skipped.get(baseline):
        cell.skipped[baseline] = cell.skipped.get(baseline) or "no-baseline"
        return
    if cell.visit is None:
        cell.slow = {name for name in steps if seconds[name] > _SLOW * seconds[baseline]}
        cell.visit = Visit.fitting(max([seconds[name] for name in steps if name not in cell.slow]))
    together = [name for name in steps if name not in cell.slow]
    apart = [[baseline, name] for name in steps if name in cell.slow]
    for names in (*apart, together):
        left = max(end - clock(), 0.0)
        timing = interleave(
            {name: steps[name] for name in names},
            blocks=(cell.visit.burst, _BLOCKS),
            seconds=left if names is together else _SHARE * left,
            generator=generator,
            visit=cell.visit,
            clock=clock,
        )
        for name in names:
            if name != baseline or names is together:
                cell.taken.setdefault(name, []).append(timing.of(name, baseline))


def _expected(known: tuple[int, float] | None, M: int) -> float:
    """Seconds that a product may take at M rows, from one at fewer: in proportion, beyond what is bound by memory."""
    if known is None:
        return 0.0
    before, seconds = known
    return seconds * max(M / before, 1.0) if before >= 64 or before >= M else seconds * max(M / 64, 1.0)


def _of_cell(
    linear: LinearShape,
    name: str,
    sides: Mapping[str, Runnable | str],
    cell: _Cell,
    baseline: str,
    parts: tuple[str, str],
) -> TimedVariant:
    """Give what was taken of one variant in one cell; `parts` name its quantizer and its twin."""
    side = sides[name]
    if isinstance(side, str):
        return TimedVariant(linear, cell.M, name, timing=Timing(skipped=side))
    ran = RanSide.of(side, cell.M)
    skipped = cell.skipped.get(name, "") or cell.skipped.get(baseline, "")
    if skipped or name not in cell.taken:
        return TimedVariant(linear, cell.M, name, ran, Timing(skipped=skipped or "not-measured"))

    def times(which: str, taken: Timing) -> Array:
        """Of one product."""
        runs = sides[which]
        assert not isinstance(runs, str)
        result: Array = taken.seconds[which] / runs.products(cell.M)
        return result

    joined = {key: Timing.joined(cell.taken[key]) for key in (name, *parts) if key in cell.taken}
    quantizing, raw = (float(np.median(times(part, joined[part]))) if part in joined else None for part in parts)
    own = joined[name]
    timing = replace(own, seconds={SUBJECT: times(name, own), BASELINE: times(baseline, own)}, began={}, order=())
    return TimedVariant(linear, cell.M, name, ran, timing, quantizing=quantizing, raw=raw)


def _hot(step: Step, clock: Clock) -> float:
    """The median of a few runs in a row, after two."""
    fewest, most, limit = _HOT
    step()
    step()
    began = clock()
    taken: list[float] = []
    while len(taken) < fewest or (len(taken) < most and clock() - began < limit):
        taken.append(timed(step, clock))
    return float(np.median(taken))


def copies(cost: StepCost, cache: int) -> int:
    """How many weights of a kind are needed so that all of them are at least three times the last-level cache."""
    return max(1, math.ceil(3 * cache / cost.weight_bytes)) if cost.weight_bytes else 1
