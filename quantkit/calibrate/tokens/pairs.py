"""A set of pairs -> token ids to calibrate on, and the pairs themselves to score: for encoders.

    row   [CLS] one text [SEP] [CLS] another [SEP] [CLS] the begin

Passes take sequences of one length. Here it is that of the longest text, so that no position is seen which texts do not
reach; each row begins with a text, as the model's own inputs do, and goes on with others until it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit import content
from quantkit.calibrate.sets.card import Card, Split
from quantkit.calibrate.sets.pairs import SUFFIX, load_pairs
from quantkit.calibrate.tokens.ids import TokenSet, check_vocabulary, demand_tokenizer, ids_sha256
from quantkit.calibrate.tokens.pack import begins, filled
from quantkit.errors import InputError
from quantkit.lazy import torch

# tokens of a text that count, as sentence encoders are trained
LONGEST = 256


def is_pairs(reference: str) -> bool:
    """Whether a set holds pairs. Raises InputError (`unknown-calibration`, `file-missing`, `card-invalid`)."""
    path = content.find("calibration", reference)
    card = Card.at(path)
    return path.suffix.lower() == SUFFIX if card is None else card.kind == "pairs"


def load_pair_tokens(
    reference: str, split: Split, *, tokenizer: Any, samples: int, tokens: int, seed: int, vocab_size: int
) -> TokenSet:
    """Read pairs and pack their texts; the arguments are those of `sets.load_tokens`.

    About `samples` times `tokens` ids are packed, in more rows where texts are shorter than `tokens`. The set's `pairs`
    are all of the split.

    Raises:
        InputError: of `load_pairs`; `calibration-tokenizer`, `calibration-short`, `calibration-ids`.
    """
    demand_tokenizer(tokenizer, reference, "texts have", "a model folder with a tokenizer")
    pairs = load_pairs(reference, split, samples=None, seed=seed)
    order = np.random.default_rng(seed if split == "calib" else 0).permutation(len(pairs.left))
    texts = [side[place] for place in order for side in (pairs.left, pairs.right)]
    ids = token_ids(texts, tokenizer, min(tokens, LONGEST))
    length = max(map(len, ids))
    rows = filled(ids, length, -(-samples * tokens // length))
    if not len(rows):
        raise InputError(
            "calibration-short",
            where=reference,
            value=f"{len(pairs.left)} pairs to {split}",
            rule="a row of ids is filled with texts",
            remedy="more pairs",
        )
    check_vocabulary(rows, vocab_size, reference)
    sha256 = ids_sha256(rows) if split == "calib" else pairs.sha256
    opening = begins(rows, tokenizer)
    return TokenSet(torch.from_numpy(rows), pairs.name, split, sha256, pairs.notes, pairs, opening)


def token_ids(texts: Sequence[str], tokenizer: Any, longest: int = LONGEST) -> list[list[int]]:
    """The ids of each text with the tokenizer's own around them, at most `longest`."""
    limit = min(longest, int(getattr(tokenizer, "model_max_length", longest)))
    found: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
    return found
