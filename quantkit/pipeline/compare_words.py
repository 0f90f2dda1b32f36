"""The next words that flipped between A and B, with their text: the scored tokens are read again, and known by hash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.calibrate.sets import load_tokens
from quantkit.errors import InputError
from quantkit.measure.accuracy import Items
from quantkit.measure.against import flipped
from quantkit.measure.compared import Flip, Flips
from quantkit.measure.rows import Data
from quantkit.pipeline.compare_sides import Side
from quantkit.pipeline.measure import config_of
from quantkit.stats.mcnemar import mcnemar

Array = NDArray[Any]
Decode = Callable[[list[int]], str]

# tokens before each that are shown
_BEFORE = 16


@dataclass(frozen=True)
class Text:
    """What was scored.

    Args:
        ids: `[samples, tokens]`; None where the text is not at hand.
        decode: ids as text; as numbers, where the tokenizer is not at hand.
    """

    ids: Array | None
    decode: Decode


def flips(a: Items, b: Items, text: Text, count: int) -> Flips:
    """What flipped, with `count` examples of each kind: where the chance of what follows has changed most."""
    test = mcnemar(a.right_candidate, b.right_candidate)
    rise = b.nll_candidate - a.nll_candidate
    moved = flipped(a, b)
    lost, gained = (moved[a.right_candidate[moved] == side] for side in (True, False))
    shown = [
        *lost[np.argsort(-rise[lost], kind="stable")][:count],
        *gained[np.argsort(rise[gained], kind="stable")][:count],
    ]
    starts = (
        {int(label): int(np.argmax(a.sequence == label)) for label in np.unique(a.sequence[shown])} if shown else {}
    )
    return Flips(
        lost=test.only_first,
        gained=test.only_second,
        n=a.n,
        p=test.p,
        agree=float(np.mean(a.best_candidate == b.best_candidate)),
        examples=[_flip(a, b, text, int(item), float(rise[item]), starts) for item in shown],
    )


def scored_text(side: Side, items: Items, data: Data, calibration: str | None) -> tuple[Text, list[str]]:
    """The text that was scored, and what a reader must know where it is not at hand.

    Args:
        side: whose tokenizer reads it.
        items: how many sequences there are, and how long.
        data: its name and hash.
        calibration: where it is; None is the name that the rows have for it.
    """
    tokenizer, why = _tokenizer(side.bundle.path)
    if tokenizer is None:
        return Text(None, lambda ids: " ".join(f"#{each}" for each in ids)), [
            f"flipped words are shown by number: {why}"
        ]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    samples = int(np.unique(items.sequence).size)
    size = config_of(side.bundle).get("vocab_size")
    try:
        found = load_tokens(
            calibration or data.set,
            data.split,
            tokenizer=tokenizer,
            samples=samples,
            tokens=items.n // samples + 1,
            seed=side.manifest.seed,
            vocab_size=size if isinstance(size, int) else 1 << 31,
        )
    except InputError as problem:
        return Text(None, decode), [_without(data, problem.line())]
    if found.sha256 != data.sha256:
        where = calibration or data.set
        return Text(None, decode), [
            _without(data, f"the tokens of {where} have another hash than those that were scored")
        ]
    return Text(found.ids.numpy(), decode), []


def _without(data: Data, why: str) -> str:
    return (
        f"flipped words are shown without their text ({why}); --calibration names the file that was scored, {data.set}"
    )


def _tokenizer(bundle: Path) -> tuple[Any, str]:
    """A bundle's tokenizer, or why there is none."""
    folder = next(
        (each for each in (bundle / "model", bundle / "onnx") if (each / "tokenizer_config.json").is_file()), None
    )
    if folder is None:
        return None, "the bundle has no tokenizer"
    try:
        import torch  # noqa: F401 (what token sets are made of)
        from transformers import AutoTokenizer
    except ImportError as problem:
        return None, f"{problem.name} is not installed"
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True), ""
    except Exception as problem:  # whatever a damaged file makes the library raise
        return None, str(problem).splitlines()[0] if str(problem) else type(problem).__name__


def _flip(a: Items, b: Items, text: Text, item: int, rise: float, starts: dict[int, int]) -> Flip:
    sequence = int(a.sequence[item])
    position = item - starts[sequence]
    right: Literal["A", "B"] = "A" if a.right_candidate[item] else "B"
    before = follows = None
    if text.ids is not None:
        row = text.ids[sequence].tolist()
        before = text.decode(row[max(0, position + 1 - _BEFORE) : position + 1])
        follows = text.decode([row[position + 1]])
    return Flip(
        sequence=sequence,
        position=position,
        right=right,
        rise=rise,
        before=before,
        follows=follows,
        a=text.decode([int(a.best_candidate[item])]),
        a_chance=float(a.chance_candidate[item]),
        b=text.decode([int(b.best_candidate[item])]),
        b_chance=float(b.chance_candidate[item]),
    )
