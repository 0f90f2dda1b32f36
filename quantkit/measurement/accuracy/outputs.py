"""Compare the outputs of a graph that is neither a classifier nor an embedding with its original's.

With y, ŷ an output of the original and of the candidate for one item, as vectors:

    cosine              y·ŷ / ‖y‖‖ŷ‖ of each item; left out for single numbers, where it is only a sign
    relative error      sqrt(Σ ‖ŷ − y‖² / Σ ‖y‖²) over all items
    same                share of equal values, for integers, booleans and texts

Items are the independent draws: the interval is Student's t for the mean cosine, and a bootstrap of both sums together
for the relative error. If items were drawn in clusters, such as crops of one photograph, these are the draws, and both
intervals are Student's t (`stats.clustered`).

**Chosen rows** (detections, indices: the last bit of a score may decide if a row appears) are compared as sets. Outputs
with equal numbers of rows in every sample belong together (boxes, scores, labels). If one of them holds boxes, rows are
paired by largest overlap (IoU), from 0.5 up. Otherwise equal integers or texts are paired, and floats in their order.
`same` is then 2 Σ pairs / Σ (k + k′) over pairs with equal values; boxes are equal from an IoU of 0.5. With floats
paired in order, an unpaired row counts in full as an error. Boxes are two corners if no first corner lies beyond the
second, else centre and size; a leading column of zeros is the index of the sample in a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled import About, Drawn, cosine_row, demand_alike, demand_finite
from quantkit.measurement.rows import Interval, Row
from quantkit.stats.clustered import clustered_ratio, ratio_interval
from quantkit.stats.shares import wilson

Array = NDArray[Any]


def outputs(
    float_outputs: Mapping[str, Array],
    own_outputs: Mapping[str, Array],
    *,
    about: About,
    clusters: Array | None = None,
    seed: int = 0,
    chosen: Collection[str] = (),
) -> list[Row]:
    """Return `accuracy.cosine` and `.relative_error` of each float output, `.same` of others and of sets.

    Args:
        float_outputs: outputs `[n, ...]` of the original by name; if numbers of rows vary, an array [n] of arrays.
        own_outputs: outputs of the candidate, with the same names.
        clusters: see `labelled.Drawn`.
        chosen: names of outputs to compare as sets of rows, for any shape.

    Raises ValueError: names or shapes; InputError: `nothing-scored`; `outputs-not-finite` of the original; GateError:
    `outputs-not-finite` of the candidate.
    """
    if set(float_outputs) != set(own_outputs):
        raise ValueError(f"both sides need the same outputs, got {sorted(float_outputs)} and {sorted(own_outputs)}")
    rows: list[Row] = []
    sets: tuple[dict[str, list[Array]], dict[str, list[Array]]] = {}, {}
    for name, values in float_outputs.items():
        original, candidate = np.asarray(values), np.asarray(own_outputs[name])
        # the whole output of a graph with a fixed batch is one item
        alike = clusters if clusters is None or len(clusters) == len(original) else None
        if name in chosen or original.shape[1:] != candidate.shape[1:] or object in (original.dtype, candidate.dtype):
            for side, values_ in zip(sets, (original, candidate), strict=True):
                # a single number is one row
                side[name] = [np.asarray(item) if np.ndim(item) else np.reshape(item, 1) for item in values_]
        elif original.dtype.kind != "f":
            equal = (original == candidate).reshape(len(original), -1)
            size = np.full(len(equal), equal.shape[1])
            rows.append(same_row(name, equal.sum(axis=1), size, about, alike, {}, "values"))
        elif original.size or candidate.size:
            demand_alike(original, candidate, f"output {name}", "outputs")
            rows += _rows(name, _vectors(original), _vectors(candidate), about, alike, seed)
    for names in together(sets[0]):
        rows += _of_sets(*sets, names, about, clusters, seed)
    if not rows:
        raise InputError("nothing-scored", where=about.data.set, value="no outputs", rule="scoring needs an output")
    return rows


def _of_sets(
    original: Mapping[str, Sequence[Array]],
    candidate: Mapping[str, Sequence[Array]],
    names: Sequence[str],
    about: About,
    clusters: Array | None,
    seed: int,
) -> list[Row]:
    rows: list[Row] = []
    for name, (pairs, by) in paired(original, candidate, names).items():
        sides = list(zip(original[name], candidate[name], pairs, strict=True))
        alike = clusters if clusters is None or len(clusters) == len(sides) else None
        counts = {"original": sum(map(len, original[name])), "candidate": sum(map(len, candidate[name]))}
        floats = original[name][0].dtype.kind == "f"
        if not floats or (by == "boxes" and original[name][0].ndim == 2):
            same = [2 * (len(i) if floats else equal_rows(a[i], b[j]).sum()) for a, b, (i, j) in sides]
            size = np.array([len(a) + len(b) for a, b, _ in sides])
            rows.append(same_row(name, np.array(same), size, about, alike, counts, by if floats else "values"))
        if floats and any(counts.values()):
            for values, kind in ((original[name], "the original"), (candidate[name], "the candidate")):
                demand_finite(
                    np.concatenate([np.ravel(rows) for rows in values])[None], f"output {name}", "outputs", kind
                )
            if by == "boxes":
                sides = [(a[i], b[j], (np.arange(len(i)),) * 2) for a, b, (i, j) in sides]
            moved, size = np.array([_moved(a, b, i, j) for a, b, (i, j) in sides]).T
            rows.append(_error_row(name, moved, size, about, Drawn(moved.size, "item", alike), seed))
    return rows


def _moved(original: Array, candidate: Array, left: Array, right: Array) -> tuple[float, float]:
    """Return (Σ ‖ŷ − y‖² over pairs and unpaired rows, Σ ‖y‖²)."""
    before, after = _vectors(original), _vectors(candidate)
    alone = np.delete(before, left, axis=0), np.delete(after, right, axis=0)
    moved = sum(float((part**2).sum()) for part in (after[right] - before[left], *alone))
    return moved, float((before**2).sum())


def _vectors(values: Array) -> Array:
    return values.reshape(values.shape[0], int(np.prod(values.shape[1:]))).astype(np.float64)


def _rows(name: str, original: Array, candidate: Array, about: About, clusters: Array | None, seed: int) -> list[Row]:
    count, width = original.shape
    drawn = Drawn(count, "item", clusters)
    lengths = np.linalg.norm(original, axis=1) * np.linalg.norm(candidate, axis=1)
    rows: list[Row] = []
    if width > 1:
        products = (original * candidate).sum(axis=1)
        turned = np.clip(products / np.where(lengths > 0, lengths, 1.0), -1.0, 1.0)
        flags = ["zero-outputs"] if (lengths == 0).any() else []
        rows.append(cosine_row(turned, drawn, about, flags, output=name))
    moved, size = ((candidate - original) ** 2).sum(axis=1), (original**2).sum(axis=1)
    return [*rows, _error_row(name, moved, size, about, drawn, seed)]


def _error_row(name: str, moved: Array, size: Array, about: About, drawn: Drawn, seed: int) -> Row:
    own: dict[str, Any] = {"better": "lower", "settings": {"output": name}}
    total = float(size.sum())
    if total == 0:
        return about.row("accuracy.relative_error", None, flags=["original-is-zero"], **own)
    value = float(np.sqrt(moved.sum() / total))
    interval = None
    if drawn.clusters is not None:
        ends = clustered_ratio(moved, size, drawn.clusters).ci95
        interval = None if ends is None else (float(np.sqrt(ends[0])), float(np.sqrt(ends[1])))
    # the relative error of an item of zeros is undefined
    elif drawn.n > 1 and (size > 0).all():
        low, high = (float(np.sqrt(max(0.0, end))) for end in ratio_interval(moved, size, seed=seed))
        interval = min(low, value), max(high, value)
    row = about.row("accuracy.relative_error", value, drawn, ci95=interval, against=0.0, stat="root_mean_square", **own)
    return row if interval else row.model_copy(update={"flags": ["no-interval"]})


Side = Mapping[str, Sequence[Array]]
# indices of paired rows of the original and of the candidate
Pairs = tuple[Array, Array]

_OVERLAP = 0.5
NOTHING = "nothing-chosen"


def together(original: Side) -> list[list[str]]:
    """Group the names of outputs with equal numbers of rows in every sample."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, values in original.items():
        groups.setdefault(tuple(len(rows) for rows in values), []).append(name)
    return list(groups.values())


