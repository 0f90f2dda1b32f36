"""What a head and a tied embedding in 4 bits cost, by how their codes are found and stored.

    python benchmarks/head_codes.py
    python benchmarks/head_codes.py --blocks BUNDLE --calibration ids.jsonl --samples 8 --eval ids.json

The blocks of SmolLM2-135M are those of `int4-best`; head and embedding stay floats in that checkpoint, and take each
form in turn (`harness/head_side.py`): a head rounded to nearest, solved by GPTQ on what the blocks give, and solved
with the correction for the drift of its inputs, in groups of 32 and of 64; with its first rows in 8 bits; an embedding
in 8 bits, in the head's codes, and in these and 2 or 4 bits more.

Claims: solving takes at least three quarters off what rounding costs; the first 2,048 rows in 8 bits take at least a
third off what is left; the embedding of `int4-cpu` (the head's codes and 2 bits) costs less than 0.003 nats.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness.process import compiled, helper
from harness.record import parsing, record, sha256, show, verdicts

MODEL, RECIPE, CHECKPOINT = "smollm2-135m", "int4-best", "export=[{checkpoint: {layout: pack-quantized}}]"
GROUPS, ROWS = [32, 64], [2048, 8192]


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--blocks", type=Path, help=f"a bundle with a checkpoint; default: compile {RECIPE}")
    parser.add_argument("--calibration", type=Path, help="lines of {input_ids: [...]}; default: prose-en")
    parser.add_argument("--samples", type=int, default=16, help="calibration sequences")
    parser.add_argument("--eval", type=Path, help="a JSON list of id lists; default: prose-en, eval")
    options = parser.parse_args()
    asked = {"model": MODEL, "set": "prose-en", "tokens": 512}
    given, _ = helper("ids.py", {**asked, "samples": options.samples})
    calibration, scored = given["ids"], helper("ids.py", {**asked, "split": "eval", "samples": 12})[0]["ids"]
    if options.calibration:
        lines = options.calibration.read_text().splitlines()[: options.samples]
        calibration = [json.loads(line)["input_ids"] for line in lines]
    if options.eval:
        scored = json.loads(options.eval.read_text())
    with tempfile.TemporaryDirectory() as place:
        blocks = options.blocks or Path(place) / "blocks"
        if options.blocks is None:
            own = ["--calibration", options.calibration] if options.calibration else []
            samples = f"calibration.samples={options.samples}"
            compiled(MODEL, RECIPE, blocks, "--no-speed", *own, "--set", samples, "--set", CHECKPOINT)
        request = {"model": given["folder"], "blocks": str(blocks.resolve() / "model"), "calibration": calibration}
        rows = helper("head_side.py", {**request, "eval": scored, "groups": GROUPS, "rows": ROWS})[0]
    columns = {"head": "head", "embedding": "embedding", "kl": "KL:.4f", "kl_se": "±:.4f", "costs": "costs:.4f"}
    show(f"{MODEL}, blocks by {RECIPE}", rows, columns | {"costs_se": "±:.4f", "error": "relative error:.4f"})
    settings = {
        "samples": options.samples,
        "calibration": sha256(options.calibration) if options.calibration else "prose-en",
        "eval": sha256(options.eval) if options.eval else "prose-en, eval split, 12 x 512",
    }
    claim = "a head in 4 bits, solved, costs at most a quarter of one that is rounded"
    record("head-codes-ids" if options.eval else "head-codes", claim, rows, settings)
    costs = {(row["head"], row["embedding"]): row["costs"] for row in rows}
    solved = costs[f"group {GROUPS[0]}, solved, drift corrected", "floats"]
    first = costs[f"the best of group {GROUPS[0]}, {ROWS[0]} rows in 8 bits", "floats"]
    return verdicts(
        {
            "solving takes three quarters off": solved <= 0.25 * costs[f"group {GROUPS[0]}, rounded", "floats"],
            f"{ROWS[0]} rows in 8 bits take a third off": first <= 2 / 3 * solved,
            "the refined embedding costs less than 0.003": costs["floats", "the head's codes and 2 bits"] < 0.003,
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
