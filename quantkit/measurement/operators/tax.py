"""The tax of a quantized format: what a step takes beyond what the machine's own limits ask for.

For a step of format f at batch M, with β and π (bytes read and operations a second) measured in the same run:

    bound       R = max(bytes / β, operations / π)           promised speed-up  S* = R_hp / R_f
    tax         t_f − R_f                                    delivered          S = t_hp / t_f
    captured gain   (S − 1) / (S* − 1), where S* ≥ 1.05
    bytes       weights with scales and zeros once, the cache and what goes in and out for each sequence
    win         the ranges of M where the whole interval of S lies above 1. Between two batches its lower end is a
                straight line in log S over log M; the break-even batch is where the first range ends. The interval of
                such an end: the curve of each resample, lowered by the same margin, ends somewhere too

All of it is arithmetic on numbers that were measured elsewhere.
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
    """What a step of a model must move and compute, whatever runs it.

    Args:
        format: of the weights: `int4`, `float32`.
        weight_bytes: read once a step at any batch: packed weights, scales, zeros, the head's too.
        kv_bytes_per_token: of the cache, for each token of each sequence.
        flops_per_token: 2 x the weights of the matrix products.
        attention_flops: for each new token and each token it looks at.
        head_flops: of those that a prefill does for the last token of a sequence alone; not in `flops_per_token`.
        io_bytes_per_token: what goes in and out for each new token.
        compute: the input type of the matrix products, whose measured rate bounds them.
        attention: the same of attention, and of what stays in floats.
        float_bytes: of `weight_bytes`, those of products that stay in floats.
        float_head_flops: `head_flops`, if the head stays in floats.
        many_rows: of a model that multiplies in two ways: from so many rows on, tokens of all sequences, it reads
            `many_bytes` of weights instead; 0 of others.
        many_bytes: see there.
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
        """Count the bytes of weights read by a step of `rows` rows."""
        return self.many_bytes if 0 < self.many_rows <= rows else self.weight_bytes

    def bytes(self, batch: float, tokens: float, context: float) -> float:
        """Count the bytes moved by a step of `tokens` new tokens a sequence, with `context` tokens in the cache."""
        moved = (context + tokens) * self.kv_bytes_per_token + tokens * self.io_bytes_per_token
        return self.weights(batch * tokens) + batch * moved

    def bound(self, batch: float, tokens: float, context: float, limits: Limits) -> float | None:
        """Return the least seconds, `max(bytes / β, operations / π)`; None if a ceiling is unknown."""
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
        read: bytes a second.
        compute: input type -> operations a second.
        error: the farthest that the end of a ceiling's interval lies from it, as a share.
        cache: bytes of the last-level cache; None: not known.
    """

    read: float | None
    compute: Mapping[str, float]
    error: float = 0.0
    cache: int | None = None

    @classmethod
    def of(cls, measured: Sequence[Ceiling], cache: int | None = None) -> Limits:
        """Read measured ceilings; missing ones are absent."""
        read = next((c.value for c in measured if c.name == "ceiling.read"), None)
        rates = {str(c.settings["compute_type"]): c.value for c in measured if c.name == "ceiling.compute"}
        used = [c.error for c in measured if c.name in ("ceiling.read", "ceiling.compute")]
        known = {kind: rate for kind, rate in rates.items() if rate is not None}
        return cls(read, known, max(used, default=0.0), cache)

    def promise(self, bound: float | None, hp_bound: float | None) -> dict[str, float]:
        """Return settings of a latency: `promised`, S* = R_hp / R_f, and `promised_most`, with the ceilings' error.

        Two ceilings, one too high and one too low, distort their ratio twice. Empty if a bound is unknown.

        Args:
            bound: R_f in seconds.
            hp_bound: R_hp.
        """
        if not bound or not hp_bound:
            return {}
        return {"promised": hp_bound / bound, "promised_most": hp_bound / bound * (1 + self.error) ** 2}


def _looked_at(tokens: float, context: float) -> float:
    """Count the (query, key) pairs of a sequence."""
    return tokens * context + tokens * (tokens + 1) / 2


def captured_gain(row: Row) -> float | None:
    """Return (S − 1) / (S* − 1) of a `tax.total` row; None if S* < 1.05, which promises nothing, or is unknown."""
    op = row.op
    if row.value is None or op is None or not (op.bound_s and op.hp_bound_s and op.hp_s):
        return None
    promised, delivered = op.hp_bound_s / op.bound_s, op.hp_s / (row.value + op.bound_s)
    return (delivered - 1) / (promised - 1) if promised >= _LEAST_PROMISE else None


@dataclass(frozen=True)
class Win:
    """A range of M where the subject is surely faster. An end that the measured range cuts off is None."""

    start: float | None
    start_ci95: Interval | None
    end: float | None
    end_ci95: Interval | None


def win_intervals(sizes: Sequence[int], low: Sequence[float], ratio: Sequence[float], draws: Array) -> list[Win]:
    """Find the ranges of M where the lower end of the ratio's interval lies above 1.

    Args:
        sizes: measured M, rising.
        low: lower end of the interval of the ratio at each M.
        ratio: ratio at each M.
        draws: `[len(sizes), resamples]` ratio in each resample.
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
    # a resample whose range does not end within what was measured counts as ending at the edge
    others = [_crossing(at, curve, path) for curve in resampled.T]
    reached = [at[path[-1]] if other is None else other for other in others]
    low, high = np.exp(np.quantile([*reached, crossing], (0.025, 0.975)))
    end = float(np.exp(crossing))
    return end, (min(float(low), end), max(float(high), end))


def _crossing(at: Array, height: Array, path: range) -> float | None:
    """Find the first zero of a curve along a path of points; its first point if it is there already; or None."""
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
    """Find the M up to which the roofline promises a gain, where S* = 1, or the reason for having none.

    Args:
        shape: M -> (batch, new tokens a sequence, tokens in the cache); fractions are allowed.

    Returns:
        (M, "") or (None, `no-ceiling` | `ideal-wins-nowhere` | `ideal-wins-everywhere`, up to 65,536).
    """
    return ideal_sum([(ours, theirs, 1)], limits, shape)


def ideal_sum(
    parts: Sequence[tuple[StepCost, StepCost, int]], limits: Limits, shape: Callable[[float], Shape]
) -> tuple[float | None, str]:
    """Find the `ideal` of several operations one after the other: (the format's cost, the baseline's, how often)."""

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
    """Return S* of several operations one after the other; None if a ceiling is unknown."""
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
