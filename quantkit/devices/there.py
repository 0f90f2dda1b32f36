"""The device's side of every work: a job in, cells out, with only the small install.

`runtimes.child.main` runs it in the workdir; paths in a job are below that. The answers are raw; the machine that asked
makes rows of them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.devices.answers import (
    LINE,
    LINEAR,
    ROUND,
    CeilingSamples,
    CheckResult,
    DeviceFacts,
    Footprints,
    ProductTimes,
    RoundTimes,
    SideCosts,
    Times,
    read,
)
from quantkit.devices.scores import Outbox, generate, load, score
from quantkit.devices.sent import probe
from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.operators import ceilings
from quantkit.measurement.operators.onnxruntime import SMALL, OnnxRuntimeBench, StoredProducts
from quantkit.measurement.operators.products import SweepPlan, TimedVariant, take
from quantkit.measurement.operators.run import CpuLimits
from quantkit.measurement.timing import latency, speed
from quantkit.measurement.timing import rounds as raw
from quantkit.measurement.timing.clocks import Clocks, of_cpu, of_gpu
from quantkit.measurement.timing.latency import LoadedSides
from quantkit.measurement.timing.rounds import Task
from quantkit.measurement.timing.rounds import measure as anew
from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Shape, Step, TimingPlan
from quantkit.model.device import is_out_of_memory
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes import child, load_runtime
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.stats.slowdown import BURST

# tokens in a decoder's cache and in an encoder's pass, as in `nightly.running.steps`
_TOKENS = 128
# bytes of one step in a line
_STEP = 48


def work(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Run one kind of work, except for its known cells.

    Args:
        data: `work`, its kind; `job`, the request; `cells`, see `Outbox`.
    """
    outbox = Outbox(caller, data["cells"])
    outbox.give("about", about())
    try:
        _DONE_BY[data["work"]](data["job"], outbox)
    except QuantkitError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        value = f"{type(problem).__name__}: {problem}"[:500]
        raise InputError("device-failed", str(data["work"]), value) from problem


def about() -> DeviceFacts:
    """Return this machine's facts."""
    # as in the probe, since nvidia-ml-py may be missing
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


