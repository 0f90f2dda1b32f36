"""How far a model whose inputs are rounded departs from itself when sequences are longer: plain transformers alone.

    python benchmarks/rounded_inputs.py
    python benchmarks/rounded_inputs.py --recipes int8 int8-dynamic fp8 gptq-int4 --samples 16

The same tokens, by themselves and at the beginning of longer sequences: a decoder gives the same logits for both, but
for the last bits of its sums. Where inputs are rounded as the model runs, a number between two codes goes either way by
them. What is compared is one checkpoint with itself, in float32; beside it stands what it loses from its original on
each. That is why a compile confirms such a score on the very tokens (`quantkit/pipeline/blocks/score.py`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness.process import compiled, helper
from harness.record import parsing, record, show

SHORT, LONG, SEQUENCES = 96, 512, 2
COLUMNS = {"recipe": "recipe", "apart": f"KL of {LONG} from {SHORT}:.2e"} | {
    "kl_short": f"KL from the original, {SHORT}:.4f",
    "kl_long": f"{LONG}:.4f",
}


def compared(folder: Path, model: str, ids: list[list[int]]) -> dict[str, float]:
    """Means over the first `SHORT` tokens of each sequence, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    from quantkit.model.source.open import open_model

    def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return network(tokens, use_cache=False).logits[:, :SHORT].double().log_softmax(-1)

    def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
        return float((p.exp() * (p - q)).sum(-1).mean())

    tokens = torch.tensor(ids)
    with torch.no_grad():
        original = logits(open_model(model, hashed=False).path, tokens[:, :SHORT])
        short, long = logits(folder, tokens[:, :SHORT]), logits(folder, tokens)
    return {
        "apart": divergence(short, long),
        "kl_short": divergence(original, short),
        "kl_long": divergence(original, long),
    }


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", nargs="+", default=["int8", "int8-dynamic", "gptq-int4"])
    parser.add_argument("--samples", type=int, default=4, help="calibration sequences")
    options = parser.parse_args()
    asked = {"model": options.model, "set": "prose-en", "split": "eval", "samples": SEQUENCES, "tokens": LONG}
    ids = helper("ids.py", asked)[0]["ids"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for recipe in options.recipes:
            out = Path(place) / recipe
            changed = ("--set", f"calibration.samples={options.samples}", "--no-speed")
            compiled(options.model, recipe, out, *changed)
            rows.append({"recipe": recipe, **compared(out / "model", options.model, ids)})
    show(f"{options.model}, {SEQUENCES} sequences, plain transformers", rows, COLUMNS)
    claim = "how far a checkpoint departs from itself when sequences are longer"
    settings = {"model": options.model, "samples": options.samples, "short": SHORT, "long": LONG}
    record("rounded_inputs", claim, rows, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
