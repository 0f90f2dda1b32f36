"""How far the correlations of two halves of the tokens are apart, in one launch over the upper triangle.

    ¼ sum_{i<j} (R₁ - R₂)²    and    sum_{i<j} R²        r_ij = h_ij / sqrt(h_ii h_jj)

It is the twin of `InputStats.noise` (`calibrate/statistics/sums.py`), which is the first by the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# columns of a square, warps
SQUARE, WARPS = 64, 8


@triton.jit
def size_of(halves_ptr, place, tokens, K):
    """Square roots of the diagonal; infinite where it is zero, so that what is divided by it is none."""
    at = halves_ptr + place.to(tl.int64) * K + place
    first = tl.load(at, mask=place < K, other=0.0)
    second = tl.load(at + tl.cast(K, tl.int64) * K, mask=place < K, other=0.0)
    square = tl.math.div_rn(first + second, tl.zeros_like(first) + tokens)
    return tl.where(square > 0.0, tl.math.sqrt_rn(tl.maximum(square, 0.0)), float("inf"))


@triton.jit
def apart_and_both(
    halves_ptr,  # [2, K, K] float32
    parts_ptr,  # [2, squares, squares] float64
    tokens,
    first_count,
    second_count,
    K,
    SQUARE: tl.constexpr,
):
    """See the module."""
    across, down = tl.program_id(0), tl.program_id(1)
    rows = down * SQUARE + tl.arange(0, SQUARE)
    columns = across * SQUARE + tl.arange(0, SQUARE)
    apart = tl.zeros((SQUARE,), tl.float32)
    both = tl.zeros((SQUARE,), tl.float32)
    if across >= down:
        # beyond the last column too, a size is infinite
        mask = (rows[:, None] < columns[None, :]) & (columns < K)[None, :]
        at = halves_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        one = tl.load(at, mask=mask, other=0.0)
        other = tl.load(at + tl.cast(K, tl.int64) * K, mask=mask, other=0.0)
        scale = size_of(halves_ptr, rows, tokens, K)[:, None] * size_of(halves_ptr, columns, tokens, K)[None, :]
        gap = tl.math.div_rn(one, tl.zeros_like(one) + first_count)
        gap = tl.math.div_rn(gap, scale) - tl.math.div_rn(
            tl.math.div_rn(other, tl.zeros_like(one) + second_count), scale
        )
        whole = tl.math.div_rn(tl.math.div_rn(one + other, tl.zeros_like(one) + tokens), scale)
        apart += tl.sum(gap * gap, axis=0)
        both += tl.sum(whole * whole, axis=0)
    place = tl.cast(down, tl.int64) * tl.num_programs(0) + across
    every = tl.cast(tl.num_programs(0), tl.int64) * tl.num_programs(1)
    tl.store(parts_ptr + place, tl.sum(apart, axis=0).to(tl.float64) / 4)
    tl.store(parts_ptr + every + place, tl.sum(both, axis=0).to(tl.float64))


@torch.library.custom_op("quantkit::chance", mutates_args=())
def chance(halves: Tensor, counts: list[int], tokens: int) -> Tensor:
    """[2, squares] float64, to be added up and divided (`quotient`).

    Args:
        halves: [2, K, K] float32, sums of products over each half.
        counts: tokens of each half, neither 0.
        tokens: by which the sum of both becomes a mean.
    """
    made = _room(halves)
    squares = triton.cdiv(halves.shape[1], SQUARE)
    apart_and_both[(squares, squares)](
        halves, made, float(tokens), float(counts[0]), float(counts[1]), halves.shape[1],
        SQUARE=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return made


@chance.register_fake
def _(halves, counts, tokens):
    return _room(halves)


def _room(halves: Tensor) -> Tensor:
    return halves.new_empty((2, triton.cdiv(halves.shape[1], SQUARE) ** 2), dtype=torch.float64)
