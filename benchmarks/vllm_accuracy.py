"""What does quantization cost in vLLM, and what do vLLM's kernels and types change?

    python benchmarks/vllm_accuracy.py --work DIR [--models smollm2-135m,qwen2.5-coder-0.5b]
        [--recipes awq-int4,int8-dynamic]

Compiles what DIR lacks, then runs `quantkit measure BUNDLE --no-speed` in torch and in vLLM, of a copy of each bundle:
KL from the float model in torch and in vLLM, KL of the bundle in vLLM from itself in torch, and the noise floor, which
is the float model's. Claim: in vLLM a bundle loses what it loses in torch, within 3 noise floors of the two runs, and
what the bundle's own departure explains. Needs `quantkit runtime add vllm`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness.record import parsing, record, show, verdicts

from quantkit import machine
from quantkit.runtimes import apart

FLOORS = 3.0


def quantkit(*words: str) -> list[dict[str, Any]]:
    """Return the rows of a command."""
    command = machine.python("-m", "quantkit", *words, "--json")
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    if answer["result"] is None:
        raise SystemExit(str(answer["error"]))
    rows: list[dict[str, Any]] = answer["result"]["measurements"]
    return rows


def figures(bundle: Path, model: str) -> dict[str, Any]:
    """Measure a copy of a bundle in both runtimes."""
    with tempfile.TemporaryDirectory(prefix="vllm-accuracy-") as place:
        copy = shutil.copytree(bundle, Path(place) / bundle.name)
        words = ("measure", str(copy), "--baseline", model, "--no-speed", "--runtime")
        torch, vllm = (quantkit(*words, runtime) for runtime in ("torch", "vllm"))
    (plain,) = (row for row in torch if row["name"] == "accuracy.kl" and "kv_cache" not in row["settings"])
    (there,) = (row for row in vllm if row["name"] == "accuracy.kl")
    across = [row for row in vllm if row["name"] == "across.kl"]
    (own,) = (row for row in across if not row["settings"].get("floor"))
    (floor,) = (row for row in across if row["settings"].get("floor"))
    told = {"bundle": bundle.name, "positions": there["n"], "dtype": there["settings"]["dtype"]}
    told |= {"torch": plain["value"], "torch_ci95": plain["ci95"], "vllm": there["value"], "vllm_ci95": there["ci95"]}
    return told | {"across": own["value"], "floor": floor["value"], "kernels": there["settings"]["kernels"]}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--recipes", default="awq-int4,int8-dynamic")
    options = parser.parse_args()
    rows, models = [], options.models.split(",")
    for model in models:
        for recipe in options.recipes.split(","):
            bundle = options.work / f"{Path(model).name}--{recipe}"
            if not bundle.exists():
                quantkit("compile", model, "--recipe", recipe, "--out", str(bundle), "--no-speed")
            rows.append(figures(bundle, model))
            print(rows[-1], flush=True)
    columns = {"bundle": "bundle", "positions": "n", "torch": "in torch:.4f", "vllm": "in vLLM:.4f"}
    show("KL divergence, nats", rows, {**columns, "across": "from itself:.5f", "floor": "noise floor:.5f"})
    off = [row["bundle"] for row in rows if abs(row["vllm"] - row["torch"]) > FLOORS * row["floor"] + row["across"]]
    claim = "in vLLM a bundle loses what it loses in torch, within 3 noise floors and its own departure"
    name = "vllm-accuracy" + (f"-{Path(models[0]).name}" if len(models) == 1 else "")
    record(name, claim, rows, {"vllm": dict(apart.demand("vllm").versions), "floors": FLOORS})
    return verdicts({f"every bundle loses as much in both: {' '.join(off)}": not off})


if __name__ == "__main__":
    raise SystemExit(main())
