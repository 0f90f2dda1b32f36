"""Conversion of documents to sequences of equal length: joined, cut, drawn from the whole text; or filled in order.

One sequence comes from each of the first `samples` sections, in a drawn order:

    text    |----------|----------|----------|----------|      sections of 12 characters per token, cut at white space
    drawn        3rd        1st                   2nd
    ids      [first 512]                     [first 512]       a section with fewer ids is skipped

So 16 sequences come from 16 places, only those are tokenized, and 8 samples are the first 8 of 16. A text too small for
that is tokenized whole and cut into sequences, from which samples are drawn.

The tokens that a tokenizer puts around a text are found by tokenizing: its settings and its behaviour may differ.

Conversations become ids by the chat template of the model's own tokenizer, including the beginning of a prompt. A
template is not trusted: transformers renders it in Jinja's `ImmutableSandboxedEnvironment`. Some write the date
(`strftime_now`); here it is a fixed day. Plain text is cut into pieces of about one sequence, with the first quarter as
the user's message: a chat model mostly reads its own output.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import limits
from quantkit.errors import InputError

Encode = Callable[[str], Sequence[int]]
# English has 4 to 5 characters a token; 12 leave room for a wordier vocabulary
CHARACTERS_A_TOKEN = 12


def sections(text: str, size: int) -> list[str]:
    """Cut a text into consecutive pieces of at least `size` characters, before white space; joined they are the text.

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
    """Return up to `samples` sequences of `tokens` ids, `[samples, tokens]`, of the joined documents.

    Args:
        generator: generator of the places; None to take the text from its beginning.
    """
    parts = sections(text, CHARACTERS_A_TOKEN * tokens)
    if generator is None:
        return _chop((encode(part) for part in parts), tokens, limit=samples)
    # one permutation in both cases, so that the number of draws does not depend on the tokenizer
    order = generator.permutation(len(parts))
    if len(parts) >= samples:
        rows: list[Any] = []
        for place in order:
            ids = encode(parts[place])
            if len(ids) >= tokens:
                rows.append(np.asarray(ids[:tokens], dtype=np.int64))
            if len(rows) == samples:
                return np.stack(rows)
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
    """Return the same with the tokenizer's own tokens around every document: all are tokenized, joined and cut.

    Args:
        before: ids that will be put before every sequence; a sequence that begins with a document omits them here.
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
    """Return up to `limit` rows of `length` ids, each beginning with a text; ids beyond a row are dropped.

    Args:
        texts: token ids.
        before: ids that only the first text of a row keeps.
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
    """Return a tokenizer's ids before a text, and after it; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def begins(ids: NDArray[Any], tokenizer: Any) -> str | None:
    """Return the special tokens at the beginning of all sequences `[samples, tokens]`, as text; None without any."""
    if tokenizer is None or not ids.size:
        return None
    special = {*frame(tokenizer)[0], *tokenizer.all_special_ids}
    count = 0
    while count < ids.shape[1] and int(ids[0, count]) in special and (ids[:, count] == ids[0, count]).all():
        count += 1
    return named(ids[0, :count].tolist(), tokenizer) or None


def named(ids: Sequence[int], tokenizer: Any) -> str:
    """Return special tokens as text: `<bos>`."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))


Message = dict[str, Any]
Messages = Sequence[Message]

CODE = "calibration-template"
NONE = "--set calibration.template=null"
# default day of Llama's templates without a clock
_DAY = datetime.datetime(2024, 7, 26, 12)
_ASKED = 0.25


def has_template(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has a chat template; several without a default count as none."""
    try:
        return bool(tokenizer.get_chat_template())
    except (AttributeError, ValueError):
        return False


def renderer(tokenizer: Any) -> Callable[[Messages, str], list[int]]:
    """Return a function from messages, and their place for errors, to token ids.

    Raises:
        InputError: `calibration-template` without a template, or, from the function, for a conversation that it
            rejects.
    """
    try:
        template = stopped_clock() + tokenizer.get_chat_template()
    except (AttributeError, ValueError):  # none, or several without a default
        where, rule = "calibration.template", "conversations need the model's own chat template"
        remedy = f"put its chat_template.jinja beside the tokenizer, or {NONE}"
        raise InputError(CODE, where, "the model's tokenizer has no chat template", rule, remedy) from None

    def render(messages: Messages, where: str) -> list[int]:
        try:
            with limits.guarded(where):
                text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except InputError:
            raise
        except Exception as problem:  # a template may raise anything
            reason = " ".join(str(problem).split())[:200] or type(problem).__name__
            remedy = "correct that conversation, or leave it out"
            rule = "the model's chat template must accept every conversation"
            raise InputError(CODE, where, reason, rule, remedy) from None
        return ids

    return render


def exchange(text: str) -> Messages:
    """Return a piece of text as a conversation: the user begins it, the model continues.

    >>> exchange("One two three four five")
    [{'role': 'user', 'content': 'One two'}, {'role': 'assistant', 'content': 'three four five'}]
    """
    text = text.strip()
    place = int(len(text) * _ASKED)
    while place < len(text) and not text[place].isspace():
        place += 1
    asked, answered = text[:place], text[place:].strip()
    messages = [{"role": "user", "content": asked}]
    return [*messages, {"role": "assistant", "content": answered}] if answered else messages


def stopped_clock() -> str:
    """Return a macro in place of transformers' `strftime_now` in a template."""
    codes = [f"replace('%{code}', '{_DAY.strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY"]
    unpadded = [f"replace('%-{code}', '{int(_DAY.strftime('%' + code))}')" for code in "dHIm"]
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ {' | '.join(['format', *unpadded, *codes])} }}}}{{%- endmacro -%}}"
    )
