"""What stands before and behind the Cholesky factor of a Hessian, one launch each.

`damped` shrinks and damps it, and lays it out in the reverse of the order of choice; `unit_of` turns the factor round
and takes its diagonal out. They are the twins of the lines of `passes/solvers/factor.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.search import require_contiguous

# columns of a square, of the diagonal at a time, warps
SQUARE, AT_ONCE, WARPS = 64, 1024, 8


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
    order_ptr,  # [K] int64, or None: as they are
    diagonal_ptr,  # [K] float32, in any order
    shrink_ptr,  # [] float64, or None
    shrink,
    share,
    whole_ptr,  # [K, K] float32, in the order of the weights
    turned_ptr,  # [K, K] float32, the last to be chosen first
    costs_ptr,  # [K] float32, the diagonal of `whole`
    K,
    SQUARE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """See the module."""
    down, across = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    # each program has the mean by itself: a launch less
    total = tl.zeros((AT_ONCE,), tl.float32)
    for start in range(0, K, AT_ONCE):
        place = start + tl.arange(0, AT_ONCE)
        total += tl.load(diagonal_ptr + place, mask=place < K, other=0.0)
    mean = tl.sum(total, axis=0) / K
    mean = tl.where(mean > 0.0, mean, 1.0)
    keeps = 1.0 - shrink
    if shrink_ptr is not None:
        keeps = (1.0 - tl.load(shrink_ptr)).to(tl.float32)
    value, mask = shrunk_at(hessian_ptr, down, across, mean, keeps, share, K)
    at = down.to(tl.int64)[:, None] * K + across[None, :]
    tl.store(whole_ptr + at, value, mask=mask)
    if tl.program_id(0) == tl.program_id(1):
        own = tl.sum(tl.where(down[:, None] == across[None, :], value, 0.0), axis=1)
        tl.store(costs_ptr + down, own, mask=down < K)
    if order_ptr is not None:
        rows = tl.load(order_ptr + (K - 1 - down), mask=down < K, other=K)
        columns = tl.load(order_ptr + (K - 1 - across), mask=across < K, other=K)
    else:
        rows, columns = tl.where(down < K, K - 1 - down, K), tl.where(across < K, K - 1 - across, K)
    value, _ = shrunk_at(hessian_ptr, rows, columns, mean, keeps, share, K)
    tl.store(turned_ptr + at, value, mask=mask)


@triton.jit
def unit_and_pivots(
    lower_ptr,  # [K, K] float32, of any strides
    info_ptr,  # [] int32
    order_ptr,  # [K] int64, or None: as they are
    unit_ptr,  # [K, K] float32
    pivots_ptr,  # [K] float32
    importance_ptr,  # [K] float32, the same in the order of the weights
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
        places = columns
        if order_ptr is not None:
            places = tl.load(order_ptr + columns, mask=columns < K, other=0)
        tl.store(importance_ptr + places, square, mask=columns < K)


@torch.library.custom_op("quantkit::damped", mutates_args=())
def damped(
    hessian: Tensor, order: Tensor | None, diagonal: Tensor, shrink: Tensor | None, fixed: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The damped Hessian [K, K] in the order of the weights, in the reverse of the order of choice, and its diagonal.

    Args:
        hessian: [K, K] float32.
        order: [K] int64, of choice; None: that of the weights.
        diagonal: [K] float32, in any order, contiguous.
        shrink, fixed: share that is taken off beside the diagonal: [] float64, or else the number.
        share: of the diagonal's mean, that is added to it.
    """
    hessian = hessian.contiguous()
    require_contiguous(diagonal)
    whole, turned, costs = torch.empty_like(hessian), torch.empty_like(hessian), torch.empty_like(diagonal)
    columns = hessian.shape[0]
    squares = triton.cdiv(columns, SQUARE)
    damp_and_turn[(squares, squares)](
        hessian, order, diagonal, shrink, fixed, share, whole, turned, costs, columns,
        SQUARE=SQUARE, AT_ONCE=AT_ONCE, num_warps=WARPS,
    )  # fmt: skip
    return whole, turned, costs


@damped.register_fake
def _(hessian, order, diagonal, shrink, fixed, share):
    return hessian.new_empty(hessian.shape), hessian.new_empty(hessian.shape), diagonal.new_empty(diagonal.shape)


@torch.library.custom_op("quantkit::unit_of", mutates_args=())
def unit_of(lower: Tensor, info: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The factor turned round, with unit diagonal [K, K], the squares of its diagonal [K], and these in the order of
    the weights.

    Args:
        lower: [K, K] float32, the factor of the turned Hessian.
        info: [] int32, 0 if there is one; else all squares are NaN.
        order: [K] int64, of choice; None: that of the weights.
    """
    columns = lower.shape[0]
    unit, pivots, importance = lower.new_empty(lower.shape), lower.new_empty(columns), lower.new_empty(columns)
    squares = triton.cdiv(columns, SQUARE)
    unit_and_pivots[(squares, squares)](
        lower, info, order, unit, pivots, importance, lower.stride(0), lower.stride(1), columns,
        SQUARE=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return unit, pivots, importance


@unit_of.register_fake
def _(lower, info, order):
    return lower.new_empty(lower.shape), lower.new_empty(lower.shape[0]), lower.new_empty(lower.shape[0])
