"""A calibration set's name or path -> the token ids that passes see and measures score.

Which part of it is which split, `sources.py` says. Token ids are used as given, in order. A set of kind `random` is no
data at all: ids drawn from the vocabulary, each as likely as the next, to calibrate on and for nothing else.

**Every sequence begins as a prompt does**: with the tokens that the tokenizer puts before a text (`<bos>`), or with
what the model's chat template writes, where `template` is `chat`. To a model that was trained with it the first token
is like no other: much of attention rests on it, and its activations are often the largest there are. What the tokenizer
puts after a text closes an encoder's sequences alone: a decoder's are beginnings of texts that go on, as prompts are.

    load_tokens("prose-en", "calib", tokenizer=..., samples=16, tokens=512, seed=0, vocab_size=49152).ids   # [16, 512]

A set of pairs gives an encoder rows of one length to calibrate on, that of the longest text, and pairs to score:

    row   [CLS] one text [SEP] [CLS] another [SEP] [CLS] the begin
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit import content
from quantkit.calibrate.sets.card import Card, Split
from quantkit.calibrate.sets.pairs import SUFFIX, PairSet, load_pairs
from quantkit.calibrate.tokens import pack, sources
from quantkit.calibrate.tokens.pack import Encode, begins, filled, frame, named
from quantkit.calibrate.tokens.sources import Conversations, Ids, SplitData, Texts
from quantkit.errors import InputError
from quantkit.lazy import torch

# which of the tokens that a tokenizer puts before and after a text a sequence has
Special = Literal["none", "before", "around"]
Template = Literal["chat"]
# tokens of a text that count, as sentence encoders are trained
LONGEST = 256


@dataclass(frozen=True, eq=False)
class TokenSet:
    """What the passes and the measures see.

    Args:
        ids: `[samples, tokens]`, int64.
        sha256: over shape and little-endian int64 bytes of the ids.
        notes: what was decided on the way, one sentence each; for the manifest.
        pairs: of the texts that the ids are of, where embeddings are scored; `sha256` is then theirs.
        begins: the special tokens that every sequence begins with, as text: `<bos>`; None where there are none.
        generated: how many of the samples, the last ones, the model wrote itself.
        longest: ids that a text of the pairs has at most, for the model's positions.
        whole: `sha256` of the set that these samples are the first of; empty where they are all of it.
    """

    ids: torch.Tensor
    name: str
    split: Split
    sha256: str
    notes: tuple[str, ...] = ()
    pairs: PairSet | None = None
    begins: str | None = None
    generated: int = 0
    longest: int = LONGEST
    whole: str = ""

    def first(self, samples: int) -> TokenSet:
        """Keep the first samples."""
        if samples >= len(self.ids):
            return self
        ids = self.ids[:samples]
        return replace(self, ids=ids, sha256=ids_sha256(ids.numpy()), whole=self.whole or self.sha256)

    @property
    def items(self) -> int:
        """Positions with a next token to predict, samples · (tokens − 1); of pairs, how many."""
        if self.pairs is not None:
            return len(self.pairs.left)
        samples, tokens = self.ids.shape
        return int(samples * (tokens - 1))

    @property
    def unit(self) -> str:
        """What `items` counts."""
        return "position" if self.pairs is None else "pair"


def ids_sha256(ids: NDArray[Any]) -> str:
    """Return the hash of ids `[samples, tokens]`: the same on every machine, whatever the integer type they came in."""
    head = f"int64 {'x'.join(str(size) for size in ids.shape)}\n".encode()
    return hashlib.sha256(head + np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()


def load_tokens(
    reference: str,
    split: Split,
    *,
    tokenizer: Any,
    samples: int,
    tokens: int,
    seed: int,
    vocab_size: int,
    special: Special = "before",
    template: Template | None = None,
) -> TokenSet:
    """Read, sample and check a calibration set.

    Args:
        reference: a shipped name, or the path of a folder with `card.yaml`, a `.txt`, `.jsonl`, `.json`, `.csv` or
            `.parquet` file (`PATH:COLUMN` names a column), or a `datasets` folder.
        split: which part; only `tune` may guide a choice, `eval` is for scoring.
        tokenizer: of the model, from transformers; may be None where the set holds ids.
        samples: sequences.
        tokens: ids in each, those of the tokenizer's own included.
        seed: of the recipe. It moves what `calib` draws; `tune` and `eval` stay, or no two runs could be compared.
        vocab_size: ids lie below it.
        special: the tokenizer's own tokens that sequences have: those before a text, as a decoder's prompts; those
            around it, as an encoder's inputs; or none, as older bundles were scored.
        template: `chat` has the model's own chat template write them; `special` then says nothing.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `folder`, `suffix`, `empty`, `short`, `not-text`, `json`, `fields`, `mixed`, `unreadable`,
            `ids`, `messages`, `tokenizer`, `template`, `random`.
    """
    part = sources.read(reference, split, chat=template is not None)
    asked = _Asked(part, split, tokenizer, samples, tokens, seed)
    before, after = frame(tokenizer)
    notes = list(part.notes)
    if template is not None and not isinstance(part.content, Texts | Conversations):
        notes.append(f"{part.name} holds ids, which no chat template writes")
    if isinstance(part.content, Ids):
        ids = _as_given(asked, part.content, vocab_size)
        notes += _not_as_prompts(ids, before, tokenizer, part.name) if special != "none" else []
    elif template is not None and part.content is not None:
        ids = _from_chat(asked, part.content, before)
        notes.append(f"{part.name} is written as conversations by the model's chat template")
    else:
        before = before if special != "none" else []
        if special == "before" and after and not part.sampling.special_tokens:
            notes.append(f"no text ends inside a sequence, so none has the {named(after, tokenizer)} of the tokenizer")
        after = after if special == "around" else []
        room = max(1, tokens - len(before) - len(after))
        ids = _drawn(asked, room, vocab_size) if part.content is None else _from_text(asked, part.content, room, before)
        ids = np.pad(ids, ((0, 0), (len(before), len(after))))
        ids[:, : len(before)], ids[:, ids.shape[1] - len(after) :] = before, after
    check_vocabulary(ids, vocab_size, part.where)
    opening = begins(ids, tokenizer)
    return TokenSet(torch.from_numpy(ids), part.name, split, ids_sha256(ids), tuple(notes), begins=opening)


@dataclass(frozen=True)
class _Asked:
    """What is made of which data."""

    part: SplitData
    split: Split
    tokenizer: Any
    samples: int
    tokens: int
    seed: int

    @property
    def generator(self) -> np.random.Generator | None:
        """Draws the places; None takes the text from its beginning."""
        return self.part.sampling.generator(self.split, self.seed)

    def demand(self, ids: Sequence[Any] | NDArray[np.int64]) -> Any:
        """Return `ids`, [sequences, tokens], if there are enough. Raises InputError `calibration-short`."""
        if (count := len(ids)) >= self.samples:
            return ids
        value = f"{count} sequence{'' if count == 1 else 's'} of {self.tokens} tokens in it"
        remedy = f"calibration.samples={count}, fewer tokens each, or more text"
        remedy = remedy if count else "fewer tokens each, or more text"
        rule = f"{self.samples} were asked for"
        raise InputError("calibration-short", self.part.where, value, rule, remedy)

    def encoder(self, *, special_tokens: bool) -> Encode:
        """Text -> ids. Raises InputError `calibration-tokenizer`."""
        demand_tokenizer(self.tokenizer, self.part.where, "text has", "give a .jsonl with `input_ids`")

        def encode(text: str) -> Sequence[int]:
            # not verbose: a text longer than the model's context is what we cut up, no reason to warn
            ids: Sequence[int] = self.tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
            return ids

        return encode


def _drawn(asked: _Asked, room: int, vocab_size: int) -> NDArray[np.int64]:
    if asked.split != "calib":
        value = f"the split {asked.split!r} of a set without text"
        rule = "random tokens say how large activations are, and nothing about how good a model is"
        raise InputError("calibration-random", asked.part.where, value, rule, "score on a set of text")
    generator = np.random.default_rng([asked.part.sampling.seed, asked.seed])
    return generator.integers(0, vocab_size, (asked.samples, room), dtype=np.int64)


def _as_given(asked: _Asked, given: Ids, vocab_size: int) -> NDArray[np.int64]:
    rows = asked.demand(given.rows)[: asked.samples]
    for row, place in zip(rows, given.places, strict=False):
        if len(row) < asked.tokens:
            rule = f"{asked.tokens} tokens a sequence were asked for"
            remedy = f"calibration.tokens={len(row)}, or longer lists" if row else "longer lists"
            raise InputError("calibration-short", place, f"{len(row)} ids", rule, remedy)
        # before numpy, which has no place for an int of 30 digits
        _check_range(min(row), max(row), vocab_size, place)
    return np.asarray([row[: asked.tokens] for row in rows], dtype=np.int64)


def _not_as_prompts(ids: NDArray[np.int64], before: Sequence[int], tokenizer: Any, name: str) -> list[str]:
    """Return what there is to say of ids that were given, where prompts begin otherwise."""
    others = sum(row[: len(before)] != list(before) for row in ids.tolist())
    if not others:
        return []
    which = "no sequence" if others == len(ids) else f"{len(ids) - others} of {len(ids)} sequences"
    verb = "begins" if others == len(ids) else "begin"
    every = f"{which} of {name} {verb} with {named(before, tokenizer)}, as the model's inputs in use do"
    return [f"{every}: the ids are used as given"]


def _from_text(asked: _Asked, text: Texts | Conversations, room: int, before: Sequence[int]) -> NDArray[np.int64]:
    """Return what comes after `before` in each sequence, `[samples, room]`."""
    part = asked.part
    encode = asked.encoder(special_tokens=part.sampling.special_tokens)
    if isinstance(text, Conversations):
        rule = "conversations are written by the model's chat template, where the recipe says so"
        remedy = "--set calibration.template=chat"
        raise InputError(pack.CODE, part.where, f"conversations (`{sources.MESSAGES}`)", rule, remedy)
    how: dict[str, Any] = {"samples": asked.samples, "tokens": room, "generator": asked.generator}
    ids: NDArray[np.int64] = asked.demand(
        pack.sample_documents(text.documents, encode, before=before, **how)
        if part.sampling.special_tokens
        else pack.sample(text.joiner.join(text.documents), encode, **how)
    )
    return ids


def _from_chat(asked: _Asked, text: Texts | Conversations, before: Sequence[int]) -> NDArray[np.int64]:
    """Sequences that begin with a conversation, and go on with others until they are full."""
    encode = asked.encoder(special_tokens=False)
    render = pack.renderer(asked.tokenizer)
    if isinstance(text, Texts):
        whole = text.joiner.join(text.documents)
        # in pieces of about as many tokens as a sequence has, by how many the beginning has
        beginning = whole[: pack.CHARACTERS_A_TOKEN * asked.tokens]
        size = max(1, len(beginning) * asked.tokens // max(1, len(encode(beginning))))
        pieces = pack.sections(whole, size)
        talks = [(pack.exchange(piece), asked.part.where) for piece in pieces if piece.strip()]
    else:
        talks = list(zip(text.items, text.places, strict=True))
    generator = asked.generator
    order = range(len(talks)) if generator is None else generator.permutation(len(talks)).tolist()
    rows = pack.filled((render(*talks[at]) for at in order), asked.tokens, asked.samples, before)
    ids: NDArray[np.int64] = asked.demand(rows)
    return ids


def demand_tokenizer(tokenizer: Any, where: str, what: str, remedy: str) -> None:
    """Refuse what has to be tokenized where the model has no tokenizer. Raises InputError `calibration-tokenizer`."""
    if tokenizer is None:
        rule = f"{what} to be tokenized"
        raise InputError("calibration-tokenizer", where, "the model has no tokenizer", rule, remedy)


def check_vocabulary(ids: NDArray[np.int64], vocab_size: int, where: str) -> None:
    """Refuse ids that the model has not. Raises InputError `calibration-ids`."""
    if ids.size:
        _check_range(int(ids.min()), int(ids.max()), vocab_size, where, remedy="this tokenizer is of another model")


def _check_range(low: int, high: int, vocab_size: int, where: str, remedy: str = "tokenize for this model") -> None:
    if low < 0 or high >= vocab_size:
        rule = f"ids lie in 0..{vocab_size - 1}, the vocabulary"
        raise InputError("calibration-ids", where, f"id {low if low < 0 else high}", rule, remedy)


def is_pairs(reference: str) -> bool:
    """Tell whether a set holds pairs. Raises InputError (`unknown-calibration`, `file-missing`, `card-invalid`)."""
    path = content.find("calibration", reference)
    card = Card.at(path)
    return path.suffix.lower() == SUFFIX if card is None else card.kind == "pairs"


def load_pair_tokens(
    reference: str, split: Split, *, tokenizer: Any, samples: int, tokens: int, seed: int, vocab_size: int
) -> TokenSet:
    """Read pairs and pack their texts; the arguments are those of `load_tokens`.

    About `samples` times `tokens` ids are packed, in more rows where texts are shorter than `tokens`. The set's `pairs`
    are all of the split.

    Raises:
        InputError: of `load_pairs`; `calibration-tokenizer`, `calibration-short`, `calibration-ids`.
    """
    demand_tokenizer(tokenizer, reference, "texts have", "a model folder with a tokenizer")
    pairs = load_pairs(reference, split, samples=None, seed=seed)
    order = np.random.default_rng(seed if split == "calib" else 0).permutation(len(pairs.left))
    texts = [side[place] for place in order for side in (pairs.left, pairs.right)]
    longest = min(tokens, LONGEST)
    ids = token_ids(texts, tokenizer, longest)
    length = max(map(len, ids))
    rows = filled(ids, length, -(-samples * tokens // length))
    if not len(rows):
        rule, remedy = "a row of ids is filled with texts", "more pairs"
        raise InputError("calibration-short", reference, f"{len(pairs.left)} pairs to {split}", rule, remedy)
    check_vocabulary(rows, vocab_size, reference)
    sha256 = ids_sha256(rows) if split == "calib" else pairs.sha256
    opening, packed = begins(rows, tokenizer), torch.from_numpy(rows)
    return TokenSet(packed, pairs.name, split, sha256, pairs.notes, pairs, opening, longest=longest)


def token_ids(
    texts: Sequence[str], tokenizer: Any, longest: int = LONGEST, beside: Sequence[str] | None = None
) -> list[list[int]]:
    """Return the ids of each text, and of what goes in `beside` it, at most `longest`, the tokenizer's own included."""
    limit = min(longest, int(getattr(tokenizer, "model_max_length", longest)))
    both = [list(texts), *([list(beside)] if beside is not None else [])]
    ids: list[list[int]] = tokenizer(*both, truncation=True, max_length=limit)["input_ids"]
    return ids
