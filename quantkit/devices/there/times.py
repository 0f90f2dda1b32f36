"""Times of two models on this device: raw, for whoever asked makes rows of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.devices.answers import (
    ROUND,
    CeilingSamples,
    Footprints,
    RoundTimes,
    Rows,
    ShapeTimes,
    SideCosts,
    dumped,
    read,
)
from quantkit.errors import InputError
from quantkit.measurement.operators import ceilings
from quantkit.measurement.timing import latency, speed
from quantkit.measurement.timing import rounds as raw
from quantkit.measurement.timing.clocks import Clocks, of_cpu, of_gpu
from quantkit.measurement.timing.latency import LoadedSides
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Shape, TimingPlan
from quantkit.runtimes import child, load_runtime
from quantkit.runtimes.torch import RUNTIME as TORCH


def measure(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """Cells: `sides`, `ceilings`, one for each shape, `ceilings-after`; `memory`, of what is no graph and on no GPU.

    Args:
        job: `ours` and `theirs`: `place`, `subject`, `format`, `weight_bytes`, and of an engine `built`, the hashes
            that it has to have, and `saved_bytes`; `runtime` and `floats`, that run them; `shapes`, `seconds` of all of
            them, `cell_seconds`, `rounds` and `seed`; `graphs` of the ceilings; `samples` of a graph; `layers`, how
            those of a checkpoint on quantkit's kernels are stored.
    """
    runner = load_runtime(job["runtime"])
    # torch's models are timed on a GPU alone
    on = (_EngineTimes if runner.engines else _ProcessorTimes if runner.floats else _KernelTimes)(job)
    if job["shapes"]:
        _shapes(job, done, on, caller)
    # last: the first times are waited for
    if job["samples"] is None and runner.floats is not None and "memory" not in done:
        speed_job = _speed_job(job)
        sides = (speed_job.ours, speed_job.theirs)
        speed.demand_room([Path(side.path) for side in sides])
        ours, theirs = (speed.footprint(side, speed_job.threads) for side in sides)
        caller.row({"cell": "memory", "rows": [dumped(Footprints(ours=ours, theirs=theirs))]})


def _shapes(job: Mapping[str, Any], done: Mapping[str, Rows], on: Any, caller: child.Caller) -> None:
    shapes = [Shape(**shape) for shape in job["shapes"]]
    left = [shape for shape in shapes if cell_of(shape) not in done]

    def tell(cell: str, found: Any) -> None:
        if cell not in done:
            caller.row({"cell": cell, "rows": [dumped(found())]})

    def limits() -> CeilingSamples:
        return CeilingSamples(ceilings=tuple(on.ceilings()))

    loaded: LoadedSides | None = on.sides() if left else None
    if loaded is not None:
        if loaded.said:
            caller.note(loaded.said)
        tell("sides", partial(_costs, loaded, shapes))
    caller.at(0.0, "ceilings")
    tell("ceilings", limits)
    asked = TimingPlan(cell_seconds=job["cell_seconds"], rounds=job["rounds"], seed=job["seed"])
    end = time.monotonic() + job["seconds"] * len(left) / len(shapes)
    for number, shape in enumerate(left):
        assert loaded is not None
        share = max(end - time.monotonic(), 1e-3) / (len(left) - number)
        at = 1 - (len(left) - number) / len(shapes)
        before, plan = on.clocks(), replace(asked, seconds=share)
        sides = {BASELINE: loaded.baseline, SUBJECT: loaded.subject}
        (timing,) = latency.take([shape], sides, plan, partial(_at, caller, at))
        seconds = {side: times.tolist() for side, times in timing.seconds.items()}
        clocks = {"before": before, "after": on.clocks()}
        found = ShapeTimes.model_validate(
            {"seconds": seconds, "rounds": timing.rounds, "skipped": timing.skipped, **clocks}
        )
        caller.row({"cell": cell_of(shape), "rows": [dumped(found)]})
    caller.at(1.0, "ceilings")
    tell("ceilings-after", limits)


def _at(caller: child.Caller, at: float, _: float, words: str) -> None:
    caller.at(at, words)


def cell_of(shape: Shape) -> str:
    """The name of a shape's cell."""
    return f"{shape.kind}-{shape.batch}-{shape.size}"


def _costs(loaded: LoadedSides, shapes: Iterable[Shape]) -> SideCosts:
    linears, batches = loaded.linears, {shape.batch for shape in shapes if shape.kind == "decode"}
    return SideCosts(
        ours=loaded.subject.cost,
        theirs=loaded.baseline.cost,
        settings=dict(loaded.settings),
        resident_bytes=loaded.subject.resident_bytes,
        linears=None if linears is None else {batch: linears(batch) for batch in sorted(batches)},
    )


def _speed_job(job: Mapping[str, Any]) -> speed.SpeedJob:
    def side(of: Mapping[str, Any], runtime: str) -> speed.SpeedSide:
        return speed.SpeedSide(of["place"], of["subject"], of["format"], of["weight_bytes"], runtime)

    plan = TimingPlan(cell_seconds=job["cell_seconds"], rounds=job["rounds"], seed=job["seed"])
    samples = None if job["samples"] is None else speed.Samples(**job["samples"])
    sides = side(job["ours"], job["runtime"]), side(job["theirs"], job["floats"])
    return speed.SpeedJob(*sides, machine.cores(), plan, samples)


