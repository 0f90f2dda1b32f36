"""Documents to sequences of equal length: joined, chopped, drawn from all over the text; or filled, one after another.

One sequence from each of the first `samples` sections, in a drawn order:

    text    |----------|----------|----------|----------|      sections of 12 characters a token, cut at white space
    drawn        3rd        1st                   2nd
    ids      [first 512]                     [first 512]       of a section that gives fewer, the next in line is taken

So 16 sequences come from 16 places, only what is used is tokenized, and asking for 8 gives the first 8 of them. A text
too small for that is tokenized whole and chopped back to back, and the chops are drawn from.

The tokens that a tokenizer puts around a text: what sequences of ids have, and whether they have it.

    tokenizer("Why?").input_ids                             [2, 11355, 236881]     <bos> before it
    tokenizer("Why?", add_special_tokens=False).input_ids      [11355, 236881]

Asked of the tokenizer itself: what its settings say and what it does are not always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[str], Sequence[int]]
# English has 4 to 5 characters a token; 12 leave room for a wordier vocabulary
CHARACTERS_A_TOKEN = 12


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
    parts = sections(text, CHARACTERS_A_TOKEN * tokens)
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
    documents: Sequence[str],
    encode: Encode,
    *,
    samples: int,
    tokens: int,
    generator: np.random.Generator | None,
    before: Sequence[int] = (),
) -> NDArray[np.int64]:
    """The same where the tokenizer puts its own tokens around every document: all are tokenized, joined and chopped.

    Args:
        before: what will be put before every sequence; one that begins with a document has it already, and is given
            without.
    """
    ids = [token for document in documents for token in encode(document)]
    chops, place = [], 0
    while place + tokens <= len(ids):
        if before and ids[place : place + len(before)] == list(before):
            place += len(before)
        if place + tokens <= len(ids):
            chops.append(ids[place : place + tokens])
        place += tokens
    order = range(len(chops)) if generator is None else generator.permutation(len(chops))
    return _rows([chops[place] for place in order[:samples]], tokens)


def filled(texts: Iterable[Sequence[int]], length: int, limit: int, before: Sequence[int] = ()) -> NDArray[np.int64]:
    """At most `limit` rows of `length` ids, each beginning with a text; what a row has no place for is left out.

    Args:
        texts: token ids.
        length, limit: of the rows.
        before: what a text that begins a row may begin with, and the others in it not.
    """
    rows: list[Sequence[int]] = []
    left: Iterator[Sequence[int]] = iter(texts)
    while len(rows) < limit:
        row: list[int] = []
        while len(row) < length and (text := next(left, None)) is not None:
            again = bool(row) and list(text[: len(before)]) == list(before)
            row.extend(text[len(before) :] if again else text)
        if len(row) < length:
            break
        rows.append(row[:length])
    return _rows(rows, length)


def _rows(rows: Sequence[Sequence[int]], length: int) -> NDArray[np.int64]:
    return np.asarray(rows, dtype=np.int64).reshape(len(rows), length)


def _chop(pieces: Iterator[Sequence[int]], tokens: int, *, limit: int | None) -> NDArray[np.int64]:
    ids: list[int] = []
    for piece in pieces:
        ids.extend(piece)
        if limit is not None and len(ids) >= limit * tokens:
            break
    count = len(ids) // tokens if limit is None else min(limit, len(ids) // tokens)
    return np.asarray(ids[: count * tokens], dtype=np.int64).reshape(count, tokens)


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
