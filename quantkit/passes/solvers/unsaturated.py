"""8-bit codes whose products never saturate when pairs are added in 16 bits.

x86 processors without VNNI multiply unsigned by signed bytes in pairs, x₀q₀ + x₁q₁ with x in 0..255 (`vpmaddubsw`), and
sums beyond 2¹⁵ − 1 saturate silently. With

    max(q₀, 0) + max(q₁, 0) <= 128        and        min(q₀, 0) + min(q₁, 0) >= −128

none does: 255 · 128 = 32,640. `int7` ensures that by |q| <= 64, for four times the squared error of 8 bits.
But two neighbours are seldom both large and of one sign: scales need to be 1.2 times as wide, not twice. If two are,
one of them is reduced, and columns chosen later compensate it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.scheme import WeightScheme

# largest sum of the codes of one sign in a pair
LIMIT = 128
_STEPS, _LEAST = 16, 0.5


def bounded(scheme: WeightScheme) -> bool:
    """Tell whether codes of a scheme are multiplied as bytes with one scale a row, so that this matters."""
    return scheme.format == "int8" and scheme.symmetric and scheme.granularity == "channel"


def neighbours(columns: int) -> Tensor:
    """Return every column's partner in a pair, [K], in the order of the weights; an odd last column has itself."""
    partners = torch.arange(columns) ^ 1
    return torch.where(partners < columns, partners, torch.arange(columns))


def hold(codes: Tensor, beside: Tensor) -> None:
    """Bound codes [N], in place, by those of the neighbour chosen before."""
    torch.minimum(codes, LIMIT - beside.clamp(min=0), out=codes)
    torch.maximum(codes, -LIMIT - beside.clamp(max=0), out=codes)


def scales(target: Tensor, other: Tensor, importance: Tensor) -> Tensor:
    """Return scales [N] of int8 codes with bounded neighbours: the best of sixteen for every row.

    They go from the scale at which no code is reduced down to half of it; the best has the least error by `importance`
    [K].

    Args:
        target: [K, N], weights, transposed.
        other: [K], neighbour of every column; itself if it has none.
    """
    alone = (other == torch.arange(len(other), device=other.device))[:, None]
    beside = torch.where(alone, 0.0, target[other])
    up, down = (target.clamp(min=0) + beside.clamp(min=0)), (target.clamp(max=0) + beside.clamp(max=0))
    widest = torch.maximum(target.abs().amax(0) / 127.5, torch.maximum(up, -down).amax(0) / LIMIT)
    widest = widest.clamp(min=torch.finfo(torch.float32).tiny)
    best, least = widest, torch.full_like(widest, float("inf"))
    for step in range(_STEPS):
        scale = widest * (1 - (1 - _LEAST) * step / _STEPS)
        codes = (target / scale).round_().clamp_(-128, 127)
        beside = torch.where(alone, 0.0, codes[other])
        beyond = (codes.clamp(min=0) + beside.clamp(min=0) - LIMIT).clamp_(min=0)
        beyond -= (-LIMIT - codes.clamp(max=0) - beside.clamp(max=0)).clamp_(min=0)
        # the reduction is shared between two codes of one sign
        codes -= torch.where(codes.sign() == beyond.sign(), beyond / 2, 0.0)
        cost = importance @ (codes * scale - target).square_()
        better = cost < least
        best, least = torch.where(better, scale, best), torch.where(better, cost, least)
    return best
