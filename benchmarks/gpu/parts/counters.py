"""What the hardware's counters say of the decode kernels: Nsight Compute over one launch of each, if it is there."""

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

from parts.shapes import DTYPES, PROFILED, WHOLE_MODEL, settings

_BATCHES = (1, 16)
# what a memory-bound kernel waits for; with the sections that name a remedy
_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
_SECTIONS = ("WarpStateStats", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")


def tool() -> str | None:
    """Where Nsight Compute is."""
    return shutil.which("ncu")


def profiled(ncu: str, dtype: str, deadline: float) -> Iterator[dict[str, Any]]:
    """One row a variant and batch: metrics by name, of each of the four shapes of a whole model.

    Yields:
        `{"variant", "batch", "shapes", "launches": [{metric: value}], "reason"}`.
    """
    wanted = [argument for name in _SECTIONS for argument in ("--section", name)]
    wanted += ["--metrics", ",".join(_METRICS)]
    for batch in _BATCHES:
        for variant in PROFILED:
            row = {"variant": variant, "batch": batch, "shapes": [list(shape) for shape in WHOLE_MODEL]}
            left = deadline - time.monotonic()
            if left <= 0:
                yield row | {"launches": [], "reason": "the time was up"}
                continue
            # the clocks are not the tool's to set; the first launch of each shape warms up
            command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--profile-from-start", "off", *wanted]
            command += [sys.executable, "-P", __file__, variant, str(batch), dtype]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
            except subprocess.TimeoutExpired:
                yield row | {"launches": [], "reason": "the time was up"}
                continue
            launches = table(done.stdout)
            reason = "" if launches else f"exit {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
            yield row | {"launches": launches, "reason": reason}


def table(text: str) -> list[dict[str, str]]:
    """The rows of the tool's CSV, behind what it says itself (`==PROF== ...`); units are a row of their own."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]


def main() -> None:
    """What is profiled: one launch of each shape, after one that is not."""
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[1]), str(here.parents[3])]
    import torch

    from quantkit.kernels.matmul import weight_only
    from quantkit.measurement.cuda.sides import inputs, known, weight

    variant, batch, dtype = known()[sys.argv[1]], int(sys.argv[2]), DTYPES[sys.argv[3]]
    config = settings(variant, batch)[0]
    runtime: Any = torch.cuda.cudart()
    for shape in WHOLE_MODEL:
        packed, x = weight(variant, *shape, "cuda"), inputs(batch, shape[1], dtype, "cuda")
        weight_only(x, packed, config)
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        weight_only(x, packed, config)
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()


if __name__ == "__main__":
    main()
