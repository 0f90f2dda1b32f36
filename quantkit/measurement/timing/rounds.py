"""Time models in turns and load all of them anew in every round: raw times, from which `stats.slowdown` decides.

The order of loading, and a load's place in memory, make a difference that lasts as long as the load. No repetition
within one load shows it. So a round loads all sides in a random order, then visits every shape in a few blocks
(`timing.schedule`).

A comparison (`run`) has two sides and several shapes. It takes at least `LEAST` rounds, and more while there is time. A
round is complete by itself, so an interrupted comparison goes on after its last complete round. A cell of a night
(`measure`) has one step of up to three sides. A side that fails to load is left out and its reason recorded; without
the candidate the cell fails. A step of less than a millisecond is run several times in a row, and its mean is kept.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.timing.clocks import Between, Clocks
from quantkit.measurement.timing.schedule import (
    TOO_LARGE,
    Clock,
    Shape,
    Step,
    Timeable,
    Timing,
    Visit,
    interleave,
    runs_of,
    warm,
)
from quantkit.measurement.timing.speed import RUNTIME, demand, demand_room, opened, samples_of
from quantkit.runtimes import child
from quantkit.runtimes.child import Report
from quantkit.stats.slowdown import BLOCKS, BURST, SETTLE

# fewest and most rounds: `stats.abba` resamples rounds from six on; beyond 40 they add little
LEAST, MOST = 6, 40
CANDIDATE: Final = "candidate"
BASELINE: Final = "baseline"
SIDES = (CANDIDATE, BASELINE)


@dataclass(frozen=True)
class RoundsJob:
    """Two sides and the shapes to time.

    Args:
        candidate: folder that its runtime reads, or a graph's file.
        baseline: folder or file to compare with, of the same kind.
        shapes: shapes in the order in which a round visits them.
        threads: threads of both sides.
        seconds: time for everything; `LEAST` rounds of one block a shape are taken even beyond it.
        samples: for graphs, a .npz with an array [n, ...] for each input; otherwise empty.
        seed: seed of every random order.
        runtimes: runtime of the candidate, and of the baseline.
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
class TimedRound:
    """One round of two sides.

    Args:
        parts: times of every shape, in order, of `CANDIDATE` and `BASELINE`.
        seconds: duration, both loads included.
    """

    parts: Sequence[Timing]
    seconds: float


def run(job: RoundsJob, progress: Report | None = None) -> list[Timing]:
    """Time both sides in a process of their own.

    Raises InputError: `out-of-memory`, the two do not fit; `onnx-unreadable`, `speed-failed`; MissingDependency:
    onnxruntime or scipy.
    """
    demand(job.runtimes)
    demand_room([Path(side) for side in (job.candidate, job.baseline)])
    remedy = "try smaller batches: --batch 1,2,4"
    return [Timing.read(row) for row in child.run(_time, asdict(job), progress, remedy=remedy)]


def take(loads: Mapping[str, Callable[[], Timeable]], shapes: Sequence[Shape], **how: Any) -> list[Timing]:
    """Time models from loading functions; `how`: arguments of `in_rounds`."""
    return joined([*in_rounds(loads, shapes, **how)])


def joined(rounds: Sequence[TimedRound]) -> list[Timing]:
    """Join the rounds of each shape; a shape that did not fit in one round has no times."""
    return [Timing.joined(parts) for parts in zip(*(turn.parts for turn in rounds), strict=True)]


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
    """Take the rounds of several shapes, and yield each round as soon as it is complete.

    Args:
        loads: side -> function that loads it anew.
        seconds: time after which no round begins that would end too late.
        seed: seed of every random order.
        done: rounds taken earlier; their time and their layout are kept.
        progress: function called with the share done and with words for the current shape.
        clock: rising seconds.
    """
    cells = [_Cell(shape, done[0].parts[i] if done else None) for i, shape in enumerate(shapes)]
    for turn_done in done:
        for cell, part in zip(cells, turn_done.parts, strict=True):
            cell.skipped = cell.skipped or part.skipped
    turn, last = len(done), done[-1].seconds if done else 0.0
    spent = sum(turn_done.seconds for turn_done in done)
    while turn < LEAST or (turn < MOST and spent + last < seconds):
        began = clock()
        # one generator a round: its draws are the same after an interruption
        generator = np.random.default_rng((seed, turn))
        drawn = [[*loads][number] for number in generator.permutation(len(loads))]
        loaded = {side: loads[side]() for side in drawn}
        models = {side: loaded.pop(side) for side in loads}
        parts = []
        for i, cell in enumerate(cells):
            if progress is not None:
                rounds, passed = (turn + i / len(cells)) / LEAST, (spent + clock() - began) / seconds
                progress(min(rounds, passed, 1.0), f"round {turn + 1}, {cell.shape.words}")
            parts.append(cell.round(models, seconds / LEAST / len(cells), generator, clock))
        models.clear()
        last = clock() - began
        turn, spent = turn + 1, spent + last
        yield TimedRound(parts, last)


