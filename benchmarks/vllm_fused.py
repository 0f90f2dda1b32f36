"""What vLLM makes of a checkpoint's weights once it has fused linears, on SmolLM2-135M: the same model, or another.

    python benchmarks/vllm_fused.py
    python benchmarks/vllm_fused.py --bundles NAME=FOLDER ...       bundles that are there already

Each bundle's weights are expanded twice into a dense model: linear by linear, as its own library does it, and fused as
vLLM does it (`tests/reference/plain_vllm_weights.py`, which names the commits that it follows). Inputs stay floats on
both sides. Plain transformers scores both on the shipped text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, helper, scored
from harness.record import record, show, verdicts

MODEL = "smollm2-135m"
# formats with one number for a whole matrix: recipe, what is changed in it
CASES = {"nvfp4": ("nvfp4", []), "fp8 by tensor": ("fp8", ["--set", "scheme.weights.granularity=tensor"])}
# of the perplexity, by which the two may differ: compared are sums in float32, and a library that expands to bfloat16
LIMIT = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", nargs="+", metavar="NAME=FOLDER", help="score these, compile nothing")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        if options.bundles:
            bundles = {name: Path(folder) for name, _, folder in (each.partition("=") for each in options.bundles)}
        else:
            bundles = {name: Path(place) / name.replace(" ", "-") for name in CASES}
            for name, (recipe, changes) in CASES.items():
                compiled(MODEL, recipe, bundles[name], "--no-speed", *changes)
        for name, bundle in bundles.items():
            home = Path(place) / "dense" / name.replace(" ", "-")
            found = helper("fused_side.py", {"model": MODEL, "bundle": str(bundle), "out": str(home)})[0]
            sides = {side: str(home / side) for side in ("stored", "fused")}
            scores = scored(MODEL, sides, {"eval": {"set": "prose-en"}})
            rows += [{"bundle": name, **found, **row} for row in scores]

    columns = {
        "bundle": "bundle",
        "candidate": "weights",
        "perplexity": "perplexity:.3f",
        "kl": "KL:.4f",
        "kl_se": "± se:.4f",
        "largest": "largest difference of a weight:.1e",
    }
    show(f"{MODEL}, {THREADS} threads; perplexity of the original {rows[0]['perplexity_reference']:.3f}", rows, columns)
    settings = {"model": MODEL, "threads": THREADS, "eval": "prose-en, eval split, 12 x 512"}
    label = "vllm_fused-bundles" if options.bundles else "vllm_fused"
    record(
        label,
        "weights fused as vLLM fuses them are those that were stored",
        rows,
        settings,
        write=not options.no_record,
    )
    checks = {}
    for stored, fused in zip(rows[::2], rows[1::2], strict=True):
        moved = abs(fused["perplexity"] / stored["perplexity"] - 1)
        checks[f"{stored['bundle']}: perplexity moves by {moved:.1e} <= {LIMIT:g}"] = moved <= LIMIT
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
