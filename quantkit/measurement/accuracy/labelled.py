"""Score classifiers and embeddings against their original on the same items.

**Share of right answers** (`share_row`): k/n with Wilson's interval; the loss k/n − k₀/n against the original with a
paired bootstrap interval over items; and McNemar's exact test on the items that only one side gets right. If items have
cluster labels (crops of one photograph), all three are computed over clusters: 480 crops of five photographs are five
independent draws. `shape.clusters` is the number of clusters. If both sides are right on the same items, a bootstrap
interval would have no width; it is then ± the upper end of Wilson's interval for 0 of n: 3.8/n.

**Classification** (`classification`): with o, c the logits [C] of the original and of the candidate for one item,
p = softmax(o), q = softmax(c), and y the label:

    top-1           argmax c = y; the first class wins a tie
    top-5           fewer than five classes rank before y; the earlier class wins a tie
    agreement       argmax o = argmax c, over all items and over those with max p > 0.3; below that the original only
                    guesses, and a changed guess is no loss
    KL(p ‖ q)       Σ p (log p − log q), nats

Some graphs end in a softmax. If every row of the original is a distribution, both sides' values are probabilities. They
are limited to at least 1e-8 (rounded to 8 bits, most are 0) and scaled to sum to 1.

**Retrieval** (`retrieval`): the share of embeddings that find their partner among all embeddings of the other side.
With unit vectors l_i, r_j of n pairs, pair i is found among the first k if fewer than k of the r_j, j ≠ i, have
l_i · r_j ≥ l_i · r_i − 1e-6 (the float32 rounding error of equal texts). Ties count as misses: otherwise a model that
gives one vector to every text would find all. With g partners ranked before its own, a pair gains 1 / log2(2 + g) for
g < 10, else nothing; the mean gain is nDCG at 10, for a pair has one right answer. The cosine compares each embedding
with the original's of the same text; its interval is over pairs. A vector of length 0 finds nothing, is not found, and
has cosine 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import GateError, InputError
from quantkit.measurement.rows import Baseline, Data, Device, Interval, Row
from quantkit.stats.clustered import clustered_mean, mean_interval
from quantkit.stats.shares import clustered_share, mcnemar, wilson

Array = NDArray[Any]


@dataclass(frozen=True)
class About:
    """Subject, baseline and data of rows of accuracy.

    Args:
        subject: `content_sha256` of the candidate.
        baseline: `content_sha256` or another hash of the original.
        runtime, settings: runtime and settings of the candidate.
        data: scored data.
        device, versions: machine and package versions of the run.
    """

    subject: str
    baseline: str
    runtime: str
    data: Data
    device: Device | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)

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
        """Return a row of accuracy, by default a mean for which higher is better.

        Args:
            drawn: scored items; None if nothing was scored.
            held: limits to which the interval is clipped.
            against: baseline, or the original's value.
            settings: settings of the row, besides those of the run.
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
        return Row(
            name=name,
            value=value,
            shape=dict(shape) if shape else None,
            subject=self.subject,
            runtime=self.runtime,
            settings={**self.settings, **(settings or {})},
            device=self.device,
            versions=dict(self.versions),
            data=self.data,
            flags=list(flags),
            **{**fields, **others},
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """The number of items and how they were sampled.

    Args:
        n: number of items.
        unit: kind of item, such as `image`.
        clusters: cluster label `[n]` of each item (items drawn together share one); None if each was drawn alone.
    """

    n: int
    unit: str
    clusters: Array | None = None

    @property
    def by(self) -> str:
        """Unit of the intervals."""
        return self.unit if self.clusters is None else "cluster"

    @property
    def labels(self) -> Array:
        """Label [n] of each item's independent draw."""
        return np.arange(self.n) if self.clusters is None else np.asarray(self.clusters)

    @property
    def shape(self) -> dict[str, int]:
        """Sizes beside `n` in rows."""
        return {} if self.clusters is None else {"clusters": int(np.unique(self.clusters).size)}

    def among(self, chosen: Array) -> Drawn:
        """Keep the items of a mask [n]."""
        return Drawn(int(chosen.sum()), self.unit, None if self.clusters is None else self.labels[chosen])


def demand_alike(original: Array, candidate: Array, where: str, what: str) -> None:
    """Refuse two sides without items or with non-finite values.

    Raises ValueError: different shapes; InputError: `nothing-scored`; `outputs-not-finite`, of the original; GateError:
    `outputs-not-finite`, of the candidate.
    """
    if original.shape != candidate.shape:
        raise ValueError(f"both sides must have the same shape, got {original.shape} and {candidate.shape}")
    if original.size == 0:
        raise InputError("nothing-scored", where=where, value=f"no {what}", rule="scoring needs at least one item")
    for side, values in (("the original", original), ("the candidate", candidate)):
        demand_finite(values, where, what, side)


def demand_finite(values: Array, where: str, what: str, side: str) -> None:
    """Refuse NaN or infinity in items [n, ...] of one side. Raises as `demand_alike`."""
    wrong = ~np.isfinite(values).reshape(values.shape[0], -1).all(axis=1)
    if wrong.any():
        own = side == "the candidate"
        kind = GateError if own else InputError
        value = f"{side} returns NaN or infinity for {int(wrong.sum())} items, first item {int(wrong.argmax())}"
        remedy = "look for NaN or infinite weights and scales" if own else "check the model and the items"
        raise kind("outputs-not-finite", where=where, value=value, rule=f"{what} must be finite", remedy=remedy)


def share_row(
    name: str, right: Array, before: Array | None, drawn: Drawn, *, about: About, seed: int = 0, **others: Any
) -> Row:
    """Return a row of the share of `right` [n] bool.

    Args:
        right: True [n] for each right answer of the candidate.
        before: right answers of the original; None if right means "equal to the original's".
        drawn: number and sampling of the items.
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
    """Return `accuracy.cosine`: the mean of cosines [n] with its interval, the median, and the minimum as `p0`."""
    mean = clustered_mean(values, drawn.labels)
    quantiles = {"p0": float(values.min()), "p50": float(np.median(values))}
    how: dict[str, Any] = {"flags": flags, "settings": settings, "held": (-1.0, 1.0), "against": 1.0}
    return about.row("accuracy.cosine", mean.value, drawn, ci95=mean.ci95, n=values.size, quantiles=quantiles, **how)


def share_interval(right: Array, clusters: Array | None = None) -> Interval:
    """Return the 95 % interval of the share of `right` [n] bool, within 0 and 1."""
    if clusters is None:
        return wilson(int(np.sum(right)), right.size)
    return clustered_share(right, clusters)


def difference_interval(
    right: Array, before: Array, clusters: Array | None = None, *, seed: int = 0
) -> Interval | None:
    """Return the 95 % interval of mean(right) − mean(before), [n] bool, paired; None for a single item or cluster."""
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


SURE = 0.3
_TOP = 5
_LEAST_CHANCE = 1e-8
# logits per chunk, in float64
_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class _Answers:
    """Most likely class of each side, probability of the original's, and KL divergence, for n items."""

    best_original: Array
    best: Array
    chance: Array
    kl: Array


def classification(
    float_logits: Array,
    logits: Array,
    labels: Array | None,
    *,
    about: About,
    unit: str = "image",
    clusters: Array | None = None,
    seed: int = 0,
) -> list[Row]:
    """Return `accuracy.top1`, `.top5` (of more than five classes), `.top1_agreement`, `.kl`; the first two need labels.

    One row of agreement is over all items; one with `settings.surer_than` is over items with a confident original.

    Args:
        float_logits, logits: logits `[n, C]` of the original and of the candidate.
        labels: label `[n]` of each item, 0 to C − 1; None without labels.
        unit, clusters: see `Drawn`.

    Raises ValueError: shapes; InputError: `nothing-scored`, `one-class`, `label-out-of-range`; `outputs-not-finite` of
    the original; GateError: `outputs-not-finite` of the candidate.
    """
    original, candidate = np.asarray(float_logits), np.asarray(logits)
    if original.ndim != 2:
        raise ValueError(f"logits must have shape [n, C], got {original.shape}")
    demand_alike(original, candidate, about.data.set, "logits")
    count, classes = original.shape
    if classes < 2:
        value, rule = "one logit an item", "a classifier has at least two classes"
        remedy = "score a model with one output by its outputs, not as a classifier"
        raise InputError("one-class", where=about.data.set, value=value, rule=rule, remedy=remedy)
    chances = _are_chances(original)
    flags, drawn = ["outputs-are-chances"] if chances else [], Drawn(count, unit, clusters)
    common: dict[str, Any] = {"about": about, "shape": {"classes": classes}}
    rows: list[Row] = []
    if labels is not None:
        truth = _checked(np.asarray(labels), count, classes, about.data.set)
        lonely = ["labels-of-one-class"] if np.unique(truth).size == 1 else []
        ranks = [_rank(side, truth) for side in (candidate, original)]
        for name, first in (("accuracy.top1", 1), ("accuracy.top5", _TOP)):
            if first < classes:
                right, before = (rank < first for rank in ranks)
                rows.append(share_row(name, right, before, drawn, flags=lonely, seed=seed, **common))
    same, name = _answers(original, candidate, chances), "accuracy.top1_agreement"
    agree, sure = same.best == same.best_original, same.chance > SURE
    rows.append(share_row(name, agree, None, drawn, **common))
    surer: dict[str, Any] = {"settings": {"surer_than": SURE}}
    if sure.any():
        rows.append(share_row(name, agree[sure], None, drawn.among(sure), flags=flags, **surer, **common))
    else:
        rows.append(about.row(name, None, flags=[*flags, "nothing-is-surer"], shape={"classes": classes}, **surer))
    mean = clustered_mean(same.kl, drawn.labels)
    p50, p90, p99 = (float(x) for x in np.quantile(same.kl, (0.5, 0.9, 0.99)))
    quantiles = {"p50": p50, "p90": p90, "p99": p99}
    how: dict[str, Any] = {"held": (0.0, math.inf), "against": 0.0, "flags": flags, "shape": {"classes": classes}}
    kl: dict[str, Any] = {"unit": "nat", "better": "lower", "quantiles": quantiles, **how}
    return [*rows, about.row("accuracy.kl", mean.value, drawn, ci95=mean.ci95, **kl)]


def by_item(float_logits: Array, logits: Array, labels: Array | None, where: str = "") -> tuple[Array | None, Array]:
    """Return right answers [n] (None without labels), and KL(p ‖ q) [n] in nats.

    Arguments and errors: see `classification`.
    """
    demand_alike(float_logits, logits, where, "logits")
    right = None
    if labels is not None:
        count, classes = float_logits.shape
        right = _rank(logits, _checked(np.asarray(labels), count, classes, where)) < 1
    return right, _answers(float_logits, logits, _are_chances(float_logits)).kl


def _checked(labels: Array, count: int, classes: int, where: str) -> Array:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(f"expected {count} integer labels, got {labels.dtype} {labels.shape}")
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.argmax())
        value = f"label {int(labels[first])} of item {first}"
        rule = f"labels of a model with {classes} classes are 0 to {classes - 1}"
        remedy = "use samples whose labels are the model's own classes"
        raise InputError("label-out-of-range", where=where, value=value, rule=rule, remedy=remedy)
    return labels.astype(np.int64)


