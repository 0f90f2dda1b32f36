"""How far the outputs of any graph have moved: for what is neither a classifier nor an embedding.

With y, ŷ an output of the original and of the candidate for one item, taken as vectors:

    cosine              y·ŷ / ‖y‖‖ŷ‖ of each item; not of outputs that are a single number, where it is a sign
    relative error      sqrt(Σ ‖ŷ − y‖² / Σ ‖y‖²) over all items
    same                the share of equal values, of whole numbers, truth values and texts

Outputs whose rows were chosen are compared as sets (`sets.py`).

Intervals take the item for the unit that was drawn: Student's t for the mean cosine, a bootstrap of the two sums drawn
together for the relative error. Of items that were drawn in clusters, such as crops of one photograph, the cluster is
the unit, and both are Student's t (`stats.clustered`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled.about import About, demand_alike, demand_finite
from quantkit.measurement.accuracy.labelled.pairs import cosine_row
from quantkit.measurement.accuracy.labelled.sets import equal_rows, paired, same_row, together
from quantkit.measurement.rows import Baseline, Row
from quantkit.stats.bootstrap import ratio_interval
from quantkit.stats.clustered import clustered_ratio

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
    """`accuracy.cosine` and `.relative_error` of each output of floats, `.same` of others and of sets; its name is in
    `settings.output`.

    Args:
        float_outputs: name -> `[n, ...]`, of the original; of rows whose number differs an array [n] of arrays.
        own_outputs: the same names, of the candidate.
        about: what the rows share.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.
        chosen: names of outputs that are sets of rows, whatever their shapes.

    Raises:
        ValueError: names or shapes that do not fit.
        InputError: `nothing-scored`; `outputs-not-finite`, of the original.
        GateError: `outputs-not-finite`, of the candidate.
    """
    if set(float_outputs) != set(own_outputs):
        raise ValueError(f"both sides have the same outputs, got {sorted(float_outputs)} and {sorted(own_outputs)}")
    rows: list[Row] = []
    sets: tuple[dict[str, list[Array]], dict[str, list[Array]]] = {}, {}
    for name, values in float_outputs.items():
        original, candidate = np.asarray(values), np.asarray(own_outputs[name])
        # of a graph of a fixed batch, what it gives of a whole feed is one item
        alike = clusters if clusters is None or len(clusters) == len(original) else None
        if name in chosen or original.shape[1:] != candidate.shape[1:] or object in (original.dtype, candidate.dtype):
            for side, each in zip(sets, (original, candidate), strict=True):
                side[name] = _by_item(each)
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
        raise InputError("nothing-scored", where=about.data.set, value="no outputs", rule="one is scored")
    return rows


def _by_item(values: Array) -> list[Array]:
    """The rows of each item; a number by itself is one row."""
    return [np.asarray(each) if np.ndim(each) else np.reshape(each, 1) for each in values]


def _of_sets(
    original: Mapping[str, Sequence[Array]],
    candidate: Mapping[str, Sequence[Array]],
    names: Sequence[str],
    about: About,
    clusters: Array | None,
    seed: int,
) -> list[Row]:
    """`accuracy.same` of outputs that belong together, and of floats the relative error."""
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
            for each, kind in ((original[name], "the original"), (candidate[name], "the candidate")):
                demand_finite(
                    np.concatenate([np.ravel(rows) for rows in each])[None], f"output {name}", "outputs", kind
                )
            if by == "boxes":
                sides = [(a[i], b[j], (np.arange(len(i)),) * 2) for a, b, (i, j) in sides]
            moved, size = np.array([_moved(a, b, i, j) for a, b, (i, j) in sides]).T
            rows.append(_error_row(name, moved, size, about, alike, seed))
    return rows


def _moved(original: Array, candidate: Array, left: Array, right: Array) -> tuple[float, float]:
    """(Σ ‖ŷ − y‖² over pairs and what one side alone has, Σ ‖y‖²)."""
    before, after = _vectors(original), _vectors(candidate)
    alone = np.delete(before, left, axis=0), np.delete(after, right, axis=0)
    moved = sum(float((each**2).sum()) for each in (after[right] - before[left], *alone))
    return moved, float((before**2).sum())


def _vectors(values: Array) -> Array:
    return values.reshape(values.shape[0], int(np.prod(values.shape[1:]))).astype(np.float64)


def _rows(name: str, original: Array, candidate: Array, about: About, clusters: Array | None, seed: int) -> list[Row]:
    count, width = original.shape
    lengths = np.linalg.norm(original, axis=1) * np.linalg.norm(candidate, axis=1)
    nowhere = bool((lengths == 0).any())
    found: list[Row] = []
    if width > 1:
        products = (original * candidate).sum(axis=1)
        turned = np.clip(products / np.where(lengths > 0, lengths, 1.0), -1.0, 1.0)
        flags = ["zero-outputs"] if nowhere else []
        each, unit = (np.arange(count), "item") if clusters is None else (clusters, "cluster")
        found.append(cosine_row(turned, each, about, unit, flags, _shape(clusters), output=name))
    moved, size = ((candidate - original) ** 2).sum(axis=1), (original**2).sum(axis=1)
    return [*found, _error_row(name, moved, size, about, clusters, seed)]


def _shape(clusters: Array | None) -> dict[str, int] | None:
    return None if clusters is None else {"clusters": int(np.unique(clusters).size)}


def _error_row(name: str, moved: Array, size: Array, about: About, clusters: Array | None, seed: int) -> Row:
    count = moved.size
    common: dict[str, Any] = {"name": "accuracy.relative_error", "unit": "1", "better": "lower"}
    total = float(size.sum())
    if total == 0:
        return Row(value=None, **common, **about.common(flags=["original-is-zero"], output=name))
    value = float(np.sqrt(moved.sum() / total))
    interval = None
    if clusters is not None:
        ends = clustered_ratio(moved, size, clusters).ci95
        interval = None if ends is None else (float(np.sqrt(ends[0])), float(np.sqrt(ends[1])))
    # an item of zeros has no error relative to itself: together with a neighbour it has
    elif count > 1 and (size > 0).all():
        low, high = (float(np.sqrt(max(0.0, end))) for end in ratio_interval(moved, size, seed=seed))
        interval = min(low, value), max(high, value)
    by = "item" if clusters is None else "cluster"
    return Row(
        value=value,
        stat="root_mean_square",
        ci95=interval,
        n=count,
        shape=_shape(clusters),
        baseline=Baseline(subject=about.baseline, value=0.0),
        **common,
        **about.common(flags=[f"ci95-by-{by}"] if interval else ["no-interval"], output=name),
    )