class _ProcessorTimes:
    """What `measure` asks of two models on this processor."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job, self._pool = _speed_job(job), ceilings.Pool(graphs=Path(job["graphs"]))

    def sides(self) -> LoadedSides:
        """Both, loaded. Raises as `speed.sides`."""
        speed.demand_room([Path(side.path) for side in (self._job.ours, self._job.theirs)])
        (ours, theirs), settings = speed.sides(self._job)
        return LoadedSides(ours, theirs, settings)

    def ceilings(self) -> list[ceilings.Ceiling]:
        """Of the processor."""
        return ceilings.measured(self._job.threads, pool=self._pool)

    def clocks(self) -> Clocks:
        """Of the processor, now."""
        return of_cpu()


class _GpuTimes:
    """What `measure` asks of two models on this GPU; nothing is loaded before it does.

    Args:
        at: the torch device that both are on: `cuda`, or `cpu` for tests.
    """

    def __init__(self, job: Mapping[str, Any], at: str) -> None:
        from quantkit.measurement.cuda.device import GpuDevice

        ours, theirs = job["ours"], job["theirs"]
        self._job, self._device, self._ours = job, GpuDevice(at, dry=at == "cpu"), Path(ours["place"])
        subjects = (ours["subject"], theirs["subject"])
        self._how: dict[str, Any] = {"form": ours["format"], "subjects": subjects, "device": self._device}

    def _source(self) -> Any:
        return TORCH.stream(Path(self._job["theirs"]["place"])).source

    def ceilings(self) -> Sequence[ceilings.Ceiling]:
        """Of the GPU."""
        import numpy as np

        from quantkit.measurement.cuda.device import sampled
        from quantkit.measurement.timing.cuda import CEILING_BLOCKS

        return sampled(self._device, CEILING_BLOCKS, np.random.default_rng(self._job["seed"]))

    def clocks(self) -> Clocks:
        """Of the GPU, now."""
        return of_gpu()


class _EngineTimes(_GpuTimes):
    """Times of an engine. Raises as `Runtime.open`."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        runner: Any = load_runtime(job["runtime"])
        self._model = runner.open(Path(job["ours"]["place"]), built=job["ours"]["built"])
        super().__init__(job, self._model.engine.device.type)

    def sides(self) -> LoadedSides:
        """Both, loaded. Raises InputError `out-of-memory`."""
        from quantkit.measurement.timing import cuda

        return cuda.engine_sides(self._model, self._source(), saved=self._job["ours"]["saved_bytes"], **self._how)


class _KernelTimes(_GpuTimes):
    """Times of a checkpoint on quantkit's own kernels. Raises InputError `device-absent`."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        import torch

        from quantkit.kernels.matmul import interpreted

        seen = torch.cuda.is_available()
        if not seen and not interpreted():
            rule, remedy = "quantkit's kernels are for NVIDIA GPUs", "a driver as new as its torch, or --no-speed"
            raise InputError("device-absent", where="torch", value="no GPU that torch sees", rule=rule, remedy=remedy)
        super().__init__(job, "cuda" if seen else "cpu")

    def sides(self) -> LoadedSides:
        """Both, loaded. Raises InputError `out-of-memory`, `dispatch-invalid`; MissingDependency: triton."""
        from quantkit.bundle import LayerEntry
        from quantkit.measurement.timing import cuda

        layers = [LayerEntry.model_validate(layer) for layer in self._job["layers"]]
        return cuda.kernel_sides(self._ours, layers, self._source(), **self._how)


def rounds(job: Mapping[str, Any], done: Mapping[str, Rows], caller: child.Caller) -> None:
    """Cells: one for each round, with all shapes: what it says is of one load of each side, and whole or not at all.

    Args:
        job: of `measurement.timing.rounds.RoundsJob`.
    """
    threads, paths = machine.cores(), [job[side] for side in raw.SIDES]
    speed.demand_room([*map(Path, paths)])
    samples = speed.samples_of(job["samples"])
    loads = {
        side: partial(speed.opened, path, samples, threads, runtime)
        for side, path, runtime in zip(raw.SIDES, paths, job["runtimes"], strict=True)
    }
    shapes = [Shape(**shape) for shape in job["shapes"]]
    # what was answered before this process began is not done again
    kept = [read(RoundTimes, rows[0], cell) for cell, rows in done.items() if cell.startswith(ROUND)]
    before, known = of_cpu(), [found.round({*raw.SIDES}, ROUND) for found in kept]
    how: dict[str, Any] = {"seconds": job["seconds"], "seed": job["seed"], "done": known, "progress": caller.at}
    for number, found in enumerate(raw.in_rounds(loads, shapes, **how), len(known)):
        after = of_cpu()
        caller.row({"cell": f"{ROUND}{number}", "rows": [dumped(RoundTimes.of(found, before, after))]})
        before = after
