"""What it is worth to calibrate and score on sequences that begin as prompts do, on a model whose tokenizer adds BOS.

    python benchmarks/bos.py --model ./gemma-3-270m
    python benchmarks/bos.py --model ./gemma-3-270m --recipes gptq-int4

Every recipe is compiled twice, on the same places of the shipped text: as it is, where every sequence begins with what
the tokenizer puts before a text, and on token ids without. Both are scored twice by plain transformers, on text that
begins so, as anyone runs the model, and on the same text without. Scales of activations and of the KV cache are fixed
in `int8+kv-fp8`; what the cache costs as the context grows is scored by quantkit (`kl_of_caches` in the record), on
text that begins as prompts do. The source at hand was published in 4 bits (GGUF): none of these schemes is its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, helper, scored
from harness.record import layout, parsing, record, show, verdicts

RECIPES = ["gptq-int4", "int8+kv-fp8"]
TOKENS, SAMPLES, EVALUATED = 512, 16, 12
WITH, WITHOUT = "as prompts begin", "without"


def sequences(model: str, split: str, samples: int, special: str) -> list[list[int]]:
    asked = {"model": model, "set": "prose-en", "split": split, "samples": samples, "tokens": TOKENS}
    found: list[list[int]] = helper("ids.py", {**asked, "special": special})[0]["ids"]
    return found


def own(result: dict[str, Any]) -> dict[str, Any]:
    """What the compile itself scored, on text that begins as prompts do: KL, and that of each cache by context."""
    rows = [row for row in result["measurements"] if row["name"] == "accuracy.kl"]
    plain = next(row for row in rows if "kv_cache" not in row["settings"])
    caches: dict[str, dict[str, float]] = {}
    for row in rows:
        if "kv_cache" in row["settings"]:
            caches.setdefault(row["settings"]["kv_cache"], {})[str(row["shape"]["context"])] = row["value"]
    return {"kl_own": plain["value"], "data": plain["data"], "kl_of_caches": caches}


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--label", help="what sets the record apart")
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        (home / "plain.jsonl").write_text(
            "".join(json.dumps({"input_ids": row}) + "\n" for row in sequences(options.model, "calib", SAMPLES, "none"))
        )
        texts = {}
        for name, special in ((WITH, "before"), (WITHOUT, "none")):
            path = home / f"{special}.json"
            path.write_text(json.dumps(sequences(options.model, "eval", EVALUATED, special)))
            texts[name] = {"ids": str(path)}
        for recipe in options.recipes:
            folders, facts = {}, {}
            for name, text in ((WITH, "prose-en"), (WITHOUT, str(home / "plain.jsonl"))):
                out = home / f"{recipe}-{len(folders)}"
                arguments = ["--calibration", text, "--set", f"calibration.samples={SAMPLES}", "--no-speed"]
                result, done = compiled(options.model, recipe, out, *arguments, "--target", "h100")
                facts[name] = {**own(result), "exit": done.status, "cpu_seconds": done.cpu}
                folders[name] = str(out / "model")
            for row in scored(options.model, folders, texts, samples=EVALUATED, paired=WITH):
                rows.append({"recipe": recipe, "calibrated": row.pop("candidate"), **row})
                rows[-1].update(facts[rows[-1]["calibrated"]] if rows[-1]["text"] == WITH else {})

    columns = layout(
        "recipe | calibrated | text=scored on text | perplexity_reference=perplexity, float:.2f | "
        "perplexity=quantized:.2f | kl=KL:.4f | kl_se=± se:.4f | kl_less=KL more than calibrated as prompts:.4f | "
        "kl_less_se=± se:.4f | top1=top-1:.3f"
    )
    show(f"{options.model}, {THREADS} threads", rows, columns)
    checks = {}
    for recipe in options.recipes:
        kl = {row["calibrated"]: row["kl"] for row in rows if row["recipe"] == recipe and row["text"] == WITH}
        claim = (
            f"{recipe}: KL {kl[WITH]:.4f} where sequences begin as prompts do <= {kl[WITHOUT]:.4f} where they do not"
        )
        checks[claim] = kl[WITH] <= kl[WITHOUT]
    settings = {
        "model": Path(options.model).name,
        "threads": THREADS,
        "calibration": f"prose-en, calib split, {SAMPLES} x {TOKENS}",
        "eval": f"prose-en, eval split, {EVALUATED} x {TOKENS}",
    }
    name = "-".join(["bos", options.label or Path(options.model).name])
    claim = "on text that begins as prompts do, calibrating on such text loses no more than on text without BOS"
    record(name, claim, rows, settings)
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
