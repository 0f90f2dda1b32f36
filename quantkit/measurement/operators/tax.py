"""Compute the tax of a quantized format: the time of a step beyond the bound of the machine's measured ceilings.

For a step of format f at batch M, with β and π (bytes read and operations a second) measured in the same run:

    bound       R = max(bytes / β, operations / π)           promised speed-up  S* = R_hp / R_f
    tax         t_f − R_f                                    delivered          S = t_hp / t_f
    captured gain   (S − 1) / (S* − 1), where S* ≥ 1.05
    bytes       weights with scales and zeros once; KV cache, inputs and outputs for each sequence
    win         the ranges of M in which the whole interval of S lies above 1. Between two batches, its lower end is
                interpolated as a straight line in log S over log M. The break-even batch is the end of the first range;
                its interval comes from the ends of resampled curves, lowered by the same margin

This module only computes; the times and ceilings are measured elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.rows import Interval, Row
from quantkit.planning import efficiency

Array = NDArray[Any]
Shape = tuple[float, float, float]

_LEAST_PROMISE = 1.05
_LARGEST = 65536.0


@dataclass(frozen=True)
class StepCost:
    """The bytes and operations of a model's step, in any runtime.

    Args:
        format: format of the weights: `int4`, `float32`.
        weight_bytes: bytes of weights that a step reads once: packed weights, scales, zeros, with those of the head.
        kv_bytes_per_token: bytes of the KV cache for each token of each sequence.
        flops_per_token: operations of the matrix products, 2 per weight, for each token.
        attention_flops: operations for each pair of a new token and a token that it attends to.
        head_flops: operations of the head, which prefill runs only for a sequence's last token; not in
            `flops_per_token`.
        io_bytes_per_token: bytes of inputs and outputs for each new token.
        compute: input type of the matrix products; its measured rate bounds them.
        attention: input type of attention and of products in floats.
        float_bytes: part of `weight_bytes` that belongs to products in floats.
        float_head_flops: `head_flops` if the head is in floats, else 0.
        many_rows: number of rows (tokens of all sequences) from which a model with two ways to multiply reads
            `many_bytes`; 0 for other models.
        many_bytes: bytes of weights that a step reads from `many_rows` rows on.
    """

    format: str
    weight_bytes: float
    kv_bytes_per_token: float = 0.0
    flops_per_token: float = 0.0
    attention_flops: float = 0.0
    head_flops: float = 0.0
    io_bytes_per_token: float = 0.0
    compute: str = "fp32"
    attention: str = "fp32"
    float_bytes: float = 0.0
    float_head_flops: float = 0.0
    many_rows: int = 0
    many_bytes: float = 0.0

    def weights(self, rows: float) -> float:
        """Return the bytes of weights that a step of `rows` rows reads."""
        return self.many_bytes if 0 < self.many_rows <= rows else self.weight_bytes

    def bytes(self, batch: float, tokens: float, context: float) -> float:
        """Return the bytes moved by a step, with `tokens` new and `context` cached tokens a sequence."""
        moved = (context + tokens) * self.kv_bytes_per_token + tokens * self.io_bytes_per_token
        return self.weights(batch * tokens) + batch * moved

    def bound(self, batch: float, tokens: float, context: float, limits: Limits) -> float | None:
        """Return the least time in seconds, `max(bytes / β, operations / π)`; None if a ceiling is unknown."""
        work = [
            (batch * (tokens * self.flops_per_token + self.head_flops), self.compute),
            (batch * _looked_at(tokens, context) * self.attention_flops, self.attention),
        ]
        if limits.read is None or any(flops and kind not in limits.compute for flops, kind in work):
            return None
        computing = sum(flops / limits.compute[kind] for flops, kind in work if flops)
        return max(self.bytes(batch, tokens, context) / limits.read, computing)

    def shares(self, batch: float, tokens: float, context: float, limits: Limits) -> dict[str, Interval] | None:
        """Return seconds of a step by component, for `planning.efficiency`; None if a ceiling is unknown."""
        inside = self.weights(batch * tokens) - self.float_bytes + batch * tokens * self.io_bytes_per_token
        flops = batch * (tokens * self.flops_per_token + self.head_flops - self.float_head_flops)
        floats = efficiency.named(efficiency.floats(self.attention), self.attention)
        cache = batch * (context + tokens) * self.kv_bytes_per_token
        seen = batch * _looked_at(tokens, context) * self.attention_flops
        parts = [
            (efficiency.named(self.format, self.compute), inside, flops, self.compute),
            (floats, self.float_bytes, batch * self.float_head_flops, self.attention),
            (efficiency.ATTENTION, cache, seen, self.attention),
        ]
        if limits.read is None or any(work and kind not in limits.compute for _, _, work, kind in parts):
            return None
        return efficiency.together(
            (what, moved / limits.read, work / limits.compute[kind] if work else 0.0)
            for what, moved, work, kind in parts
        )


@dataclass(frozen=True)
class Limits:
    """The measured roofline.

    Args:
        read: bytes read a second; None if unknown.
        compute: operations a second by input type.
        error: largest relative distance of a ceiling from an end of its interval.
        cache: bytes of the last-level cache; None if unknown.
    """

    read: float | None
    compute: Mapping[str, float]
    error: float = 0.0
    cache: int | None = None

    @classmethod
    def of(cls, measured: Sequence[Ceiling], cache: int | None = None) -> Limits:
        """Make the roofline from measured ceilings."""
        read = next((c.value for c in measured if c.name == "ceiling.read"), None)
        rates = {str(c.settings["compute_type"]): c.value for c in measured if c.name == "ceiling.compute"}
        used = [c.error for c in measured if c.name in ("ceiling.read", "ceiling.compute")]
        known = {kind: rate for kind, rate in rates.items() if rate is not None}
        return cls(read, known, max(used, default=0.0), cache)

    def promise(self, bound: float | None, hp_bound: float | None) -> dict[str, float]:
        """Return settings of a latency row: `promised`, S* = R_hp / R_f, and `promised_most`, with the ceilings' error.

        The error counts twice, for one ceiling too high and one too low. Empty if a bound is unknown.

        Args:
            bound: R_f in seconds.
            hp_bound: R_hp.
        """
        if not bound or not hp_bound:
            return {}
        return {"promised": hp_bound / bound, "promised_most": hp_bound / bound * (1 + self.error) ** 2}


def _looked_at(tokens: float, context: float) -> float:
    """Return the number of (query, key) pairs of a sequence."""
    return tokens * context + tokens * (tokens + 1) / 2


def captured_gain(row: Row) -> float | None:
    """Return (S − 1) / (S* − 1) of a `tax.total` row; None if S* is unknown or below 1.05."""
    op = row.op
    if row.value is None or op is None or not (op.bound_s and op.hp_bound_s and op.hp_s):
        return None
    promised, delivered = op.hp_bound_s / op.bound_s, op.hp_s / (row.value + op.bound_s)
    return (delivered - 1) / (promised - 1) if promised >= _LEAST_PROMISE else None


@dataclass(frozen=True)
class Win:
    """A range of M in which the subject is significantly faster. An end beyond the measured M is None."""

    start: float | None
    start_ci95: Interval | None
    end: float | None
    end_ci95: Interval | None


def win_intervals(sizes: Sequence[int], low: Sequence[float], ratio: Sequence[float], draws: Array) -> list[Win]:
    """Find the ranges of M in which the lower end of the ratio's interval lies above 1.

    Args:
        sizes: measured M, ascending.
        low: lower end of the interval of the ratio at each M.
        ratio: ratio at each M.
        draws: ratios `[len(sizes), resamples]` of each resample.
    """
    at, margin = np.log(sizes), np.log(low) - np.log(ratio)
    height = np.log(low)
    resampled = np.log(draws) + margin[:, None]
    wins: list[Win] = []
    first = 0
    while first < len(height):
        if height[first] <= 0:
            first += 1
            continue
        last = first
        while last + 1 < len(height) and height[last + 1] > 0:
            last += 1
        best = first + int(np.argmax(height[first : last + 1]))
        start, end = (_end(at, height, resampled, path) for path in (range(best, -1, -1), range(best, len(at))))
        wins.append(Win(*start, *end))
        first = last + 1
    return wins


def _end(at: Array, height: Array, resampled: Array, path: range) -> tuple[float | None, Interval | None]:
    """Find the end of a range along a path that begins inside it, with its interval."""
    crossing = _crossing(at, height, path)
    if crossing is None:
        return None, None
    # a resample without an end within the measured M ends at the edge
    others = [_crossing(at, curve, path) for curve in resampled.T]
    reached = [at[path[-1]] if other is None else other for other in others]
    low, high = np.exp(np.quantile([*reached, crossing], (0.025, 0.975)))
    end = float(np.exp(crossing))
    return end, (min(float(low), end), max(float(high), end))


def _crossing(at: Array, height: Array, path: range) -> float | None:
    """Find the first zero of a curve along a path of points (its first point if not above zero there), or None."""
    if height[path[0]] <= 0:
        return float(at[path[0]])
    for here, there in pairwise(path):
        if height[there] <= 0:
            share = height[here] / (height[here] - height[there])
            return float(at[here] + share * (at[there] - at[here]))
    return None


def ideal(
    ours: StepCost, theirs: StepCost, limits: Limits, shape: Callable[[float], Shape]
) -> tuple[float | None, str]:
    """Find the M up to which the roofline promises a gain (S* = 1), or the reason for having none.

    Args:
        ours, theirs: costs of the format and of the baseline.
        limits: the roofline.
        shape: function from M to (batch, new tokens a sequence, cached tokens); fractions are allowed.

    Returns:
        (M, "") or (None, `no-ceiling` | `ideal-wins-nowhere` | `ideal-wins-everywhere`, up to 65,536).
    """
    return ideal_sum([(ours, theirs, 1)], limits, shape)


def ideal_sum(
    parts: Sequence[tuple[StepCost, StepCost, int]], limits: Limits, shape: Callable[[float], Shape]
) -> tuple[float | None, str]:
    """Find `ideal` for successive operations, each (the format's cost, the baseline's cost, number of runs)."""

    def promise(m: float) -> float | None:
        return promised(parts, limits, shape(m))

    least, most = 1.0, _LARGEST
    start, end = promise(least), promise(most)
    if start is None or end is None:
        return None, "no-ceiling"
    if start <= 1:
        return None, "ideal-wins-nowhere"
    if end > 1:
        return None, "ideal-wins-everywhere"
    while most / least > 1.0001:
        middle = math.sqrt(least * most)
        if (promise(middle) or 0.0) > 1:
            least = middle
        else:
            most = middle
    return math.sqrt(least * most), ""


def promised(parts: Sequence[tuple[StepCost, StepCost, int]], limits: Limits, shape: Shape) -> float | None:
    """Return S* of successive operations; None if a ceiling is unknown."""
    bounds = [(ours.bound(*shape, limits), theirs.bound(*shape, limits), count) for ours, theirs, count in parts]
    if any(own is None or other is None for own, other, _ in bounds):
        return None
    return sum((other or 0.0) * n for _, other, n in bounds) / sum((own or 0.0) * n for own, _, n in bounds)


def win_settings(wins: Sequence[Win], sizes: Sequence[int]) -> dict[str, float | int | str | None]:
    """Return settings of a `tax.break_even` row: `win_1_from`, `win_1_to_low`, ...; null at the edges."""
    told: dict[str, float | int | str | None] = {
        "measured_from": sizes[0],
        "measured_to": sizes[-1],
        "wins": len(wins),
        "win_intervals": ", ".join(f"{w.start or sizes[0]:.4g} to {w.end or sizes[-1]:.4g}" for w in wins),
    }
    for i, win in enumerate(wins, start=1):
        for end, value, ci95 in (("from", win.start, win.start_ci95), ("to", win.end, win.end_ci95)):
            told[f"win_{i}_{end}"] = value
            told[f"win_{i}_{end}_low"], told[f"win_{i}_{end}_high"] = ci95 or (None, None)
    return told


def win_flags(wins: Sequence[Win]) -> list[str]:
    """Return the reason for a break-even row without a value: `wins-nowhere`, `wins-everywhere`, `wins-to-the-end`."""
    if not wins:
        return ["wins-nowhere"]
    if wins[0].end is None:
        return ["wins-everywhere" if wins[0].start is None else "wins-to-the-end"]
    return []
