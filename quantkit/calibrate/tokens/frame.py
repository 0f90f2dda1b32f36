"""The tokens that a tokenizer puts around a text: what sequences of ids have, and whether they have it.

    tokenizer("Why?").input_ids                             [2, 11355, 236881]     <bos> before it
    tokenizer("Why?", add_special_tokens=False).input_ids      [11355, 236881]

Asked of the tokenizer itself: what its settings say and what it does are not always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before a text, and after it; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    bare, whole = (list(tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def begins(ids: NDArray[Any], tokenizer: Any) -> str | None:
    """The special tokens that all sequences `[samples, tokens]` begin with, as text; None if there are none."""
    if tokenizer is None or not ids.size:
        return None
    special = {*frame(tokenizer)[0], *tokenizer.all_special_ids}
    count = 0
    while count < ids.shape[1] and int(ids[0, count]) in special and (ids[:, count] == ids[0, count]).all():
        count += 1
    return named(ids[0, :count].tolist(), tokenizer) or None


def named(ids: Sequence[int], tokenizer: Any) -> str:
    """Special tokens as text: `<bos>`."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))
