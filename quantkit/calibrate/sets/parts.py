"""A calibration set's name or path, and a split -> what that split holds, not tokenized yet.

A shipped set or a folder with a `card.yaml` has its splits. A user's own text has none, and what calibrates must not
score: its last 10 % are kept for `eval`, the 5 % before for `tune`, by whole documents where there are 20 or more, else
by the length of the text; conversations are never cut. Token ids stay whole, whichever split is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from quantkit import content
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.calibrate.sets.own import bounds
from quantkit.calibrate.tokens import sources
from quantkit.calibrate.tokens.sources import Content, Conversations, Ids, Texts
from quantkit.errors import InputError

# from so many on, a text is parted by whole documents
_BY_DOCUMENT = 20


@dataclass(frozen=True)
class SplitData:
    """The data of one split, read but not tokenized.

    Args:
        content: None where ids are drawn.
        sampling: how sequences are made of it.
        notes: what was decided, one sentence each.
    """

    content: Content | None
    sampling: SetSampling
    name: str
    where: str
    notes: tuple[str, ...] = ()


def read(reference: str, split: Split, *, chat: bool) -> SplitData:
    """One split of a calibration set.

    Args:
        reference: a shipped name, or a path; see `sets.load_tokens`.
        chat: whether a chat template will write what is in it.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `folder`, `suffix`, `empty`, `not-text`, `json`, `fields`, `mixed`, `unreadable`, `ids`,
            `messages`.
    """
    path = content.find("calibration", reference)
    if (card := Card.at(path)) is not None:
        return _from_card(card, split, chat)
    if path.is_dir():
        if not sources.is_dataset(path):
            raise InputError(
                "calibration-folder",
                where=reference,
                value="neither a card.yaml nor a saved dataset in it",
                rule="a folder with card.yaml, or one written by datasets' save_to_disk",
                remedy="name the file inside it",
            )
        found, own_splits = sources.read_dataset(path, split, where=reference, chat=chat)
    else:
        found = sources.parse(read_bytes(path), suffix=path.suffix.lower(), where=reference, chat=chat)
        own_splits = False
    name = path.resolve().name
    if own_splits:
        return SplitData(found, SetSampling(), name, reference)
    if isinstance(found, Ids):
        note = f"{name} has no splits: the ids are used as given for {split} as for any other split"
        return SplitData(found, SetSampling(), name, reference, (note,))
    own, note = _own_split(found, split, name)
    return SplitData(own, SetSampling(), name, f"{reference} ({split} part)", (note,))


def _from_card(card: Card, split: Split, chat: bool) -> SplitData:
    card.demand_kind("random", "text", "tokens", rule="a language model reads text or tokens")
    if card.kind == "random":
        return SplitData(None, card.sampling, card.name, card.where)
    parts = [
        sources.parse(data, suffix=path.suffix.lower(), where=str(path), chat=chat) for path, data in card.read(split)
    ]
    return SplitData(_joined(parts, split, card.where), card.sampling, card.name, card.where)


def _joined(parts: Sequence[Content], split: Split, where: str) -> Content:
    """The content of several files as that of one. Raises InputError `calibration-mixed`."""
    texts = [part for part in parts if isinstance(part, Texts)]
    ids = [part for part in parts if isinstance(part, Ids)]
    talks = [part for part in parts if isinstance(part, Conversations)]
    if len(parts) > max(len(texts), len(ids), len(talks)):
        value = f"texts, conversations or input_ids, not one kind, in the split {split!r}"
        raise InputError("calibration-mixed", where=where, value=value)
    if texts:
        return Texts(tuple(document for part in texts for document in part.documents))
    if ids:
        return Ids(
            tuple(row for part in ids for row in part.rows), tuple(place for part in ids for place in part.places)
        )
    return Conversations(
        tuple(item for part in talks for item in part.items), tuple(place for part in talks for place in part.places)
    )


def _own_split(found: Texts | Conversations, split: Split, name: str) -> tuple[Content, str]:
    whole_ones = found.documents if isinstance(found, Texts) else found.items
    count, of = len(whole_ones), "documents" if isinstance(found, Texts) else "conversations"
    if isinstance(found, Texts) and count < _BY_DOCUMENT:
        whole = found.joiner.join(found.documents)
        first, last = bounds(split, len(whole), partial(_cut, whole))
        note = f"{name} has no splits: {split} is characters {first} to {last} of {len(whole)}"
        return Texts((whole[first:last].strip(),), found.joiner), note
    first, last = bounds(split, count)
    part = slice(first, last)
    note = f"{name} has no splits: {split} is {of} {first + 1} to {last} of {count}"
    if isinstance(found, Texts):
        return Texts(found.documents[part], found.joiner), note
    return Conversations(found.items[part], found.places[part]), note


def _cut(text: str, share: float) -> int:
    """The first white space at or after a share of the text."""
    place = int(len(text) * share)
    while place < len(text) and not text[place].isspace():
        place += 1
    return place if place < len(text) else int(len(text) * share)
