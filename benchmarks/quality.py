"""What each recipe costs in accuracy, and takes in processor time, on SmolLM2-135M.

    python benchmarks/quality.py                                                    the shipped text
    python benchmarks/quality.py --calibration ids.jsonl --samples 8 --eval ids.json      token ids of your own

Every recipe is compiled in a fresh process at 2 threads. What is scored is the finished checkpoint, loaded by plain
transformers; the perplexity of the original comes first. Processor seconds run from the first calibration token to the
packed weights on disk, without import and opening. The model was published in a 4-bit format (GGUF Q4_1: int4, group
32, asymmetric), so these figures compare recipes with each other; none of them rests on that scheme.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, scored
from harness.record import layout, parsing, record, sha256, show, verdicts

RECIPES = ["rtn-int4", "gptq-int4", "awq-int4", "int4-best", "int4-symmetric", "int3", "int8-weights"]
# mean KL in nats and processor seconds, at 8 x 512 calibration tokens
TARGETS = {"gptq-int4": (0.100, 45.0), "awq-int4": (0.110, 120.0)}


def figure(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row["value"] for row in rows if row["name"] == name), None)


def measured(model: str, recipe: str, out: Path, arguments: list[str]) -> dict[str, Any]:
    """One compile."""
    result, done = compiled(model, recipe, out, "--no-speed", *arguments)
    return (
        {"recipe": Path(recipe).stem, "exit": result["exit"], "content_sha256": result["content_sha256"]}
        | {"bits_per_weight": figure(result["measurements"], "size.bits_per_weight")}
        | {"bytes": figure(result["measurements"], "size.bytes"), "cpu_seconds": result["seconds"]["quantize_cpu"]}
        | {"wall_seconds": done.wall, "cpu_seconds_whole": done.cpu, "peak_bytes": done.peak}
        | {"kl_own": figure(result["measurements"], "accuracy.kl"), "decisions": len(result["decisions"])}
    )


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--calibration", help="a set's name or a path; default: the recipe's own")
    parser.add_argument("--samples", type=int, help="calibration sequences; default: the recipe's own")
    parser.add_argument("--eval", type=Path, help="a JSON list of token id lists to score; default: prose-en, eval")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=YAML", help="change every recipe")
    parser.add_argument("--label", help="what sets the record apart")
    options = parser.parse_args()

    arguments = [f"--set={change}" for change in options.set]
    if options.calibration:
        arguments += ["--calibration", options.calibration]
    if options.samples:
        arguments += ["--set", f"calibration.samples={options.samples}"]
    with tempfile.TemporaryDirectory() as place:
        rows = [
            measured(options.model, recipe, Path(place) / Path(recipe).stem, arguments) for recipe in options.recipes
        ]
        folders = {row["recipe"]: str(Path(place) / row["recipe"] / "model") for row in rows}
        text = {"ids": str(options.eval.resolve())} if options.eval else {"set": "prose-en"}
        scores = scored(options.model, folders, {"eval": text})
    rows = [{**row, **score} for row, score in zip(rows, scores, strict=True)]
    for row in rows:
        row["megabytes"], row["peak_megabytes"] = row["bytes"] / 1e6, row["peak_bytes"] / 1e6

    print(f"perplexity of the original: {rows[0]['perplexity_reference']:.3f} on {rows[0]['n']} positions")
    columns = layout(
        "recipe | perplexity:.2f | kl=KL:.4f | kl_se=± se:.4f | top1=top-1:.3f | bits_per_weight=bits/weight:.3f | "
        "cpu_seconds=CPU s:.1f | wall_seconds=whole, wall s:.0f | peak_megabytes=peak MB:.0f | megabytes=MB:.1f"
    )
    show(f"{options.model}, {THREADS} threads", rows, columns)
    given = options.eval is not None
    settings = (
        {"model": options.model, "threads": THREADS}
        | {"calibration": sha256(Path(options.calibration)) if given and options.calibration else options.calibration}
        | {"samples": options.samples}
        | {"eval": sha256(options.eval) if given else "prose-en, eval split, 12 x 512", "changes": options.set}
    )
    claim = "KL and processor seconds of each recipe; gptq-int4 at most 0.100 in 45 s, awq-int4 at most 0.110 in 120 s"
    name = options.label or ("ids" if given else "")
    record(f"quality-{name}" if name else "quality", claim, rows, settings)
    if not given:
        return 0
    checks = {}
    for row in rows:
        if row["recipe"] in TARGETS:
            kl, seconds = TARGETS[row["recipe"]]
            checks[f"{row['recipe']}: KL {row['kl']:.4f} <= {kl}"] = row["kl"] <= kl
            checks[f"{row['recipe']}: {row['cpu_seconds']:.1f} CPU s <= {seconds:g}"] = row["cpu_seconds"] <= seconds
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
