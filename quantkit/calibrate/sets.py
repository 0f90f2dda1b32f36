"""A calibration set's name or path -> the token ids that passes see and measures score.

A shipped set or a folder with a `card.yaml` has its splits. A user's own text has none, and what calibrates must not
score: its last 10 % are kept for `eval`, the 5 % before for `tune`, by whole documents where there are 20 or more, else
by the length of the text. Token ids are used as given, in order, whichever split is asked for. A set of kind `random`
is no data at all: ids drawn from the vocabulary, each as likely as the next, to calibrate on and for nothing else.

    load_tokens("prose-en", "calib", tokenizer=..., samples=16, tokens=512, seed=0, vocab_size=49152).ids   # [16, 512]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import content
from quantkit.calibrate import pack, sources
from quantkit.calibrate.card import Card, Sampling, Split, read_bytes
from quantkit.calibrate.pairs import PairSet
from quantkit.calibrate.sources import Ids, Texts
from quantkit.errors import InputError

if TYPE_CHECKING:
    import torch

# from here on a text belongs to tune, to eval
_TUNE, _EVAL = 0.85, 0.90
_BY_DOCUMENT = 20


@dataclass(frozen=True, eq=False)
class TokenSet:
    """What the passes and the measures see.

    Args:
        ids: `[samples, tokens]`, int64.
        name: of the set: the folder or file name.
        split: `calib`, `tune` or `eval`.
        sha256: over shape and little-endian int64 bytes of the ids.
        notes: what was decided on the way, one sentence each; for the manifest.
        pairs: of the texts that the ids are of, where embeddings are scored; `sha256` is then theirs.
    """

    ids: torch.Tensor
    name: str
    split: Split
    sha256: str
    notes: tuple[str, ...] = ()
    pairs: PairSet | None = None

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
    """The hash of ids `[samples, tokens]`: the same on every machine, whatever the integer type they came in."""
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
    framed: bool = False,
) -> TokenSet:
    """Read, sample and check a calibration set.

    Args:
        reference: a shipped name, or the path of a folder with `card.yaml`, a `.txt`, `.jsonl`, `.json` or `.parquet`
            file, or a `datasets` folder.
        split: which part; only `tune` may guide a choice, `eval` is for scoring.
        tokenizer: of the model, from transformers; may be None where the set holds ids.
        samples: sequences.
        tokens: ids in each.
        seed: of the recipe. It moves what `calib` draws; `tune` and `eval` stay, or no two runs could be compared.
        vocab_size: ids lie below it.
        framed: whether each sequence of a text has the tokenizer's own tokens around it, as an encoder's inputs have.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `folder`, `suffix`, `empty`, `short`, `not-text`, `json`, `fields`, `mixed`, `unreadable`,
            `ids`, `tokenizer`, `random`.
    """
    part = _open(reference, split)
    if part.content is None:
        ids = _drawn(part, split, samples=samples, tokens=tokens, seed=seed, vocab_size=vocab_size)
    elif isinstance(part.content, Ids):
        ids = _as_given(part.content, samples, tokens, vocab_size, part.where)
    else:
        before, after = frame(tokenizer) if framed else ([], [])
        inside = max(1, tokens - len(before) - len(after))
        ids = _from_text(part, split, tokenizer, samples=samples, tokens=inside, seed=seed)
        ids = np.pad(ids, ((0, 0), (len(before), len(after))))
        ids[:, : len(before)], ids[:, ids.shape[1] - len(after) :] = before, after
        _check_vocabulary(ids, vocab_size, part.where)

    import torch

    return TokenSet(ids=torch.from_numpy(ids), name=part.name, split=split, sha256=ids_sha256(ids), notes=part.notes)


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before a text, and after it; none without a tokenizer."""
    if tokenizer is None:
        return [], []
    bare, whole = (list(tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


@dataclass(frozen=True)
class _Part:
    """The data of one split, read but not tokenized; None where ids are drawn."""

    content: Texts | Ids | None
    sampling: Sampling
    name: str
    where: str
    notes: tuple[str, ...] = ()


def _open(reference: str, split: Split) -> _Part:
    path = content.find("calibration", reference)
    if path.name == "card.yaml" or (path.is_dir() and (path / "card.yaml").is_file()):
        return _from_card(Card.load(path), split)
    if path.is_dir():
        if not sources.is_dataset(path):
            raise InputError(
                "calibration-folder",
                where=reference,
                value="neither a card.yaml nor a saved dataset in it",
                rule="a folder with card.yaml, or one written by datasets' save_to_disk",
                remedy="name the file inside it",
            )
        found, own_splits = sources.read_dataset(path, split, where=reference)
    else:
        found = sources.parse(read_bytes(path), suffix=path.suffix.lower(), where=reference)
        own_splits = False
    name = path.resolve().name
    if own_splits:
        return _Part(found, Sampling(), name, reference)
    if isinstance(found, Ids):
        note = f"{name} has no splits: the ids are used as given for {split} as for any other split"
        return _Part(found, Sampling(), name, reference, (note,))
    texts, note = _own_split(found, split, name)
    return _Part(texts, Sampling(), name, f"{reference} ({split} part)", (note,))


def _from_card(card: Card, split: Split) -> _Part:
    where = str(card.folder / "card.yaml")
    if card.kind == "random":
        return _Part(None, card.sampling, card.name, where)
    if card.kind not in ("text", "tokens"):
        raise InputError(
            "calibration-kind",
            where=where,
            value=f"the set holds {card.kind}",
            rule="a language model reads text or tokens",
            remedy="use another set; see `quantkit list calibrations`",
        )
    parts = [sources.parse(data, suffix=path.suffix.lower(), where=str(path)) for path, data in card.read(split)]
    texts = [part for part in parts if isinstance(part, Texts)]
    ids = [part for part in parts if isinstance(part, Ids)]
    if texts and ids:
        raise InputError("calibration-mixed", where=where, value=f"texts and input_ids in the split {split!r}")
    found: Texts | Ids
    if texts:
        found = Texts(tuple(document for part in texts for document in part.documents))
    else:
        found = Ids(
            tuple(row for part in ids for row in part.rows), tuple(place for part in ids for place in part.places)
        )
    return _Part(found, card.sampling, card.name, where)


def _own_split(texts: Texts, split: Split, name: str) -> tuple[Texts, str]:
    count = len(texts.documents)
    if count >= _BY_DOCUMENT:
        tune, evaluation = int(count * _TUNE), int(count * _EVAL)
        bounds = {"calib": (0, tune), "tune": (tune, evaluation), "eval": (evaluation, count)}
        first, last = bounds[split]
        note = f"{name} has no splits: {split} is documents {first + 1} to {last} of {count}"
        return Texts(texts.documents[first:last], texts.joiner), note
    whole = texts.joiner.join(texts.documents)
    tune, evaluation = _cut(whole, _TUNE), _cut(whole, _EVAL)
    bounds = {"calib": (0, tune), "tune": (tune, evaluation), "eval": (evaluation, len(whole))}
    first, last = bounds[split]
    note = f"{name} has no splits: {split} is characters {first} to {last} of {len(whole)}"
    return Texts((whole[first:last].strip(),), texts.joiner), note


def _cut(text: str, share: float) -> int:
    """The first white space at or after a share of the text."""
    place = int(len(text) * share)
    while place < len(text) and not text[place].isspace():
        place += 1
    return place if place < len(text) else int(len(text) * share)


def _drawn(part: _Part, split: Split, *, samples: int, tokens: int, seed: int, vocab_size: int) -> NDArray[np.int64]:
    if split != "calib":
        raise InputError(
            "calibration-random",
            where=part.where,
            value=f"the split {split!r} of a set without text",
            rule="random tokens say how large activations are, and nothing about how good a model is",
            remedy="score on a set of text",
        )
    generator = np.random.default_rng([part.sampling.seed, seed])
    return generator.integers(0, vocab_size, (samples, tokens), dtype=np.int64)


def _as_given(rows: Ids, samples: int, tokens: int, vocab_size: int, where: str) -> NDArray[np.int64]:
    if len(rows.rows) < samples:
        raise _short(where, len(rows.rows), samples, tokens)
    for row, place in zip(rows.rows[:samples], rows.places[:samples], strict=True):
        if len(row) < tokens:
            raise InputError(
                "calibration-short",
                where=place,
                value=f"{len(row)} ids",
                rule=f"{tokens} tokens a sequence were asked for",
                remedy=f"calibration.tokens={len(row)}, or longer lists" if row else "longer lists",
            )
        # before numpy, which has no place for an int of 30 digits
        _check_range(min(row), max(row), vocab_size, place)
    return np.asarray([row[:tokens] for row in rows.rows[:samples]], dtype=np.int64)


def _from_text(part: _Part, split: Split, tokenizer: Any, *, samples: int, tokens: int, seed: int) -> NDArray[np.int64]:
    if tokenizer is None:
        raise InputError(
            "calibration-tokenizer",
            where=part.where,
            value="the model has no tokenizer",
            rule="text has to be tokenized",
            remedy="give a .jsonl with `input_ids`",
        )
    assert isinstance(part.content, Texts)
    texts, sampling = part.content, part.sampling
    generator = None
    if sampling.shuffle:
        generator = np.random.default_rng([sampling.seed, seed if split == "calib" else 0])
    encode = _encoder(tokenizer, special_tokens=sampling.special_tokens)
    if sampling.special_tokens:
        ids = pack.sample_documents(texts.documents, encode, samples=samples, tokens=tokens, generator=generator)
    else:
        whole = texts.joiner.join(texts.documents)
        ids = pack.sample(whole, encode, samples=samples, tokens=tokens, generator=generator)
    if len(ids) < samples:
        raise _short(part.where, len(ids), samples, tokens)
    return ids


def _encoder(tokenizer: Any, *, special_tokens: bool) -> Callable[[str], Sequence[int]]:
    def encode(text: str) -> Sequence[int]:
        # not verbose: a text longer than the model's context is what we cut up, no reason to warn
        ids: Sequence[int] = tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        return ids

    return encode


def _short(where: str, found: int, samples: int, tokens: int) -> InputError:
    if found:
        remedy = f"calibration.samples={found}, fewer tokens each, or more text"
    else:
        remedy = "fewer tokens each, or more text"
    return InputError(
        "calibration-short",
        where=where,
        value=f"{found} sequence{'' if found == 1 else 's'} of {tokens} tokens in it",
        rule=f"{samples} were asked for",
        remedy=remedy,
    )


def _check_vocabulary(ids: NDArray[np.int64], vocab_size: int, where: str) -> None:
    if ids.size:
        _check_range(int(ids.min()), int(ids.max()), vocab_size, where, remedy="this tokenizer is of another model")


def _check_range(low: int, high: int, vocab_size: int, where: str, remedy: str = "tokenize for this model") -> None:
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        rule = f"ids lie in 0..{vocab_size - 1}, the vocabulary"
        raise InputError("calibration-ids", where=where, value=f"id {wrong}", rule=rule, remedy=remedy)
