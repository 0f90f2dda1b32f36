"""A cell timed, in a process of its own: candidate, baseline and release in turns, round by round (`timing.anew`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.measurement.timing import clocks
from quantkit.measurement.timing.anew import CANDIDATE, Task, measure
from quantkit.measurement.timing.schedule import Step, Timing
from quantkit.measurement.timing.speed import samples_of
from quantkit.nightly.config import TimeBudget
from quantkit.nightly.records import Side
from quantkit.runtimes import child


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


def task_of(budget: TimeBudget, **others: Any) -> Task:
    """With a budget of `nightly.yaml`."""
    return Task(rounds=budget.rounds, blocks=budget.most, seconds=budget.seconds, **others)


def run(task: Task, progress: Callable[[float, str], None] | None = None) -> CellTimes:
    """Time it.

    Raises:
        InputError: what the candidate raises; `timing-failed` if the process dies.
    """
    remedy = "look into the system's log; a smaller batch takes less memory"
    rows = child.run(_time, asdict(task), progress, remedy=remedy, died="timing-failed", where=_place(task))
    return times(rows)


def times(rows: Iterable[Mapping[str, Any]]) -> CellTimes:
    """Of the rows of `anew.measure`."""
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
    """The steps of one round, as whoever timed it tells it."""
    timing = Timing.read(row["turns"])
    return [Iteration(side, row["round"], *step, **row["state"]) for side, *step in timing.steps()]  # type: ignore[arg-type]


def _place(task: Task) -> str:
    return f"{Path(task.sides[CANDIDATE]).name}, batch {task.batch}"


def _time(data: Mapping[str, Any], caller: child.Caller) -> None:
    from quantkit.nightly.running.steps import loaded

    given = Task(**data)
    samples = samples_of(given.samples)

    def load(side: str) -> Step:
        return loaded(Path(given.sides[side]), given.runtime, given.batch, samples)

    done = 0
    for row in measure(given, load, lambda: clocks.of_gpu() if given.gpu else clocks.of_cpu()):
        caller.row(row)
        done += "turns" in row
        caller.at(done / given.rounds, f"round {done} of {given.rounds}")
