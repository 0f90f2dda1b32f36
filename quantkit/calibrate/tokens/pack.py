"""Documents to sequences of equal length: joined, chopped, drawn from all over the text; or filled, one after another.

One sequence from each of the first `samples` sections, in a drawn order:

    text    |----------|----------|----------|----------|      sections of 12 characters a token, cut at white space
    drawn        3rd        1st                   2nd
    ids      [first 512]                     [first 512]       of a section that gives fewer, the next in line is taken

So 16 sequences come from 16 places, only what is used is tokenized, and asking for 8 gives the first 8 of them. A text
too small for that is tokenized whole and chopped back to back, and the chops are drawn from.

What a tokenizer puts around a text is asked of the tokenizer itself: its settings and what it does differ at times.

Conversations become ids by the chat template of the model's own tokenizer, which writes itself what a prompt begins
with. A template is not trusted: transformers renders it in Jinja's `ImmutableSandboxedEnvironment`. Some write the date
(`strftime_now`); here it is always the same day. Plain text is cut into pieces of about one sequence, the first quarter
of which is what a user says: most of what a model of conversations reads is what it has written itself.
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
    """At most `samples` sequences of `tokens` ids, `[samples, tokens]`, of the joined documents; fewer when there are
    no more.

    Args:
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
    """Return at most `limit` rows of `length` ids, each beginning with a text; what a row has no place for is left out.

    Args:
        texts: token ids.
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
    """Return the ids that a tokenizer puts before a text, and after it; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    bare, whole = (list(tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def begins(ids: NDArray[Any], tokenizer: Any) -> str | None:
    """Return the special tokens that all sequences `[samples, tokens]` begin with, as text; None if there are none."""
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


Message = dict[str, Any]
Messages = Sequence[Message]

CODE = "calibration-template"
NONE = "--set calibration.template=null"
# the day that Llama's templates take where there is no clock
_DAY = datetime.datetime(2024, 7, 26, 12)
_ASKED = 0.25


def renderer(tokenizer: Any) -> Callable[[Messages, str], list[int]]:
    """Returns a function from messages to token ids; its second argument is their place, for errors.

    Raises:
        InputError: `calibration-template`: there is none, or, from what is returned, it does not take a conversation.
    """
    try:
        template = _stopped_clock() + tokenizer.get_chat_template()
    except (AttributeError, ValueError):  # none, or several and none of them the default
        where, rule = "calibration.template", "conversations are written by the model's own"
        remedy = f"put its chat_template.jinja beside the tokenizer, or {NONE}"
        raise InputError(CODE, where, "the model's tokenizer has no chat template", rule, remedy) from None

    def render(messages: Messages, where: str) -> list[int]:
        try:
            with limits.guarded(where):
                text = tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False)
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except InputError:
            raise
        except Exception as problem:  # whatever a template makes of what it was not written for
            said = " ".join(str(problem).split())[:200] or type(problem).__name__
            remedy = "mend that conversation, or leave it out"
            raise InputError(CODE, where, said, "the model's chat template takes every conversation", remedy) from None
        return ids

    return render


def exchange(text: str) -> Messages:
    """Return a piece of text as a conversation: a user begins it, the model goes on.

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


def _stopped_clock() -> str:
    """Return a macro that stands before a template, and in it for the `strftime_now` that transformers offers."""
    codes = [f"replace('%{code}', '{_DAY.strftime('%' + code)}')" for code in "aAbBdHIjmMpSyY"]
    unpadded = [f"replace('%-{code}', '{int(_DAY.strftime('%' + code))}')" for code in "dHIm"]
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ {' | '.join(['format', *unpadded, *codes])} }}}}{{%- endmacro -%}}"
    )
