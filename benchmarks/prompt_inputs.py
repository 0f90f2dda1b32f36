"""Where the KL of prompts goes that multiply in integers, and what could take it back.

    python benchmarks/prompt_inputs.py
    python benchmarks/prompt_inputs.py --blocks BUNDLE      a bundle of `int4-best` with its checkpoint

The blocks of SmolLM2-135M by `int4-best`, head and embedding in floats; inputs are rounded as MatMulNBits does it (by
block), or by token as `prefill: int8` does it, with weights in 8 bits a channel; then one kind of product is left as it
is for few rows, or channels are smoothed by what calibration saw (`harness/inputs_side.py`). Nothing of it is in the
exporter but rounding by token. Smoothing spares o_proj, whose inputs are values of the cache, which both ways share.

Claim: smoothing at 0.5 takes at least half off what rounding by token costs beyond rounding by block.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness.process import compiled, helper
from harness.record import parsing, record, show, verdicts

MODEL, RECIPE, CHECKPOINT = "smollm2-135m", "int4-best", "export=[{checkpoint: {layout: pack-quantized}}]"
ALL = ("qkv", "gate_up", "o", "down")
FOLDED = ("qkv", "gate_up", "down")


def ways() -> dict[str, dict[str, dict[str, object]]]:
    """Name -> how inputs are rounded and smoothed."""
    token = dict.fromkeys(ALL, "token")
    found: dict[str, dict[str, dict[str, object]]] = {"floats": {"round": {}, "smooth": {}}}
    found["by block"] = {"round": dict.fromkeys(ALL, "block"), "smooth": {}}
    found["by token"] = {"round": {**token}, "smooth": {}}
    for kind in ALL:
        found[f"by token, {kind} by block"] = {"round": {**token, kind: "block"}, "smooth": {}}
    for alpha in (0.3, 0.5, 0.7):
        found[f"by token, smoothed {alpha}"] = {"round": {**token}, "smooth": dict.fromkeys(FOLDED, alpha)}
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--blocks", type=Path, help=f"a bundle with a checkpoint; default: compile {RECIPE}")
    parser.add_argument("--sequences", type=int, default=12, help="to score, of 512 tokens")
    options = parser.parse_args()
    asked = {"model": MODEL, "set": "prose-en", "tokens": 512}
    given, _ = helper("ids.py", {**asked, "samples": 16})
    scored = helper("ids.py", {**asked, "split": "eval", "samples": options.sequences})[0]["ids"]
    with tempfile.TemporaryDirectory() as place:
        blocks = options.blocks or Path(place) / "blocks"
        if options.blocks is None:
            compiled(MODEL, RECIPE, blocks, "--no-speed", "--set", "calibration.samples=16", "--set", CHECKPOINT)
        request = {"model": given["folder"], "blocks": str(blocks.resolve() / "model"), "calibration": given["ids"][:8]}
        rows = helper("inputs_side.py", {**request, "eval": scored, "ways": ways()})[0]
    show(f"{MODEL}, blocks by {RECIPE}", rows, {"way": "inputs", "kl": "KL:.4f", "kl_se": "±:.4f"})
    claim = "smoothing takes at least half off what inputs by token cost beyond inputs by block"
    settings = {"calibration": "prose-en, 8 x 512", "eval": f"prose-en, eval split, {options.sequences} x 512"}
    record("prompt-inputs", claim, rows, settings)
    kl = {row["way"]: row["kl"] for row in rows}
    more = {name: kl[name] - kl["by block"] for name in ("by token", "by token, smoothed 0.5")}
    return verdicts({claim: more["by token, smoothed 0.5"] <= more["by token"] / 2})


if __name__ == "__main__":
    raise SystemExit(main())
