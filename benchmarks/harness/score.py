"""Score folders that plain transformers loads against their original: a process of its own.

    request: {"reference": MODEL, "candidates": {name: folder}, "texts": {name: {"ids"|"file"|"set": ...}},
              "samples": 12, "tokens": 512, "paired": name or null}
    answer:  [{"candidate", "text", "n", "sequences", "perplexity_reference", "perplexity", "kl", "kl_se", "top1", ...}]

Both sides are loaded by `from_pretrained` and run whole, in float32: none of quantkit's own streaming or unpacking is
in the way. `ids` is a JSON list of id lists, scored as it is; `file` a text, cut into sequences from its beginning;
`set` a shipped calibration set's eval split. Sequences of a text begin with what the tokenizer puts before one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

from quantkit.calibrate.tokens.ids import ids_sha256, load_tokens
from quantkit.calibrate.tokens.pack import frame
from quantkit.measurement.accuracy.positions import Accuracy, Items
from quantkit.model.source.open import open_model


def token_ids(text: dict[str, Any], tokenizer: Any, vocabulary: int, samples: int, tokens: int) -> torch.Tensor:
    """[at most samples, tokens], or the given ids."""
    if "ids" in text:
        return torch.tensor(json.loads(Path(text["ids"]).read_text()))
    if "set" in text:
        found = load_tokens(
            text["set"], "eval", tokenizer=tokenizer, samples=samples, tokens=tokens, seed=0, vocab_size=vocabulary
        )
        return found.ids
    before, _ = frame(tokenizer)
    ids = tokenizer(Path(text["file"]).read_text(), add_special_tokens=False)["input_ids"]
    inside = tokens - len(before)
    count = min(samples, len(ids) // inside)
    rows = torch.tensor(ids[: count * inside]).reshape(count, inside)
    return torch.cat([torch.tensor(before, dtype=rows.dtype).expand(count, -1), rows], dim=1)


def load(folder: str | Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


@torch.no_grad()
def score(original: Any, candidate: Any, ids: torch.Tensor, other: Items | None) -> tuple[dict[str, Any], Items]:
    """Figures of a candidate; `other` holds the positions of the one it is compared with."""
    accuracy = Accuracy()
    for row in ids:
        accuracy.add(row, original(row[None]).logits[0].float(), candidate(row[None]).logits[0].float())
    items = accuracy.items()
    kl, before = items.mean(items.kl), items.mean(items.nll_original)
    found = (
        {"n": items.n, "sequences": int(ids.shape[0]), "perplexity_reference": math.exp(before.value)}
        | {"perplexity": math.exp(items.mean(items.nll_candidate).value), "kl": kl.value}
        | {"kl_se": kl.standard_error, "top1": items.mean(items.agree).value}
        | {"next_word": items.mean(items.right_candidate).value}
        | {"next_word_reference": items.mean(items.right_original).value, "ids_sha256": ids_sha256(ids.numpy())}
    )
    if other is not None:
        less = items.mean(items.kl - other.kl)
        found |= {"kl_less": less.value, "kl_less_se": less.standard_error}
    return found, items


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = open_model(request["reference"])
    tokenizer, vocabulary = source.tokenizer(), int(source.config["vocab_size"])
    texts = {
        name: token_ids(text, tokenizer, vocabulary, request["samples"], request["tokens"])
        for name, text in request["texts"].items()
    }
    original = load(source.path)
    rows = []
    paired: dict[str, Items] = {}
    for name, folder in request["candidates"].items():
        candidate = load(folder)
        for text, ids in texts.items():
            figures, items = score(original, candidate, ids, paired.get(text))
            rows.append({"candidate": name, "text": text, **figures})
            if name == request["paired"]:
                paired[text] = items
        del candidate
    return rows
