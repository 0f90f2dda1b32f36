"""Documents to sequences of equal length: joined, chopped, drawn from all over the text.

One sequence from each of the first `samples` sections, in a drawn order:

    text    |----------|----------|----------|----------|      sections of 12 characters a token, cut at white space
    drawn        3rd        1st                   2nd
    ids      [first 512]                     [first 512]       of a section that gives fewer, the next in line is taken

So 16 sequences come from 16 places, only what is used is tokenized, and asking for 8 gives the first 8 of them. A text
too small for that is tokenized whole and chopped back to back, and the chops are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[str], Sequence[int]]
# English has 4 to 5 characters a token; 12 leave room for a wordier vocabulary
_CHARACTERS_A_TOKEN = 12


def sections(text: str, size: int) -> list[str]:
    """Consecutive pieces of at least `size` characters, cut before white space; joined they are the text.

    >>> sections("one two three", 4)
    ['one two', ' three']
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + size
        while end < len(text) and not text[end].isspace():
            end += 1
            if end - start >= 2 * size:
                break  # no white space in this script
        pieces.append(text[start:end])
        start = end
    return pieces


def sample(
    text: str, encode: Encode, *, samples: int, tokens: int, generator: np.random.Generator | None
) -> NDArray[np.int64]:
    """At most `samples` sequences of `tokens` ids, `[samples, tokens]`; fewer when the text has no more.

    Args:
        text: the documents, joined.
        encode: text -> ids.
        samples: sequences wanted.
        tokens: ids in each.
        generator: draws the places; None takes the text from its beginning.
    """
    parts = sections(text, _CHARACTERS_A_TOKEN * tokens)
    if generator is None:
        return _chop((encode(part) for part in parts), tokens, limit=samples)
    # one permutation for both ways, so that the number of draws never depends on the tokenizer
    order = generator.permutation(len(parts))
    if len(parts) >= samples:
        found: list[Any] = []
        for place in order:
            ids = encode(parts[place])
            if len(ids) >= tokens:
                found.append(np.asarray(ids[:tokens], dtype=np.int64))
            if len(found) == samples:
                return np.stack(found)
    chops = _chop((encode(part) for part in parts), tokens, limit=None)
    return chops[generator.permutation(len(chops))[:samples]]


def sample_documents(
    documents: Sequence[str], encode: Encode, *, samples: int, tokens: int, generator: np.random.Generator | None
) -> NDArray[np.int64]:
    """The same where the tokenizer puts its own tokens around every document: all are tokenized, joined and chopped."""
    chops = _chop((encode(document) for document in documents), tokens, limit=None if generator else samples)
    return chops[:samples] if generator is None else chops[generator.permutation(len(chops))[:samples]]


def _chop(pieces: Iterator[Sequence[int]], tokens: int, *, limit: int | None) -> NDArray[np.int64]:
    ids: list[int] = []
    for piece in pieces:
        ids.extend(piece)
        if limit is not None and len(ids) >= limit * tokens:
            break
    count = len(ids) // tokens if limit is None else min(limit, len(ids) // tokens)
    return np.asarray(ids[: count * tokens], dtype=np.int64).reshape(count, tokens)
