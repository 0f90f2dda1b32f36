"""Pairs of texts with the same meaning, for scoring a sentence encoder.

    Hebrews 2:11 <tab> For both he that sanctifieth and they … <tab> For both he who sanctifies and those …

One pair a line, UTF-8, three columns: a name, a text, a text. The encoder has to find `right[i]` for `left[i]` among
all
of `right`; so texts on a side must be distinct, and a pair that repeats one is dropped. A user's own file has no
splits:
its last 10 % of lines are for `eval`, the 5 % before for `tune`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quantkit import content
from quantkit.calibrate.sets import card as cards
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.errors import InputError

SUFFIX = ".tsv"
_COLUMNS = 3
Pairs = list[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class PairSet:
    """Texts of equal meaning: `left[i]` and `right[i]` are a pair; `sha256` is over the texts in order."""

    left: list[str]
    right: list[str]
    name: str
    split: Split
    sha256: str
    notes: tuple[str, ...] = ()


def load_pairs(reference: str, split: Split, *, samples: int | None, seed: int) -> PairSet:
    """Read and draw pairs of a shipped set, a folder with `card.yaml` or a `.tsv`; see `load_images`.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `suffix`, `empty`, `short`, `not-text`, `columns`.
    """
    path = content.find("calibration", reference)
    notes: tuple[str, ...] = ()
    if (card := Card.at(path)) is not None:
        card.demand_kind("pairs", rule="this model is scored on pairs of texts")
        name, sampling = card.name, card.sampling
        lines = [pair for file, data in card.read(split) for pair in parse(data, where=str(file))]
    elif path.is_dir() or path.suffix.lower() != SUFFIX:
        value = "a folder without card.yaml" if path.is_dir() else f"cannot read {path.suffix or 'that'}"
        rule = "pairs come as .tsv: lines of a name, a text, a text"
        raise InputError("calibration-suffix", reference, value, rule, "write it with tabs")
    else:
        name, sampling = path.resolve().name, SetSampling()
        lines = parse(read_bytes(path), where=reference)
    kept = _distinct(lines)  # before the split: a text that calibrates must not score
    if dropped := len(lines) - len(kept):
        notes = (f"{dropped} pairs of {name} repeat a text of another and were left out",)
    if card is None:
        first, last = cards.bounds(split, len(kept))
        if first == last:
            raise cards.short(reference, f"{len(kept)} pairs, none of them left for {split}", "pairs")
        notes = (f"{name} has no splits: {split} is pairs {first + 1} to {last} of {len(kept)}", *notes)
        kept = kept[first:last]
    if samples is not None:
        if (generator := sampling.generator(split, seed)) is not None:
            kept = [kept[place] for place in generator.permutation(len(kept))]
        kept = kept[:samples]
        if len(kept) < samples:
            notes = (*notes, f"{name} has {len(kept)} pairs to {split}, {samples} were asked for")
    digest = hashlib.sha256("".join(f"{left}\t{right}\n" for left, right in kept).encode())
    return PairSet([left for left, _ in kept], [right for _, right in kept], name, split, digest.hexdigest(), notes)


def parse(data: bytes, *, where: str) -> Pairs:
    """Return the pairs of one file, in order.

    Raises:
        InputError: `calibration-not-text`, `calibration-columns`, `calibration-empty`.
    """
    pairs = []
    # not splitlines(), which also splits at U+2028 and others
    lines = cards.decoded(data, where, "pairs").replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != _COLUMNS or not columns[1] or not columns[2]:
            counted = f"{len(columns)} column{'' if len(columns) == 1 else 's'}"
            value = counted if len(columns) != _COLUMNS else "an empty text"
            rule = "a line is: a name, a text, a text, separated by tabs"
            raise InputError("calibration-columns", f"{where}:{number}", value, rule, "correct that line")
        pairs.append((columns[1], columns[2]))
    if not pairs:
        raise cards.empty(where, "no pair in it")
    return pairs


def _distinct(lines: Pairs) -> Pairs:
    """Drop pairs with a repeated text."""
    kept, seen_left, seen_right = [], set(), set()
    for left, right in lines:
        if left not in seen_left and right not in seen_right:
            kept.append((left, right))
        seen_left.add(left)
        seen_right.add(right)
    return kept
