"""A bundle and its baseline timed side by side: latency, throughput, effective bandwidth, tax and win intervals.

Every shape (batch and context, or tokens of a prefill) is measured in several rounds over the whole run, so that the
drift of a machine over minutes is inside the intervals instead of between the shapes. Read bandwidth and compute rates
are measured before and after; with them the tax (`operators.tax`) of a runtime that is a black box: only the sum is
known, not what of it is decoding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling, joined
from quantkit.measurement.operators.tax import Limits, StepCost
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.latency_rows import across_row, break_even, curves, rows_of
from quantkit.measurement.timing.schedule import Clock, Step, Turns, Visit, interleave, warm
from quantkit.measurement.timing.shapes import TOO_LARGE, Shape, Timeable, TimingPlan
from quantkit.runtimes.child import Report
from quantkit.stats.abba import Comparison, compare

_FEWEST = {"decode": 30, "prefill": 10}
SUBJECT, BASELINE, ACROSS = "subject", "baseline", "across"
# blocks of four visits a shape: never fewer, however slow; no more, however fast
_BLOCKS = (5, 240)


@dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Args:
        cost: what its steps must move and compute.
        subject: `content_sha256` of its bundle.
        resident_bytes: what it takes in memory, where known.
        runtime: that runs it; of those that `measure` is given besides.
    """

    cost: StepCost
    subject: str
    resident_bytes: int | None = None
    runtime: str = ""


@dataclass(frozen=True)
class TimedSide:
    """A side that can be run; `model` is loaded. The rest: see `Side`."""

    model: Timeable
    cost: StepCost
    subject: str
    resident_bytes: int | None = None
    runtime: str = ""

    @property
    def side(self) -> Side:
        """Without the model."""
        return Side(self.cost, self.subject, self.resident_bytes, self.runtime)


@dataclass(frozen=True)
class LoadedSides:
    """Both that are compared, loaded.

    Args:
        settings: of their rows.
        said: of how they run what somebody has to know, in a sentence, or "".
        linears: batch -> seconds of all of a step's linears as they were timed one by one, None where one was not; None
            of a side whose linears nobody times.
    """

    subject: TimedSide
    baseline: TimedSide
    settings: Mapping[str, str | bool | int | float | None]
    said: str = ""
    linears: Callable[[int], float | None] | None = None


