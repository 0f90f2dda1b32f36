"""How far the outputs of any graph have moved: for what is neither a classifier nor an embedding.

With y, ŷ an output of the original and of the candidate for one item, taken as vectors:

    cosine              y·ŷ / ‖y‖‖ŷ‖ of each item; not of outputs that are a single number, where it is a sign
    relative error      sqrt(Σ ‖ŷ − y‖² / Σ ‖y‖²) over all items

Intervals take the item for the unit that was drawn: Student's t for the mean cosine, a bootstrap of the two sums drawn
together for the relative error. Of items that were drawn in clusters, such as crops of one photograph, the cluster is
the unit, and both are Student's t (`stats.clustered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled.about import About, demand_alike
from quantkit.measurement.accuracy.labelled.pairs import cosine_row
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
) -> list[Row]:
    """`accuracy.cosine` and `accuracy.relative_error` of each output of floats, its name in `settings.output`.

    Args:
        float_outputs: name -> `[n, ...]`, of the original.
        own_outputs: the same names and shapes, of the candidate.
        about: what the rows share.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.

    Raises:
        ValueError: names or shapes that do not fit.
        InputError: `nothing-scored`, also where no output has floats; `outputs-not-finite`, of the original.
        GateError: `outputs-not-finite`, of the candidate.
    """
    if set(float_outputs) != set(own_outputs):
        raise ValueError(f"both sides have the same outputs, got {sorted(float_outputs)} and {sorted(own_outputs)}")
    rows: list[Row] = []
    for name, values in float_outputs.items():
        original, candidate = np.asarray(values), np.asarray(own_outputs[name])
        if original.dtype.kind != "f":
            continue
        demand_alike(original, candidate, f"output {name}", "outputs")
        rows += _rows(name, _vectors(original), _vectors(candidate), about, clusters, seed)
    if not rows:
        raise InputError("nothing-scored", where=about.data.set, value="no output of floats", rule="one is scored")
    return rows


def _vectors(values: Array) -> Array:
    return values.reshape(values.shape[0], -1).astype(np.float64)


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