def _are_chances(original: Array) -> bool:
    return bool(original.min() >= 0 and np.abs(original.sum(axis=1, dtype=np.float64) - 1).max() < 1e-3)


def _parts(count: int, width: int) -> Iterator[slice]:
    rows = max(1, _ELEMENTS // width)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _rank(logits: Array, labels: Array) -> Array:
    ranks = np.empty(labels.size, np.int64)
    places = np.arange(logits.shape[1])
    for part in _parts(*logits.shape):
        own = np.take_along_axis(logits[part], labels[part, None], axis=1)
        earlier = (logits[part] == own) & (places < labels[part, None])
        ranks[part] = ((logits[part] > own) | earlier).sum(axis=1)
    return ranks


def _answers(original: Array, candidate: Array, chances: bool) -> _Answers:
    chance, kl = np.empty(original.shape[0]), np.empty(original.shape[0])
    for part in _parts(*original.shape):
        log_p, log_q = _log_chances(original[part], chances), _log_chances(candidate[part], chances)
        p = np.exp(log_p)
        chance[part] = p.max(axis=1)
        kl[part] = np.maximum((p * (log_p - log_q)).sum(axis=1), 0.0)
    return _Answers(original.argmax(axis=1), candidate.argmax(axis=1), chance, kl)


def _log_chances(values: Array, chances: bool) -> Array:
    values = values.astype(np.float64)
    if chances:
        values = np.log(np.maximum(values, _LEAST_CHANCE))
    values -= values.max(axis=1, keepdims=True)
    result: Array = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return result


# k of recall at k, and the name of its row
NAMES = {1: "accuracy.recall_at_1", 5: "accuracy.recall_at_5", 10: "accuracy.recall_at_10"}
_TIE = 1e-6
# rank from which a partner gains nothing in nDCG
_GAINED = 10
_ROWS = 512


def retrieval(
    float_left: Array, float_right: Array, left: Array, right: Array, *, about: About, seed: int = 0
) -> list[Row]:
    """Return `accuracy.recall_at_1`, `_5` and `_10` (k < n), `accuracy.ndcg_at_10`, `accuracy.cosine` to the original.

    Args:
        float_left, float_right: embeddings `[n, D]` of the original, not normalized; row i of both is one pair.
        left, right: embeddings `[n, D]` of the candidate.

    Raises ValueError: shapes; InputError: `nothing-scored`; `one-pair`; `outputs-not-finite` of the original;
    GateError: `outputs-not-finite` of the candidate.
    """
    before, after = ([np.asarray(side) for side in sides] for sides in ((float_left, float_right), (left, right)))
    if len({side.shape for side in (*before, *after)}) != 1 or before[0].ndim != 2:
        raise ValueError(f"embeddings must have shape [n, D], got {[side.shape for side in (*before, *after)]}")
    for original, candidate in zip(before, after, strict=True):
        demand_alike(original, candidate, about.data.set, "embeddings")
    count = before[0].shape[0]
    if count < 2:
        rule = "retrieval needs at least two pairs"
        raise InputError("one-pair", where=about.data.set, value="one pair", rule=rule)
    units_before, units = ([_unit(side) for side in sides] for sides in (before, after))
    (rank_before, tied_before), (rank, tied) = (_partners(*sides) for sides in (units_before, units))
    nowhere = any((np.abs(side).sum(axis=1) == 0).any() for side in (*units_before, *units))
    zero = ["zero-embeddings"] if nowhere else []
    flags = [*(["ties-are-misses"] if tied or tied_before else []), *zero]
    rows = [
        share_row(name, rank < k, rank_before < k, Drawn(count, "pair"), about=about, flags=flags, seed=seed)
        for k, name in NAMES.items()
        if k < count
    ]
    rows.append(_gained(rank, rank_before, about, flags, seed))
    both = _Pairs(count, "pair", np.tile(np.arange(count), 2))
    turned = np.concatenate([(a * b).sum(axis=1) for a, b in zip(units_before, units, strict=True)])
    return [*rows, cosine_row(np.clip(turned, -1.0, 1.0), both, about, zero)]


def _gained(rank: Array, before: Array, about: About, flags: Sequence[str], seed: int) -> Row:
    """Return the row of nDCG from the number of partners ranked before the right one, [n], of both sides."""
    gain, base = (np.where(side < _GAINED, 1 / np.log2(2.0 + side), 0.0) for side in (rank, before))
    mean, value = clustered_mean(gain, np.arange(gain.size)), float(base.mean())
    against = Baseline(
        subject=about.baseline,
        value=value,
        ratio=mean.value / value if value else None,
        difference=mean.value - value,
        difference_ci95=difference_interval(gain, base, seed=seed),
    )
    drawn = Drawn(gain.size, "pair")
    return about.row(
        "accuracy.ndcg_at_10", mean.value, drawn, ci95=mean.ci95, held=(0, 1), against=against, flags=flags
    )


class _Pairs(Drawn):
    """Items that are both sides of pairs; a pair is one independent draw."""

    @property
    def by(self) -> str:
        """See `Drawn`."""
        return self.unit

    @property
    def shape(self) -> dict[str, int]:
        """See `Drawn`."""
        return {}


def found_first(left: Array, right: Array) -> Array:
    """Return True [n] for each pair that is found at rank 1, from embeddings `[n, D]`."""
    ranks, _ = _partners(_unit(np.asarray(left)), _unit(np.asarray(right)))
    first: Array = ranks < 1
    return first


def _unit(vectors: Array) -> Array:
    vectors = vectors.astype(np.float64)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Array = vectors / np.where(length > 0, length, 1.0)
    return result


def _partners(left: Array, right: Array) -> tuple[Array, bool]:
    """Return (number of `right` ranked before the partner [n], True if there is a tie)."""
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
