"""What a device does, a function for each kind of work: a job in, cells out; nothing beyond the small install.

It is run by `runtimes.child.main`, in the workdir: a place in a job is a path below that. What goes back is raw;
rows are made of it where the job came from.
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
from quantkit.devices.scores import Outbox, generate, score
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

# tokens in the cache of a decoder, and of an encoder's pass: as `nightly.running.steps` has it
_TOKENS = 128
# bytes of a step in a line
_STEP = 48


def work(data: Mapping[str, Any], caller: child.Caller) -> None:
    """Do a kind of work, as far as it is not done.

    Args:
        data: `work`, its kind; `job`, what is asked; `cells`, see `Outbox`.
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


def verify(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Give `checks`: a `bundle`'s hashes and, if they hold, what each runtime that is there makes of its export.

    Args:
        job: `loads`, runtime -> what it opens; `graphs`, whether it is no transformer.
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
    """Give `ceilings`, by the `graphs` of a `size`, in so many `runs`."""
    pool, names = ceilings.Pool(graphs=Path(job["graphs"])), ("read", "copy", "compute")
    measured = ceilings.measured(machine.cores(), names, size=job["size"], runs=job["runs"], pool=pool)
    outbox.give("ceilings", CeilingSamples(ceilings=tuple(measured)))


def engine(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Give `engine`, what came of a build; the engine itself lies in `made`, by its hash.

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
    built = engines.build(engines.EngineJob.model_validate(told), progress=outbox.at)
    Path("made").mkdir(exist_ok=True)
    made.replace(Path("made") / built.sha256)
    outbox.give("engine", built)


@dataclass(frozen=True)
class _Timed:
    """Where two models are timed.

    Args:
        load: both; nothing is loaded before, but an engine.
        ceilings, clocks: of the processor or the GPU.
    """

    load: Callable[[], LoadedSides]
    ceilings: Callable[[], Sequence[ceilings.Ceiling]]
    clocks: Callable[[], Clocks]


def measure(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Give `sides`, `ceilings`, one for each shape, `ceilings-after`; `memory`, of what is no graph and on no GPU.

    Args:
        job: `ours` and `theirs`, of `speed.SpeedSide`; of an engine `built`, the hashes that it has to have, and
            `saved_bytes`; `shapes`, `seconds` of all of them, `cell_seconds`, `rounds` and `seed`; `graphs` of the
            ceilings; `samples` of a graph; `layers`, how those of a checkpoint on quantkit's kernels are stored.
    """
    sides = speed.SpeedSide(**job["ours"]), speed.SpeedSide(**job["theirs"])
    runner, paths = load_runtime(sides[0].runtime), [Path(side.path) for side in sides]
    if job["shapes"]:
        # torch's models are timed on a GPU alone
        on_gpu = runner.floats is None
        _shapes(job, _on_gpu(job, engine=runner.engines) if on_gpu else _on_processor(job, sides), outbox)
    # last: the first times are waited for
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
    """Name a shape's cell."""
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
    """An engine, or a checkpoint on quantkit's own kernels. Raises InputError `device-absent`; as `Runtime.open`."""
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
    """The torch device of quantkit's kernels: `cpu` where they are interpreted. Raises InputError `device-absent`."""
    import torch

    from quantkit.kernels.matmul import interpreted

    if torch.cuda.is_available():
        return "cuda"
    if interpreted():
        return "cpu"
    rule, remedy = "quantkit's kernels are for NVIDIA GPUs", "a driver as new as its torch, or --no-speed"
    raise InputError("device-absent", "torch", "no GPU that torch sees", rule, remedy)


def rounds(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Give one cell for each round, with all shapes: it is of one load of each side, and whole or not at all.

    Args:
        job: of `measurement.timing.rounds.RoundsJob`.
    """
    paths = [job[side] for side in raw.SIDES]
    speed.demand_room([*map(Path, paths)])
    samples = speed.samples_of(job["samples"])
    loads = {
        side: partial(speed.opened, path, samples, machine.cores(), runtime)
        for side, path, runtime in zip(raw.SIDES, paths, job["runtimes"], strict=True)
    }
    shapes = [Shape(**shape) for shape in job["shapes"]]
    # what was answered before this process began is not done again
    kept = [read(RoundTimes, rows[0], cell) for cell, rows in outbox.done.items() if cell.startswith(ROUND)]
    before, known = of_cpu(), [times.round({*raw.SIDES}, ROUND) for times in kept]
    how: dict[str, Any] = {"seconds": job["seconds"], "seed": job["seed"], "done": known, "progress": outbox.at}
    for number, timed in enumerate(raw.in_rounds(loads, shapes, **how), len(known)):
        after, parts = of_cpu(), tuple(Times.of(part) for part in timed.parts)
        outbox.give(f"{ROUND}{number}", RoundTimes(parts=parts, took=timed.seconds, before=before, after=after))
        before = after


def tax(job: Mapping[str, Any], outbox: Outbox) -> None:
    """Give `ceilings`, one for each product, `ceilings-after`. What a linear lacks is timed at one time.

    Args:
        job: `linears`, `K`, `N` and `place` of each; `small`, the place of the products that say which kernels run;
            `graphs` of the ceilings; `baseline`, `variants`, `batches`, `threads` of one product; `cache`, bytes beyond
            which the weights of a product have to go together; `seconds` of all, `rounds` and `seed`.
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
    """Give one cell for each round, and one for each side that does not load; see `timing.rounds.Task`."""
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
    """Blocks of a round, which is a line: of each step when it began and how long it took."""
    return int(0.9 * LINE / (_STEP * 2 * BURST * sides))


_DONE_BY: Mapping[str, Callable[[Any, Outbox], None]] = {
    "measure": measure,
    "rounds": rounds,
    "accuracy": score,
    "tax": tax,
    "generate": generate,
    "verify": verify,
    "doctor": doctor,
    "night": night,
    "engine": engine,
}
WORKS: Sequence[str] = tuple(_DONE_BY)
