"""Build an engine from a network with Polygraphy, in a child process with a time limit.

TensorRT's timings of kernels are kept in the user's cache (`timings.py`). A JSON file beside an engine records the
library, GPU, driver and options of its build.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from quantkit import limits
from quantkit.content import Closed
from quantkit.errors import InputError
from quantkit.exporters.tensorrt.parser import demand_polygraphy, read
from quantkit.exporters.tensorrt.profiles import ProfileShapes, batches, fitted, inputs_of, shapes
from quantkit.exporters.tensorrt.timings import Tactics, TimedLayer, Timings, place
from quantkit.model.source.weights import write_atomic
from quantkit.runtimes import child
from quantkit.runtimes.child import Report
from quantkit.runtimes.tensorrt.file import NETWORK
from quantkit.runtimes.tensorrt.library import AHEAD_OF_TIME, Library, Name, Said, load, unsupported
from quantkit.target import Profile

# options that TensorRT-RTX does not have: its engines are for one release and for named GPUs
TENSORRT_ALONE = ("version_compatible", "hardware_compatible")
_MORE_TIME = "use a longer build_timeout, fewer profiles, or a lower optimization_level; timings so far are kept"


class TensorrtOptions(Closed):
    """Settings of `export: - tensorrt: {…}`; the target gives those that are missing.

    Args:
        type: type of the computation: `float16` or `bfloat16`.
        cache: kind of KV cache. `in_place` writes keys and values into one buffer, so a step can be replayed as a CUDA
            graph; `grown` returns a longer cache at each step.
        capacity: tokens of a cache in place; None for the number that the profiles need.
        engine: True builds an engine; False writes only the network.
        library: `tensorrt_rtx` or `tensorrt`.
        sm: compute capability of the GPU, such as "8.9".
        profiles: shapes of the engine's inputs.
        workspace: bytes that kernels may use beside weights and activations.
        optimization_level: effort of the search for fast kernels, 0 to 5.
        version_compatible: True lets later versions of the library load the engine; TensorRT only.
        hardware_compatible: True lets later GPUs run the engine; TensorRT only.
        build_timeout: time limit of a build in seconds; its timings are kept.
    """

    type: Literal["float16", "bfloat16"] = "float16"
    cache: Literal["in_place", "grown"] = "in_place"
    capacity: int | None = Field(default=None, gt=0)
    engine: bool = True
    library: Name = "tensorrt_rtx"
    sm: str | None = None
    profiles: tuple[Profile, ...] = ()
    workspace: float = Field(default=4.0e9, gt=0)
    optimization_level: int = Field(default=3, ge=0, le=5)
    version_compatible: bool = False
    hardware_compatible: bool = False
    build_timeout: float | None = Field(default=None, gt=0)


class EngineJob(Closed):
    """One build of an engine.

    Args:
        network, engine: files to read and write.
        library: library that builds.
        sm: compute capabilities of the engine.
        gpu: name of the GPU; "" for a build ahead of time.
        profiles: shapes of the inputs.
        workspace, optimization_level, version_compatible, hardware_compatible: see `TensorrtOptions`.
        timing_cache: file of kernel timings; None keeps none.
        keep_every: seconds between two writes of that file.
        seconds: time limit; None for no limit.
    """

    network: str
    engine: str
    library: Name
    sm: list[str]
    gpu: str
    profiles: list[ProfileShapes]
    workspace: float
    optimization_level: int
    version_compatible: bool = False
    hardware_compatible: bool = False
    timing_cache: str | None = None
    keep_every: float = 20.0
    seconds: float | None = None


class Built(Closed):
    """An engine that was built.

    Args:
        library, version: library of the build, and its version.
        sm, gpu: compute capabilities and GPU of the engine.
        bytes, sha256: size and hash of the engine file.
        seconds: wall time of the build.
        layers: number of layers before fusion.
        cache_hit: True if the timing cache had any of its timings; None without a cache.
        first_seconds: wall time of the first build with that cache; None if this is the first.
        saved_seconds: seconds that this build took less.
        cache_problem: reason that timings could not be kept; "" if they were.
        tactics: timed kernels of the slowest layers. Timings from the cache are not repeated, and TensorRT-RTX has
            none.
    """

    library: Name
    version: str
    sm: list[str]
    gpu: str
    bytes: int
    sha256: str
    seconds: float
    layers: int
    cache_hit: bool | None = None
    first_seconds: float | None = None
    saved_seconds: float | None = None
    cache_problem: str = ""
    tactics: tuple[TimedLayer, ...] = ()


def build_engine(folder: Path, options: TensorrtOptions, progress: Report | None = None) -> dict[str, str]:
    """Build the engine of `folder/network.onnx` beside it.

    Returns:
        hashes of `NAME.engine`, and of `NAME.json` that describes it.

    Raises InputError: the build's own (`build`).
    """
    from quantkit import machine

    gpus, _ = machine.gpus()
    plan = planned(folder, options, gpus)
    cache = place(load(options.library), plan.gpu, plan.flags)
    built = build(plan.job(folder / NETWORK, folder / plan.engine, cache), progress=progress)
    data = plan.described(built)
    write_atomic(folder / plan.record, [data])
    return {plan.engine: built.sha256, plan.record: hashlib.sha256(data).hexdigest()}


@dataclass(frozen=True)
class EnginePlan:
    """Plan of a network's engine, built here or elsewhere: GPU and driver are empty ahead of time."""

    library: Name
    sm: list[str]
    gpu: str
    driver: str
    profiles: list[ProfileShapes]
    flags: dict[str, Any]
    seconds: float | None

    @property
    def engine(self) -> str:
        """File name of the engine: `sm89.engine`."""
        return f"sm{''.join(self.sm).replace('.', '')}.engine"

    @property
    def record(self) -> str:
        """File name of its description: `sm89.json`."""
        return f"{Path(self.engine).stem}.json"

    def job(self, network: Path, engine: Path, timing_cache: Path | None) -> EngineJob:
        """Make the job for building it."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("library", "sm", "gpu", "profiles", "seconds")}
        cache = None if timing_cache is None else str(timing_cache)
        return EngineJob(network=str(network), engine=str(engine), timing_cache=cache, **own, **self.flags)

    def described(self, built: Built, **more: str) -> bytes:
        """Return the content of `smNN.json`; `more` describes the machine of the build."""
        record = {**built.model_dump(mode="json"), "driver": self.driver, "options": self.flags, **more}
        record["profiles"] = [profile.model_dump() for profile in self.profiles]
        return (json.dumps(record, indent=2) + "\n").encode()


def planned(folder: Path, options: TensorrtOptions, gpus: Sequence[Mapping[str, Any]]) -> EnginePlan:
    """Plan the engine of `folder/network.onnx`.

    Args:
        options: settings of the export.
        gpus: GPUs of the building machine, from `machine.gpus`.

    Raises InputError: `profile-impossible`.
    """
    from quantkit.exporters.onnx.exporter import context_of

    inputs = inputs_of(folder / NETWORK)
    if (folder / "config.json").is_file():
        config = json.loads(limits.read(folder / "config.json"))
        kind = "decoder" if any(name.startswith("past_key_values.") for name in inputs) else "encoder"
        profiles, _ = fitted(options.profiles, kind=kind, context=context_of(config))
    else:  # of a graph
        profiles = batches(options.profiles)
    ahead = options.library in AHEAD_OF_TIME
    gpu, driver = ("", "") if ahead or not gpus else (str(gpus[0]["name"]), str(gpus[0]["driver"]))
    sm = [options.sm] if ahead and options.sm else [str(gpus[0]["sm"])] if gpus else []
    names = ("workspace", "optimization_level", *(() if ahead else TENSORRT_ALONE))
    flags = {name: getattr(options, name) for name in names}
    return EnginePlan(options.library, sm, gpu, driver, shapes(inputs, profiles), flags, options.build_timeout)


def build(job: EngineJob, *, progress: Report | None = None) -> Built:
    """Build in a child process. It stops itself at the time limit, and keeps its timings.

    Raises InputError: `network-unsupported` with the nodes, `build-failed`, `timeout`, `sm-unsupported`;
    MissingDependency: the library, polygraphy.
    """
    demand_polygraphy()
    library = load(job.library)
    for capability in job.sm if library.ahead_of_time else []:
        if capability not in library.capabilities():
            raise unsupported(library, capability)
    (row,) = child.run(
        _build,
        job.model_dump(mode="json"),
        progress,
        remedy=_MORE_TIME,
        died="build-failed",
        where=f"{job.library} {library.version}",
        environment=library.environment(),
        # a child that no longer reacts
        seconds=None if job.seconds is None else 2 * job.seconds + 30,
    )
    return Built.model_validate(row)


def _build(data: Mapping[str, Any], caller: child.Caller) -> None:
    caller.row(_built(EngineJob.model_validate(data), caller.at).model_dump(mode="json"))


def _built(job: EngineJob, report: Report) -> Built:
    from polygraphy.backend.trt import EngineBytesFromNetwork, PostprocessConfig
    from polygraphy.exception import PolygraphyException

    library, tactics, started = load(job.library), Tactics(), time.perf_counter()
    where = f"{library.name} {library.version}"
    log = Said(library.api, tactics.hear)
    loaded = read(library, log, Path(job.network), Path(job.network).name)
    timings = Timings(job.timing_cache, job.keep_every)
    deadline = None if job.seconds is None else started + job.seconds
    monitor = _monitor(library.api, deadline, timings, report)
    config = PostprocessConfig(_config(job, library, timings, monitor), timings.attach)
    try:
        data = memoryview(EngineBytesFromNetwork(loaded, config=config)())
    except PolygraphyException as problem:
        if monitor.late:
            value = f"not done after {job.seconds:g} s"
            raise InputError("timeout", where=where, value=value, rule="the limit", remedy=_MORE_TIME) from None
        value = log.first or " ".join(str(problem).split())[:240]
        rule = "a network that passed the checks must build"
        remedy = "please report it, with the recipe; --set tensorrt.engine=false writes only the network"
        raise InputError("build-failed", where, value, rule, remedy) from None
    finally:
        timings.keep()
    write_atomic(Path(job.engine), [data])
    seconds = time.perf_counter() - started
    first = timings.first(Path(job.network), job.profiles, seconds)
    return Built(
        library=job.library,
        version=library.version,
        sm=job.sm,
        gpu=job.gpu,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        seconds=seconds,
        layers=int(loaded[1].num_layers),
        cache_hit=timings.hit,
        first_seconds=first,
        saved_seconds=None if first is None else first - seconds,
        cache_problem=timings.problem,
        tactics=tuple(tactics.timed()),
    )


def _config(job: EngineJob, library: Library, timings: Timings, monitor: Any) -> Any:
    """Return Polygraphy's loader of the builder's configuration."""
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import CreateConfig, Profile

    profiles = [Profile() for _ in job.profiles]
    for profile, shapes_of in zip(profiles, job.profiles, strict=True):
        for name, sizes in {**shapes_of.inputs, **shapes_of.values}.items():  # of one that is sizes, what they may be
            profile.add(name, *map(tuple, sizes))
    api = library.api
    shared: dict[str, Any] = {
        "profiles": profiles,
        "memory_pool_limits": {api.MemoryPoolType.WORKSPACE: int(job.workspace)},
        "builder_optimization_level": job.optimization_level,
        # names of layers and what was fused: what the inspector shows of an engine
        "profiling_verbosity": api.ProfilingVerbosity.DETAILED,
        "progress_monitor": monitor,
    }
    if library.ahead_of_time:
        capabilities = [tuple(map(int, sm.split("."))) for sm in job.sm]
        return CreateConfigRTX(compute_capabilities=capabilities, **shared)
    if job.hardware_compatible:
        shared["hardware_compatibility_level"] = api.HardwareCompatibilityLevel.AMPERE_PLUS
    # its loaders turn TF32 off by default; a strongly typed network has float32 only where it was asked for
    return CreateConfig(tf32=True, version_compatible=job.version_compatible, load_timing_cache=timings.file, **shared)


def _monitor(api: Any, deadline: float | None, timings: Timings, report: Report) -> Any:
    """Report the build's progress, keep its timings, and end it at the time limit."""

    class Monitor(api.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            api.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.late = False

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.steps[name] = max(steps, 1)

        def step_complete(self, name: str, step: int) -> bool:
            if name in self.steps:
                report(min(1.0, (step + 1) / self.steps[name]), name)
            timings.step()
            self.late = deadline is not None and time.perf_counter() > deadline
            return not self.late

        def phase_finish(self, name: str) -> None:
            self.steps.pop(name, None)

    return Monitor()
