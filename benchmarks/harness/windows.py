"""Token ids of texts by a model's own tokenizer: windows spread evenly over each, BOS first where it adds one.

request: {"model": MODEL, "texts": [{"path": FILE, "samples": 8}, ...], "tokens": 512}     answer: {"folder", "ids"}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.model.source.open import open_model

# more than any tokenizer here needs for one token
CHARACTERS = 12


def windows(tokenizer: Any, text: str, samples: int, tokens: int) -> list[list[int]]:
    """[samples, tokens], each from the first line that begins at or after its share of the text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    first = whole[: whole.index(plain[0])]
    found = []
    for number in range(samples):
        begin = text.find("\n", number * len(text) // samples) + 1 if number else 0
        end = (number + 1) * len(text) // samples
        piece = text[begin : min(end, begin + CHARACTERS * tokens)]
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        if len(first) + len(ids) < tokens:
            raise SystemExit(f"window {number} of {samples} has fewer than {tokens} tokens: take fewer")
        found.append([*first, *ids][:tokens])
    return found


def main(request: dict[str, Any]) -> dict[str, Any]:
    source = open_model(request["model"])
    tokenizer = source.tokenizer()
    ids = [
        windows(tokenizer, Path(text["path"]).read_text(encoding="utf-8"), text["samples"], request["tokens"])
        for text in request["texts"]
    ]
    return {"folder": str(source.path), "ids": ids}
