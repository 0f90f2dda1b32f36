"""A sweep over shapes, variants, batches and thread counts: each thread count, and a GPU, in a process of its own.

Threads of a library are set before it is loaded, and what else the asking process holds is not part of the figures. In
each child ceilings are measured before and after, on a CPU with as many threads as the products have. A GPU whose
clocks fell in between says so: its ceilings carry the flag `throttled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import machine
from quantkit.errors import MissingDependency
from quantkit.measurement.operators import ceilings as _ceilings
from quantkit.measurement.operators.ceilings import Ceiling, Pool, joined
from quantkit.measurement.operators.products import Bench, SweepPlan, TimedVariant, measure
from quantkit.measurement.operators.rows import Setting, rows
from quantkit.measurement.operators.tax import Limits
from quantkit.measurement.rows import Row
from quantkit.model.sizes.shapes import LinearShape
from quantkit.runtimes import child
from quantkit.runtimes.child import Report

# of a GPU's ceilings
_BLOCKS = 4


@dataclass(frozen=True)
class SweepJob:
    """What is to be timed in one child.

    Args:
        linears: distinct shapes, as `Linear.model_dump()`.
        model: whose linears they are; "" for shapes alone, over which nothing is summed.
        baseline: the high-precision variant.
        variants: the others.
        batches: M, rows of the activation.
        threads: of one product; 0 is a GPU.
        seconds: for all of it but ceilings and preparing.
        seed: of weights, activations and the order of steps.
        rounds: over the batches of each shape.
    """

    linears: Sequence[Mapping[str, Any]]
    model: str
    baseline: str
    variants: Sequence[str]
    batches: Sequence[int]
    threads: int
    seconds: float
    seed: int = 0
    rounds: int = 8


def demand(threads: int) -> None:
    """Refuse to begin what needs a package that is not there. Raises MissingDependency."""
    for package in ("onnxruntime", "onnx", "scipy", "torch") if threads else ("triton", "scipy", "torch"):
        if not machine.has(package):
            extra = "gpu" if package == "triton" else "compile"
            raise MissingDependency(package, extra=extra, purpose="timing single products")


def environment(threads: int) -> dict[str, str]:
    """Of the process that times: libraries read the number of their threads when they are loaded. 0 is a GPU."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**{name: str(threads or 1) for name in names}, "GOMP_SPINCOUNT": "0"}


def run(job: SweepJob, progress: Report | None = None) -> list[Row]:
    """All rows of one thread count.

    Raises:
        InputError: what the child met, or `speed-failed`.
        MissingDependency: onnxruntime, onnx, scipy or torch; on a GPU triton.
    """
    demand(job.threads)
    found = child.run(
        _answer,
        asdict(job),
        progress,
        remedy="try fewer shapes, or smaller batches: --batch 1,2,4",
        environment=environment(job.threads),
    )
    return [Row.model_validate(row) for row in found]


def _answer(data: Mapping[str, Any], caller: child.Caller) -> None:
    """What the child does."""
    job = SweepJob(**data)
    for row in (_on_cpu if job.threads else _on_gpu)(job, caller.at):
        caller.row(row.as_dict())


def _measured(
    job: SweepJob, bench: Bench, ceilings: Callable[[], list[Ceiling]], report: Report
) -> tuple[list[TimedVariant], list[Ceiling], list[Ceiling]]:
    """Time the products; the ceilings before and after."""
    report(0.0, "ceilings")
    before = ceilings()
    linears = [LinearShape.model_validate(dict(linear)) for linear in job.linears]
    plan = SweepPlan(tuple(job.batches), job.seconds, job.rounds, job.seed)
    timed = measure(bench, linears, job.baseline, job.variants, plan, progress=report)
    report(1.0, "ceilings")
    return timed, before, ceilings()


def _on_cpu(job: SweepJob, report: Report) -> list[Row]:
    from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench

    limits, bench = CpuLimits.of(job.threads), OnnxRuntimeBench(job.threads, seed=job.seed)
    timed, before, after = _measured(job, bench, limits.measured, report)
    facts: dict[str, Any] = {"device": machine.device(), "versions": machine.versions(), "cache": bench.cache}
    return rows_of(timed, joined(before, after), job, **facts)


@dataclass(frozen=True)
class CpuLimits:
    """The ceilings of a processor, in the threads that its products have."""

    threads: int
    pool: Pool

    @classmethod
    def of(cls, threads: int, graphs: Path | None = None) -> CpuLimits:
        """Prepare this process, before its first session. `graphs`: see `ceilings.Pool`."""
        import onnxruntime

        if threads > 1:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
        return cls(threads, Pool(threads, shared=threads > 1, graphs=graphs))

    def measured(self) -> list[Ceiling]:
        """Measure all, a second or two."""
        return _ceilings.measured(self.threads, ("read", "copy", "compute", "launch"), pool=self.pool)


def _on_gpu(job: SweepJob, report: Report) -> list[Row]:
    import torch

    from quantkit.kernels.launch import interpreted
    from quantkit.measurement.cuda.ceilings import sampled, slower
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.operators.cuda import RUNTIME, CudaBench

    # tests run it in the interpreter, tiny; whoever calls it without that needs the device
    device = GpuDevice("cpu", dry=True) if interpreted() else GpuDevice("cuda", dry=False)
    generator, bench = np.random.default_rng(job.seed), CudaBench(device, torch.bfloat16, job.seed)
    timed, before, after = _measured(job, bench, lambda: sampled(device, _BLOCKS, generator), report)
    device.sample("end")
    own, driver = device.identity(), str(device.describe().get("driver", ""))
    fell = slower(*([ceiling.as_dict(device=own, versions={}) for ceiling in part] for part in (before, after)))
    return rows_of(
        timed,
        joined(before, after),
        job,
        runtime=RUNTIME,
        device=own,
        versions={**machine.versions(), "driver": driver},
        cache=device.cache_bytes,
        flags=["throttled"] if fell or device.throttled() else [],
    )


def rows_of(
    timed: Sequence[TimedVariant],
    ceilings: Sequence[Ceiling],
    job: SweepJob,
    *,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int,
    runtime: str = "onnxruntime",
    flags: Sequence[str] = (),
) -> list[Row]:
    """Give the rows of products, wherever they ran, and of the device's ceilings.

    Args:
        ceilings: before and after, joined.
        cache: bytes of its last-level cache.
        flags: of the ceilings.
    """
    launch = next((ceiling.value for ceiling in ceilings if ceiling.name == "ceiling.launch"), None)
    threads = {"threads": job.threads} if job.threads else {}
    result = []
    for ceiling in ceilings:
        row = ceiling.row(device=dict(device), versions=dict(versions))
        extra = {"last_level_cache": cache} if ceiling.name == "ceiling.read" else {}
        update = {"settings": {**row.settings, **threads, **extra}, "flags": [*row.flags, *flags]}
        result.append(row.model_copy(update=update))
    setting = Setting(runtime, job.threads or None, device, versions, Limits.of(ceilings), launch, cache, job.baseline)
    return result + rows(timed, setting, model=job.model)
