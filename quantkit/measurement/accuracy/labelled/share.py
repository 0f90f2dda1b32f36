"""The share of items that a model gets right, and what it has lost against its original on the same items.

    value           k/n, with Wilson's interval
    difference      k/n − k₀/n, with a bootstrap interval over items, both sides of an item drawn together
    p               McNemar's exact test, on the items that one side alone gets right

Items that were not drawn one by one (crops of one photograph) come with cluster labels, and then all three are over the
clusters: Wilson's interval of the effective number of items, Student's t for the difference, and McNemar's p no less
than that of Student's t. `shape.clusters` says how many there are: 480 crops of five photographs are five draws, and
the intervals are as wide as that.

Where no item tells the sides apart, resampling would give an interval without width, as if a sample had proved that
there is no difference. It is then ± the upper end of Wilson's interval for 0 of n (items or clusters): 3.8/n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.measurement.accuracy.labelled.about import About
from quantkit.measurement.rows import Baseline, Interval, Row
from quantkit.stats.bootstrap import mean_interval
from quantkit.stats.clustered import clustered_mean
from quantkit.stats.shares import clustered_share, mcnemar, wilson

Array = NDArray[Any]


def share_row(
    name: str,
    right: Array,
    before: Array | None,
    *,
    about: About,
    unit: str,
    clusters: Array | None = None,
    shape: dict[str, int] | None = None,
    flags: Sequence[str] = (),
    seed: int = 0,
    **settings: float,
) -> Row:
    """A row of the share of `right` [n] bool.

    Args:
        before: what the original gets right; None where right means "as the original", whose own share is 1.
        about: what rows share.
        unit: what an item is, `image`.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.
        shape, flags, settings: of the row; the number of clusters joins `shape`.
    """
    n = right.size
    value = float(np.mean(right))
    by = unit if clusters is None else "cluster"
    if clusters is not None:
        shape = {**(shape or {}), "clusters": int(np.unique(clusters).size)}
    return Row(
        name=name,
        value=value,
        unit="1",
        stat="mean",
        better="higher",
        ci95=share_interval(right, clusters),
        n=n,
        shape=shape,
        baseline=_against(right, before, value, about.baseline, clusters, seed),
        **about.common(flags=[f"ci95-by-{by}", *flags], **settings),
    )


def _against(
    right: Array, before: Array | None, value: float, subject: str, clusters: Array | None, seed: int
) -> Baseline:
    if before is None:
        return Baseline(subject=subject, value=1.0)
    base = float(np.mean(before))
    return Baseline(
        subject=subject,
        value=base,
        ratio=value / base if base else None,
        difference=value - base,
        difference_ci95=difference_interval(right, before, clusters, seed=seed),
        p_value=mcnemar(before, right, clusters).p,
    )


def share_interval(right: Array, clusters: Array | None = None) -> Interval:
    """The 95 % interval of the share of `right` [n] bool, within 0 and 1."""
    if clusters is None:
        return wilson(int(np.sum(right)), right.size)
    return clustered_share(right, clusters)


def difference_interval(
    right: Array, before: Array, clusters: Array | None = None, *, seed: int = 0
) -> Interval | None:
    """The 95 % interval of mean(right) − mean(before), both [n] bool, paired; None of a single item or cluster."""
    moved = right.astype(np.float64) - before.astype(np.float64)
    draws = right.size if clusters is None else np.unique(clusters).size
    if draws < 2:
        return None
    if not moved.any():
        reach = wilson(0, draws)[1]
        return -reach, reach
    value = float(moved.mean())
    if clusters is not None:
        low, high = clustered_mean(moved, clusters).ci95 or (-1.0, 1.0)
        return max(-1.0, low), min(1.0, high)
    low, high = mean_interval(moved, seed=seed)
    return min(low, value), max(high, value)
