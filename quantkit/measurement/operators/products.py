"""Time single matrix products: every variant of a weight against the high-precision one, shape by shape.

A bench (a runtime on a device) prepares one side for each variant of a shape: products of [M, K] with weights [N, K].
The weights of a side take turns and exceed three times the last-level cache together, so none is still cached at its
next turn. All sides of a shape and a batch are timed in one randomised palindrome (`timing.schedule`), in rounds over
the batches, so the intervals include the machine's drift over minutes. Only products with a correct result are timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from quantkit.errors import InputError
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import (
    BASELINE,
    SUBJECT,
    Array,
    Clock,
    Settings,
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

# largest number of blocks of four visits for each cell and round; the least is one, or two with short steps
_BLOCKS = 60
# rounds of a cell that are taken in any case; later ones are left out once its time is up: a step on a GPU is many
# products, so that it takes far more time than it tells
_ROUNDS = 2
# a side this many times slower than the baseline is timed with the baseline alone, in part of the time: beside the
# others it would leave them few visits, and a ratio so far from 1 needs little precision
_SLOW, _SHARE = 4.0, 0.15
# share of the seconds for each bisection; batches this near each other are not bisected
_BISECTED, _CLOSE = 0.2, 1.125
# number of runs, and largest number of seconds, for products with cached weights
_HOT = (5, 40, 0.2)


class Runnable(Protocol):
    """A prepared variant of one shape. Its steps raise InputError `out-of-memory` for an M that does not fit."""

    @property
    def cost(self) -> StepCost:
        """Cost of one product."""
        ...

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of a weight in memory if known; a kernel's packed copy may not be included."""
        ...

    def products(self, M: int) -> int:
        """Return the number of successive products in a step at M rows."""
        ...

    def settings(self, M: int) -> Settings:
        """Return the settings at M rows of x: kernel, block, accuracy level."""
        ...

    def step(self, M: int) -> Step:
        """Prepare a step at M rows, which uses the next weights at each call; see `timing.schedule`."""
        ...

    def hot(self, M: int) -> Step | None:
        """Prepare a product with a cached weight; None if the weight exceeds the cache."""
        ...


class Bench(Protocol):
    """A runtime on a device that runs products."""

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> Mapping[str, Runnable | str]:
        """Return a checked side for each variant, or the flag of its failure, such as `wrong-result`.

        `batches` lists every M that will be used.
        """
        ...

    def quantizer(self, variant: str) -> str:
        """Return the name of the side that only quantizes x for this variant; "" without one."""
        ...

    def twin(self, variant: str) -> str:
        """Return the name of the side that loads this variant's weight without decoding it; "" without one."""
        ...


@dataclass(frozen=True)
class SweepPlan:
    """The settings of a sweep.

    Args:
        batches: batches M (rows of the activation).
        seconds: time for all shapes and batches together.
        rounds: number of rounds over the batches of each shape.
        seed: seed for the order of the steps and for resampling.
        bisections: number of times that the batches around each break-even are bisected, in a fifth of `seconds` each.
    """

    batches: Sequence[int]
    seconds: float = 300.0
    rounds: int = 8
    seed: int = 0
    bisections: int = 0


@dataclass(frozen=True)
class RanSide:
    """The facts of a side at one batch, without its weights; see `Runnable`."""

    cost: StepCost
    products: int
    resident_bytes: int | None
    settings: Settings


@dataclass(frozen=True)
class TimedVariant:
    """One variant of one shape at one batch. Times are of one product.

    Args:
        linear: shape of the product.
        M: rows of the activation.
        variant: name of the variant.
        side: facts of the side; None if it could not be prepared.
        timing: times of the side (`SUBJECT`) and of the float product (`BASELINE`) in the same blocks.
        times: comparison of both; None if skipped, or before `compared`.
        hot: seconds with a cached weight.
        quantizing: seconds of only quantizing x.
        raw: seconds of its twin, which loads the weight without decoding.
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
        """Flag of the reason for having no times; "" with times."""
        return self.timing.skipped

    def compared(self, seed: int) -> TimedVariant:
        """Compare with the baseline. Raises MissingDependency: scipy is not installed."""
        return replace(self, times=self.timing.compared(SUBJECT, BASELINE, seed))


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
        bench: runtime of the products.
        linears: distinct shapes.
        baseline: name of the high-precision variant.
        variants: names of the other variants.
        plan: settings of the sweep.
        progress: function that is called with the share that is done, and a text.
        clock: monotonic clock in seconds.

    Returns:
        Timed variants by shape, batch and variant, the baseline first (it has only an A/A spread).

    Raises InputError: the bench's error if it cannot prepare the baseline for any shape; MissingDependency: scipy.
    """
    progress = progress or (lambda share, words: None)
    all_timed: list[TimedVariant] = []
    passes, part = 1 + plan.bisections, _BISECTED * plan.seconds
    for number in range(passes):
        batches = between(all_timed, baseline) if number else plan.batches
        seconds = part if number else plan.seconds - plan.bisections * part
        for i, linear in enumerate(linears if batches else ()):

            def report(share: float, words: str, done: float = number + i / len(linears)) -> None:
                progress((done + share / len(linears)) / passes, words)

            share, these = seconds / (len(linears) * len(batches)), replace(plan, batches=batches)
            for taken in take(bench, linear, baseline, variants, these, seconds=share, progress=report, clock=clock):
                all_timed.append(taken.compared(plan.seed + len(all_timed)))
    demand_any(all_timed, baseline)
    order = {linear.label: place for place, linear in enumerate(linears)}
    return sorted(all_timed, key=lambda one: (order[one.linear.label], one.M))


