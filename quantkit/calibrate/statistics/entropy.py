"""How far a grid reaches so that what it makes of a distribution tells least apart from it: the least KL divergence.

Migacz, "8-bit Inference with TensorRT", GTC 2017; the calibrators of TensorRT and ONNX Runtime do the same. Values are
counted in bins of one width. For each range that is tried, with P the bins inside of it,

    P gets what lies outside at its outermost bins, as it will saturate; Q does not
    Q is P on the grid: the bins of one code share its mass evenly, as far as they are not empty
    KL(P || Q) = Σ P log(P / Q),  both of sum 1

There, a grid is symmetric and one threshold is looked for. Here, the codes are those that the scheme's own scale and
zero point make, so that a grid may have two ends: both are first shrunk alike, then each for itself while that helps.
Zeros are not counted, since zero is always a code: half of what a ReLU makes is zeros, and spread over the bins of
their code they would ask for ever narrower ranges. Bins are linear in the values, as there: where one is a thousand
times larger than nearly all others, these fall into a few bins, and `mse` knows better.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.formats.base import activation

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import ActivationScheme, CacheScheme

# of the whole range: 16 a code, as TensorRT's 2,048 for 128
_BINS = 4096
# tried are multiples of so many bins, down to where a bin is a code
_STEP, _FEWEST = 128, 256
_ROUNDS = 3

Array = NDArray[Any]


def reach(values: Tensor, counts: Tensor, scheme: ActivationScheme | CacheScheme) -> tuple[float, float]:
    """From where to where the grid goes.

    Args:
        values: that came, ascending, float32, each the nearest of bfloat16 to what it stands for.
        counts: how often.
    """
    low, high = min(float(values[0]), 0.0), max(float(values[-1]), 0.0)
    if scheme.symmetric:
        low, high = -max(-low, high), max(-low, high)
    there = values != 0
    edges = np.linspace(low, high, _BINS + 1)
    if not bool(there.any()) or not bool((np.diff(edges) > 0).all()):
        return low, high
    mass = _binned(values[there], counts[there], edges)
    origin = int(np.abs(edges).argmin())

    def cost(ends: tuple[int, int]) -> float:
        return _divergence(mass, edges, ends, scheme)

    below, above = origin, _BINS - origin
    shares = [number / _BINS for number in range(_BINS, _FEWEST - 1, -_STEP)]
    best = _least(((origin - round(share * below), origin + round(share * above)) for share in shares), cost)
    for _ in range(0 if scheme.symmetric or not below or not above else _ROUNDS):
        before = best
        best = _least(((best[0], origin + round(share * above)) for share in shares), cost)
        best = _least(((origin - round(share * below), best[1]) for share in shares), cost)
        if best == before:
            break
    return min(float(edges[best[0]]), 0.0), max(float(edges[best[1]]), 0.0)


def _least(tried: Iterable[tuple[int, int]], cost: Any) -> tuple[int, int]:
    """What costs least; of equals the first."""
    found: tuple[int, int] = min(tried, key=cost)
    return found


def _binned(values: Tensor, counts: Tensor, edges: Array) -> Array:
    """Counts of bfloat16 values in linear bins, [len(edges) - 1]: each spread over what rounds to it."""
    bits = values.to(torch.bfloat16).view(torch.int16)
    away, towards = ((bits + step).view(torch.bfloat16).float() for step in (1, -1))
    ends = [((values + torch.where(torch.isfinite(end), end, values)) / 2).numpy() for end in (away, towards)]
    lower, upper = (np.clip(pick(*ends), edges[0], edges[-1]) for pick in (np.minimum, np.maximum))
    total = np.cumsum(counts.numpy(), dtype=np.float64)
    places = np.stack([lower, upper], axis=1).reshape(-1)
    reached = np.stack([total - counts.numpy(), total], axis=1).reshape(-1)
    found: Array = np.diff(np.interp(edges, places, reached, left=0.0, right=total[-1]))
    found[0] += np.interp(edges[0], places, reached)  # all of a value that is the end itself
    return found


def _divergence(mass: Array, edges: Array, ends: tuple[int, int], scheme: ActivationScheme | CacheScheme) -> float:
    first, last = ends
    inside = mass[first:last]
    there = np.flatnonzero(inside)
    if not len(there):
        return float("inf")
    parts = inside[there]
    p = parts.copy()
    p[0] += mass[:first].sum()
    p[-1] += mass[last:].sum()
    middles = torch.from_numpy((edges[first:last] + edges[first + 1 : last + 1])[there] / 2).float()
    low, high = (torch.tensor([edges[end]], dtype=torch.float32) for end in ends)
    scale, zero = activation.parameters(low, high, scheme)
    codes = activation.apply(middles, scheme, scale, zero).numpy()
    group = np.concatenate([[0], np.cumsum(np.diff(codes) != 0)])
    q = (np.bincount(group, weights=parts) / np.bincount(group))[group]
    p, q = p / p.sum(), q / q.sum()
    return float((p * np.log(p / q)).sum())
