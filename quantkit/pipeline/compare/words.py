"""The next words that flipped between A and B, with their text: the scored tokens are read again, and known by hash."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.calibrate.tokens.ids import load_tokens
from quantkit.errors import InputError, QuantkitError
from quantkit.measurement.accuracy.positions import Items, flipped
from quantkit.measurement.compared import WordFlip, WordFlips
from quantkit.measurement.rows import Data
from quantkit.model.source import pretrained
from quantkit.pipeline.compare.sides import BundleSide
from quantkit.pipeline.measure import config_of
from quantkit.runtimes.text import Tokenizer
from quantkit.stats.shares import mcnemar

Array = NDArray[Any]
Decode = Callable[[Sequence[int]], str]

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


def flips(a: Items, b: Items, text: Text, count: int) -> WordFlips:
    """What flipped, with `count` examples of each kind: where the chance of what follows has changed most."""
    test = mcnemar(a.right_candidate, b.right_candidate, b.clusters()[0])
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
    return WordFlips(
        lost=test.only_first,
        gained=test.only_second,
        n=a.n,
        p=test.p,
        agree=float(np.mean(a.best_candidate == b.best_candidate)),
        examples=[_flip(a, b, text, int(item), float(rise[item]), starts) for item in shown],
    )


def scored_text(side: BundleSide, items: Items, data: Data, calibration: str | None) -> tuple[Text, list[str]]:
    """The text that was scored, and what a reader must know where it is not at hand.

    Args:
        items: how many sequences there are, and how long.
        data: its name and hash.
        calibration: where it is; None is the name that the rows have for it.

    Raises:
        InputError: where `calibration` says where it is: `items-differ` and those of `load_tokens`.
    """
    folders = (side.bundle.path / place for place in ("model", "onnx"))
    folder = next((each for each in folders if (each / "tokenizer_config.json").is_file()), None)
    if folder is None:
        return Text(None, _numbers), ["flipped words are shown as numbers: the bundle has no tokenizer"]
    missing = next((package for package in ("torch", "transformers") if not machine.has(package)), None)
    if missing is not None:
        return Text(None, _decode_alone(folder)), [_without(data, f"{missing} is not installed")]
    decode: Decode = _numbers
    try:
        tokenizer = _loaded(folder)
        decode = functools.partial(_decoded, tokenizer)
        return Text(_ids(side, tokenizer, items, data, calibration or data.set), decode), []
    except InputError as problem:
        if calibration is not None:
            raise
        return Text(None, decode), [_without(data, problem.line())]


def _ids(side: BundleSide, tokenizer: Any, items: Items, data: Data, reference: str) -> Array:
    """The scored token ids, [samples, tokens], read again.

    Raises:
        InputError: `items-differ`, other ids; those of `load_tokens`.
    """
    samples = int(np.unique(items.sequence).size)
    chosen = side.manifest.recipe.get("calibration") or {}
    size = config_of(side.bundle).get("vocab_size")
    found = load_tokens(
        reference,
        data.split,
        tokenizer=tokenizer,
        samples=samples,
        tokens=items.n // samples + 1,
        seed=side.manifest.seed,
        vocab_size=size if isinstance(size, int) else 1 << 31,
        # rows that do not say what their sequences begin with may be older than BOS in them
        special="none" if data.begins is None else "before",
        template=chosen.get("template"),
    )
    _demand_scored(found.sha256, data, reference)
    ids: Array = found.ids.numpy()
    return ids


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(f"#{each}" for each in ids)


def _decode_alone(folder: Path) -> Decode:
    """Ids as text by the tokenizer's file alone; as numbers, where that cannot be had."""
    try:
        return Tokenizer(folder).decode
    except QuantkitError:
        return _numbers


def _demand_scored(found: str, data: Data, where: str) -> None:
    if found != data.sha256:
        rule = f"those that were scored have {data.sha256[:12]}"
        raise InputError("items-differ", where=where, value=f"its tokens have the hash {found[:12]}", rule=rule)


def _without(data: Data, why: str) -> str:
    return f"flipped words are shown without their text ({why}); it is {data.set}, and --calibration says where"


def _loaded(folder: Path) -> Any:
    """The tokenizer as transformers has it, with which the text was tokenized.

    Raises:
        InputError: `tokenizer-damaged`.
    """
    try:
        return pretrained.tokenizer(folder)
    except InputError:
        raise
    except Exception as problem:  # whatever a damaged file makes the library raise
        said = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise InputError("tokenizer-damaged", where=str(folder), value=said) from problem


def _flip(a: Items, b: Items, text: Text, item: int, rise: float, starts: dict[int, int]) -> WordFlip:
    sequence = int(a.sequence[item])
    position = item - starts[sequence]
    right: Literal["A", "B"] = "A" if a.right_candidate[item] else "B"
    before = follows = None
    if text.ids is not None:
        row = text.ids[sequence].tolist()
        before = text.decode(row[max(0, position + 1 - _BEFORE) : position + 1])
        follows = text.decode([row[position + 1]])
    return WordFlip(
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
