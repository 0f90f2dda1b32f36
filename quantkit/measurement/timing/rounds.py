"""Two models timed in turns, both loaded anew in every round: raw times, from which `stats.deciding.slowdown` decides.

Which was loaded first, and where a load lies in memory, makes a difference that lasts as long as the load does, and no
repetition within it shows that. So a round loads both, in an order that is drawn, and visits every shape in a few
blocks (`timing.schedule`); there are `LEAST` rounds at least, and more while there is time. All of it happens in a
process of its own. A round is whole by itself: whoever has kept the ones before goes on with the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SIDES = CANDIDATE, BASELINE = "candidate", "baseline"


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


@dataclass(frozen=True)
class TimedPart:
    """One shape in one round.

    Args:
        turns: of `CANDIDATE` and `BASELINE`; None where it does not fit.
        visit: how they were laid out.
        skipped: as `Taken` has it.
    """

    turns: Turns | None = None
    visit: Visit | None = None
    skipped: str = ""


@dataclass(frozen=True)
class TimedRound:
    """One round.

    Args:
        parts: of each shape, in their order.
        seconds: that it took, with both loads.
    """

    parts: Sequence[TimedPart]
    seconds: float


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


def take(loads: Mapping[str, Callable[[], Timeable]], shapes: Sequence[Shape], **how: Any) -> list[Taken]:
    """Time what functions load; see the module, and `in_rounds` for how."""
    return joined(shapes, [*in_rounds(loads, shapes, **how)])


def joined(shapes: Sequence[Shape], rounds: Sequence[TimedRound]) -> list[Taken]:
    """What all rounds say of each shape: one that did not fit into one of them has no times."""
    taken = []
    for shape, parts in zip(shapes, zip(*(each.parts for each in rounds), strict=True), strict=True):
        skipped = next((part.skipped for part in parts if part.skipped), "")
        turns = None if skipped else Turns.joined([part.turns for part in parts if part.turns is not None])
        taken.append(Taken(shape, turns, skipped))
    return taken


def in_rounds(
    loads: Mapping[str, Callable[[], Timeable]],
    shapes: Sequence[Shape],
    *,
    seconds: float,
    seed: int = 0,
    done: Sequence[TimedRound] = (),
    progress: Report | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[TimedRound]:
    """The rounds, one by one, each as soon as it is whole.

    Args:
        loads: side -> what loads it anew.
        seconds: after which no further round begins that would not end in time.
        seed: of every order that is drawn.
        done: the first rounds, where they have been taken before: neither their time nor their layout is begun anew.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.
    """
    timings = [_Timing(shape, [each.parts[i] for each in done]) for i, shape in enumerate(shapes)]
    turn, last = len(done), done[-1].seconds if done else 0.0
    spent = sum(each.seconds for each in done)
    while turn < LEAST or (turn < MOST and spent + last < seconds):
        began = clock()
        # of each round its own: what a round draws does not go by whether somebody broke off before it
        generator = np.random.default_rng((seed, turn))
        drawn = [[*loads][number] for number in generator.permutation(len(loads))]
        loaded = {side: loads[side]() for side in drawn}
        models = {side: loaded.pop(side) for side in loads}
        parts = []
        for i, timing in enumerate(timings):
            if progress is not None:
                rounds, passed = (turn + i / len(timings)) / LEAST, (spent + clock() - began) / seconds
                progress(min(rounds, passed, 1.0), f"round {turn + 1}, {timing.shape.words}")
            parts.append(timing.round(models, seconds / LEAST / len(timings), generator, clock))
        models.clear()
        last = clock() - began
        turn, spent = turn + 1, spent + last
        yield TimedRound(parts, last)


class _Timing:
    """One shape as it is timed; how its rounds are laid out is settled in the first."""

    def __init__(self, shape: Shape, done: Sequence[TimedPart]) -> None:
        self.shape = shape
        self.skipped = next((part.skipped for part in done if part.skipped), "")
        self.visit: Visit | None = None
        self.blocks = 0
        if done and done[0].turns is not None:
            self.visit, (self.blocks,) = done[0].visit, done[0].turns.rounds

    def round(
        self, models: Mapping[str, Timeable], share: float, generator: np.random.Generator, clock: Clock
    ) -> TimedPart:
        """At most `BLOCKS` blocks, fewer where they would take longer than `share` seconds; none of what is skipped."""
        if self.skipped:
            return TimedPart(skipped=self.skipped)
        try:
            steps = {side: self.shape.step(model) for side, model in models.items()}
            seconds = [warm(step, clock) for step in steps.values()]
        except InputError as problem:
            if problem.code not in TOO_LARGE:
                raise
            self.skipped = problem.code
            return TimedPart(skipped=self.skipped)
        if self.visit is None:
            self.visit = Visit.fitting(max(seconds), runs=runs_of(max(seconds)))
            self.blocks = min(max(int(share / self.visit.block(seconds)), 1), BLOCKS)
        turns = interleave(
            steps,
            blocks=(self.blocks, self.blocks),
            seconds=0.0,
            generator=generator,
            visit=self.visit,
            clock=clock,
        )
        return TimedPart(turns, self.visit)


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
