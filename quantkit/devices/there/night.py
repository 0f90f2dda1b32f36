"""A nightly cell on this device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.devices import job as jobs
from quantkit.measurement.timing import speed
from quantkit.measurement.timing.anew import Task, measure
from quantkit.measurement.timing.clocks import of_cpu
from quantkit.measurement.timing.schedule import Step
from quantkit.runtimes import child
from quantkit.stats.deciding.slowdown import BURST

# tokens in the cache of a decoder, and of an encoder's pass: as `nightly.running.steps` has it
_TOKENS = 128
# bytes of a step in a line
_STEP = 48


def night(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Cells: one for each round, and one for each side that does not load."""
    work, workdir = jobs.NightTimes.model_validate(data["work"]), Path(data["workdir"])
    threads = work.threads or machine.cores()
    samples = speed.samples_of(str(workdir / work.samples) if work.samples else None)
    paths: dict[str, str] = {side: str(workdir / each.place) for side, each in work.sides.items()}

    def load(side: str) -> Step:
        model = speed.opened(paths[side], samples, threads, work.runtime)
        context = getattr(model, "context", None)
        if samples or context is None:
            return model.prefill(work.batch, 1)
        if getattr(model, "decoder", True):
            return model.decode(work.batch, min(_TOKENS, context - 1))
        return model.prefill(work.batch, min(_TOKENS, context))

    # what was answered before this process began is not done again; the rounds that are left are others
    cells = [cell for cell in data["cells"] if cell.startswith(jobs.ROUND)]
    done, left = len(cells), work.rounds - len(cells)
    if not left:
        return
    task = Task(
        paths,
        work.runtime,
        work.batch,
        left,
        None if work.blocks is None else max(work.blocks * left // work.rounds, left),
        None if work.seconds is None else work.seconds * left / work.rounds,
        work.seed + done,
        most=most(len(paths)),
    )
    for row in measure(task, load, of_cpu):
        if "turns" in row:
            caller.row({"cell": f"{jobs.ROUND}{done}", "rows": [{**row, "round": done}]})
            done += 1
            caller.at(done / work.rounds, f"round {done} of {work.rounds}")
        else:
            caller.row({"cell": f"side-{row['unloadable']}-{done}", "rows": [row]})


def most(sides: int) -> int:
    """Blocks of a round, which is a line: of each step when it began and how long it took."""
    return int(0.9 * jobs.LINE / (_STEP * 2 * BURST * sides))