def verify(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `checks`: a `bundle`'s hashes and, if they hold, the result of loading each export in an installed runtime.

    Args:
        job: `loads`, runtime -> path to open; `graphs`, True for a graph.
    """
    checks = Bundle.load(job["bundle"]).verify()
    results = [CheckResult(name=check.name, ok=check.ok, where=(check.where or "")[:2000]) for check in checks]
    for runtime, place in job["loads"].items() if all(check.ok for check in checks) else ():
        if load_runtime(runtime).why_not_here() is not None:
            continue
        outbox.at(0.5, f"loading it in {runtime}")
        problem = ""
        speed.demand_room([Path(place)])
        try:
            speed.stepped(Path(place), runtime, graph=job["graphs"])
        except QuantkitError as refused:
            problem = refused.line()[:2000]
        results.append(CheckResult(name=f"{runtime}.loads", ok=not problem, where=problem))
    outbox.give("checks", *results)


def doctor(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `ceilings`, measured with `graphs` of a `size` in `runs` repetitions."""
    pool, names = ceilings.Pool(graphs=Path(job["graphs"])), ("read", "copy", "compute")
    measured = ceilings.measured(machine.cores(), names, size=job["size"], runs=job["runs"], pool=pool)
    outbox.give("ceilings", CeilingSamples(ceilings=tuple(measured)))


def engine(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `engine`, the result of a build; the engine itself lies in `made`, named by its hash.

    Args:
        job: fields of `exporters.tensorrt.engine.EngineJob`; `network` is a folder with one.
    """
    from quantkit.exporters.tensorrt import engine as engines
    from quantkit.exporters.tensorrt.timings import place
    from quantkit.runtimes.tensorrt.file import NETWORK
    from quantkit.runtimes.tensorrt.library import load

    # in this process's scratch folder until it is complete
    file, flags = Path(os.environ["TMPDIR"]) / "engine", job["flags"]
    cache = place(load(job["library"]), job["gpu"], flags)
    told = {name: value for name, value in job.items() if name != "flags"}
    # kept on the device from build to build
    told |= {"timing_cache": None if cache is None else str(Path("timing") / cache.name)}
    told |= {**flags, "network": str(Path(job["network"]) / NETWORK), "engine": str(file)}
    built = engines.build(engines.EngineJob.model_validate(told), progress=outbox.at)
    Path("made").mkdir(exist_ok=True)
    file.replace(Path("made") / built.sha256)
    outbox.give("engine", built)


@dataclass(frozen=True)
class _Timed:
    """Settings for timing two models.

    Args:
        load: loads both; only an engine is loaded earlier.
        ceilings, clocks: functions for the processor or the GPU.
    """

    load: Callable[[], LoadedSides]
    ceilings: Callable[[], Sequence[ceilings.Ceiling]]
    clocks: Callable[[], Clocks]


def measure(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `sides`, `ceilings`, a cell for each shape, `ceilings-after`; and `memory`, except for graphs and GPUs.

    Args:
        job: `ours` and `theirs`, fields of `speed.SpeedSide`; for an engine `built`, its required hashes, and
            `saved_bytes`; `shapes`, `seconds` of all of them, `cell_seconds`, `rounds` and `seed`; `graphs` of the
            ceilings; `samples` of a graph; `layers`, storage of those of a checkpoint on quantkit's kernels.
    """
    sides = speed.SpeedSide(**job["ours"]), speed.SpeedSide(**job["theirs"])
    runner, paths = load_runtime(sides[0].runtime), [Path(side.path) for side in sides]
    if job["shapes"]:
        # models in torch are only timed on a GPU
        on_gpu = runner.floats is None
        _shapes(job, _on_gpu(job, engine=runner.engines) if on_gpu else _on_processor(job, sides), outbox)
    # last, since the client waits for the first times
    if job["samples"] is None and runner.floats is not None and "memory" not in outbox.done:
        speed.demand_room(paths)
        ours, theirs = (speed.footprint(side, machine.cores()) for side in sides)
        outbox.give("memory", Footprints.model_validate({"ours": ours, "theirs": theirs}))


def _shapes(job: Mapping[str, Any], timed: _Timed, outbox: Outbox) -> None:
    shapes = [Shape(**shape) for shape in job["shapes"]]
    left = [shape for shape in shapes if cell_of(shape) not in outbox.done]
    if left:
        loaded = timed.load()
        if loaded.note:
            outbox.note(loaded.note)
        outbox.give("sides", _costs(loaded, shapes))
    outbox.at(0.0, "ceilings")
    if "ceilings" not in outbox.done:
        outbox.give("ceilings", CeilingSamples(ceilings=tuple(timed.ceilings())))
    end = time.monotonic() + job["seconds"] * len(left) / len(shapes)
    for number, shape in enumerate(left):
        share = max(end - time.monotonic(), 1e-3) / (len(left) - number)
        before, at = timed.clocks(), 1 - (len(left) - number) / len(shapes)
        both = {BASELINE: loaded.baseline, SUBJECT: loaded.subject}
        (timing,) = latency.take([shape], both, replace(_plan(job), seconds=share), partial(_at, outbox, at))
        outbox.give(cell_of(shape), Times.of(timing, before, timed.clocks()))
    outbox.at(1.0, "ceilings")
    if "ceilings-after" not in outbox.done:
        outbox.give("ceilings-after", CeilingSamples(ceilings=tuple(timed.ceilings())))


def _plan(job: Mapping[str, Any]) -> TimingPlan:
    return TimingPlan(cell_seconds=job["cell_seconds"], rounds=job["rounds"], seed=job["seed"])


def _at(outbox: Outbox, at: float, _: float, words: str) -> None:
    outbox.at(at, words)


def cell_of(shape: Shape) -> str:
    """Return the name of a shape's cell."""
    return f"{shape.kind}-{shape.batch}-{shape.size}"


def _costs(loaded: LoadedSides, shapes: Sequence[Shape]) -> SideCosts:
    linears, batches = loaded.linears, {shape.batch for shape in shapes if shape.kind == "decode"}
    return SideCosts(
        ours=loaded.subject.cost,
        theirs=loaded.baseline.cost,
        settings=dict(loaded.settings),
        resident_bytes=loaded.subject.resident_bytes,
        linears=None if linears is None else {batch: linears(batch) for batch in sorted(batches)},
    )


def _on_processor(job: Mapping[str, Any], sides: tuple[speed.SpeedSide, speed.SpeedSide]) -> _Timed:
    samples = None if job["samples"] is None else speed.Samples(**job["samples"])
    threads, pool = machine.cores(), ceilings.Pool(graphs=Path(job["graphs"]))

    def load() -> LoadedSides:
        speed.demand_room([Path(side.path) for side in sides])
        (ours, theirs), settings = speed.sides(speed.SpeedJob(*sides, threads, _plan(job), samples))
        return LoadedSides(ours, theirs, settings)

    return _Timed(load, lambda: ceilings.measured(threads, pool=pool), of_cpu)


def _on_gpu(job: Mapping[str, Any], *, engine: bool) -> _Timed:
    """Prepare an engine, or a checkpoint on quantkit's own kernels. Raises InputError `device-absent`; as
    `Runtime.open`."""
    from quantkit.bundle import LayerEntry
    from quantkit.measurement.cuda.device import GpuDevice, sampled
    from quantkit.measurement.timing import cuda

    ours, theirs = job["ours"], job["theirs"]
    if engine:
        runner: Any = load_runtime(ours["runtime"])
        model = runner.open(Path(ours["path"]), built=job["built"])
        at = model.engine.device.type
    else:
        at = _kernels_on()
    device = GpuDevice(at, dry=at == "cpu")

    def load() -> LoadedSides:
        how: dict[str, Any] = {"form": ours["format"], "subjects": (ours["subject"], theirs["subject"])}
        how |= {"device": device}
        source = TORCH.stream(Path(theirs["path"])).source
        if engine:
            return cuda.engine_sides(model, source, saved=job["saved_bytes"], **how)
        layers = [LayerEntry.model_validate(layer) for layer in job["layers"]]
        return cuda.kernel_sides(Path(ours["path"]), layers, source, **how)

    def limits() -> Sequence[ceilings.Ceiling]:
        return sampled(device, cuda.CEILING_BLOCKS, np.random.default_rng(job["seed"]))

    return _Timed(load, limits, of_gpu)


def _kernels_on() -> str:
    """Return the torch device of quantkit's kernels: `cpu` if interpreted. Raises InputError `device-absent`."""
    import torch

    from quantkit.kernels.matmul import interpreted

    if torch.cuda.is_available():
        return "cuda"
    if interpreted():
        return "cpu"
    rule, remedy = "quantkit's kernels need an NVIDIA GPU", "install a driver as new as its torch, or use --no-speed"
    raise InputError("device-absent", "torch", "no GPU that torch sees", rule, remedy)


def rounds(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send one cell for each round, with all shapes: one load of each side, complete or absent.

    Args:
        job: fields of `measurement.timing.rounds.RoundsJob`.
    """
    paths = [job[side] for side in raw.SIDES]
    speed.demand_room([*map(Path, paths)])
    samples = speed.samples_of(job["samples"])
    loads = {
        side: partial(speed.opened, path, samples, machine.cores(), runtime)
        for side, path, runtime in zip(raw.SIDES, paths, job["runtimes"], strict=True)
    }
    shapes = [Shape(**shape) for shape in job["shapes"]]
    # rounds that an earlier process sent are not repeated
    kept = [read(RoundTimes, rows[0], cell) for cell, rows in outbox.done.items() if cell.startswith(ROUND)]
    before, known = of_cpu(), [times.round({*raw.SIDES}, ROUND) for times in kept]
    how: dict[str, Any] = {"seconds": job["seconds"], "seed": job["seed"], "done": known, "progress": outbox.at}
    for number, timed in enumerate(raw.in_rounds(loads, shapes, **how), len(known)):
        after, parts = of_cpu(), tuple(Times.of(part) for part in timed.parts)
        outbox.give(f"{ROUND}{number}", RoundTimes(parts=parts, took=timed.seconds, before=before, after=after))
        before = after


def tax(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send `ceilings`, a cell for each product, `ceilings-after`. The missing products of a linear are timed together.

    Args:
        job: `linears`, `K`, `N` and `place` of each; `small`, path of the products that show which kernels run;
            `graphs` of the ceilings; `baseline`, `variants`, `batches`, `threads` of one product; `cache`, bytes that
            the weights of a product have to exceed together; `seconds` of all, `rounds` and `seed`.
    """
    limits, linears = CpuLimits.of(job["threads"], Path(job["graphs"])), job["linears"]
    names, places = (job["baseline"], *job["variants"]), {(SMALL.K, SMALL.N): job["small"]}
    places |= {(linear["K"], linear["N"]): linear["place"] for linear in linears}

    def source(linear: LinearShape) -> StoredProducts:
        return StoredProducts(Path(places[linear.K, linear.N]))

    def measure_limits(cell: str) -> None:
        outbox.at(float(cell != "ceilings"), "ceilings")
        if cell not in outbox.done:
            outbox.give(cell, CeilingSamples(ceilings=tuple(limits.measured())))

    bench = OnnxRuntimeBench(job["threads"], job["cache"], source=source)
    measure_limits("ceilings")
    for number, linear in enumerate(linears):
        cells = {M: {f"{LINEAR}{number}-{M}-{name}" for name in names} for M in job["batches"]}
        left = tuple(M for M, of in cells.items() if not of <= outbox.done.keys())
        if not left:
            continue
        before = of_cpu()
        timed = take(
            bench,
            LinearShape(name=f"{linear['K']}x{linear['N']}", K=linear["K"], N=linear["N"]),
            job["baseline"],
            job["variants"],
            SweepPlan(left, job["seconds"], job["rounds"], job["seed"]),
            seconds=job["seconds"] / (len(linears) * len(job["batches"])),
            progress=partial(_share, outbox, number, len(linears)),
        )
        after = of_cpu()
        for one in timed:
            outbox.give(f"{LINEAR}{number}-{one.M}-{one.variant}", _product(number, one, before, after))
    measure_limits("ceilings-after")


def _share(outbox: Outbox, number: int, count: int, share: float, words: str) -> None:
    outbox.at((number + share) / count, words)


def _product(number: int, one: TimedVariant, before: Clocks, after: Clocks) -> ProductTimes:
    ran: dict[str, Any] = {}
    if one.side is not None:
        ran = {"prepared": True, "products": one.side.products, "resident_bytes": one.side.resident_bytes}
        ran |= {"settings": dict(one.side.settings)}
    ran |= {"hot": one.hot, "quantizing": one.quantizing, "times": Times.of(one.timing, before, after)}
    return ProductTimes(linear=number, M=one.M, variant=one.variant, **ran)


def night(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Send one cell for each round, and one for each side that fails to load; see `timing.rounds.Task`."""
    samples = speed.samples_of(job["samples"])

    def load(side: str) -> Step:
        model = speed.opened(job["sides"][side], samples, machine.cores(), job["runtime"])
        context = getattr(model, "context", None)
        if samples or context is None:
            return model.prefill(job["batch"], 1)
        if getattr(model, "decoder", True):
            return model.decode(job["batch"], min(_TOKENS, context - 1))
        return model.prefill(job["batch"], min(_TOKENS, context))

    # rounds that an earlier process sent are not repeated; the remaining ones have other seeds
    number, rounds = sum(cell.startswith(ROUND) for cell in outbox.done), job["rounds"]
    left, blocks, seconds = rounds - number, job["blocks"], job["seconds"]
    if not left:
        return
    task = Task(
        **{name: job[name] for name in ("sides", "runtime", "batch")},
        rounds=left,
        blocks=None if blocks is None else max(blocks * left // rounds, left),
        seconds=None if seconds is None else seconds * left / rounds,
        seed=job["seed"] + number,
        most=most(len(job["sides"])),
    )
    for row in anew(task, load, of_cpu):
        if "turns" in row:
            outbox.give(f"{ROUND}{number}", {**row, "round": number})
            number += 1
            outbox.at(number / rounds, f"round {number} of {rounds}")
        else:
            outbox.give(f"side-{row['unloadable']}-{number}", row)


def most(sides: int) -> int:
    """Return the blocks of a round that fit in a line: start and duration of each step."""
    return int(0.9 * LINE / (_STEP * 2 * BURST * sides))


_DONE_BY: Mapping[str, Callable[[Any, Outbox], None]] = {
    "measure": measure,
    "rounds": rounds,
    "accuracy": score,
    "tax": tax,
    "generate": generate,
    "load": load,
    "verify": verify,
    "doctor": doctor,
    "night": night,
    "engine": engine,
}
WORKS: Sequence[str] = tuple(_DONE_BY)
