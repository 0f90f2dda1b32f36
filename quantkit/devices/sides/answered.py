"""What a device said of positions and samples, put together again, and refused where it is not what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.devices.answers import SampleOutputs, ScoredStretch, invalid, read
from quantkit.devices.collect import CollectedCells

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet


def items_of(answers: CollectedCells, tokens: TokenSet) -> dict[str, Any]:
    """Way -> the numbers of all positions, in order. Raises InputError `answer-invalid`."""
    from quantkit.measurement.accuracy.positions import DTYPES, Items

    ways: dict[str, list[ScoredStretch]] = {}
    for cell, rows in answers.cells.items():
        for row in rows if cell.startswith("scored-") else ():
            found = read(ScoredStretch, row, answers.on)
            ways.setdefault(found.way, []).append(found)
    count, length = tokens.ids.shape
    made = {}
    for way, parts in ways.items():
        arrays: dict[str, list[Any]] = {name: [] for name in DTYPES}
        for part in parts:
            sizes = {len(values) for values in part.found.values()}
            if set(part.found) != {*DTYPES} - {"sequence"} or len(sizes) != 1:
                raise invalid(answers.on, f"scored: {', '.join(part.found)}"[:200])
            arrays["sequence"].append(np.full(next(iter(sizes)), part.sequence))
            for name, values in part.found.items():
                arrays[name].append(np.array(values))
        items = Items(**{name: np.concatenate(parts).astype(DTYPES[name]) for name, parts in arrays.items()})
        if not np.array_equal(items.sequence, np.repeat(np.arange(count), length - 1)):
            raise invalid(answers.on, f"{items.n} positions, not the {count * (length - 1)} that were asked for")
        made[way] = items
    if not made:
        raise invalid(answers.on, "no position")
    return made


def outputs_of(answers: CollectedCells, count: int) -> dict[str, Any]:
    """Name -> what came out, [count, ...]. Raises InputError `answer-invalid`."""
    parts: dict[str, list[Any]] = {}
    done, numbers = 0, np.empty(0, np.float32)
    for cell, rows in answers.cells.items():
        for row in rows if cell.startswith("outputs-") else ():
            found = read(SampleOutputs, row, answers.on)
            if found.first != done or found.at != len(numbers):
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            numbers = np.concatenate([numbers, np.array(found.numbers, np.float32)])
            if cell != f"outputs-{done}":  # more of the same samples follows
                continue
            try:
                arrays = found.arrays(numbers)
            except ValueError:
                raise invalid(answers.on, f"{cell}: numbers that do not fit their shape") from None
            if len({array.shape[:1] for array in arrays.values()}) != 1 or not next(iter(arrays.values())).ndim:
                raise invalid(answers.on, f"{cell}: not the samples that were asked for")
            done += len(next(iter(arrays.values())))
            numbers = np.empty(0, np.float32)
            for name, array in arrays.items():
                parts.setdefault(name, []).append(array)
    if done != count:
        raise invalid(answers.on, f"{done} samples, not {count}")
    try:
        return {name: np.concatenate(found) for name, found in parts.items()}
    except ValueError:
        raise invalid(answers.on, "samples of several shapes") from None
