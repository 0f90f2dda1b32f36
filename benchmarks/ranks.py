"""Time the quantize stage on one rank and on two, a thread each, in turns: seconds, processor seconds, peak memory.

    python benchmarks/ranks.py [RECIPE ...]      two turns each; SmolLM2-135M, 8 sequences of 512 tokens

The first rank's figures: its processor seconds are those of its share, of `all` those of all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.record import layout, parsing, record, show

COLUMNS = layout(
    "recipe | ranks | seconds=s:.1f | cpu_seconds=CPU s, first:.1f | cpu_seconds_all=all:.1f | peak_mb | kl:.4f"
)
SETTINGS = ("calibration.samples=8", "calibration.tokens=512", "export=[{checkpoint: {layout: pack-quantized}}]")


def measured(recipe: str, ranks: int, folder: Path) -> dict[str, object]:
    """Compile on so many ranks, and return the figures of the stage."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [*launch, "-m", "quantkit", "compile", "smollm2-135m", "--recipe", recipe, "--json"]
    command += [part for setting in SETTINGS for part in ("--set", setting)]
    command += ["--set", "gptq.gradients=0"] if recipe == "int4-best" else []
    command += ["--no-speed", "--no-vllm", "--out", str(folder / f"{recipe}-{ranks}-{len(list(folder.iterdir()))}")]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    result = json.loads(answer.stdout)["result"]
    stage = next(stage for stage in result["stages"] if stage["name"] == "quantize")
    kl = next((row["value"] for row in result["measurements"] if row["name"].endswith("kl")), None)
    return {
        "recipe": recipe,
        "ranks": ranks,
        "seconds": round(stage["seconds"], 1),
        "cpu_seconds": round(stage["cpu_seconds"], 1),
        "cpu_seconds_all": round(result["seconds"]["quantize_cpu"], 1),
        "peak_mb": round(stage["memory_peak_bytes"] / 1e6),
        "kl": kl,
        "content": result["content_sha256"][:12],
    }


def main() -> None:
    """Measure, show and record."""
    parser = parsing(__doc__)
    parser.add_argument("recipes", nargs="*", default=["gptq-int4", "awq-int4", "int4-best"])
    recipes, rows = parser.parse_args().recipes, list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as name:
        for recipe in recipes:
            rows += [measured(recipe, ranks, Path(name)) for _ in range(2) for ranks in (1, 2)]
            show(recipe, rows[-4:], COLUMNS)
    record("ranks", "two ranks with a thread each share the quantize stage of SmolLM2-135M", rows, {"set": SETTINGS})


if __name__ == "__main__":
    main()