def paired(original: Side, candidate: Side, names: Sequence[str]) -> dict[str, tuple[list[Pairs], str]]:
    """Return (pairs of each sample, basis of the pairing: `boxes`, `values` or `order`) by name of output."""
    read = {name: _boxes([*original[name], *candidate[name]]) for name in names}
    boxes = next((name for name, corners_of in read.items() if corners_of is not None), None)
    whole = {name: [len(rows) for rows in candidate[name]] for name in names}
    if boxes is not None:
        corners, count = read[boxes], len(original[boxes])
        assert corners is not None
        by = [_overlapping(corners[i], corners[count + i]) for i in range(count)]
    pairs_of: dict[str, tuple[list[Pairs], str]] = {}
    for name in names:
        sides = list(zip(original[name], candidate[name], strict=True))
        if boxes is not None and whole[name] == whole[boxes]:
            pairs_of[name] = by, "boxes"
        elif sides and sides[0][0].dtype.kind == "f":
            pairs_of[name] = [(np.arange(min(len(a), len(b))),) * 2 for a, b in sides], "order"
        else:
            pairs_of[name] = [_equal(a, b) for a, b in sides], "values"
    return pairs_of


def equal_rows(before: Array, after: Array) -> Array:
    """Return True [k] for each pair of equal rows [k, ...]."""
    result: Array = (before == after).all(axis=tuple(range(1, before.ndim)))
    return result


