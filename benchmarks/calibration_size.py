"""How much calibration text is enough: the KL of each recipe with 4 to 128 sequences of the shipped text.

    python benchmarks/calibration_size.py
    python benchmarks/calibration_size.py --recipes gptq-int4 --samples 4 8 16
    python benchmarks/calibration_size.py --calibration ids.jsonl --eval ids.json       token ids of your own

More text is the strongest means there is against overfitting, and it costs processor time in proportion. Scored on
held-out text of the kind that calibrates (`own`), and on a text of another kind, Alice's Adventures in Wonderland
(`fiction`), which tells what is learned of the model from what is learned of the speeches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness.process import THREADS, compiled, scored
from harness.record import layout, parsing, record, sha256, show

RECIPES = ["gptq-int4", "int4-best"]
SAMPLES = [4, 8, 16, 32, 64, 128]
FICTION = Path(__file__).resolve().parent / "texts" / "alice.txt"


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES)
    parser.add_argument("--calibration", help="a set's name or a path; default: the recipe's own")
    parser.add_argument("--eval", type=Path, help="a JSON list of token id lists to score; default: prose-en, eval")
    options = parser.parse_args()

    change = ["--calibration", options.calibration] if options.calibration else []
    own = {"ids": str(options.eval.resolve())} if options.eval else {"set": "prose-en"}
    texts = {"own": own, "fiction": {"file": str(FICTION)}}
    rows = []
    for recipe in options.recipes:
        for samples in options.samples:
            with tempfile.TemporaryDirectory() as name:
                out = Path(name) / recipe
                size = ["--set", f"calibration.samples={samples}"]
                result, done = compiled(options.model, recipe, out, "--no-speed", *change, *size)
                scores = scored(options.model, {recipe: str(out / "model")}, texts)
            row = {"recipe": recipe, "samples": samples, "cpu_seconds": result["seconds"]["quantize_cpu"]} | {
                "peak_megabytes": done.peak / 1e6,
                "content_sha256": result["content_sha256"],
            }
            for score in scores:
                row |= {f"{score['text']} {key}": score[key] for key in ("kl", "kl_se", "perplexity", "n")}
            rows.append(row)
    columns = layout(
        "recipe | samples=sequences:d | own kl=KL:.4f | own kl_se=± se:.4f | fiction kl=KL on fiction:.4f | "
        "fiction kl_se=± se:.4f | cpu_seconds=CPU s:.0f | peak_megabytes=peak MB:.0f"
    )
    show(f"{options.model}, {THREADS} threads, 512 tokens a sequence", rows, columns)
    settings = {
        "model": options.model,
        "threads": THREADS,
        "calibration": Path(options.calibration).name if options.calibration else "prose-en, calib split",
        "eval": sha256(options.eval) if options.eval else "prose-en, eval split, 12 x 512",
        "fiction": sha256(FICTION),
    }
    claim = "the KL falls with the number of calibration sequences; where it stops paying"
    record("calibration-size-ids" if options.eval else "calibration-size", claim, rows, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