def between(timed: Sequence[TimedVariant], baseline: str) -> list[int]:
    """Return the geometric middle of the batches around the first break-even of each variant, over all linears.

    Batches less than an eighth apart are close enough.
    """
    sums: dict[str, dict[int, float]] = {}
    lacking: set[int] = {one.M for one in timed if one.times is None and one.variant == baseline}
    for one in timed:
        by_batch = sums.setdefault(one.variant, {})
        times = one.times.quantiles["p50"] if one.times is not None else math.inf
        by_batch[one.M] = by_batch.get(one.M, 0.0) + one.linear.count * times
    middles: set[int] = set()
    for curve in sums.values():
        batches = sorted(M for M in curve if M not in lacking and curve[M] < math.inf)
        wins = [curve[M] < sums[baseline][M] for M in batches]
        for (low, high), (won, goes_on) in zip(pairwise(batches), pairwise(wins), strict=True):
            if won and not goes_on:
                middle = round(math.sqrt(low * high))
                middles |= {middle} if low < middle < high and high > _CLOSE * low else set()
                break
    return sorted(middles)


def demand_any(variants: Sequence[TimedVariant], baseline: str) -> None:
    """Refuse a sweep without any timed product. Raises InputError: the flag of the reason."""
    if not any(variant.side for variant in variants):
        flag = variants[0].skipped if variants else "no-shapes"
        where = ", ".join(dict.fromkeys(variant.linear.label for variant in variants))
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
    """Take raw times of one shape, with no more than NumPy.

    Args:
        plan: settings of the sweep; its seconds are ignored.
        seconds: time for each batch.
        progress: function that is called with the share of this shape, and a text.

    Returns:
        Timed variants by batch and variant, the baseline first.
    """
    progress(0.0, f"{linear.label}: preparing")
    names = [baseline, *(name for name in variants if name != baseline)]
    parts = {name: (bench.quantizer(name), bench.twin(name)) for name in names}
    asked = [*names, *dict.fromkeys(part for pair in parts.values() for part in pair if part)]
    sides = bench.prepare(linear, asked, plan.batches)
    usable = {name: side for name, side in sides.items() if not isinstance(side, str)}
    if baseline not in usable:
        # without its baseline this shape cannot be compared; the other shapes can
        flag = str(sides.get(baseline, "absent"))
        return [TimedVariant(linear, M, name, timing=Timing(skipped=flag)) for M in plan.batches for name in names]
    cells = [_Cell(M, usable, baseline) for M in plan.batches]
    speeds: dict[str, tuple[int, float]] = {}
    generator = np.random.default_rng([plan.seed, linear.K, linear.N])
    with undisturbed():
        for turn in range(plan.rounds):
            for place, cell in enumerate(cells):
                progress((turn * len(cells) + place) / (plan.rounds * len(cells)), f"{linear.label}, batch {cell.M}")
                if turn < _ROUNDS or cell.spent < seconds:
                    cell.round(speeds, seconds, plan.rounds, generator, clock)
    results = []
    for cell in cells:
        progress(1.0, f"{linear.label}, batch {cell.M}: weights in the cache")
        for name in names:
            side = sides[name]
            if isinstance(side, str):
                results.append(TimedVariant(linear, cell.M, name, timing=Timing(skipped=side)))
                continue
            one = cell.variant(linear, name, parts[name])
            if not one.skipped and (step := side.hot(cell.M)) is not None:
                one = replace(one, hot=_hot(step, clock))
            results.append(one)
    return results