def same_row(
    name: str, same: Array, size: Array, about: About, clusters: Array | None, counts: dict[str, int], by: str
) -> Row:
    """Return `accuracy.same`: Σ same / Σ size of items [n], with an interval over them or their clusters."""
    own: dict[str, Any] = {"settings": {"output": name, "by": by}}
    if not size.sum():
        return about.row("accuracy.same", None, flags=[NOTHING], **own)
    drawn = Drawn(same.size, "item", clusters)
    ratio = clustered_ratio(same, size, drawn.labels)
    interval: Interval | None = ratio.ci95
    if ratio.value in (0.0, 1.0):  # the interval of a share of 0 or 1 needs a width
        interval = wilson(round(ratio.value) * ratio.clusters, ratio.clusters)
    held = (-np.inf, 1.0)
    return about.row("accuracy.same", ratio.value, drawn, ci95=interval, held=held, against=1.0, shape=counts, **own)


def _equal(before: Array, after: Array) -> Pairs:
    left: dict[bytes, list[int]] = {}
    for index, row in enumerate(after):
        left.setdefault(row.tobytes(), []).append(index)
    pairs = [(i, left[key].pop(0)) for i, row in enumerate(before) if left.get(key := row.tobytes())]
    indices = np.array(pairs, np.int64).reshape(-1, 2)
    return indices[:, 0], indices[:, 1]


def _boxes(samples: Sequence[Array]) -> list[Array] | None:
    """Return the corners of boxes, [k, 4] of each sample; None if they are not boxes."""
    if any(sample.ndim != 2 or sample.shape[1] < 4 or sample.dtype.kind != "f" for sample in samples):
        return None
    whole = np.concatenate(samples).astype(np.float64)
    first = int(whole.shape[1] > 4 and len(whole) > 0 and not whole[:, 0].any())
    near, far = whole[:, first : first + 2], whole[:, first + 2 : first + 4]
    if (far < near).any():
        if (far < 0).any():
            return None
        near, far = near - far / 2, near + far / 2
    ends = np.cumsum([len(sample) for sample in samples])[:-1]
    return list(np.split(np.concatenate([near, far], axis=1), ends))


def _overlapping(before: Array, after: Array) -> Pairs:
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
    indices = np.array(pairs, np.int64).reshape(-1, 2)
    return indices[:, 0], indices[:, 1]
