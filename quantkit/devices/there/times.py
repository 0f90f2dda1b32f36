"""ShapeTimes of two models on this device: raw, for whoever asked makes rows of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.devices import job as jobs
from quantkit.devices.answers import CeilingSamples, Footprints, RoundTimes, ShapeTimes, SideCosts, dumped, read
from quantkit.devices.there.gpu import EngineTimes, KernelTimes
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings
from quantkit.measurement.timing import latency, speed
from quantkit.measurement.timing import rounds as raw
from quantkit.measurement.timing.clocks import Clocks, of_cpu
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT
from quantkit.measurement.timing.shapes import Shape, TimingPlan
from quantkit.runtimes import child, load_runtime


def measure(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Cells: `sides`, `ceilings`, one for each shape, `ceilings-after`."""
    work, workdir = jobs.Measure.model_validate(data["work"]), Path(data["workdir"])
    if not work.shapes:  # what each takes in memory is found elsewhere
        return
    done, runner = data["cells"], load_runtime(work.runtime)
    # torch's models are timed on a GPU alone
    kind = EngineTimes if runner.engines else _ProcessorTimes if runner.floats else KernelTimes
    on = kind(work, workdir)
    left = [shape for shape in work.shapes if shape.cell not in done]
    if left:
        loaded = on.sides()
        ours, theirs = loaded.subject, loaded.baseline
        if loaded.said:
            caller.note(loaded.said)
        _tell(caller, done, "sides", lambda: _costs(loaded, work.shapes))
    caller.at(0.0, "ceilings")

    def limits() -> CeilingSamples:
        return CeilingSamples(ceilings=tuple(on.ceilings()))

    _tell(caller, done, "ceilings", limits)
    asked = TimingPlan(cell_seconds=work.cell_seconds, rounds=work.rounds, seed=work.seed)
    end = time.monotonic() + work.seconds * len(left) / len(work.shapes)
    for number, shape in enumerate(left):
        share = max(end - time.monotonic(), 1e-3) / (len(left) - number)
        at = 1 - (len(left) - number) / len(work.shapes)
        before = on.clocks()
        plan = replace(asked, seconds=share)
        sides = {BASELINE: theirs, SUBJECT: ours}
        one = [Shape(**shape.model_dump())]
        (timing,) = latency.take(one, sides, plan, lambda part, words, at=at: caller.at(at, words))  # type: ignore[misc]
        seconds = {side: times.tolist() for side, times in timing.seconds.items()}
        clocks = {"before": before, "after": on.clocks()}
        found = ShapeTimes.model_validate(
            {"seconds": seconds, "rounds": timing.rounds, "skipped": timing.skipped, **clocks}
        )
        caller.row({"cell": shape.cell, "rows": [dumped(found)]})
    caller.at(1.0, "ceilings")
    _tell(caller, done, "ceilings-after", limits)


def _costs(loaded: latency.LoadedSides, shapes: Iterable[jobs.ShapeCell]) -> SideCosts:
    linears, batches = loaded.linears, {shape.batch for shape in shapes if shape.kind == "decode"}
    return SideCosts(
        ours=loaded.subject.cost,
        theirs=loaded.baseline.cost,
        settings=dict(loaded.settings),
        resident_bytes=loaded.subject.resident_bytes,
        linears=None if linears is None else {batch: linears(batch) for batch in sorted(batches)},
    )


class _ProcessorTimes:
    """What `measure` asks of two models on this processor."""

    def __init__(self, work: jobs.Measure, workdir: Path) -> None:
        if work.graphs is None:
            raise InputError("job-invalid", where="graphs", value="none", rule="they measure a processor's ceilings")
        self._job = _speed_job(work, workdir)
        self._pool = ceilings.Pool(graphs=workdir / work.graphs)

    def sides(self) -> latency.LoadedSides:
        """Both, loaded. Raises as `speed.sides`."""
        speed.demand_room([Path(side.path) for side in (self._job.ours, self._job.theirs)])
        (ours, theirs), settings = speed.sides(self._job)
        return latency.LoadedSides(ours, theirs, settings)

    def ceilings(self) -> list[ceilings.Ceiling]:
        """Of the processor."""
        return ceilings.measured(self._job.threads, pool=self._pool)

    def clocks(self) -> Clocks:
        """Of the processor, now."""
        return of_cpu()


def rounds(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Cells: one for each round, with all shapes: what it says is of one load of each side, and whole or not at all."""
    work, workdir = jobs.Rounds.model_validate(data["work"]), Path(data["workdir"])
    threads = work.threads or machine.cores()
    paths = [str(workdir / side.place) for side in (work.ours, work.theirs)]
    speed.demand_room([*map(Path, paths)])
    samples = speed.samples_of(str(workdir / work.samples.place) if work.samples else None)
    loads = {
        side: partial(speed.opened, path, samples, threads, runtime)
        for side, path, runtime in zip(raw.SIDES, paths, work.runtimes, strict=True)
    }
    shapes = [Shape(**shape.model_dump()) for shape in work.shapes]
    # what was answered before this process began is not done again
    done = [read(RoundTimes, rows[0], cell) for cell, rows in data["cells"].items() if cell.startswith(jobs.ROUND)]
    kept = [each.round({*raw.SIDES}, jobs.ROUND) for each in done]
    how: dict[str, Any] = {"seconds": work.seconds, "seed": work.seed, "progress": caller.at}
    before = of_cpu()
    for number, found in enumerate(raw.in_rounds(loads, shapes, done=kept, **how), len(done)):
        after = of_cpu()
        caller.row({"cell": f"{jobs.ROUND}{number}", "rows": [dumped(RoundTimes.of(found, before, after))]})
        before = after


def memory(work: jobs.Measure, workdir: Path) -> Footprints:
    """What each of the two takes, in a process of its own. Raises InputError: see `speed.footprint`."""
    job = _speed_job(work, workdir)
    speed.demand_room([Path(side.path) for side in (job.ours, job.theirs)])
    return Footprints(ours=speed.footprint(job.ours, job.threads), theirs=speed.footprint(job.theirs, job.threads))


def _tell(caller: child.Caller, done: Mapping[str, Any], cell: str, find: Any) -> None:
    if cell not in done:
        caller.row({"cell": cell, "rows": [dumped(find())]})


def _speed_job(work: jobs.Measure, workdir: Path) -> speed.SpeedJob:
    def side(of: jobs.PlacedModel, runtime: str) -> speed.SpeedSide:
        return speed.SpeedSide(str(workdir / of.place), of.subject, of.format, of.weight_bytes, runtime)

    samples = work.samples
    return speed.SpeedJob(
        side(work.ours, work.runtime),
        side(work.theirs, work.floats),
        work.threads or machine.cores(),
        TimingPlan(cell_seconds=work.cell_seconds, rounds=work.rounds, seed=work.seed),
        None if samples is None else speed.Samples(str(workdir / samples.place), samples.macs, samples.outputs),
    )
