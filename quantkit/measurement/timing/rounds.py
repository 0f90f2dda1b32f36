"""Two models timed in turns, both loaded anew in every round: raw times, from which `stats.slowdown` decides.

Which was loaded first, and where a load lies in memory, makes a difference that lasts as long as the load does, and no
repetition within it shows that. So a round loads both, in an order that is drawn, and visits every shape in a few ABBA
blocks (`stats.abba`); there are `LEAST` rounds at least, and more while there is time. All of it happens in a process
of its own.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.timing.graph import Passes
from quantkit.measurement.timing.latency import SHORT, TOO_LARGE, Plan, Report, Side, Step
from quantkit.measurement.timing.speed import demand, demand_room
from quantkit.runtimes import child
from quantkit.runtimes.onnxruntime.session import Loaded
from quantkit.stats.abba import interleave
from quantkit.stats.deciding.slowdown import BLOCKS, BURST, SETTLE

Array = NDArray[Any]
Load = Callable[[], Side]

# rounds: fewer are no sample of loads (`stats.abba` resamples rounds from six on); more say little that is new
LEAST, MOST = 6, 40
# what takes less is run several times in a row, seconds
SHORTEST = 1e-3


@dataclass(frozen=True)
class Shape:
    """What is timed.

    Args:
        name: `latency.decode_step` or `latency.prefill`.
        batch: sequences, or samples of a graph.
        tokens: in the cache of a decode step; of each sequence of a prefill, which is 1 of a graph.
    """

    name: Literal["latency.decode_step", "latency.prefill"]
    batch: int
    tokens: int

    @property
    def shape(self) -> dict[str, int]:
        """As rows have it."""
        decodes = self.name == "latency.decode_step"
        return {"new_tokens": 1 if decodes else self.tokens, "context": self.tokens if decodes else 0}

    @property
    def words(self) -> str:
        """For progress and errors."""
        what, of = ("decode", "context") if self.name == "latency.decode_step" else ("prefill", "tokens")
        return f"{what}, batch {self.batch}, {of} {self.tokens}"


@dataclass(frozen=True)
class Job:
    """What is to be timed.

    Args:
        candidate: a folder with `model.onnx`, or a graph's file.
        baseline: what it is set against, of the same kind.
        shapes: in the order in which a round visits them.
        threads: of both.
        seconds: for all; `LEAST` rounds of one block a shape are taken, however long they take.
        samples: of graphs, a .npz with an array [n, ...] for each input; empty else.
        seed: of every order that is drawn.
    """

    candidate: str
    baseline: str
    shapes: Sequence[Shape]
    threads: int
    seconds: float
    samples: str = ""
    seed: int = 0


@dataclass
class Taken:
    """The times of one shape.

    Args:
        shape: which.
        candidate: seconds, [blocks, 2, burst], in the order in which they were taken; see `stats.abba.interleave`.
        baseline: the same blocks of the other side.
        rounds: blocks of each round.
        began: when each round of it began, seconds since 1970.
        skipped: why it has no times: `out-of-memory`, `prompt-too-long` or `shape-unsupported`; empty else.
    """

    shape: Shape
    candidate: Array = field(default_factory=lambda: np.empty((0, 2, 1)))
    baseline: Array = field(default_factory=lambda: np.empty((0, 2, 1)))
    rounds: tuple[int, ...] = ()
    began: tuple[float, ...] = ()
    skipped: str = ""

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(
            asdict(self) | {"candidate": self.candidate.tolist(), "baseline": self.baseline.tolist()}, allow_nan=False
        )

    @classmethod
    def read(cls, line: str) -> Taken:
        """The opposite of `line`."""
        data = json.loads(line)
        return cls(
            Shape(**data["shape"]),
            np.asarray(data["candidate"], np.float64),
            np.asarray(data["baseline"], np.float64),
            tuple(data["rounds"]),
            tuple(data["began"]),
            data["skipped"],
        )


def shapes_of(plan: Plan) -> list[Shape]:
    """The shapes of a plan: decode steps, then prefills."""
    steps = [Shape("latency.decode_step", batch, context) for batch in plan.batches for context in plan.contexts]
    return steps + [Shape("latency.prefill", batch, n) for batch in plan.prefill_batches for n in plan.prefills]


def run(job: Job, progress: Report | None = None) -> list[Taken]:
    """Time both, in a process of their own.

    Raises:
        InputError: `out-of-memory`, the two do not fit; `onnx-unreadable`, `speed-failed`.
        MissingDependency: onnxruntime or scipy.
    """
    demand()
    demand_room([Path(side) for side in (job.candidate, job.baseline)])
    remedy = "try smaller batches: --batch 1,2,4"
    return [Taken.read(line) for line in child.lines(__name__, [], json.dumps(asdict(job)), progress, remedy=remedy)]


def take(
    candidate: Load,
    baseline: Load,
    shapes: Sequence[Shape],
    *,
    seconds: float,
    seed: int = 0,
    progress: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Taken]:
    """Time what two functions load; see the module.

    Args:
        candidate: loads what is judged.
        baseline: loads what it is set against.
        shapes: to time.
        seconds: after which no further round begins that would not end in time.
        seed: of every order that is drawn.
        progress: told the share that is done, and what is being done.
        clock: seconds, rising.
    """
    generator = np.random.default_rng(seed)
    cells = [_Cell(Taken(shape)) for shape in shapes]
    start = clock()
    turn, last = 0, 0.0
    while turn < LEAST or (turn < MOST and clock() + last < start + seconds):
        began = clock()
        sides: list[Side | None] = [None, None]
        for which in generator.permutation(2):
            sides[which] = (candidate, baseline)[which]()
        for i, cell in enumerate(cells):
            if progress is not None:
                rounds, spent = (turn + i / len(cells)) / LEAST, (clock() - start) / seconds
                progress(min(rounds, spent, 1.0), f"round {turn + 1}, {cell.taken.shape.words}")
            if not cell.taken.skipped:
                cell.visit([side for side in sides if side is not None], seconds / LEAST / len(cells), generator, clock)
        sides.clear()
        turn, last = turn + 1, clock() - began
    return [cell.taken for cell in cells]


class _Cell:
    """One shape as it is timed; how its rounds are laid out is settled in the first."""

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self.blocks = self.burst = self.settle = self.runs = 0

    def visit(
        self, sides: Sequence[Side], share: float, generator: np.random.Generator, clock: Callable[[], float]
    ) -> None:
        """One round: at most `BLOCKS` blocks, fewer where they would take longer than `share` seconds."""
        try:
            (ours, once), (theirs, again) = (_warm(side, self.taken.shape, clock) for side in sides)
        except InputError as problem:
            if problem.code not in TOO_LARGE:
                raise
            self.taken = Taken(self.taken.shape, skipped=problem.code)
            return
        if not self.blocks:
            longer, both = max(once, again), once + again
            self.runs = math.ceil(SHORTEST / longer)
            self.burst, self.settle = (BURST, SETTLE) if longer < SHORT else (1, 0)
            block = 2 * (self.burst + self.settle) * self.runs * both
            self.blocks = min(max(int(share / max(block, 1e-9)), 1), BLOCKS)
        began = time.time()
        times = interleave(
            [repeated(step, self.runs) for step in (ours, theirs)],
            blocks=(self.blocks, self.blocks),
            seconds=0.0,
            generator=generator,
            burst=self.burst,
            settle=self.settle,
            clock=clock,
        )
        old, (ours_took, theirs_took) = self.taken, (each / self.runs for each in times)
        self.taken = Taken(
            old.shape,
            np.concatenate([old.candidate, ours_took]) if old.rounds else ours_took,
            np.concatenate([old.baseline, theirs_took]) if old.rounds else theirs_took,
            (*old.rounds, self.blocks),
            (*old.began, began),
        )


def _warm(side: Side, shape: Shape, clock: Callable[[], float]) -> tuple[Step, float]:
    """(a prepared step, about the seconds that it takes) after it has run twice: the first faults the pages in."""
    make = side.decode if shape.name == "latency.decode_step" else side.prefill
    step = make(shape.batch, shape.tokens)
    step()
    began = clock()
    step()
    return step, max(clock() - began, 1e-9)


def repeated(step: Step, runs: int) -> Step:
    """A step that is so many of them, one after another."""
    if runs == 1:
        return step

    def several() -> None:
        for _ in repeat(None, runs):
            step()

    return several


def _time(data: Mapping[str, Any]) -> None:
    job = Job(**{**data, "shapes": [Shape(**each) for each in data["shapes"]]})

    samples: dict[str, Array] = {}
    if job.samples:
        with np.load(job.samples, allow_pickle=False) as file:
            samples = {name: file[name] for name in file.files}

    def load(place: str) -> Side:
        return Passes(place, samples, job.threads) if samples else Loaded(Path(place), threads=job.threads)

    found = take(
        lambda: load(job.candidate),
        lambda: load(job.baseline),
        job.shapes,
        seconds=job.seconds,
        seed=job.seed,
        progress=lambda share, words: print(f"at {share} {words}", flush=True),
    )
    for each in found:
        print(f"row {each.line()}", flush=True)


def main(arguments: list[str]) -> None:
    """The child: a job on stdin."""
    child.answering(lambda: _time(json.load(sys.stdin)))