@dataclass
class _Cell:
    """All sides of one shape at M rows.

    Attributes:
        visit: length of a visit; None before the first round.
        spent: seconds of all rounds so far.
        taken: times of each side, with the baseline's from the same palindromes.
    """

    M: int
    sides: Mapping[str, Runnable]
    baseline: str
    visit: Visit | None = None
    spent: float = 0.0
    slow: set[str] = field(default_factory=set)
    taken: dict[str, list[Timing]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def round(
        self,
        speeds: dict[str, tuple[int, float]],
        share: float,
        rounds: int,
        generator: np.random.Generator,
        clock: Clock,
    ) -> None:
        """Time one round; `speeds` holds each side's last (M, seconds of a product)."""
        begin, baseline = clock(), self.baseline
        end = begin + share / rounds
        steps: dict[str, Step] = {}
        seconds: dict[str, float] = {}
        for name, side in self.sides.items():
            if self.skipped.get(name) or self.skipped.get(baseline):
                continue
            # with two visits a round, a step may take at most a tenth of its cell's time
            expected = side.products(self.M) * _expected(speeds.get(name), self.M)
            if self.visit is None and expected > max(share / 10, 0.25):
                self.skipped[name] = "too-slow"
                continue
            try:
                step = side.step(self.M)
                seconds[name] = warm(step, clock)
            except InputError as error:
                self.skipped[name] = error.code
                continue
            steps[name] = step
            speeds[name] = (self.M, seconds[name] / side.products(self.M))
        if baseline not in steps or self.skipped.get(baseline):
            self.skipped[baseline] = self.skipped.get(baseline) or "no-baseline"
            return
        if self.visit is None:
            self.slow = {name for name in steps if seconds[name] > _SLOW * seconds[baseline]}
            self.visit = Visit.fitting(max(seconds[name] for name in steps if name not in self.slow))
        together = [name for name in steps if name not in self.slow]
        apart = [[baseline, name] for name in steps if name in self.slow]
        for names in (*apart, together):
            left = max(end - clock(), 0.0)
            timing = interleave(
                {name: steps[name] for name in names},
                blocks=(self.visit.burst, _BLOCKS),
                seconds=left if names is together else _SHARE * left,
                generator=generator,
                visit=self.visit,
                clock=clock,
            )
            for name in names:
                if name != baseline or names is together:
                    self.taken.setdefault(name, []).append(timing.of(name, baseline))
        self.spent += clock() - begin

    def variant(self, linear: LinearShape, name: str, parts: tuple[str, str]) -> TimedVariant:
        """Return the times of one variant; `parts` holds the names of its quantizer and its twin."""
        side = self.sides[name]
        ran = RanSide(side.cost, side.products(self.M), side.resident_bytes, dict(side.settings(self.M)))
        skipped = self.skipped.get(name, "") or self.skipped.get(self.baseline, "")
        if skipped or name not in self.taken:
            return TimedVariant(linear, self.M, name, ran, Timing(skipped=skipped or "not-measured"))

        def of_one(which: str, timing: Timing) -> Array:
            times: Array = timing.seconds[which] / self.sides[which].products(self.M)
            return times

        joined = {key: Timing.joined(self.taken[key]) for key in (name, *parts) if key in self.taken}
        quantizing, raw = (float(np.median(of_one(part, joined[part]))) if part in joined else None for part in parts)
        own = joined[name]
        seconds = {SUBJECT: of_one(name, own), BASELINE: of_one(self.baseline, own)}
        timing = replace(own, seconds=seconds, began={}, order=())
        return TimedVariant(linear, self.M, name, ran, timing, quantizing=quantizing, raw=raw)


def _expected(speed: tuple[int, float] | None, M: int) -> float:
    """Estimate a product's seconds at M rows from those at fewer rows: proportional beyond the memory bound."""
    if speed is None:
        return 0.0
    before, seconds = speed
    return seconds * max(M / before, 1.0) if before >= 64 or before >= M else seconds * max(M / 64, 1.0)


def _hot(step: Step, clock: Clock) -> float:
    fewest, most, limit = _HOT
    step()
    step()
    began = clock()
    taken: list[float] = []
    while len(taken) < fewest or (len(taken) < most and clock() - began < limit):
        taken.append(timed(step, clock))
    return float(np.median(taken))


def copies(cost: StepCost, cache: int) -> int:
    """Return the number of weights that exceed three times the last-level cache."""
    return max(1, math.ceil(3 * cache / cost.weight_bytes)) if cost.weight_bytes else 1
