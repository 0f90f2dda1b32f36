"""Two models timed in turns, both loaded anew in every round: raw times, from which `stats.deciding.slowdown` decides.

Which was loaded first, and where a load lies in memory, makes a difference that lasts as long as the load does, and no
repetition within it shows that. So a round loads both, in an order that is drawn, and visits every shape in a few
blocks (`timing.schedule`); there are `LEAST` rounds at least, and more while there is time. All of it happens in a
process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.measurement.timing.schedule import Clock, Turns, Visit, interleave, runs_of, warm
from quantkit.measurement.timing.shapes import TOO_LARGE, Shape, Timeable
from quantkit.measurement.timing.speed import RUNTIME, demand, demand_room, opened, samples_of
from quantkit.runtimes import child
from quantkit.runtimes.child import Report
from quantkit.stats.deciding.slowdown import BLOCKS

# rounds: fewer are no sample of loads (`stats.abba` resamples rounds from six on); more say little that is new
LEAST, MOST = 6, 40
CANDIDATE, BASELINE = "candidate", "baseline"


@dataclass(frozen=True)
class RoundsJob:
    """What is to be timed.

    Args:
        candidate: a folder of what its runtime reads, or a graph's file.
        baseline: what it is set against, of the same kind.
        shapes: in the order in which a round visits them.
        threads: of both.
        seconds: for all; `LEAST` rounds of one block a shape are taken, however long they take.
        samples: of graphs, a .npz with an array [n, ...] for each input; empty else.
        seed: of every order that is drawn.
        runtimes: of the candidate, and of the baseline.
    """

    candidate: str
    baseline: str
    shapes: Sequence[Shape]
    threads: int
    seconds: float
    samples: str = ""
    seed: int = 0
    runtimes: tuple[str, str] = (RUNTIME, RUNTIME)


@dataclass(frozen=True)
class Taken:
    """The times of one shape.

    Args:
        shape: which.
        turns: of `CANDIDATE` and `BASELINE`; None where it does not fit.
        skipped: why it has no times: `out-of-memory`, `prompt-too-long` or `shape-unsupported`; empty else.
        throttled: whether the processor lowered its clock meanwhile, where somebody looked.
    """

    shape: Shape
    turns: Turns | None = None
    skipped: str = ""
    throttled: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has."""
        turns = None if self.turns is None else self.turns.as_dict()
        return {"shape": asdict(self.shape), "turns": turns, "skipped": self.skipped}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Taken:
        """The opposite of `as_dict`."""
        turns = None if data["turns"] is None else Turns.read(data["turns"])
        return cls(Shape(**data["shape"]), turns, data["skipped"])


def run(job: RoundsJob, progress: Report | None = None) -> list[Taken]:
    """Time both, in a process of their own.

    Raises:
        InputError: `out-of-memory`, the two do not fit; `onnx-unreadable`, `speed-failed`.
        MissingDependency: onnxruntime or scipy.
    """
    demand(job.runtimes)
    demand_room([Path(side) for side in (job.candidate, job.baseline)])
    remedy = "try smaller batches: --batch 1,2,4"
    return [Taken.read(row) for row in child.run(_time, asdict(job), progress, remedy=remedy)]


def take(
    loads: Mapping[str, Callable[[], Timeable]],
    shapes: Sequence[Shape],
    *,
    seconds: float,
    seed: int = 0,
    progress: Report | None = None,
    clock: Clock = time.perf_counter,
) -> list[Taken]:
    """Time what functions load; see the module.

    Args:
        loads: side -> what loads it anew.
        seconds: after which no further round begins that would not end in time.
        seed: of every order that is drawn.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.
    """
    generator = np.random.default_rng(seed)
    timings = [_Timing(shape) for shape in shapes]
    start = clock()
    turn, last = 0, 0.0
    while turn < LEAST or (turn < MOST and clock() + last < start + seconds):
        began = clock()
        drawn = [[*loads][number] for number in generator.permutation(len(loads))]
        loaded = {side: loads[side]() for side in drawn}
        models = {side: loaded.pop(side) for side in loads}
        for i, timing in enumerate(timings):
            if progress is not None:
                rounds, spent = (turn + i / len(timings)) / LEAST, (clock() - start) / seconds
                progress(min(rounds, spent, 1.0), f"round {turn + 1}, {timing.shape.words}")
            if not timing.skipped:
                timing.round(models, seconds / LEAST / len(timings), generator, clock)
        models.clear()
        turn, last = turn + 1, clock() - began
    return [timing.taken() for timing in timings]


class _Timing:
    """One shape as it is timed; how its rounds are laid out is settled in the first."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.skipped = ""
        self.visit: Visit | None = None
        self.blocks = 0
        self.parts: list[Turns] = []

    def round(self, models: Mapping[str, Timeable], share: float, generator: np.random.Generator, clock: Clock) -> None:
        """At most `BLOCKS` blocks, fewer where they would take longer than `share` seconds."""
        try:
            steps = {side: self.shape.step(model) for side, model in models.items()}
            seconds = [warm(step, clock) for step in steps.values()]
        except InputError as problem:
            if problem.code not in TOO_LARGE:
                raise
            self.skipped = problem.code
            return
        if self.visit is None:
            self.visit = Visit.fitting(max(seconds), runs=runs_of(max(seconds)))
            self.blocks = min(max(int(share / self.visit.block(seconds)), 1), BLOCKS)
        self.parts.append(
            interleave(
                steps,
                blocks=(self.blocks, self.blocks),
                seconds=0.0,
                generator=generator,
                visit=self.visit,
                clock=clock,
            )
        )

    def taken(self) -> Taken:
        """What was found of it."""
        return Taken(self.shape, None if self.skipped else Turns.joined(self.parts), self.skipped)


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    """What the child does."""
    job = RoundsJob(**{**data, "shapes": [Shape(**each) for each in data["shapes"]]})
    samples = samples_of(job.samples)
    ours, theirs = job.runtimes
    loads = {
        CANDIDATE: lambda: opened(job.candidate, samples, job.threads, ours),
        BASELINE: lambda: opened(job.baseline, samples, job.threads, theirs),
    }
    for each in take(loads, job.shapes, seconds=job.seconds, seed=job.seed, progress=caller.at):
        caller.row(each.as_dict())
