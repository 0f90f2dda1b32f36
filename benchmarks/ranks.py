"""Time the quantize stage on one thread, on two, on two ranks with a thread each, and twice at the same time, in turns.

    python benchmarks/ranks.py [RECIPE ...]      two turns each; SmolLM2-135M, 16 sequences of 512 tokens

Of ranks, processor seconds and memory are those of the first; `all` counts the others too. `times` is how many times as
fast as one thread in the same turn, with the least and the most of the turns. Two compiles of the first recipe beside
each other, which share nothing, are the ceiling: what two processors do of one's work.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.record import layout, parsing, record, show

Row = dict[str, Any]
COLUMNS = layout(
    "recipe | compiles | threads | ranks | seconds=s:.1f | times:.2f | least:.2f | most:.2f | cpu_seconds=CPU s:.1f"
    " | cpu_seconds_all=all:.1f | peak_mb=peak, MB:d | kl:.4f | content"
)
SETTINGS = ("calibration.samples=16", "calibration.tokens=512", "export=[{checkpoint: {layout: pack-quantized}}]")
# compiles at the same time, threads and ranks
WAYS = ((1, 1, 1), (1, 2, 1), (1, 1, 2))
CEILING = (2, 1, 1)


def measured(recipe: str, threads: int, ranks: int, out: Path) -> Row:
    """Compile with so many threads a rank, and return the figures of the stage."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "quantkit", "compile", "smollm2-135m", "--recipe", recipe, "--json"]
    command += [part for setting in SETTINGS for part in ("--set", setting)]
    command += ["--set", "gptq.gradients=0"] if recipe == "int4-best" else []
    command += ["--no-speed", "--no-vllm", "--out", str(out)]
    given = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
    result = json.loads(answer.stdout)["result"]
    stage = next(stage for stage in result["stages"] if stage["name"] == "quantize")
    return {
        "seconds": stage["seconds"],
        "cpu_seconds": stage["cpu_seconds"],
        "cpu_seconds_all": result["seconds"]["quantize_cpu"],
        "peak_mb": round(stage["memory_peak_bytes"] / 1e6),
        "kl": next((row["value"] for row in result["measurements"] if row["name"].endswith("kl")), None),
        "content": result["content_sha256"][:12],
    }


def beside(recipe: str, compiles: int, threads: int, ranks: int, out: Path) -> Row:
    """Run so many compiles at the same time; seconds are those of the last to end, by the number of compiles."""
    with ThreadPoolExecutor(compiles) as pool:
        outs = [out.with_name(f"{out.name}-{number}") for number in range(compiles)]
        runs = list(pool.map(lambda place: measured(recipe, threads, ranks, place), outs))
    return {**runs[0], "seconds": max(run["seconds"] for run in runs) / compiles}


def compared(recipe: str, turns: int, folder: Path, *, ceiling: bool) -> list[Row]:
    """Run all ways in turns, and return a row each: medians, and how many times as fast as one thread."""
    runs: dict[tuple[int, int, int], list[Row]] = {way: [] for way in (*WAYS, *([CEILING] if ceiling else []))}
    for turn in range(turns):
        # forth, then back: a machine whose speed drifts favours none
        for way, found in list(runs.items())[:: -1 if turn % 2 else 1]:
            found.append(beside(recipe, *way, folder / f"{recipe}-{turn}-{'-'.join(map(str, way))}"))
    rows = []
    for (compiles, threads, ranks), found in runs.items():
        times = [one["seconds"] / run["seconds"] for one, run in zip(runs[WAYS[0]], found, strict=True)]
        figures = {
            key: statistics.median(run[key] for run in found) for key in ("seconds", "cpu_seconds", "cpu_seconds_all")
        }
        spread = {"times": statistics.median(times), "least": min(times), "most": max(times)}
        about = {"recipe": recipe, "compiles": compiles, "threads": threads, "ranks": ranks}
        rows.append({**about, **found[0], **figures, **spread, "peak_mb": max(run["peak_mb"] for run in found)})
    show(recipe, rows, COLUMNS)
    return rows


def main() -> None:
    """Measure, show and record."""
    parser = parsing(__doc__)
    parser.add_argument("recipes", nargs="*", default=["gptq-int4", "awq-int4", "int4-best"])
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [
            row
            for number, recipe in enumerate(given.recipes)
            for row in compared(recipe, given.turns, Path(name), ceiling=number == 0)
        ]
    claim = "how many times as fast as one thread two threads, and two ranks, quantize SmolLM2-135M"
    record("ranks", claim, rows, {"set": SETTINGS, "turns": given.turns})


if __name__ == "__main__":
    main()
