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
from dataclasses import dataclass, field, replace

import numpy as np

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling, joined
from quantkit.measurement.operators.tax import Limits, StepCost
from quantkit.measurement.rows import Device, Row
from quantkit.measurement.timing.rows import FEWEST, Side, StepRows
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Clock, Step, Timing, Visit, interleave, warm
from quantkit.measurement.timing.shapes import TOO_LARGE, Shape, Timeable, TimingPlan
from quantkit.runtimes.child import Report

Settings = Mapping[str, str | bool | int | float | None]
ACROSS = "across"
# blocks of four visits a shape: never fewer, however slow; no more, however fast
_BLOCKS = (5, 240)


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
    settings: Settings
    said: str = ""
    linears: Callable[[int], float | None] | None = None


def measure(
    subject: TimedSide,
    baseline: TimedSide,
    *,
    runtime: str,
    settings: Settings,
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
        flagged `out-of-memory` or `prompt-too-long`, with `-baseline` where it is that which does not fit. With
        `across` also `across.*`, the subject's steps against its, which `settings` name as `baseline_runtime` and
        `baseline_format`.

    Raises:
        InputError: whatever else a side raises.
        MissingDependency: scipy is not installed.
    """
    plan = plan or TimingPlan()
    progress = progress or (lambda share, words: None)
    ceilings = ceilings or (lambda: _ceilings.measured(int(settings.get("threads") or machine.cores())))
    progress(0.0, "ceilings")
    before = ceilings()
    sides = {BASELINE: baseline, SUBJECT: subject, **({ACROSS: across} if across else {})}
    timings = take(plan.shapes(), sides, plan, progress, clock)
    progress(1.0, "ceilings")
    return judged(
        timings,
        {name: side.side for name, side in sides.items()},
        joined(before, ceilings()),
        runtime=runtime,
        settings=settings,
        device=device,
        versions=versions,
        cache=machine.last_level_cache(),
        seed=plan.seed,
    )


def judged(
    timings: Sequence[Timing],
    sides: Mapping[str, Side],
    ceilings: Sequence[Ceiling],
    *,
    runtime: str,
    settings: Settings,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int | None,
    seed: int = 0,
) -> list[Row]:
    """Give the rows that follow from times, wherever they were taken; see `measure`.

    Args:
        sides: `SUBJECT`, `BASELINE`, and `ACROSS` where there is one.
        ceilings: of the device.
        cache: bytes of its last-level cache.
        seed: of the resamples.
    """
    subject = sides[SUBJECT]
    common = {
        "subject": subject.subject,
        "runtime": runtime,
        "device": Device.model_validate(dict(device)),
        "versions": dict(versions),
    }
    make = StepRows(subject, sides[BASELINE], Limits.of(ceilings, cache), common, settings)
    rows = [ceiling.row(device=dict(device), versions=dict(versions)) for ceiling in ceilings]
    timed = []
    for timing in timings:
        times = timing.compared(SUBJECT, BASELINE, seed)
        rows += make.of(timing, times)
        assert timing.shape is not None
        timed.append((timing.shape, times))
        if ACROSS in sides and (other := timing.compared(SUBJECT, ACROSS, seed)) is not None:
            rows.append(make.across(timing.shape, other, sides[ACROSS]))
    return rows + make.curves(timed)


def take(
    shapes: Sequence[Shape],
    sides: Mapping[str, TimedSide],
    plan: TimingPlan,
    progress: Report,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Time every shape, or learn why not; of the plan count seconds, rounds and seed."""
    cells = [_Cell(shape) for shape in shapes]
    generator = np.random.default_rng(plan.seed)
    end = clock() + plan.seconds
    turns = [(turn, cell) for turn in range(plan.rounds) for cell in cells]
    for i, (turn, cell) in enumerate(turns):
        progress(i / len(turns), cell.shape.words)
        if not cell.done:
            share = max(end - clock(), 0.0) / sum(not other.done for _, other in turns[i:])
            cell.round(sides, share, plan.rounds - turn, plan, generator, clock)
    return [cell.timing for cell in cells]


@dataclass
class _Cell:
    """One shape as it is timed."""

    shape: Shape
    parts: list[Timing] = field(default_factory=list)
    skipped: str = ""
    done: bool = False

    @property
    def timing(self) -> Timing:
        # a shape that has fitted once keeps what was measured of it
        return Timing.joined(self.parts) if self.parts else Timing(shape=self.shape, skipped=self.skipped)

    def round(
        self,
        sides: Mapping[str, TimedSide],
        share: float,
        left: int,
        plan: TimingPlan,
        generator: np.random.Generator,
        clock: Clock,
    ) -> None:
        """Prepare all sides, warm them up and take one round's times, or those of all rounds that are left."""
        began = clock()
        steps: dict[str, Step] = {}
        seconds = []
        for name, side in sides.items():
            try:
                steps[name] = self.shape.step(side.model)
                seconds.append(warm(steps[name], clock))
            except InputError as error:
                if error.code not in TOO_LARGE:
                    raise
                self.done, self.skipped = True, error.code if name == SUBJECT else f"{error.code}-{name}"
                return
        prepared = clock() - began
        # what costs more to prepare than to time is prepared once
        rounds = left if prepared > share else 1
        self.done = rounds == left
        visit = self.parts[0].visit if self.parts else None
        visit = visit or Visit.fitting(max(seconds))
        part = rounds / plan.rounds
        wanted = math.ceil(FEWEST[self.shape.kind] / (2 * visit.burst) * part)
        floor, most = (math.ceil(blocks * part) for blocks in _BLOCKS)
        least = max(min(wanted, int(plan.cell_seconds * part / visit.block(seconds))), floor)
        timing = interleave(
            steps,
            blocks=(least, max(least, most)),
            seconds=share * rounds - prepared,
            generator=generator,
            visit=visit,
            clock=clock,
        )
        self.parts.append(replace(timing, shape=self.shape))
