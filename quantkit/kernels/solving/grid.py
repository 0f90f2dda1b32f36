"""The grid that a kernel rounds to: whole numbers between two ends, or a table of any values.

A table is `values`, rising, and `edges` between them: what is above the first i edges becomes `values[i]`. A tie is
part of an edge: where the format rounds it up, the edge is the next number below. Both are filled up to a power of two,
so that a search takes the same steps everywhere.

Whole numbers come with their ranges: `spanned` is `parameters` of `formats/base/integers.py`, `kept` its `stored`, by
bits, since all that a scale type does to a scale is to bound it and to round its mantissa.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor


def search_steps(values: Tensor | None) -> int:
    """Comparisons that find one of so many values; 0 of whole numbers."""
    return 0 if values is None else (values.numel() - 1).bit_length()


def require_contiguous(*tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor that does not lie in memory as the kernels read it."""
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        raise ValueError("kernels read contiguous tensors")


def tabled(values: Tensor, snap: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """`values` and `edges` of the grid that `snap` rounds to.

    Args:
        values: all of the grid, in any order and repeated as it may be; what is not finite is no part of it.
        snap: float32 -> the nearest of them.
    """
    finite = values.float().isfinite()
    # codes of positive numbers come first: turned round, minus zero comes before zero
    turned = torch.where(finite, values, torch.where(finite, values, -torch.inf).max()).float().flip(0)
    rising = turned.sort(stable=True).values
    size = 1 << (len(rising) - 1).bit_length()
    rising = torch.cat([rising, rising[-1:].expand(size - len(rising))])
    middles = (rising[1:] + rising[:-1]) / 2
    edges = torch.where(snap(middles) == rising[1:], middles.nextafter(torch.full_like(middles, -torch.inf)), middles)
    return rising, edges


@triton.jit
def whole(units):
    """The nearest whole numbers, ties to even; of sizes below 2^22, where the sum has no bits for fractions."""
    return (units + 12582912.0) - 12582912.0


@triton.jit
def snapped(units, low, high, values_ptr, edges_ptr, STEPS: tl.constexpr):
    """The values of the grid that are nearest to `units`, float32; `low` and `high` are those of whole numbers."""
    if STEPS == 0:
        return whole(tl.minimum(tl.maximum(units, low), high))
    else:
        place = tl.zeros(units.shape, tl.int32)
        for i in tl.static_range(STEPS):
            edge = tl.load(edges_ptr + place + ((1 << (STEPS - 1 - i)) - 1))
            place += tl.where(units > edge, 1 << (STEPS - 1 - i), 0)
        return tl.load(values_ptr + place)


@triton.jit
def kept(scale, least, most, EVEN: tl.constexpr, HALF: tl.constexpr):
    """Scales as they are stored, float32: bounded, then EVEN bits of the mantissa rounded away, ties to even, then
    HALF bits, ties away from zero."""
    bits = tl.minimum(tl.maximum(scale, least), most).to(tl.int32, bitcast=True)
    if EVEN > 0:
        bits = (bits + ((1 << (EVEN - 1)) - 1) + ((bits >> EVEN) & 1)) & -(1 << EVEN)
    if HALF > 0:
        bits = (bits + (1 << (HALF - 1))) & -(1 << HALF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def spanned(bottom, top, low, high, least, most, SYMMETRIC: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr):
    """Scale and zero point, float32, of whole numbers from `low` to `high` over values between `bottom` and `top`."""
    if SYMMETRIC:
        scale = kept(tl.math.div_rn(tl.maximum(-bottom, top), high + 0.5), least, most, EVEN, HALF)
        return scale, tl.zeros_like(scale)
    else:
        bottom, top = tl.minimum(bottom, 0.0), tl.maximum(top, 0.0)
        scale = kept(tl.math.div_rn(top - bottom, high - low), least, most, EVEN, HALF)
        return scale, whole(tl.minimum(tl.maximum(low - tl.math.div_rn(bottom, scale), low), high))
