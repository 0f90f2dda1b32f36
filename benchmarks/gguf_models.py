"""The models that are converted from GGUF compute what llama.cpp computes on the same file: token ids and logits.

    python benchmarks/decode_peers.py --prepare             once: makes .peers/decode, with llama.cpp in it
    python benchmarks/gguf_models.py
    python benchmarks/gguf_models.py --models gemma-3-270m --python PATH-TO-A-PYTHON-WITH-LLAMA-CPP

llama.cpp expands the file to 32-bit floats with its own code (its products with packed weights round activations to 8
bits) and keeps its cache in 32 bits; transformers loads the converted folder. Texts are prose beyond the sliding
window, code with digits and Unicode, and one sentence. Limits: equal ids, logits within 1e-3 of their norm (llama.cpp's
GELU is a table in 16 bits), KL at most 1e-5 nats.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness.decode_prepared import PYTHON
from harness.process import helper
from harness.record import layout, parsing, record, show, verdicts

from quantkit.model.source.alias import ALIASES, materialize

MODELS = ["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b"]
EVERY, NORM, KL = 16, 1e-3, 1e-5
CODE = "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n\tprint(i, 12345, 'é日本語 😀')  # done\n"


def texts() -> list[str]:
    """Two pieces of prose of about 1,000 tokens, which llama.cpp takes without a cut, a line of code, a sentence."""
    prose = sorted((Path(__file__).parent / "texts").glob("*.txt"))[0].read_text()
    return [prose[4000:7600], "The capital of France is", CODE, prose[20000:24000]]


def compared(model: str, python: Path, place: Path) -> list[dict[str, Any]]:
    """One row a text."""
    import numpy as np
    import torch
    import transformers

    alias, asked = ALIASES[model], texts()
    files = {"f32": str(place / f"{model}.gguf"), "logits": str(place / f"{model}.npz")}
    request = {"source": str(alias.source.find(model)), "texts": asked, "every": EVERY, **files}
    answer, _ = helper("llama_cpp_side.py", request, python=python)
    Path(files["f32"]).unlink()
    folder = materialize(alias)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = []
    with np.load(files["logits"]) as theirs, torch.no_grad():
        for number, (text, ids) in enumerate(zip(asked, answer["ids"], strict=True)):
            ours = network(torch.tensor([ids])).logits[0, ::EVERY]
            other = torch.from_numpy(theirs[f"arr_{number}"])
            p, q = ours.double().log_softmax(-1), other.double().log_softmax(-1)
            rows.append(
                {"model": model, "tokens": len(ids), "same_ids": tokenizer(text)["input_ids"] == ids}
                | {"norm": float((ours - other).norm() / other.norm())}
                | {"kl": float((p.exp() * (p - q)).sum(-1).max())}
                | {"top1": float((ours.argmax(-1) == other.argmax(-1)).double().mean())}
            )
    return rows


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of an environment with llama-cpp-python")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for model in options.models:
            rows += compared(model, options.python, Path(place))
    columns = layout(
        "model | tokens:d | same_ids=same ids | norm=logits, off by:.1e | kl=KL, most:.1e | top1=top-1:.3f"
    )
    show("transformers on the converted folder, llama.cpp on the file", rows, columns)
    claim = f"equal token ids, logits within {NORM:g} of their norm, KL at most {KL:g}"
    record("gguf_models", claim, rows, {"every": EVERY})
    held = {
        model: all(row["same_ids"] and row["norm"] <= NORM and row["kl"] <= KL for row in rows if row["model"] == model)
        for model in options.models
    }
    return verdicts({f"{model}: {claim}": ok for model, ok in held.items()})


if __name__ == "__main__":
    raise SystemExit(main())
