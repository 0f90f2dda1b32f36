"""Models timed in turns, loaded anew in each round, in an order that is drawn: what a night keeps of a cell.

Which was loaded first, and where a load lies in memory, makes a difference that lasts as long as the load does
(`stats.slowdown`). Every step that counts is kept, with when it began and what the device was at. A side that does not
load is left out, and its reason told; without the candidate there is nothing. A step of less than a millisecond is run
several times in a row, and its mean is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.timing.clocks import Between, Clocks
from quantkit.measurement.timing.schedule import Step, Visit, interleave, runs_of, warm
from quantkit.stats.deciding.slowdown import BURST, SETTLE

_Side = Literal["candidate", "baseline", "release"]
CANDIDATE: _Side = "candidate"
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
        most: blocks of one round.
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
    most: int = _MOST


def measure(task: Task, load: Callable[[str], Step], look: Callable[[], Clocks]) -> Iterator[dict[str, Any]]:
    """Of each round its steps, and of a side that does not load, why.

    Args:
        load: loads a side anew, and prepares its step.

    Raises:
        QuantkitError: what loading the candidate raises.
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
                yield {"unloadable": side, "error": _error(problem, task, side)}
        sides = [side for side in sides if side in steps]
        # a GPU's steps are timed by its own clock
        visit = visit or Visit(BURST, SETTLE, 1 if task.gpu else runs_of(max(took)))
        blocks = (1, task.most)
        if task.blocks is not None:
            done, after = (task.blocks * number // task.rounds for number in (turn, turn + 1))
            blocks = (min(after - done, task.most),) * 2
        before = look()
        timing = interleave(
            {side: steps[side] for side in sides},
            blocks=blocks,
            seconds=(task.seconds or 0.0) / task.rounds,
            generator=generator,
            visit=visit,
        )
        state = Between.of(before, look(), counted=not task.gpu)
        yield {"round": turn, "state": asdict(state), "turns": timing.as_dict()}
        steps.clear()
        gc.collect()


def _error(problem: Exception, task: Task, side: str) -> dict[str, str]:
    if isinstance(problem, QuantkitError):
        return problem.as_dict()
    value = f"{type(problem).__name__}: {problem}"
    return InputError("load-failed", where=task.sides[side], value=value, rule="it loads and runs").as_dict()
