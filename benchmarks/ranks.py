"""Time the quantize stage on one thread, on two, on two ranks with a thread each, and twice at the same time, in turns.

    python benchmarks/ranks.py [RECIPE ...]         two turns each; SmolLM2-135M, 16 sequences of 512 tokens
    python benchmarks/ranks.py int4-best --threads  no ranks, so with the gradients of the recipe

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.record import layout, parsing, record, show

Row = dict[str, Any]
# compiles at the same time, threads and ranks
Way = tuple[int, int, int]
COLUMNS = layout(
    "recipe | compiles | threads | ranks | seconds=s:.1f | times:.2f | least:.2f | most:.2f | cpu_seconds=CPU s:.1f"
    " | cpu_seconds_all=all:.1f | peak_mb=peak, MB:d | kl:.4f | content"
)
SETTINGS = ("calibration.samples=16", "calibration.tokens=512", "export=[{checkpoint: {layout: pack-quantized}}]")
WAYS = ((1, 1, 1), (1, 2, 1), (1, 1, 2))
CEILING = (2, 1, 1)


def measured(recipe: str, settings: Sequence[str], threads: int, ranks: int, out: Path) -> Row:
    """Compile with so many threads a rank, and return the figures of the stage."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "quantkit", "compile", "smollm2-135m", "--recipe", recipe, "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
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


def beside(recipe: str, settings: Sequence[str], compiles: int, threads: int, ranks: int, out: Path) -> Row:
    """Run so many compiles at the same time; seconds are those of the last to end, by the number of compiles."""
    with ThreadPoolExecutor(compiles) as pool:
        outs = [out.with_name(f"{out.name}-{number}") for number in range(compiles)]
        runs = list(pool.map(lambda place: measured(recipe, settings, threads, ranks, place), outs))
    return {**runs[0], "seconds": max(run["seconds"] for run in runs) / compiles}


def compared(recipe: str, settings: Sequence[str], ways: Sequence[Way], turns: int, folder: Path) -> list[Row]:
    """Run all ways in turns, and return a row each: medians, and how many times as fast as one thread."""
    runs: dict[Way, list[Row]] = {way: [] for way in ways}
    for turn in range(turns):
        # forth, then back: a machine whose speed drifts favours none
        for way, found in list(runs.items())[:: -1 if turn % 2 else 1]:
            found.append(beside(recipe, settings, *way, folder / f"{recipe}-{turn}-{'-'.join(map(str, way))}"))
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
    parser.add_argument("--threads", action="store_true", help="leave ranks and the ceiling out")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for number, recipe in enumerate(options.recipes):
            alone = options.threads or recipe != "int4-best"  # ranks do not share gradients
            settings = SETTINGS if alone else (*SETTINGS, "gptq.gradients=0")
            ways = [*(WAYS[:2] if options.threads else WAYS), *([] if options.threads or number else [CEILING])]
            rows += compared(recipe, settings, ways, options.turns, Path(name))
    others = "two threads" if options.threads else "two threads, and two ranks,"
    claim = f"how many times as fast as one thread {others} quantize SmolLM2-135M"
    record("threads" if options.threads else "ranks", claim, rows, {"set": SETTINGS, "turns": options.turns})


if __name__ == "__main__":
    main()
