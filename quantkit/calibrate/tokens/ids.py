"""Token ids of a calibration set, for passes and measurements.

`sources.py` defines the splits. Token ids are used as given, in order. A set of kind `random` has no data: ids are
drawn
uniformly from the vocabulary, only for calibration.

**Every sequence begins as a prompt does**: with the tokens that the tokenizer puts before a text (`<bos>`), or with the
output of the model's chat template if `template` is `chat`. For a model trained with it the first token is special:
much
attention goes to it, and its activations are often the largest. Tokens that the tokenizer puts after a text are only
used for encoders: a decoder's sequences are beginnings of texts, as prompts are.

    load_tokens("prose-en", "calib", tokenizer=..., samples=16, tokens=512, seed=0, vocab_size=49152).ids   # [16, 512]

A set of pairs gives an encoder rows of one length to calibrate on, that of the longest text, and pairs to score:

    row   [CLS] one text [SEP] [CLS] another [SEP] [CLS] the begin
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

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

if TYPE_CHECKING:
    from quantkit.model.streaming.calls import Pictures

# the tokenizer's own tokens in a sequence: none, those before a text, those before and after it
Special = Literal["none", "before", "around"]
Template = Literal["chat"]
# sequences, and tokens of each, for plain transformers to confirm scores on
CONFIRMED = 2, 64
# most tokens of a text, as in the training of sentence encoders
LONGEST = 256


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Token ids for passes and measurements.

    Args:
        ids: `[samples, tokens]`, int64.
        name: name of the set.
        split: its split.
        sha256: hash over shape and little-endian int64 bytes of the ids.
        notes: decisions, one sentence each, for the manifest.
        pairs: pairs of the texts in the ids, if embeddings are scored; `sha256` is then theirs.
        begins: special tokens at the beginning of every sequence, as text: `<bos>`; None without any.
        generated: number of samples, the last ones, written by the model itself.
        longest: most ids of a text of the pairs, for the model's positions.
        whole: `sha256` of the full set, if these samples are only its first; else empty.
        form: form chosen for records without being asked for, `chat` or `alpaca`; else None.
        pictures: images of some sequences, for a vision-language model; recordings of all, for a model of speech.
        images: name of their set; None without any.
        lengths: ids of each sequence before its padding; None without padding.
        spoken: transcript of each recording, None for one without; empty for text.
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
    form: Literal["chat", "alpaca"] | None = None
    pictures: Pictures | None = None
    images: str | None = None
    lengths: tuple[int, ...] | None = None
    spoken: tuple[str | None, ...] = ()

    def first(self, samples: int) -> TokenSet:
        """Keep the first samples."""
        if samples >= len(self.ids):
            return self
        ids = self.ids[:samples]
        cut: dict[str, Any] = {"lengths": self.lengths and self.lengths[:samples], "spoken": self.spoken[:samples]}
        return replace(self, ids=ids, sha256=ids_sha256(ids.numpy()), whole=self.whole or self.sha256, **cut)

    def beginnings(self, samples: int, tokens: int) -> torch.Tensor:
        """Return the first ids of the first samples, without padding; of samples that begin alike, the first."""
        few = self.ids[:samples, : min((tokens, *(self.lengths or ())[:samples]))]
        alike = self.lengths is not None and bool((few == few[:1]).all(dim=1)[1:].any())
        return few[:1] if alike else few

    @property
    def items(self) -> int:
        """Number of positions with a next token, samples · (tokens − 1); for pairs, their number."""
        if self.pairs is not None:
            return len(self.pairs.left)
        if self.lengths is not None:
            return sum(self.lengths) - len(self.lengths)
        samples, tokens = self.ids.shape
        return int(samples * (tokens - 1))

    @property
    def unit(self) -> str:
        """Unit of `items`."""
        return "position" if self.pairs is None else "pair"


def ids_sha256(ids: NDArray[Any]) -> str:
    """Return the hash of ids `[samples, tokens]`: equal on every machine, for every integer type."""
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
    skip: int = 0,
) -> TokenSet:
    """Read, sample and check a calibration set.

    Args:
        reference: shipped name, or the path of a folder with `card.yaml`, a `.txt`, `.jsonl`, `.json` or `.parquet`
            file, or a `datasets` folder.
        split: part of the set; only `tune` may guide a choice, `eval` is for scoring.
        tokenizer: the model's tokenizer from transformers; may be None for a set of ids.
        samples: number of sequences.
        tokens: ids of each sequence, with the tokenizer's own.
        seed: seed of the recipe. It only affects `calib`; `tune` and `eval` stay the same, so that runs can be
            compared.
        vocab_size: upper limit of the ids.
        special: the tokenizer's own tokens in a sequence: those before a text, as in a decoder's prompts; those around
            it, as in an encoder's inputs; or none, as in older bundles.
        template: `chat` for the model's own chat template; `special` is then ignored. None has it write conversations
            alone, where the tokenizer has one.
        skip: number of given sequences of ids to pass over.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `folder`, `suffix`, `empty`, `short`, `not-text`, `json`, `fields`, `mixed`, `unreadable`,
            `ids`, `messages`, `tokenizer`, `template`, `random`.
    """
    able = special != "around" and pack.has_template(tokenizer)
    part = sources.read(reference, split, chat=True if template else False if able else None)
    asked = _Asked(part, split, tokenizer, samples, tokens, seed)
    form: Literal["chat", "alpaca"] | None = None
    if template is None:
        alpaca = isinstance(part.content, Texts) and part.content.alpaca
        form = "chat" if able and isinstance(part.content, Conversations) else "alpaca" if alpaca else None
    before, after = frame(tokenizer)
    notes = list(part.notes)
    if template is not None and not isinstance(part.content, Texts | Conversations):
        notes.append(f"{part.name} holds ids, which no chat template writes")
    if isinstance(part.content, Ids):
        ids = _as_given(asked, Ids(part.content.rows[skip:], part.content.places[skip:]), vocab_size)
        notes += _not_as_prompts(ids, before, tokenizer, part.name) if special != "none" else []
    elif (template or form == "chat") and part.content is not None:
        ids = _from_chat(asked, part.content, before)
        if template:  # else the form is a decision
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
    whole = torch.from_numpy(ids)
    return TokenSet(whole, part.name, split, ids_sha256(ids), tuple(notes), begins=opening, form=form)


@dataclass(frozen=True)
class _Asked:
    """Arguments of a request for ids."""

    part: SplitData
    split: Split
    tokenizer: Any
    samples: int
    tokens: int
    seed: int

    @property
    def generator(self) -> np.random.Generator | None:
        """Generator of the places; None to take the text from its beginning."""
        return self.part.sampling.generator(self.split, self.seed)

    def demand(self, ids: Sequence[Any] | NDArray[np.int64]) -> Any:
        """Return `ids`, [sequences, tokens], if there are enough. Raises InputError `calibration-short`."""
        if (count := len(ids)) >= self.samples:
            return ids
        value = f"{count} sequence{'' if count == 1 else 's'} of {self.tokens} tokens in it"
        fewer = f"--set calibration.samples={count}, " if count else ""
        remedy = f"{fewer}--set calibration.tokens={max(self.tokens // 4, 1)}, or more text"
        rule = f"{self.samples} were asked for"
        raise InputError("calibration-short", self.part.where, value, rule, remedy)

    def encoder(self, *, special_tokens: bool) -> Encode:
        """Return a function from text to ids. Raises InputError `calibration-tokenizer`."""
        demand_tokenizer(self.tokenizer, self.part.where, "text has", "give a .jsonl with `input_ids`")

        def encode(text: str) -> Sequence[int]:
            # not verbose: long texts are cut, so a warning about their length is useless
            ids: Sequence[int] = self.tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
            return ids

        return encode


def _drawn(asked: _Asked, room: int, vocab_size: int) -> NDArray[np.int64]:
    if asked.split != "calib":
        value = f"the split {asked.split!r} of a set without text"
        rule = "random tokens show the size of activations, but not the quality of a model"
        raise InputError("calibration-random", asked.part.where, value, rule, "score on a set of text")
    generator = np.random.default_rng([asked.part.sampling.seed, asked.seed])
    return generator.integers(0, vocab_size, (asked.samples, room), dtype=np.int64)


def _as_given(asked: _Asked, listed: Ids, vocab_size: int) -> NDArray[np.int64]:
    rows = asked.demand(listed.rows)[: asked.samples]
    for row, place in zip(rows, listed.places, strict=False):
        if len(row) < asked.tokens:
            rule = f"{asked.tokens} tokens a sequence were asked for"
            remedy = f"--set calibration.tokens={len(row)}, or longer lists" if row else "longer lists"
            raise InputError("calibration-short", place, f"{len(row)} ids", rule, remedy)
        # before numpy, which cannot hold an int of 30 digits
        _check_range(min(row), max(row), vocab_size, place)
    return np.asarray([row[: asked.tokens] for row in rows], dtype=np.int64)


def _not_as_prompts(ids: NDArray[np.int64], before: Sequence[int], tokenizer: Any, name: str) -> list[str]:
    """Return notes on given ids that do not begin as prompts do."""
    others = sum(row[: len(before)] != list(before) for row in ids.tolist())
    if not others:
        return []
    which = "no sequence" if others == len(ids) else f"{len(ids) - others} of {len(ids)} sequences"
    verb = "begins" if others == len(ids) else "begin"
    every = f"{which} of {name} {verb} with {named(before, tokenizer)}, as the model's inputs in use do"
    return [f"{every}: the ids are used as given"]


def _from_text(asked: _Asked, text: Texts | Conversations, room: int, before: Sequence[int]) -> NDArray[np.int64]:
    """Return the ids behind `before` in each sequence, `[samples, room]`."""
    part = asked.part
    encode = asked.encoder(special_tokens=part.sampling.special_tokens)
    if isinstance(text, Conversations):
        rule = "only a decoder's chat template writes conversations"
        if not pack.has_template(asked.tokenizer):
            rule = "conversations need a chat template, and the model's tokenizer has none"
        remedy = "put the model's chat_template.jinja beside its tokenizer, or give plain text: .txt, or a key `text`"
        raise InputError(pack.CODE, part.where, f"conversations (`{sources.MESSAGES}`)", rule, remedy)
    how: dict[str, Any] = {"samples": asked.samples, "tokens": room, "generator": asked.generator}
    ids: NDArray[np.int64] = asked.demand(
        pack.sample_documents(text.documents, encode, before=before, **how)
        if part.sampling.special_tokens
        else pack.sample(text.joiner.join(text.documents), encode, **how)
    )
    return ids


def _from_chat(asked: _Asked, text: Texts | Conversations, before: Sequence[int]) -> NDArray[np.int64]:
    """Return sequences of conversations: each begins with one, and others follow until it is full."""
    encode = asked.encoder(special_tokens=False)
    render = pack.renderer(asked.tokenizer)
    if isinstance(text, Texts):
        whole = text.joiner.join(text.documents)
        # in pieces of about one sequence, by the tokens per character at the beginning
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
    """Refuse text for a model without a tokenizer. Raises InputError `calibration-tokenizer`."""
    if tokenizer is None:
        rule = f"{what} to be tokenized"
        raise InputError("calibration-tokenizer", where, "the model has no tokenizer", rule, remedy)


def check_vocabulary(ids: NDArray[np.int64], vocab_size: int, where: str) -> None:
    """Refuse ids outside of the vocabulary. Raises InputError `calibration-ids`."""
    if ids.size:
        _check_range(int(ids.min()), int(ids.max()), vocab_size, where, remedy="use this model's own tokenizer")


def _check_range(low: int, high: int, vocab_size: int, where: str, remedy: str = "tokenize for this model") -> None:
    if low < 0 or high >= vocab_size:
        rule = f"ids lie in 0..{vocab_size - 1}, the vocabulary"
        raise InputError("calibration-ids", where, f"id {low if low < 0 else high}", rule, remedy)


def is_pairs(reference: str) -> bool:
    """Tell whether a set has pairs. Raises InputError (`unknown-calibration`, `file-missing`, `card-invalid`)."""
    path = content.find("calibration", reference)
    card = Card.at(path)
    return path.suffix.lower() == SUFFIX if card is None else card.kind == "pairs"


def load_pair_tokens(
    reference: str, split: Split, *, tokenizer: Any, samples: int, tokens: int, seed: int, vocab_size: int
) -> TokenSet:
    """Read pairs and pack their texts; the arguments are those of `load_tokens`.

    About `samples` times `tokens` ids are packed, in more rows if texts are shorter than `tokens`. `pairs` has all
    pairs of
    the split.

    Raises:
        InputError: as `load_pairs`; `calibration-tokenizer`, `calibration-short`, `calibration-ids`.
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
        rule, remedy = "the texts must fill at least one row of ids", "more pairs"
        raise InputError("calibration-short", reference, f"{len(pairs.left)} pairs to {split}", rule, remedy)
    check_vocabulary(rows, vocab_size, reference)
    sha256 = ids_sha256(rows) if split == "calib" else pairs.sha256
    opening, packed = begins(rows, tokenizer), torch.from_numpy(rows)
    return TokenSet(packed, pairs.name, split, sha256, pairs.notes, pairs, opening, longest=longest)


def token_ids(
    texts: Sequence[str], tokenizer: Any, longest: int = LONGEST, beside: Sequence[str] | None = None
) -> list[list[int]]:
    """Return the ids of each text, and of the text `beside` it, at most `longest`, with the tokenizer's own."""
    limit = min(longest, int(getattr(tokenizer, "model_max_length", longest)))
    both = [list(texts), *([list(beside)] if beside is not None else [])]
    ids: list[list[int]] = tokenizer(*both, truncation=True, max_length=limit)["input_ids"]
    return ids
