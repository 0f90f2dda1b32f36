"""A cell timed, in a process of its own: candidate, baseline and release in turns (`timing.schedule`), round by round.

In each round all sides are loaded anew, in an order that is drawn: which was loaded first, and where a load lies in
memory, makes a difference that lasts as long as the load does (`stats.slowdown`). Every step that counts is kept, with
when it began and what the device was at. A side that does not load is left out, and its reason told; without the
candidate there is nothing. A step of less than a millisecond is run several times in a row, and its mean is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.clocks import Between, Clocks
from quantkit.measurement.timing.schedule import Step, Turns, Visit, interleave, runs_of, warm
from quantkit.measurement.timing.speed import samples_of
from quantkit.nightly.config import TimeBudget
from quantkit.nightly.store.records import Side
from quantkit.runtimes import child
from quantkit.stats.deciding.slowdown import BURST, SETTLE

CANDIDATE: Side = "candidate"
_MOST = 1 << 20


@dataclass(frozen=True)
class Task:
    """What is to be timed.

    Args:
        sides: which -> its bundle's folder; the candidate among them.
        runtime: of all.
        batch: of the cell.
        rounds: in which all are loaded anew.
        blocks: of all rounds together; None where time decides.
        seconds: of all rounds together, without the loads, where it does.
        seed: of all that is drawn.
        gpu: whether it runs on one.
        samples: file of a graph's inputs.
    """

    sides: Mapping[Side, str]
    runtime: str
    batch: int
    rounds: int
    blocks: int | None
    seconds: float | None
    seed: int
    gpu: bool = False
    samples: str | None = None

    @classmethod
    def of(cls, budget: TimeBudget, **others: Any) -> Task:
        """With a budget of `nightly.yaml`."""
        return cls(rounds=budget.rounds, blocks=budget.most, seconds=budget.seconds, **others)


@dataclass(frozen=True)
class Iteration:
    """A step that counts; see `records.Time`."""

    side: Side
    round: int
    block: int
    position: int
    seconds: float
    began: float
    clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None


@dataclass
class CellTimes:
    """What was timed.

    Args:
        iterations: in the order in which they were taken.
        unloadable: side -> the five fields of why it was left out.
    """

    iterations: list[Iteration] = field(default_factory=list)
    unloadable: dict[Side, dict[str, str]] = field(default_factory=dict)


def run(task: Task, progress: Callable[[float, str], None] | None = None) -> CellTimes:
    """Time it.

    Raises:
        InputError: what the candidate raises; `timing-failed` if the process dies.
    """
    remedy = "look into the system's log; a smaller batch takes less memory"
    rows = child.run(_time, asdict(task), progress, remedy=remedy, died="timing-failed", where=_place(task))
    found = CellTimes()
    for row in rows:
        if "unloadable" in row:
            found.unloadable[row["unloadable"]] = row["error"]
        else:
            found.iterations += iterations(row)
    # what was left out later had company before
    found.iterations = [each for each in found.iterations if each.side not in found.unloadable]
    return found


def iterations(row: Mapping[str, Any]) -> list[Iteration]:
    """The steps of one round, as the child tells it."""
    turns = Turns.read(row["turns"])
    return [Iteration(side, row["round"], *step, **row["state"]) for side, *step in turns.steps()]  # type: ignore[arg-type]


def measure(task: Task, load: Callable[[Side], Step], look: Callable[[], Clocks]) -> Iterator[dict[str, Any]]:
    """The rows of `run`: of each round its steps, and of a side that does not load, why.

    Args:
        load: loads a side anew, and prepares its step.

    Raises:
        QuantkitError: what loading the candidate raises.
    """
    generator = np.random.default_rng(task.seed)
    sides, visit = list(task.sides), None
    for turn in range(task.rounds):
        steps: dict[Side, Step] = {}
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
                yield {"unloadable": side, "error": _error(problem, task, side)}
        sides = [side for side in sides if side in steps]
        # a GPU's steps are timed by its own clock
        visit = visit or Visit(BURST, SETTLE, 1 if task.gpu else runs_of(max(took)))
        blocks = (1, _MOST)
        if task.blocks is not None:
            done, after = (task.blocks * number // task.rounds for number in (turn, turn + 1))
            blocks = (after - done, after - done)
        before = look()
        turns = interleave(
            {side: steps[side] for side in sides},
            blocks=blocks,
            seconds=(task.seconds or 0.0) / task.rounds,
            generator=generator,
            visit=visit,
        )
        state = Between.of(before, look(), counted=not task.gpu)
        yield {"round": turn, "state": asdict(state), "turns": turns.as_dict()}
        steps.clear()
        gc.collect()


def _error(problem: Exception, task: Task, side: Side) -> dict[str, str]:
    if isinstance(problem, QuantkitError):
        return problem.as_dict()
    value = f"{type(problem).__name__}: {problem}"
    return InputError("load-failed", where=task.sides[side], value=value, rule="it loads and runs").as_dict()


def _place(task: Task) -> str:
    return f"{Path(task.sides[CANDIDATE]).name}, batch {task.batch}"


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    from quantkit.nightly.running.steps import loaded

    task = Task(**data)
    samples = samples_of(task.samples)

    def load(side: Side) -> Step:
        return loaded(Path(task.sides[side]), task.runtime, task.batch, samples)

    done = 0
    for row in measure(task, load, lambda: clocks.of_gpu() if task.gpu else clocks.of_cpu()):
        caller.row(row)
        done += "turns" in row
        caller.at(done / task.rounds, f"round {done} of {task.rounds}")
