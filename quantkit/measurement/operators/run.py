"""A sweep over shapes, variants, batches and thread counts: each thread count, and a GPU, in a process of its own.

Threads of a library are set before it is loaded, and what else the asking process holds is not part of the figures. In
each child ceilings are measured before and after, on a CPU with as many threads as the products have. A GPU whose
clocks fell in between says so: its ceilings carry the flag `throttled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    for row in _on_cpu(job, caller.at) if job.threads else _on_gpu(job, caller.at):
        caller.row(row.as_dict())


def _measured(job: SweepJob, bench: Bench, report: Report) -> list[TimedVariant]:
    return measure(
        bench,
        [LinearShape.model_validate(dict(each)) for each in job.linears],
        job.baseline,
        job.variants,
        SweepPlan(tuple(job.batches), job.seconds, job.rounds, job.seed),
        progress=report,
    )


def _on_cpu(job: SweepJob, report: Report) -> list[Row]:
    from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench

    limits = CpuLimits.of(job.threads)
    report(0.0, "ceilings")
    bench = OnnxRuntimeBench(job.threads, seed=job.seed)
    before = limits.measured()
    timed = _measured(job, bench, report)
    report(1.0, "ceilings")
    measured = joined(before, limits.measured())
    device, versions = machine.device(), machine.versions()
    return rows_of_cpu(timed, measured, job, device=device, versions=versions, cache=bench.cache)


@dataclass(frozen=True)
class CpuLimits:
    """The ceilings of a processor, in the threads that its products have."""

    threads: int
    pool: Pool

    @classmethod
    def of(cls, threads: int, graphs: Path | None = None) -> CpuLimits:
        """In this process, before its first session. `graphs`: see `ceilings.Pool`."""
        import onnxruntime

        if threads > 1:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
        return cls(threads, Pool(threads, shared=threads > 1, graphs=graphs))

    def measured(self) -> list[Ceiling]:
        """A second or two."""
        return _ceilings.measured(self.threads, ("read", "copy", "compute", "launch"), pool=self.pool)


def rows_of_cpu(
    timed: Sequence[TimedVariant],
    measured: Sequence[Ceiling],
    job: SweepJob,
    *,
    device: Mapping[str, str],
    versions: Mapping[str, str],
    cache: int,
) -> list[Row]:
    """The rows of products that ran on a processor, here or elsewhere, and of its ceilings.

    Args:
        measured: before and after, joined.
        cache: bytes of its last-level cache.
    """
    from quantkit.measurement.operators.onnxruntime import RUNTIME

    launch = next((each.value for each in measured if each.name == "ceiling.launch"), None)
    setting = Setting(RUNTIME, job.threads, device, versions, Limits.of(measured), launch, cache, job.baseline)
    found = []
    for each in measured:
        row = each.row(device=dict(device), versions=dict(versions))
        extra = {"last_level_cache": cache} if each.name == "ceiling.read" else {}
        found.append(row.model_copy(update={"settings": {**row.settings, "threads": job.threads, **extra}}))
    return found + rows(timed, setting, model=job.model)


def _on_gpu(job: SweepJob, report: Report) -> list[Row]:
    import torch

    from quantkit.kernels.workspace import interpreted
    from quantkit.measurement.cuda import ceilings as limits
    from quantkit.measurement.cuda.device import GpuDevice
    from quantkit.measurement.operators.cuda import RUNTIME, CudaBench

    # tests run it in the interpreter, tiny; whoever calls it without that needs the device
    device = GpuDevice("cpu", dry=True) if interpreted() else GpuDevice("cuda", dry=False)
    generator = np.random.default_rng(job.seed)
    report(0.0, "ceilings")
    before = limits.measured(device, _BLOCKS, generator)
    timed = _measured(job, CudaBench(device, torch.bfloat16, job.seed), report)
    report(1.0, "ceilings")
    again = limits.measured(device, _BLOCKS, generator)
    device.sample("end")
    slower = limits.slower(before, again)
    versions = {**machine.versions(), "driver": str(device.describe().get("driver", ""))}
    found = []
    for row in before:
        flags = [*row["flags"], *(["throttled"] if slower or device.throttled() else [])]
        extra = {"last_level_cache": device.cache_bytes} if row["name"] == "ceiling.read" else {}
        settings = {**row["settings"], **extra}
        found.append(Row.model_validate({**row, "flags": flags, "settings": settings, "versions": versions}))
    measured = {str(row.settings.get("compute_type")): row.value for row in found if row.name == "ceiling.compute"}
    read, launch = (limits.of(before, name) for name in ("ceiling.read", "ceiling.launch"))
    ends = [end / row.value - 1 for row in found if row.value and row.ci95 for end in row.ci95]
    rates = {kind: value for kind, value in measured.items() if value is not None}
    roofline = Limits(read, rates, max(map(abs, ends), default=0.0))
    own = device.identity()
    setting = Setting(RUNTIME, None, own, versions, roofline, launch, device.cache_bytes, job.baseline)
    return found + rows(timed, setting, model=job.model)
