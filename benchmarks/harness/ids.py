"""Token ids of a calibration set, and the folder that a model opens to: a process of its own.

request: {"model": MODEL, "set": NAME, "split": "calib", "samples": 8, "tokens": 512, "special": "before"}
answer: {"folder", "ids"}
"""

from __future__ import annotations

from typing import Any

from quantkit.calibrate.tokens.ids import load_tokens
from quantkit.model.source.open import open_model


def main(request: dict[str, Any]) -> dict[str, Any]:
    source = open_model(request["model"])
    found = load_tokens(
        request["set"],
        request.get("split", "calib"),
        tokenizer=source.tokenizer(),
        samples=request["samples"],
        tokens=request["tokens"],
        seed=0,
        vocab_size=int(source.config["vocab_size"]),
        special=request.get("special", "before"),
    )
    return {"folder": str(source.path), "ids": found.ids.tolist()}
