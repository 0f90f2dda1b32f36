"""What the hardware's counters say of five kernels of a decode step: Nsight Compute over one launch of each."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.sections import BANDWIDTH, DURATION, ISSUE
from parts.shapes import ATTENTION, BASELINE, DTYPES, PROFILED, WHOLE_MODEL, settings

if TYPE_CHECKING:
    import torch

_BATCHES = (1, 16)
# launches of a kernel, in order: N, K, M of a product; batch and tokens of attention (`attending.CASES`)
_PRODUCTS = [(*shape, batch) for batch in _BATCHES for shape in WHOLE_MODEL]
_CACHES = [(batch, tokens) for batch in _BATCHES for tokens in (513, 4097)]
# what a memory-bound kernel waits for; with the sections that name a remedy
_METRICS = (
    *(DURATION, "dram__bytes_read.sum", BANDWIDTH, ISSUE, "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    *("smsp__inst_executed.sum", "sm__warps_active.avg.pct_of_peak_sustained_active"),
)
_SECTIONS = ("WarpStateStats", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
_PLACES = [str(Path(__file__).parents[place]) for place in (1, 3)]
_PROGRAM = f"import sys; sys.path[:0] = {_PLACES!r}; from parts.counters import launched; launched(*sys.argv[1:])"


def tool() -> str | None:
    """Where Nsight Compute is."""
    return shutil.which("ncu")


def profiled(ncu: str, dtype: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield one row a kernel, with what the counters say of its launches.

    Args:
        ncu: the tool.
        dtype: of x.
        deadline: `time.monotonic()` after which nothing new begins.

    Yields:
        `{"kernel", "of", "launches": [{metric: value in its base unit}], "reason"}`. A library may launch two kernels
        for a product.
    """
    # the clocks are not the tool's to set
    asked = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    asked += ["--profile-from-start", "off", *(word for name in _SECTIONS for word in ("--section", name))]
    for kernel in PROFILED:
        row: dict[str, Any] = {"kernel": kernel, "of": of(kernel), "launches": [], "reason": "the time was up"}
        if (left := deadline - time.monotonic()) > 0:
            command = [*asked, "--metrics", ",".join(_METRICS), sys.executable, "-c", _PROGRAM, kernel, dtype]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
            except subprocess.TimeoutExpired:
                pass
            else:
                row["launches"] = table(done.stdout)
                failed = f"exit {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
                row["reason"] = "" if row["launches"] else failed
        yield row


def of(kernel: str) -> list[str]:
    """Name a kernel's launches, in order."""
    if PROFILED[kernel][0] == ATTENTION:
        return [f"{tokens} tokens, batch {batch}" for batch, tokens in _CACHES]
    return [f"{rows}x{columns}, M = {batch}" for rows, columns, batch in _PRODUCTS]


def table(text: str) -> list[dict[str, str]]:
    """The rows of the tool's CSV, behind what it says itself (`==PROF== ...`); units are a row of their own."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]


def launched(kernel: str, dtype_name: str) -> None:
    """Launch one kernel for each of `of(kernel)` under the profiler, each a second time; on a CPU a tiny one."""
    import torch

    at, dtype = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[dtype_name]
    runtime: Any = torch.cuda.cudart() if at == "cuda" else None
    for step in _steps(kernel, at, dtype):
        step()
        if runtime:
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            step()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()


def _steps(kernel: str, at: str, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Make the launches of a kernel, one at a time: together they fill a small card."""
    import torch

    from parts.attending import CASES, DRY, drawn
    from quantkit.kernels.attention import split_kv
    from quantkit.kernels.matmul import weight_only
    from quantkit.measurement.cuda.sides import inputs, known, weight

    name, whole = PROFILED[kernel]
    if name == ATTENTION:
        for case in CASES[: len(_CACHES)] if at == "cuda" else DRY:
            yield partial(split_kv, *drawn(case, dtype, at), case.size**-0.5)
        return
    for rows, columns, batch in _PRODUCTS if at == "cuda" else ((32, 512, 1),):
        x = inputs(batch, columns, dtype, at)
        if name == BASELINE:
            yield partial(torch.nn.functional.linear, x, torch.randn(rows, columns, device=at).to(dtype))
        else:
            config = next(each for each in settings(known()[name], batch) if each.whole_k == whole)
            yield partial(weight_only, x, weight(known()[name], rows, columns, at), config)
