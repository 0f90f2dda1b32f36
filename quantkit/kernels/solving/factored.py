"""What stands before and behind the Cholesky factor of a Hessian, one launch each.

`damped` shrinks and damps it, and lays it out in the reverse of the order of choice; `unit_of` turns the factor round
and takes its diagonal out. They are the twins of the lines of `passes/solvers/factor.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# columns of a square, warps
SQUARE, WARPS = 64, 8


@triton.jit
def shrunk_at(hessian_ptr, rows, columns, mean, keeps, share, K):
    """The damped Hessian at some places."""
    mask = (rows < K)[:, None] & (columns < K)[None, :]
    value = tl.load(hessian_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    # an input that was never seen is an identity's
    added = tl.where(value > 0.0, share * mean, (1.0 + share) * mean)
    return tl.where(rows[:, None] == columns[None, :], value + added, value * keeps), mask


@triton.jit
def damp_and_turn(
    hessian_ptr,  # [K, K] float32
    order_ptr,  # [K] int64
    mean_ptr,  # [] float32
    shrink_ptr,  # [] float64, or None
    shrink,
    share,
    whole_ptr,  # [K, K] float32, in the order of the weights
    turned_ptr,  # [K, K] float32, the last to be chosen first
    K,
    SQUARE: tl.constexpr,
):
    """See the module."""
    down, across = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    mean = tl.load(mean_ptr)
    mean = tl.where(mean > 0.0, mean, 1.0)
    keeps = 1.0 - shrink
    if shrink_ptr is not None:
        keeps = (1.0 - tl.load(shrink_ptr)).to(tl.float32)
    value, mask = shrunk_at(hessian_ptr, down, across, mean, keeps, share, K)
    at = down.to(tl.int64)[:, None] * K + across[None, :]
    tl.store(whole_ptr + at, value, mask=mask)
    rows = tl.load(order_ptr + (K - 1 - down), mask=down < K, other=K)
    columns = tl.load(order_ptr + (K - 1 - across), mask=across < K, other=K)
    value, _ = shrunk_at(hessian_ptr, rows, columns, mean, keeps, share, K)
    tl.store(turned_ptr + at, value, mask=mask)


@triton.jit
def unit_and_pivots(
    lower_ptr,  # [K, K] float32, of any strides
    info_ptr,  # [] int32
    unit_ptr,  # [K, K] float32
    pivots_ptr,  # [K] float32
    down_stride,
    across_stride,
    K,
    SQUARE: tl.constexpr,
):
    """See the module."""
    rows, columns = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    from_rows, from_columns = (K - 1 - rows).to(tl.int64), (K - 1 - columns).to(tl.int64)
    inside = (rows < K)[:, None] & (columns < K)[None, :]
    at = lower_ptr + from_rows[:, None] * down_stride + from_columns[None, :] * across_stride
    value = tl.load(at, mask=inside & (rows[:, None] <= columns[None, :]), other=0.0)
    pivot = tl.load(lower_ptr + from_columns * (down_stride + across_stride), mask=columns < K, other=1.0)
    unit = tl.math.div_rn(value, tl.zeros_like(value) + pivot[None, :])
    tl.store(unit_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], unit, mask=inside)
    if tl.program_id(0) == 0:
        square = tl.where(tl.load(info_ptr) == 0, pivot * pivot, float("nan"))
        tl.store(pivots_ptr + columns, square, mask=columns < K)


@torch.library.custom_op("quantkit::damped", mutates_args=())
def damped(
    hessian: Tensor, order: Tensor, mean: Tensor, shrink: Tensor | None, fixed: float, share: float
) -> tuple[Tensor, Tensor]:
    """The damped Hessian [K, K] in the order of the weights, and in the reverse of the order of choice.

    Args:
        hessian: [K, K] float32.
        order: [K] int64, of choice.
        mean: [] float32, of the diagonal.
        shrink, fixed: share that is taken off beside the diagonal: [] float64, or else the number.
        share: of the mean, that is added to the diagonal.
    """
    hessian = hessian.contiguous()
    whole, turned = torch.empty_like(hessian), torch.empty_like(hessian)
    columns = hessian.shape[0]
    squares = triton.cdiv(columns, SQUARE)
    damp_and_turn[(squares, squares)](
        hessian, order, mean, shrink, fixed, share, whole, turned, columns, SQUARE=SQUARE, num_warps=WARPS
    )
    return whole, turned


@damped.register_fake
def _(hessian, order, mean, shrink, fixed, share):
    return hessian.new_empty(hessian.shape), hessian.new_empty(hessian.shape)


@torch.library.custom_op("quantkit::unit_of", mutates_args=())
def unit_of(lower: Tensor, info: Tensor) -> tuple[Tensor, Tensor]:
    """The factor turned round, with unit diagonal [K, K], and the squares of its diagonal [K].

    Args:
        lower: [K, K] float32, the factor of the turned Hessian.
        info: [] int32, 0 if there is one; else all squares are NaN.
    """
    columns = lower.shape[0]
    unit, pivots = lower.new_empty(lower.shape), lower.new_empty(columns)
    squares = triton.cdiv(columns, SQUARE)
    unit_and_pivots[(squares, squares)](
        lower, info, unit, pivots, lower.stride(0), lower.stride(1), columns, SQUARE=SQUARE, num_warps=WARPS
    )
    return unit, pivots


@unit_of.register_fake
def _(lower, info):
    return lower.new_empty(lower.shape), lower.new_empty(lower.shape[0])
