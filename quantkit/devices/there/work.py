"""What a device does, a function for each kind of work: a job in, cells out; nothing beyond the small install.

It is run by `runtimes.child.main`, in the workdir: a place in a job is a path below that.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.devices.answers import LINE, ROUND, CeilingSamples, CheckResult, DeviceFacts, Rows, dumped
from quantkit.devices.sent import probe
from quantkit.devices.there import models, tax, times
from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.operators import ceilings
from quantkit.measurement.timing import speed
from quantkit.measurement.timing.clocks import of_cpu
from quantkit.measurement.timing.rounds import Task
from quantkit.measurement.timing.rounds import measure as anew
from quantkit.measurement.timing.schedule import Step
from quantkit.model.full_memory import is_out_of_memory
from quantkit.runtimes import child, load_runtime
from quantkit.stats.slowdown import BURST

# tokens in the cache of a decoder, and of an encoder's pass: as `nightly.running.steps` has it
_TOKENS = 128
# bytes of a step in a line
_STEP = 48


def work(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Do a kind of work, as far as it is not done.

    Args:
        data: `work`, its kind; `job`, what is asked; `cells`, those that are known, of rounds with their rows.
    """
    done: Mapping[str, Rows] = data["cells"]
    if "about" not in done:
        caller.row({"cell": "about", "rows": [dumped(about())]})
    try:
        _DONE_BY[data["work"]](data["job"], done, caller)
    except QuantkitError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        value = f"{type(problem).__name__}: {problem}"[:500]
        raise InputError("device-failed", where=str(data["work"]), value=value) from problem


def about() -> DeviceFacts:
    """This machine, as it knows itself."""
    # without nvidia-ml-py, which torch does not bring, as the probe finds it
    device, gpus = machine.device(), machine.gpus()[0] or probe.gpus()
    return DeviceFacts(
        id=device["id"],
        name=device["name"],
        machine=platform.machine(),
        isa=machine.isa(),
        cores=machine.cores(),
        memory=machine.memory_limit(),
        cache=machine.last_level_cache(),
        versions=machine.versions(),
        emulated=machine.emulated(),
        gpu=gpus[0]["name"] if gpus else "",
        driver=gpus[0]["driver"] if gpus else "",
    )


def verify(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """One cell, `checks`: a `bundle`'s hashes and, if they hold, what each runtime that is there makes of its export.

    Args:
        job: `loads`, runtime -> what it opens; `graphs`, whether it is no transformer.
    """
    bundle = Bundle.load(job["bundle"])
    found = [CheckResult(name=check.name, ok=check.ok, where=(check.where or "")[:2000]) for check in bundle.verify()]
    for runtime, place in job["loads"].items() if all(check.ok for check in found) else ():
        if load_runtime(runtime).why_not_here() is not None:
            continue
        caller.at(0.5, f"loading it in {runtime}")
        met = ""
        speed.demand_room([Path(place)])
        try:
            speed.stepped(Path(place), runtime, graph=job["graphs"])
        except QuantkitError as problem:
            met = problem.line()[:2000]
        found.append(CheckResult(name=f"{runtime}.loads", ok=not met, where=met))
    caller.row({"cell": "checks", "rows": [dumped(check) for check in found]})


def doctor(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """One cell, `ceilings`: with the `graphs` of a `size`, in so many `runs`."""
    pool = ceilings.Pool(graphs=Path(job["graphs"]))
    names = ("read", "copy", "compute")
    found = ceilings.measured(machine.cores(), names, size=job["size"], runs=job["runs"], pool=pool)
    caller.row({"cell": "ceilings", "rows": [dumped(CeilingSamples(ceilings=tuple(found)))]})


def engine(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """One cell, `engine`: what came of a build. The engine itself lies in `made`, by its hash.

    Args:
        job: of `exporters.tensorrt.engine.EngineJob`, `network` a folder with one.
    """
    from quantkit.exporters.tensorrt import engine as engines
    from quantkit.exporters.tensorrt.timings import place
    from quantkit.runtimes.tensorrt.file import NETWORK
    from quantkit.runtimes.tensorrt.library import load

    # in the folder that goes with this process, until it is whole
    made, flags = Path(os.environ["TMPDIR"]) / "engine", job["flags"]
    cache = place(load(job["library"]), job["gpu"], flags)
    told = {name: value for name, value in job.items() if name != "flags"}
    # of the device, from build to build
    told |= {"timing_cache": None if cache is None else str(Path("timing") / cache.name)}
    told |= {**flags, "network": str(Path(job["network"]) / NETWORK), "engine": str(made)}
    built = engines.build(engines.EngineJob.model_validate(told), progress=caller.at)
    Path("made").mkdir(exist_ok=True)
    made.replace(Path("made") / built.sha256)
    caller.row({"cell": "engine", "rows": [built.model_dump(mode="json")]})


def night(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """Cells of a nightly cell: one for each round, one for each side that does not load; see `timing.rounds.Task`."""
    samples = speed.samples_of(job["samples"])

    def load(side: str) -> Step:
        model = speed.opened(job["sides"][side], samples, machine.cores(), job["runtime"])
        context = getattr(model, "context", None)
        if samples or context is None:
            return model.prefill(job["batch"], 1)
        if getattr(model, "decoder", True):
            return model.decode(job["batch"], min(_TOKENS, context - 1))
        return model.prefill(job["batch"], min(_TOKENS, context))

    # what was answered before this process began is not done again; the rounds that are left are others
    number, rounds = sum(cell.startswith(ROUND) for cell in done), job["rounds"]
    left, blocks, seconds = rounds - number, job["blocks"], job["seconds"]
    if not left:
        return
    blocks = None if blocks is None else max(blocks * left // rounds, left)
    task = Task(
        **{name: job[name] for name in ("sides", "runtime", "batch")},
        rounds=left,
        blocks=blocks,
        seconds=None if seconds is None else seconds * left / rounds,
        seed=job["seed"] + number,
        most=most(len(job["sides"])),
    )
    for row in anew(task, load, of_cpu):
        if "turns" in row:
            caller.row({"cell": f"{ROUND}{number}", "rows": [{**row, "round": number}]})
            number += 1
            caller.at(number / rounds, f"round {number} of {rounds}")
        else:
            caller.row({"cell": f"side-{row['unloadable']}-{number}", "rows": [row]})


def most(sides: int) -> int:
    """Blocks of a round, which is a line: of each step when it began and how long it took."""
    return int(0.9 * LINE / (_STEP * 2 * BURST * sides))


_DONE_BY: Mapping[str, Callable[[Any, Mapping[str, Rows], child.Caller], None]] = {
    "measure": times.measure,
    "rounds": times.rounds,
    "accuracy": models.score,
    "tax": tax.tax,
    "generate": models.generate,
    "verify": verify,
    "doctor": doctor,
    "night": night,
    "engine": engine,
}
WORKS: Sequence[str] = tuple(_DONE_BY)
