"""What the hardware's counters say of five kernels of a decode step: Nsight Compute over one launch of each."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts.sections import BANDWIDTH, DURATION, ISSUE
from parts.shapes import BASELINE, DTYPES, PROFILED, WHOLE_MODEL, settings

_BATCHES = (1, 16)
# products of one kernel, in the order of their launches: N, K, M
PRODUCTS = [(*shape, batch) for batch in _BATCHES for shape in WHOLE_MODEL]
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
        `{"kernel", "products": PRODUCTS, "launches": [{metric: value in its base unit}], "reason"}`. A library may
        launch two kernels for a product.
    """
    # the clocks are not the tool's to set
    asked = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    asked += ["--profile-from-start", "off", *(word for name in _SECTIONS for word in ("--section", name))]
    for kernel in PROFILED:
        row: dict[str, Any] = {"kernel": kernel, "products": PRODUCTS, "launches": [], "reason": "the time was up"}
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


def table(text: str) -> list[dict[str, str]]:
    """The rows of the tool's CSV, behind what it says itself (`==PROF== ...`); units are a row of their own."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]


def launched(kernel: str, dtype_name: str) -> None:
    """Launch one kernel for each of `PRODUCTS` under the profiler, each a second time; on a CPU a tiny one."""
    import torch

    from quantkit.kernels.matmul import weight_only
    from quantkit.measurement.cuda.sides import inputs, known, weight

    (name, whole), dtype = PROFILED[kernel], DTYPES[dtype_name]
    at = "cuda" if torch.cuda.is_available() else "cpu"
    runtime: Any = torch.cuda.cudart() if at == "cuda" else None
    for rows, columns, batch in PRODUCTS if runtime else [(32, 512, 1)]:
        x = inputs(batch, columns, dtype, at)
        if name == BASELINE:
            w = torch.randn(rows, columns, device=at).to(dtype)

            def product(x: torch.Tensor = x, w: torch.Tensor = w) -> torch.Tensor:
                return torch.nn.functional.linear(x, w)
        else:
            packed = weight(known()[name], rows, columns, at)
            config = next(each for each in settings(known()[name], batch) if each.whole_k == whole)

            def product(x: torch.Tensor = x, packed: Any = packed, config: Any = config) -> torch.Tensor:
                return weight_only(x, packed, config)

        product()
        if runtime:
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            product()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
