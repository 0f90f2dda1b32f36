"""What rows of one run share, and what both sides have to be.

**The share of items that a model gets right** (`share_row`), and what it has lost against its original on the same
items: k/n with Wilson's interval; k/n − k₀/n with a bootstrap interval over items, both sides of an item drawn
together; McNemar's exact test, on the items that one side alone gets right. Items that come with cluster labels (crops
of one photograph) have all three over the clusters; `shape.clusters` says how many there are: 480 crops of five
photographs are five draws, and the intervals are as wide as that. Where no item tells the sides apart, resampling would
give an interval without width; it is then ± the upper end of Wilson's interval for 0 of n: 3.8/n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import GateError, InputError
from quantkit.measurement.rows import Baseline, Data, Device, Interval, Row
from quantkit.stats.bootstrap import mean_interval
from quantkit.stats.clustered import clustered_mean
from quantkit.stats.shares import clustered_share, mcnemar, wilson

Array = NDArray[Any]


@dataclass(frozen=True)
class About:
    """What was measured, on what, against what.

    Args:
        subject: `content_sha256` of the candidate.
        baseline: `content_sha256`, or another hash, of the original.
        runtime: that the candidate ran in.
        data: what was scored.
        device: that it ran on.
        versions: package -> version.
        settings: of the runtime.
    """

    subject: str
    baseline: str
    runtime: str
    data: Data
    device: Device | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)

    def common(self, *, flags: Sequence[str], **settings: str | bool | int | float) -> dict[str, Any]:
        """Give the fields that every row of the run has, with settings of its own."""
        return {
            "subject": self.subject,
            "runtime": self.runtime,
            "settings": {**self.settings, **settings},
            "device": self.device,
            "versions": dict(self.versions),
            "data": self.data,
            "flags": list(flags),
        }

    def row(
        self,
        name: str,
        value: float | None,
        drawn: Drawn | None = None,
        *,
        ci95: Interval | None = None,
        held: tuple[float, float] = (-math.inf, math.inf),
        against: Baseline | float | None = None,
        flags: Sequence[str] = (),
        shape: Mapping[str, int] | None = None,
        settings: Mapping[str, str | float] | None = None,
        **others: Any,
    ) -> Row:
        """Give a row of accuracy, by default a mean of which more is better.

        Args:
            drawn: the items that it rests on; None: nothing was scored.
            held: ends that the interval keeps within.
            against: the baseline, or the original's value.
            settings: of the row, besides those of the run.
        """
        if isinstance(against, float):
            against = Baseline(subject=self.baseline, value=against)
        if ci95 is not None:
            ci95 = max(held[0], ci95[0]), min(held[1], ci95[1])
        fields: dict[str, Any] = {"unit": "1", "better": "higher", "baseline": against, "ci95": ci95}
        if drawn is not None:
            flags = [f"ci95-by-{drawn.by}", *flags]
            fields |= {"stat": "mean", "n": drawn.n}
            shape = {**(shape or {}), **drawn.shape} or None
        common = self.common(flags=flags, **(settings or {}))
        return Row(name=name, value=value, shape=dict(shape) if shape else None, **{**fields, **others}, **common)


@dataclass(frozen=True, eq=False)
class Drawn:
    """How items were drawn.

    Args:
        n: items.
        unit: what one is, `image`.
        clusters: `[n]`, items of one label were drawn together; None: each was drawn alone.
    """

    n: int
    unit: str
    clusters: Array | None = None

    @property
    def by(self) -> str:
        """What intervals are over."""
        return self.unit if self.clusters is None else "cluster"

    @property
    def labels(self) -> Array:
        """A label [n] for every draw."""
        return np.arange(self.n) if self.clusters is None else np.asarray(self.clusters)

    @property
    def shape(self) -> dict[str, int]:
        """What rows say of them beside `n`."""
        return {} if self.clusters is None else {"clusters": int(np.unique(self.clusters).size)}

    def among(self, chosen: Array) -> Drawn:
        """Keep those of a mask [n]."""
        return Drawn(int(chosen.sum()), self.unit, None if self.clusters is None else self.labels[chosen])


def demand_alike(original: Array, candidate: Array, where: str, what: str) -> None:
    """Refuse sides that cannot be compared: no items, or a number that is none.

    Raises:
        ValueError: different shapes.
        InputError: `nothing-scored`; `outputs-not-finite`, of the original.
        GateError: `outputs-not-finite`, of the candidate.
    """
    if original.shape != candidate.shape:
        raise ValueError(f"both sides have one shape, got {original.shape} and {candidate.shape}")
    if original.size == 0:
        raise InputError("nothing-scored", where=where, value=f"no {what}", rule="at least one item is scored")
    for side, values in (("the original", original), ("the candidate", candidate)):
        demand_finite(values, where, what, side)


def demand_finite(values: Array, where: str, what: str, side: str) -> None:
    """Refuse items [n, ...] of one side that are no numbers. Raises as `demand_alike`."""
    wrong = ~np.isfinite(values).reshape(values.shape[0], -1).all(axis=1)
    if wrong.any():
        own = side == "the candidate"
        kind = GateError if own else InputError
        raise kind(
            "outputs-not-finite",
            where=where,
            value=f"{side} gives NaN or infinity for {int(wrong.sum())} items, first item {int(wrong.argmax())}",
            rule=f"{what} are finite",
            remedy="look for NaN or infinite weights and scales" if own else "check the model and the items",
        )


def share_row(
    name: str,
    right: Array,
    before: Array | None,
    drawn: Drawn,
    *,
    about: About,
    seed: int = 0,
    **others: Any,
) -> Row:
    """Give a row of the share of `right` [n] bool.

    Args:
        before: what the original gets right; None where right means "as the original", whose own share is 1.
        others: see `About.row`.
    """
    value, against = float(np.mean(right)), Baseline(subject=about.baseline, value=1.0)
    if before is not None:
        base = float(np.mean(before))
        against = Baseline(
            subject=about.baseline,
            value=base,
            ratio=value / base if base else None,
            difference=value - base,
            difference_ci95=difference_interval(right, before, drawn.clusters, seed=seed),
            p_value=mcnemar(before, right, drawn.clusters).p,
        )
    return about.row(name, value, drawn, ci95=share_interval(right, drawn.clusters), against=against, **others)


def cosine_row(values: Array, drawn: Drawn, about: About, flags: Sequence[str] = (), **settings: str | float) -> Row:
    """Give `accuracy.cosine`: the mean of cosines [n] with its interval, the median, and the least as `p0`."""
    mean = clustered_mean(values, drawn.labels)
    quantiles = {"p0": float(values.min()), "p50": float(np.median(values))}
    how: dict[str, Any] = {"flags": flags, "settings": settings, "held": (-1.0, 1.0), "against": 1.0}
    return about.row("accuracy.cosine", mean.value, drawn, ci95=mean.ci95, n=values.size, quantiles=quantiles, **how)


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
