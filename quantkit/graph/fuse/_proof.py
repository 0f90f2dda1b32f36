"""The outputs of a graph in ONNX Runtime as it stands, and how far two sets of them are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.graph.outputs import steady
from quantkit.graph.run import Runner

Feeds = Sequence[Mapping[str, NDArray[Any]]]
# of float32 sums in another order; a wrong factor, axis or bias is orders of magnitude beyond
LIMIT = 1e-4
# what is never let pass, however much rounding matters to a graph
_MOST = 1e-3
_ROUNDINGS = 4
_TINY = float(np.finfo(np.float32).tiny)


def outputs(model: ir.Model, feeds: Feeds, inner: Sequence[str] = ()) -> list[list[Any]]:
    """Run a graph with the runtime's own optimisations off.

    Returns, of each feed, what the graph is compared with itself by (`graph.outputs.steady`), then the `inner` tensors.

    Raises:
        InputError: `onnx-unrunnable`.
    """
    names = [*steady(model), *inner]
    runner = Runner(model, names, threads=1, optimised=False)
    return [[found[name] for name in names] for found in map(runner, feeds)]


def limit(model: ir.Model, feeds: Feeds, expected: list[list[Any]]) -> float:
    """How far outputs may move: `LIMIT`, or four times what the last bit of the inputs moves them, if that is more.

    The second is so where outputs are all but zero on these feeds, as those of a detector that finds nothing.
    """
    nudged = [
        {name: np.nextafter(x, np.inf, dtype=x.dtype) if x.dtype.kind == "f" else x for name, x in feed.items()}
        for feed in feeds
    ]
    moved = difference(expected, outputs(model, nudged))
    return min(max(LIMIT, _ROUNDINGS * moved), _MOST) if np.isfinite(moved) else LIMIT


def difference(expected: Any, found: Any) -> float:
    """Largest difference of any output, relative to that output's largest magnitude over all feeds.

    Whole numbers and truth values have to be equal, and so do infinities and NaN in their places: else infinity.
    """
    per_output = zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True)
    return max((_apart(before, after) for before, after in per_output), default=0.0)


def _apart(expected: Sequence[Any], found: Sequence[Any]) -> float:
    largest, scale = 0.0, _TINY
    for before, after in zip(expected, found, strict=True):
        if not isinstance(before, np.ndarray) or before.dtype.kind != "f":
            if not _same(before, after):
                return float("inf")
            continue
        if before.shape != after.shape or before.dtype != after.dtype:
            return float("inf")
        finite = np.isfinite(before)
        if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
            return float("inf")
        one, other = before[finite].astype(np.float64), after[finite].astype(np.float64)
        if not np.isfinite(other).all():
            return float("inf")
        largest = max(largest, float(np.abs(one - other).max(initial=0.0)))
        scale = max(scale, float(np.abs(one).max(initial=0.0)))
    return largest / scale


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray):
        return isinstance(after, np.ndarray) and before.dtype == after.dtype and np.array_equal(before, after)
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)
