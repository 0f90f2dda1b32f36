"""Retrieval: whether an embedding finds its partner among all of the other side, and how far embeddings have turned.

With unit vectors l_i, r_j of n pairs: pair i is found among the first k if fewer than k of the r_j, j ≠ i, have
l_i · r_j ≥ l_i · r_i − 1e-6. Ties count as misses: a model that gives one vector to every text would find all
otherwise, and two equal texts cannot be told apart. 1e-6 is what float32 leaves of the equality of two equal texts.

The cosine is that of each embedding to the original's of the same text, both sides of every pair; its interval takes
the pair for the unit that was drawn. `quantiles.p0` is the least of them.

A vector of length 0 has no direction: it finds nothing, is found by nothing, and its cosine counts as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled.about import About, demand_alike
from quantkit.measurement.accuracy.labelled.share import share_row
from quantkit.measurement.rows import Baseline, Row
from quantkit.stats.clustered import clustered_mean

Array = NDArray[Any]

# recall among the first so many; the names of the rows are the contract's
NAMES = {1: "accuracy.recall_at_1", 5: "accuracy.recall_at_5", 10: "accuracy.recall_at_10"}
_TIE = 1e-6
_ROWS = 512


def retrieval(
    float_left: Array, float_right: Array, left: Array, right: Array, *, about: About, seed: int = 0
) -> list[Row]:
    """`accuracy.recall_at_1`, `_5` and `_10` (of k < n), and `accuracy.cosine` to the original.

    Args:
        float_left, float_right: `[n, D]`, the original's embeddings; row i of both is one pair. Of any length.
        left, right: `[n, D]`, the candidate's.
        about: what the rows share.

    Raises:
        ValueError: shapes that do not fit.
        InputError: `nothing-scored`; `one-pair`; `outputs-not-finite`, of the original.
        GateError: `outputs-not-finite`, of the candidate.
    """
    before, after = ([np.asarray(side) for side in sides] for sides in ((float_left, float_right), (left, right)))
    if len({side.shape for side in (*before, *after)}) != 1 or before[0].ndim != 2:
        raise ValueError(f"embeddings [n, D], got {[side.shape for side in (*before, *after)]}")
    for original, candidate in zip(before, after, strict=True):
        demand_alike(original, candidate, about.data.set, "embeddings")
    count = before[0].shape[0]
    if count < 2:
        rule = "a partner is found among others, so there are at least two pairs"
        raise InputError("one-pair", where=about.data.set, value="one pair", rule=rule)
    units_before, units = ([_unit(side) for side in sides] for sides in (before, after))
    (rank_before, tied_before), (rank, tied) = (_rank(*sides) for sides in (units_before, units))
    nowhere = any((np.abs(side).sum(axis=1) == 0).any() for side in (*units_before, *units))
    zero = ["zero-embeddings"] if nowhere else []
    flags = [*(["ties-are-misses"] if tied or tied_before else []), *zero]
    rows = [
        share_row(name, rank < k, rank_before < k, about=about, unit="pair", flags=flags, seed=seed)
        for k, name in NAMES.items()
        if k < count
    ]
    turned = np.concatenate([(a * b).sum(axis=1) for a, b in zip(units_before, units, strict=True)])
    return [*rows, cosine_row(np.clip(turned, -1.0, 1.0), np.tile(np.arange(count), 2), about, "pair", zero)]


def found_first(left: Array, right: Array) -> Array:
    """Whether each pair is found at first, [n], by embeddings `[n, D]` of any length."""
    ranks, _ = _rank(_unit(np.asarray(left)), _unit(np.asarray(right)))
    first: Array = ranks < 1
    return first


def cosine_row(
    values: Array,
    clusters: Array,
    about: About,
    unit: str,
    flags: list[str],
    shape: dict[str, int] | None = None,
    **settings: str | float,
) -> Row:
    """`accuracy.cosine`: the mean of cosines [n] with its interval, the median, and the least as `p0`."""
    mean = clustered_mean(values, clusters)
    return Row(
        name="accuracy.cosine",
        value=mean.value,
        unit="1",
        stat="mean",
        better="higher",
        quantiles={"p0": float(values.min()), "p50": float(np.median(values))},
        ci95=None if mean.ci95 is None else (max(-1.0, mean.ci95[0]), min(1.0, mean.ci95[1])),
        n=values.size,
        shape=shape,
        baseline=Baseline(subject=about.baseline, value=1.0),
        **about.common(flags=[f"ci95-by-{unit}", *flags], **settings),
    )


def _unit(vectors: Array) -> Array:
    """Vectors [n, D] of length 1, those of length 0 as they are, in float64."""
    vectors = vectors.astype(np.float64)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Array = vectors / np.where(length > 0, length, 1.0)
    return result


def _rank(left: Array, right: Array) -> tuple[Array, bool]:
    """(how many of `right` lie before the partner [n], whether any of them by a tie)."""
    rank = np.empty(left.shape[0], np.int64)
    tied = False
    own = (left * right).sum(axis=1)
    lost = (np.abs(left).sum(axis=1) == 0) | (np.abs(right).sum(axis=1) == 0)
    for start in range(0, rank.size, _ROWS):
        part = slice(start, min(start + _ROWS, rank.size))
        others = left[part] @ right.T - own[part, None]
        others[np.arange(part.stop - start), np.arange(start, part.stop)] = -np.inf
        rank[part] = (others >= -_TIE).sum(axis=1)
        tied |= bool(((np.abs(others) <= _TIE).any(axis=1) & ~lost[part]).any())
    rank[lost] = rank.size
    return rank, tied
