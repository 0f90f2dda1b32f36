"""A set of pairs -> texts that mean the same, side by side: what a sentence encoder is scored on.

    Hebrews 2:11 <tab> For both he that sanctifieth and they … <tab> For both he who sanctifies and those …

One pair a line, UTF-8, three columns: a name, a text, a text. `left[i]` is to be found by `right[i]` among all of
`right`; so no text may stand on a side twice, and a pair that repeats one is left out. A user's own file has no splits:
its last 10 % of lines are kept for `eval`, the 5 % before for `tune`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from quantkit import content
from quantkit.calibrate.sets import own
from quantkit.calibrate.sets.card import Card, SetSampling, Split, read_bytes
from quantkit.errors import InputError

SUFFIX = ".tsv"
_COLUMNS = 3


@dataclass(frozen=True, eq=False)
class PairSet:
    """Texts of equal meaning.

    Args:
        left, right: of one length; `left[i]` and `right[i]` belong together.
        sha256: over the texts in their order.
    """

    left: list[str]
    right: list[str]
    name: str
    split: Split
    sha256: str
    notes: tuple[str, ...] = ()


def load_pairs(reference: str, split: Split, *, samples: int | None, seed: int) -> PairSet:
    """Read and draw pairs.

    Args:
        reference: a shipped name, or the path of a folder with `card.yaml` or of a `.tsv`.
        split, samples, seed: as of `load_images`.

    Raises:
        InputError: `unknown-calibration`, `file-missing`, `card-invalid`, and `calibration-` followed by `checksum`,
            `split`, `kind`, `suffix`, `empty`, `short`, `not-text`, `columns`.
    """
    kept, sampling, name, notes = _open(reference, split)
    if samples is not None:
        if (generator := sampling.generator(split, seed)) is not None:
            kept = [kept[place] for place in generator.permutation(len(kept))]
        kept = kept[:samples]
        if len(kept) < samples:
            notes = (*notes, f"{name} has {len(kept)} pairs to {split}, {samples} were asked for")
    digest = hashlib.sha256("".join(f"{left}\t{right}\n" for left, right in kept).encode())
    return PairSet([left for left, _ in kept], [right for _, right in kept], name, split, digest.hexdigest(), notes)


def parse(data: bytes, *, where: str) -> list[tuple[str, str]]:
    """The pairs of one file, in order.

    Raises:
        InputError: `calibration-not-text`, `calibration-columns`, `calibration-empty`.
    """
    text = own.decoded(data, where, "pairs")
    pairs = []
    # not splitlines(), which also parts at U+2028 and its like
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != _COLUMNS or not columns[1] or not columns[2]:
            raise InputError(
                "calibration-columns",
                where=f"{where}:{number}",
                value=f"{len(columns)} column{'' if len(columns) == 1 else 's'}"
                if len(columns) != _COLUMNS
                else "an empty text",
                rule="a line is: a name, a text, a text, parted by tabs",
                remedy="mend that line",
            )
        pairs.append((columns[1], columns[2]))
    if not pairs:
        raise own.empty(where, "no pair in it")
    return pairs


def _open(reference: str, split: Split) -> tuple[list[tuple[str, str]], SetSampling, str, tuple[str, ...]]:
    path = content.find("calibration", reference)
    if (card := Card.at(path)) is not None:
        card.demand_kind("pairs", rule="this model is scored on pairs of texts")
        lines = [pair for file, data in card.read(split) for pair in parse(data, where=str(file))]
        found, notes = _distinct(lines, card.name)
        return found, card.sampling, card.name, notes
    return _own(path, reference, split)


def _distinct(lines: list[tuple[str, str]], name: str) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Without the pairs that repeat a text of another, and what there is to say about them."""
    kept, seen_left, seen_right = [], set(), set()
    for left, right in lines:
        if left not in seen_left and right not in seen_right:
            kept.append((left, right))
        seen_left.add(left)
        seen_right.add(right)
    dropped = len(lines) - len(kept)
    return kept, (f"{dropped} pairs of {name} repeat a text of another and were left out",) if dropped else ()


def _own(path: Path, reference: str, split: Split) -> tuple[list[tuple[str, str]], SetSampling, str, tuple[str, ...]]:
    if path.is_dir() or path.suffix.lower() != SUFFIX:
        raise InputError(
            "calibration-suffix",
            where=reference,
            value="a folder without card.yaml" if path.is_dir() else f"cannot read {path.suffix or 'that'}",
            rule="pairs come as .tsv: lines of a name, a text, a text",
            remedy="write it with tabs",
        )
    name = path.resolve().name
    # before it is parted: what calibrates must not score
    pairs, notes = _distinct(parse(read_bytes(path), where=reference), name)
    first, last = own.bounds(split, len(pairs))
    if first == last:
        raise own.short(reference, f"{len(pairs)} pairs, none of them left for {split}", "pairs")
    note = f"{name} has no splits: {split} is pairs {first + 1} to {last} of {len(pairs)}"
    return pairs[first:last], SetSampling(), name, (note, *notes)
