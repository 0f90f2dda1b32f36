"""A sweep over shapes, variants, batches and thread counts: each thread count in a process of its own.

Threads of a library are set before it is loaded, and what else the asking process holds is not part of the figures. In
each child ceilings are measured before and after, with as many threads as the products have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.errors import MissingDependency
from quantkit.measure import ceilings as _ceilings
from quantkit.measure import child
from quantkit.measure.ceilings import Ceiling, Pool
from quantkit.measure.latency import joined
from quantkit.measure.ops import Plan, measure
from quantkit.measure.ops_rows import Setting, rows
from quantkit.measure.rows import Row
from quantkit.measure.tax import Limits
from quantkit.plan import machine
from quantkit.plan.shapes import Linear

Report = Callable[[float, str], None]
_UNKNOWN_CACHE = 64 * 2**20


@dataclass(frozen=True)
class Job:
    """What is to be timed in one child.

    Args:
        linears: distinct shapes, as `Linear.model_dump()`.
        model: whose linears they are; "" for shapes alone, over which nothing is summed.
        baseline: the high-precision variant.
        variants: the others.
        batches: M, rows of the activation.
        threads: of one product.
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
    rounds: int = 4


def demand() -> None:
    """Refuse to begin what needs a package that is not there. Raises MissingDependency."""
    for package in ("onnxruntime", "onnx", "scipy", "torch"):
        if not machine.has(package):
            raise MissingDependency(package, extra="compile", purpose="timing single products")


def run(job: Job, progress: Report | None = None) -> list[Row]:
    """All rows of one thread count.

    Raises:
        InputError: what the child met, or `speed-failed`.
        MissingDependency: onnxruntime, onnx, scipy or torch.
    """
    demand()
    threads = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    found = child.lines(
        __name__,
        [],
        json.dumps(asdict(job)),
        progress,
        remedy="try fewer shapes, or smaller batches: --batch 1,2,4",
        environment=threads | {"GOMP_SPINCOUNT": "0"},
    )
    return [Row.model_validate(json.loads(line)) for line in found]


def ceilings(threads: int, *, size: int = 1024, runs: int = 7) -> list[Ceiling]:
    """Read and copy bandwidth, matrix rates in float32 and int8, launch latency, each with so many threads.

    For this process alone, whose threads were set before it began; see `run`.
    """
    cache = machine.last_level_cache() or _UNKNOWN_CACHE
    span = min(max(4 * cache, 256 * 2**20), machine.memory_limit() // 8)
    pool = Pool(threads, shared=threads > 1)
    return [
        _ceilings.read(threads, span, runs),
        _ceilings.copy(threads, span, runs),
        _ceilings.compute_fp32(size, runs, pool),
        _ceilings.compute_int8(size, runs, pool),
        _ceilings.launch(threads, runs, pool),
    ]


def _time(job: Job) -> None:
    import onnxruntime

    from quantkit.measure.ops_onnxruntime import RUNTIME, OnnxRuntimeBench

    if job.threads > 1:
        onnxruntime.set_global_thread_pool_sizes(job.threads, 1)

    def progress(share: float, words: str) -> None:
        print(f"at {share} {words}", flush=True)

    progress(0.0, "ceilings")
    bench = OnnxRuntimeBench(job.threads, seed=job.seed)
    before = ceilings(job.threads)
    timed = measure(
        bench,
        [Linear.model_validate(dict(each)) for each in job.linears],
        job.baseline,
        job.variants,
        Plan(tuple(job.batches), job.seconds, job.rounds, job.seed),
        progress=progress,
    )
    progress(1.0, "ceilings")
    measured = joined(before, ceilings(job.threads))
    device, versions = machine.device(), machine.versions()
    launch = next((each.value for each in measured if each.name == "ceiling.launch"), None)
    setting = Setting(RUNTIME, job.threads, device, versions, Limits.of(measured), launch, bench.cache, job.baseline)
    for each in measured:
        row = each.row(device=device, versions=versions)
        extra = {"last_level_cache": bench.cache} if each.name == "ceiling.read" else {}
        row = row.model_copy(update={"settings": {**row.settings, "threads": job.threads, **extra}})
        print(f"row {row.line()}", flush=True)
    for row in rows(timed, setting, model=job.model):
        print(f"row {row.line()}", flush=True)


def main(arguments: list[str]) -> None:
    """The child: a job on stdin."""
    child.answering(lambda: _time(Job(**json.load(sys.stdin))))