@dataclass
class ShapeTiming:
    """One shape as it is timed; `settings` and `flags` go into its rows."""

    shape: Shape
    visit: Visit | None = None
    parts: list[Turns] = field(default_factory=list)
    skipped: str = ""
    finished: bool = False
    found: Comparison | None = None
    across: Comparison | None = None
    settings: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)
    flags: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Its times, of what JSON has."""
        if self.skipped:
            return {"skipped": self.skipped}
        turns = Turns.joined(self.parts)
        return {"seconds": {side: found.tolist() for side, found in turns.seconds.items()}, "rounds": turns.rounds}

    def given(self, seconds: Mapping[str, Any], rounds: Sequence[int], skipped: str = "") -> ShapeTiming:
        """With what `as_dict` gave: when each step began is not in it."""
        times = {side: np.asarray(found) for side, found in seconds.items()}
        self.parts = [] if skipped else [Turns(times, times, [], tuple(rounds))]
        self.skipped = skipped
        return self

    @property
    def few(self) -> bool:
        """Whether it has fewer steps than its kind should have."""
        return self.found is not None and self.found.n < _FEWEST[self.shape.kind]


def measure(
    subject: TimedSide,
    baseline: TimedSide,
    *,
    runtime: str,
    settings: Mapping[str, str | bool | int | float | None],
    device: Mapping[str, str],
    versions: Mapping[str, str],
    plan: TimingPlan | None = None,
    across: TimedSide | None = None,
    ceilings: Callable[[], Sequence[Ceiling]] | None = None,
    progress: Report | None = None,
    clock: Clock = time.perf_counter,
) -> list[Row]:
    """Time two loaded models, interleaved, and say what follows from it.

    Args:
        baseline: what it is set against, in the same runtime with the same threads.
        device: `machine.device()`.
        versions: `machine.versions()`.
        across: a third, in another runtime, that takes its turns with the two.
        ceilings: measures read bandwidth and compute rates, before and after the rest; None takes
            `ceilings.measured` with `settings["threads"]`.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.

    Returns:
        `ceiling.*`; for each cell `latency.*`, `throughput.*`, `tax.total` and, of decode steps, `bandwidth.effective`;
        `tax.break_even` for each context and for the prefills. A shape that does not fit has one row without value,
        flagged `out-of-memory` or `prompt-too-long`, with `-baseline` where it is that which does not fit.
        The rows of latency hold what has no field of its own in `settings`: `baseline_p90`, `baseline_p99`,
        `p99_ratio` with its interval `p99_ratio_low` and `p99_ratio_high`. With `across` also `across.*`, the subject's
        steps against its, which `settings` name as `baseline_runtime` and `baseline_format`.

    Raises:
        InputError: whatever else a side raises.
        MissingDependency: scipy is not installed.
    """
    plan = plan or TimingPlan()
    progress = progress or (lambda share, words: None)
    ceilings = ceilings or (lambda: _ceilings.measured(int(settings.get("threads") or machine.cores())))
    progress(0.0, "ceilings")
    before = ceilings()
    timings = [ShapeTiming(shape) for shape in plan.shapes()]
    take(timings, subject, baseline, plan, progress, clock, across=across)
    progress(1.0, "ceilings")
    measured = joined(before, ceilings())
    return judged(
        timings,
        subject.side,
        baseline.side,
        measured,
        runtime=runtime,
        settings=settings,
        device=device,
        versions=versions,
        cache=machine.last_level_cache(),
        seed=plan.seed,
        across=across.side if across else None,
    )


def judged(
    timings: Sequence[ShapeTiming],
    subject: Side,
    baseline: Side,
    ceilings: Sequence[Ceiling],
    *,
    runtime: str,
    settings: Mapping[str, str | bool | int | float | None],
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int | None,
    seed: int = 0,
    across: Side | None = None,
) -> list[Row]:
    """What follows from raw times, wherever they were taken; see `measure` for the rows.

    Args:
        timings: with their times, or why there are none; `found` is filled in.
        ceilings: of the device.
        cache: bytes of its last-level cache.
        seed: of the resamples.
        across: see `measure`.
    """
    limits = Limits.of(ceilings, cache)
    for timing in timings:
        if not timing.skipped:
            turns = Turns.joined(timing.parts)
            ours, others = (
                turns.seconds[SUBJECT],
                [turns.seconds[side] for side in (BASELINE, ACROSS) if side in turns.seconds],
            )
            timing.found, *more = (compare(ours, each, rounds=turns.rounds, seed=seed) for each in others)
            timing.across = more[0] if more else None
    common = {
        "subject": subject.subject,
        "runtime": runtime,
        "device": Device.model_validate(dict(device)),
        "versions": dict(versions),
    }
    rows = [ceiling.row(device=dict(device), versions=dict(versions)) for ceiling in ceilings]
    for timing in timings:
        rows += rows_of(timing, subject, baseline, limits, common, {**settings, **timing.settings})
        if across is not None and timing.across is not None:
            rows.append(across_row(timing.shape, timing.across, across, common, dict(settings)))
    for over, curve in curves(timings):
        rows.append(break_even(over, curve, subject, baseline, limits, common, dict(settings)))
    return rows


def take(
    timings: Sequence[ShapeTiming],
    subject: TimedSide,
    baseline: TimedSide,
    plan: TimingPlan,
    progress: Report,
    clock: Clock = time.perf_counter,
    *,
    across: TimedSide | None = None,
) -> None:
    """Fill in `parts`, or `skipped`, of every shape; of the plan count seconds, rounds and seed."""
    entries = {BASELINE: baseline, SUBJECT: subject, **({ACROSS: across} if across else {})}
    generator = np.random.default_rng(plan.seed)
    end = clock() + plan.seconds
    turns = [(turn, timing) for turn in range(plan.rounds) for timing in timings]
    for i, (turn, timing) in enumerate(turns):
        progress(i / len(turns), timing.shape.words)
        if timing.skipped or timing.finished:
            continue
        left = sum(not (each.skipped or each.finished) for _, each in turns[i:])
        share = max(end - clock(), 0.0) / left
        try:
            _round(timing, entries, share, plan.rounds - turn, plan, generator, clock)
        except _TooLarge as error:
            # a shape that has fitted once keeps what was measured of it
            timing.finished, timing.skipped = True, "" if timing.parts else str(error)


def _round(
    timing: ShapeTiming,
    entries: Mapping[str, TimedSide],
    share: float,
    left: int,
    plan: TimingPlan,
    generator: np.random.Generator,
    clock: Clock,
) -> None:
    """Prepare both sides, warm them up and take one round's times, or those of all rounds that are left."""
    began = clock()
    steps: dict[str, Step] = {}
    seconds = []
    for side, entry in entries.items():
        try:
            steps[side] = timing.shape.step(entry.model)
            seconds.append(warm(steps[side], clock))
        except InputError as error:
            if error.code not in TOO_LARGE:
                raise
            raise _TooLarge(error.code if side == SUBJECT else f"{error.code}-{side}") from None
    prepared = clock() - began
    # what costs more to prepare than to time is prepared once
    rounds = left if prepared > share else 1
    timing.finished = rounds == left
    timing.visit = timing.visit or Visit.fitting(max(seconds))
    part = rounds / plan.rounds
    wanted = math.ceil(_FEWEST[timing.shape.kind] / (2 * timing.visit.burst) * part)
    floor, most = math.ceil(_BLOCKS[0] * part), math.ceil(_BLOCKS[1] * part)
    least = max(min(wanted, int(plan.cell_seconds * part / timing.visit.block(seconds))), floor)
    timing.parts.append(
        interleave(
            steps,
            blocks=(least, max(least, most)),
            seconds=share * rounds - prepared,
            generator=generator,
            visit=timing.visit,
            clock=clock,
        )
    )


class _TooLarge(Exception):
    """The shape does not fit one of the two; the message is the row's flag."""
