"""Agreement of outputs that a graph has chosen: detections, indices, whatever the last bit of a score lets in or out.

Of one sample the original gives k rows, the candidate k′. Outputs with as many rows in every sample belong together
(boxes, scores, labels). Where one of them has boxes, rows are paired by them, largest overlap first, from half on; else
whole numbers and texts are paired with their equals, and floats in their order.

    same                2 Σ pairs / Σ (k + k′), the pairs with equal values; of boxes those that overlap by half (IoU)
    relative error      as of other outputs, over the pairs; where their order is what pairs them, what one side alone
                        has counts in full

Boxes are corners where no first corner lies beyond the second, else a centre and sizes; a column of zeros before them
numbers the samples of a batch. Intervals take the sample, or the cluster of alike ones, for the unit that was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.measurement.accuracy.labelled.about import About
from quantkit.measurement.rows import Baseline, Interval, Row
from quantkit.stats.clustered import clustered_ratio
from quantkit.stats.shares import wilson

Array = NDArray[Any]
Side = Mapping[str, Sequence[Array]]
# indices of rows of the original and of the candidate that are paired
Pairs = tuple[Array, Array]

_OVERLAP = 0.5
NOTHING = "nothing-chosen"


def together(original: Side) -> list[list[str]]:
    """Names of outputs that have as many rows in every sample."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, values in original.items():
        groups.setdefault(tuple(len(each) for each in values), []).append(name)
    return list(groups.values())


def paired(original: Side, candidate: Side, names: Sequence[str]) -> dict[str, tuple[list[Pairs], str]]:
    """Name -> (pairs of each sample, what they are paired by: `boxes`, `values`, `order`)."""
    read = {name: _boxes([*original[name], *candidate[name]]) for name in names}
    boxes = next((name for name, found in read.items() if found is not None), None)
    whole = {name: [len(each) for each in candidate[name]] for name in names}
    if boxes is not None:
        corners, count = read[boxes], len(original[boxes])
        assert corners is not None
        by = [_overlapping(corners[i], corners[count + i]) for i in range(count)]
    found: dict[str, tuple[list[Pairs], str]] = {}
    for name in names:
        sides = list(zip(original[name], candidate[name], strict=True))
        if boxes is not None and whole[name] == whole[boxes]:
            found[name] = by, "boxes"
        elif sides and sides[0][0].dtype.kind == "f":
            found[name] = [(np.arange(min(len(a), len(b))),) * 2 for a, b in sides], "order"
        else:
            found[name] = [_equal(a, b) for a, b in sides], "values"
    return found


def equal_rows(before: Array, after: Array) -> Array:
    """Tell whether rows [k, ...] are the same, [k]."""
    result: Array = (before == after).all(axis=tuple(range(1, before.ndim)))
    return result


def same_row(
    name: str, same: Array, size: Array, about: About, clusters: Array | None, counts: dict[str, int], by: str
) -> Row:
    """`accuracy.same`: Σ same / Σ size of items [n], with an interval over them or their clusters."""
    own: dict[str, Any] = {"output": name, "by": by}
    common: dict[str, Any] = {"name": "accuracy.same", "unit": "1", "better": "higher"}
    if not size.sum():
        return Row(value=None, **common, **about.common(flags=[NOTHING], **own))
    drawn = np.arange(same.size) if clusters is None else clusters
    found = clustered_ratio(same, size, drawn)
    interval: Interval | None = found.ci95
    if found.value in (0.0, 1.0):  # alike everywhere is no proof that it is so beyond the sample
        interval = wilson(round(found.value) * found.clusters, found.clusters)
    shape = {**counts, **({} if clusters is None else {"clusters": found.clusters})}
    return Row(
        value=found.value,
        stat="mean",
        ci95=None if interval is None else (interval[0], min(1.0, interval[1])),
        n=same.size,
        shape=shape or None,
        baseline=Baseline(subject=about.baseline, value=1.0),
        **common,
        **about.common(flags=[f"ci95-by-{'item' if clusters is None else 'cluster'}"], **own),
    )


def _equal(before: Array, after: Array) -> Pairs:
    """Rows of the same values, each once."""
    left: dict[bytes, list[int]] = {}
    for index, row in enumerate(after):
        left.setdefault(row.tobytes(), []).append(index)
    pairs = [(i, left[key].pop(0)) for i, row in enumerate(before) if left.get(key := row.tobytes())]
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _boxes(samples: Sequence[Array]) -> list[Array] | None:
    """The corners of boxes, [k, 4] of each sample; None where they are none."""
    if any(each.ndim != 2 or each.shape[1] < 4 or each.dtype.kind != "f" for each in samples):
        return None
    whole = np.concatenate(samples).astype(np.float64)
    first = int(whole.shape[1] > 4 and len(whole) > 0 and not whole[:, 0].any())
    near, far = whole[:, first : first + 2], whole[:, first + 2 : first + 4]
    if (far < near).any():
        if (far < 0).any():
            return None
        near, far = near - far / 2, near + far / 2
    ends = np.cumsum([len(each) for each in samples])[:-1]
    return list(np.split(np.concatenate([near, far], axis=1), ends))


def _overlapping(before: Array, after: Array) -> Pairs:
    """Pairs of boxes, largest overlap first, each box once."""
    one, other = before[:, None], after[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    shared = np.maximum(sides, 0.0).prod(axis=-1)
    areas = [(box[..., 2:] - box[..., :2]).prod(axis=-1) for box in (one, other)]
    union = areas[0] + areas[1] - shared
    overlap = np.where(union > 0, shared / np.where(union > 0, union, 1.0), (one == other).all(axis=-1))
    free = np.ones(len(before), bool), np.ones(len(after), bool)
    pairs = []
    for place in np.argsort(-overlap, axis=None, kind="stable"):
        i, j = divmod(int(place), len(after))
        if overlap[i, j] < _OVERLAP:
            break
        if free[0][i] and free[1][j]:
            free[0][i] = free[1][j] = False
            pairs.append((i, j))
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
