"""Find the nights on which a series changed its level. For display only, never for a gate.

The method is that of apache-otava 0.8.0 with its defaults, and gives its answers. Its package pins one minor version of
numpy and depends on cloud clients, so it cannot be installed beside this one. A stretch is split where two neighbouring
pieces of it, X of n and Y of m nights, are farthest apart by their energy distance

    Q(X, Y) = 2/(m+n) · ( Σ |x_i − y_j|  −  m/(n−1) · Σ_{i<k} |x_i − x_k|  −  n/(m−1) · Σ_{j<k} |y_j − y_k| ) ,

if Student's t-test, with variances that divide by n, finds different levels on both sides; the parts are then split in
turn. The search runs in windows of 50 nights that overlap by half, at ten times the requested p-value, so that some
window shows each change clearly. The weakest changes are then removed one by one, and the rest are tested on the whole
stretches between changes. (Otava keeps the old test of the change before a removed one, although its stretch is gone;
here it is tested again, which moved the answers of 3 of 20 simulated years.) Sources: Matteson and James, A
Nonparametric Approach for Multiple Change Point Analysis, JASA 109 (2014); Fleming and others, Hunter: Using Change
Point Detection to Hunt for Performance Regressions, ICPE 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.stats.clustered import special

Array = NDArray[Any]


@dataclass(frozen=True)
class Change:
    """A new level. `before`, `after`: means of the stretches up to the neighbouring changes; `p`: p-value of their
    t-test."""

    index: int
    before: float
    after: float
    p: float

    @property
    def size(self) -> float:
        """Size as a share of the smaller of the two means, without a sign."""
        if not self.before or not self.after:
            return 0.0 if self.before == self.after else float("inf")
        return max(abs(self.after / self.before - 1), abs(self.before / self.after - 1))


def changes(
    values: Sequence[float | None] | Array, *, window: int = 50, p: float = 0.001, least: float = 0.0
) -> list[Change]:
    """Find the changes of level in a series, in its order.

    Args:
        values: one value a night; None and NaN are skipped, but count in the indices.
        window: nights of one search window.
        p: largest p-value of the t-test between neighbouring levels.
        least: size that a change must exceed.

    Raises ValueError: a window of less than two nights; MissingDependency: scipy.
    """
    if window < 2:
        raise ValueError("a window is two nights at least")
    every = np.array(values, dtype=np.float64)
    there = np.flatnonzero(np.isfinite(every))
    series = every[there]
    merged = _merged(series, _split(series, window, min(1.0, 10 * p)), p, least)
    return [Change(int(there[change.index]), change.before, change.after, change.p) for change in merged]


def _split(series: Array, window: int, p: float) -> list[int]:
    """Find candidate changes in windows that overlap by half."""
    places: set[int] = set()
    start = 0
    while start < series.size:
        inside = [start + at for at in _divided(series[start : start + window], p)]
        places.update(inside)
        start = max([*inside[-1:], start + window // 2])
    return sorted(places)


def _divided(series: Array, p: float) -> list[int]:
    """Split at the largest distance within any stretch, until the t-test finds no difference."""
    ends = [0, series.size]

    @cache
    def farthest(start: int, end: int) -> tuple[float, int]:
        distance, at = _farthest(series[start:end])
        return distance, start + at

    while stretches := [(a, b) for a, b in pairwise(ends) if b - a > 1]:
        # the first of equals
        a, b = max(stretches, key=lambda stretch: farthest(*stretch)[0])
        at = farthest(a, b)[1]
        if not _compared(series[a:at], series[at:b], at).p <= p:
            break
        ends = sorted([*ends, at])
    return ends[1:-1]


def _farthest(x: Array) -> tuple[float, int]:
    """Return (largest Q, start of its second piece) over all pieces x[:t], x[t:k]."""
    size = x.size
    total = np.zeros((size + 1, size + 1))
    total[1:, 1:] = np.abs(x[:, None] - x).cumsum(axis=0).cumsum(axis=1)
    t, k = np.arange(1, size)[:, None], np.arange(2, size + 1)[None, :]
    n, m = t, np.maximum(k - t, 1)
    left, across = total[t, t], total[t, k]
    # a piece of one value has no inner distances: their sum is zero
    inner = m / np.maximum(n - 1, 1) * left / 2
    outer = n / np.maximum(m - 1, 1) * (total[k, k] - 2 * across + left) / 2
    q = np.where(k > t, 2 / (m + n) * (across - left - inner - outer), -np.inf)
    best = int(np.argmax(q))
    return float(q.flat[best]), best // q.shape[1] + 1


def _merged(series: Array, split: list[int], p: float, least: float) -> list[Change]:
    """Remove the weakest change until all that remain pass."""
    ends = [0, *split, series.size]
    kept = [_compared(series[a:b], series[b:c], b) for a, b, c in zip(ends, ends[1:], ends[2:], strict=False)]
    while kept:
        weakest = max(kept, key=lambda change: change.p)
        if weakest.p < p:
            weakest = min(kept, key=lambda change: change.size)
            if weakest.size > least:
                break
        ends.remove(weakest.index)
        kept.remove(weakest)
        # the stretches of its neighbours are longer now
        kept = [
            _compared(series[a:b], series[b:c], b)
            if weakest.index in range(a, c)
            else next(change for change in kept if change.index == b)
            for a, b, c in zip(ends, ends[1:], ends[2:], strict=False)
        ]
    return kept


def _compared(left: Array, right: Array, index: int) -> Change:
    """Apply Student's t-test with one variance, from variances that divide by n; p = 1 where both pieces have one
    value."""
    n, m, before, after = left.size, right.size, float(left.mean()), float(right.mean())
    p = 1.0
    if n + m > 2:
        spread = ((n - 1) * left.var() + (m - 1) * right.var()) / (n + m - 2) * (1 / n + 1 / m)
        if spread > 0:
            p = float(2 * special().stdtr(n + m - 2, -abs(before - after) / spread**0.5))
        else:
            p = 1.0 if before == after else 0.0
    return Change(index=index, before=before, after=after, p=p)