class _Cell:
    """One shape while it is timed; its first round settles the layout of all."""

    def __init__(self, shape: Shape, first: Timing | None) -> None:
        self.shape, self.skipped = shape, ""
        self.visit = first.visit if first else None
        self.blocks = sum(first.rounds) if first else 0

    def round(
        self, models: Mapping[str, Timeable], share: float, generator: np.random.Generator, clock: Clock
    ) -> Timing:
        """Take at most `BLOCKS` blocks, fewer if they would take longer than `share` seconds."""
        try:
            if not self.skipped:
                steps = {side: self.shape.step(model) for side, model in models.items()}
                seconds = [warm(step, clock) for step in steps.values()]
        except InputError as problem:
            if problem.code not in TOO_LARGE:
                raise
            self.skipped = problem.code
        if self.skipped:
            return Timing(shape=self.shape, skipped=self.skipped)
        if self.visit is None:
            self.visit = Visit.fitting(max(seconds), runs=runs_of(max(seconds)))
            self.blocks = min(max(int(share / self.visit.block(seconds)), 1), BLOCKS)
        blocks = (self.blocks, self.blocks)
        timing = interleave(steps, blocks=blocks, seconds=0.0, generator=generator, visit=self.visit, clock=clock)
        return replace(timing, shape=self.shape)


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    job = RoundsJob(**{**data, "shapes": [Shape(**shape) for shape in data["shapes"]]})
    samples = samples_of(job.samples)
    ours, theirs = job.runtimes
    loads = {
        CANDIDATE: lambda: opened(job.candidate, samples, job.threads, ours),
        BASELINE: lambda: opened(job.baseline, samples, job.threads, theirs),
    }
    for timing in take(loads, job.shapes, seconds=job.seconds, seed=job.seed, progress=caller.at):
        caller.row(timing.as_dict())


@dataclass(frozen=True)
class Task:
    """One cell of a night.

    Args:
        sides: `candidate`, `baseline`, `release` -> folder of its bundle; the candidate is among them.
        runtime: runtime of all sides.
        batch: batch of the cell.
        rounds: number of rounds; each loads all sides anew.
        blocks: blocks of all rounds together; None where time decides.
        seconds: if time decides, that of all rounds together, without loads.
        seed: seed of all random orders.
        gpu: True on a GPU.
        samples: file of a graph's inputs.
        most: most blocks of one round.
    """

    sides: Mapping[str, str]
    runtime: str
    batch: int
    rounds: int
    blocks: int | None
    seconds: float | None
    seed: int
    gpu: bool = False
    samples: str | None = None
    most: int = 1 << 20


def measure(task: Task, load: Callable[[str], Step], look: Callable[[], Clocks]) -> Iterator[dict[str, Any]]:
    """Yield each round's steps and the state of the device, and the error of any side that fails to load.

    Args:
        load: function that loads a side anew and prepares its step.

    Raises QuantkitError: any error of loading the candidate.
    """
    generator = np.random.default_rng(task.seed)
    sides, visit = list(task.sides), None
    for turn in range(task.rounds):
        steps: dict[str, Step] = {}
        took = []
        for number in generator.permutation(len(sides)):
            side = sides[number]
            try:
                step = load(side)
                took.append(warm(step))
                steps[side] = step
            except Exception as problem:
                if side == CANDIDATE:
                    raise
                yield {"unloadable": side, "error": _error(problem, task.sides[side])}
        # a GPU's steps are timed by its own clock
        visit = visit or Visit(BURST, SETTLE, 1 if task.gpu else runs_of(max(took)))
        blocks = (1, task.most)
        if task.blocks is not None:
            done, after = (task.blocks * number // task.rounds for number in (turn, turn + 1))
            blocks = (min(after - done, task.most),) * 2
        before = look()
        sides = [side for side in sides if side in steps]
        in_order, seconds = {side: steps[side] for side in sides}, (task.seconds or 0.0) / task.rounds
        timing = interleave(in_order, blocks=blocks, seconds=seconds, generator=generator, visit=visit)
        state = Between.of(before, look(), counted=not task.gpu)
        yield {"round": turn, "state": asdict(state), "turns": timing.as_dict()}
        steps.clear()
        in_order.clear()
        gc.collect()


def _error(problem: Exception, where: str) -> dict[str, str]:
    if isinstance(problem, QuantkitError):
        return problem.as_dict()
    value = f"{type(problem).__name__}: {problem}"
    return InputError("load-failed", where=where, value=value, rule="it loads and runs").as_dict()
