"""Loops of GPTQ, one launch each: rows of a weight are independent, once the Hessian is factored.

`damped` shrinks and damps the Hessian, and reverses it to the order in which it is factored; `unit_of` reverses its
Cholesky factor back and extracts the diagonal. Both equal their counterparts in `passes/solvers/factor.py`.

**The pass over the columns** equals `_choose` in `passes/solvers/gptq.py`:

    q_j = snap((w_j - sum_{i<j} d_i U_ij) / s)        d_j = q_j s - w_j        cost = sum_j p_j (q_j s - aim_j)²

A program owns some rows and goes from panel to panel of columns. The update from all columns before a panel is one
product of their errors with `U`; the program wrote these errors itself. Inside of the panel columns are rounded one by
one, on chip, and each updates those after it.

**Sweeps of coordinate descent** over codes and scales equal `_descend` there, which carries the gradient along instead:

    q_j = snap((w_j + d_j - (D H)_j / H_jj) / s)        s = s0 - (c · (D H)_g) / (c H_gg c)        D = q s - w

A program owns some rows, and visits the columns of a group, or 64 of them at a time. The gradient of a block is one
product with all errors, which the program wrote itself; inside of the block each change moves the gradient of the
columns after it, on chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.search import kept, require_contiguous, search_steps, snapped

# factor: columns of a square, elements of the diagonal at a time, warps
SQUARE, AT_ONCE, FACTOR_WARPS = 64, 1024, 8
# passes: rows per program, columns per panel, most columns per block, columns per product, warps, stages: no spill on
# SM 8.0 and 9.0 (benchmarks/kernel_resources.py)
ROWS, PANEL, BLOCK, CHUNK, WARPS, STAGES = 16, 64, 64, 32, 4, 2


@triton.jit
def shrunk_at(hessian_ptr, rows, columns, mean, keeps, share, K):
    """Return the damped Hessian at some places, and their mask."""
    mask = (rows < K)[:, None] & (columns < K)[None, :]
    value = tl.load(hessian_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    # an input that was always zero gets a diagonal of the mean
    added = tl.where(value > 0.0, share * mean, (1.0 + share) * mean)
    return tl.where(rows[:, None] == columns[None, :], value + added, value * keeps), mask


@triton.jit
def damp_and_turn(
    hessian_ptr,  # [K, K] float32
    order_ptr,  # [K] int64, or None for the order of the weights
    diagonal_ptr,  # [K] float32, in any order
    shrink_ptr,  # [] float64, or None
    shrink, share,
    whole_ptr,  # [K, K] float32, in the order of the weights
    turned_ptr,  # [K, K] float32, in the reverse of the order of choice
    costs_ptr,  # [K] float32, the diagonal of `whole`
    K,
    SQUARE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Damp the Hessian and reverse it, as described in the module."""
    down, across = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    # each program computes the mean, which saves a launch
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
    order_ptr,  # [K] int64, or None for the order of the weights
    unit_ptr,  # [K, K] float32
    pivots_ptr,  # [K] float32
    importance_ptr,  # [K] float32, the same in the order of the weights
    down_stride, across_stride, K,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Reverse the factor and extract its diagonal, as described in the module."""
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
    """Return the damped Hessian [K, K] in the order of the weights, the same in the reverse of the order of choice, its
    diagonal.

    Args:
        hessian: [K, K] float32.
        order: [K] int64, order of choice; None for that of the weights.
        diagonal: [K] float32, in any order, contiguous.
        shrink: [] float64, share to take off outside of the diagonal; None to use `fixed`.
        fixed: the same share as a number.
        share: share of the diagonal's mean to add to the diagonal.
    """
    hessian = hessian.contiguous()
    require_contiguous(diagonal)
    whole, turned, costs = torch.empty_like(hessian), torch.empty_like(hessian), torch.empty_like(diagonal)
    columns = hessian.shape[0]
    squares = triton.cdiv(columns, SQUARE)
    damp_and_turn[(squares, squares)](
        hessian, order, diagonal, shrink, fixed, share, whole, turned, costs, columns,
        SQUARE=SQUARE, AT_ONCE=AT_ONCE, num_warps=FACTOR_WARPS,
    )  # fmt: skip
    return whole, turned, costs


@damped.register_fake
def _(hessian, order, diagonal, *_):
    return hessian.new_empty(hessian.shape), hessian.new_empty(hessian.shape), diagonal.new_empty(diagonal.shape)


@torch.library.custom_op("quantkit::unit_of", mutates_args=())
def unit_of(lower: Tensor, info: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reversed factor with unit diagonal [K, K], and the squares of its diagonal [K] in both orders.

    Args:
        lower: [K, K] float32, the factor of the reversed Hessian.
        info: [] int32, 0 if the factorization succeeded; else all squares are NaN.
        order: [K] int64, order of choice; None for that of the weights.
    """
    columns = lower.shape[0]
    unit, pivots, importance = lower.new_empty(lower.shape), lower.new_empty(columns), lower.new_empty(columns)
    squares = triton.cdiv(columns, SQUARE)
    unit_and_pivots[(squares, squares)](
        lower, info, order, unit, pivots, importance, lower.stride(0), lower.stride(1), columns,
        SQUARE=SQUARE, num_warps=FACTOR_WARPS,
    )  # fmt: skip
    return unit, pivots, importance


@unit_of.register_fake
def _(lower, info, order):
    return lower.new_empty(lower.shape), lower.new_empty(lower.shape[0]), lower.new_empty(lower.shape[0])


# --- the pass over the columns ----------------------------------------------------------------------------------------


@triton.jit
def choose_rows(
    target_ptr,  # [K, N] float32
    unit_ptr,  # [K, K] float32, in the order of choice
    pivots_ptr,  # [K] float32, in the order of choice
    order_ptr,  # [K] int64
    scale_ptr,  # [K / GROUP, N] float32
    zero_ptr,  # the same, or None
    values_ptr, edges_ptr,
    codes_ptr,  # [K, N] float32
    delta_ptr,  # [K, N] float32
    cost_ptr,  # [N] float32
    low, high, N, K, GROUP,
    STEPS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, PANEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose codes of some rows, as described in the module."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    panel, chunk = tl.arange(0, PANEL), tl.arange(0, CHUNK)
    cost = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, PANEL):
        columns = start + panel
        there = columns < K
        place = tl.load(order_ptr + columns, mask=there, other=0)
        mask = inside[:, None] & there[None, :]
        at_panel = place[None, :] * N + rows[:, None]
        pending = tl.load(target_ptr + at_panel, mask=mask, other=0.0)
        passed = tl.zeros((ROWS, PANEL), tl.float32)
        for k in range(0, start, CHUNK):
            earlier = tl.load(order_ptr + k + chunk)
            errors = tl.load(delta_ptr + earlier[None, :] * N + rows[:, None], mask=inside[:, None], other=0.0)
            at = (k + chunk).to(tl.int64)[:, None] * K + columns[None, :]
            unit = tl.load(unit_ptr + at, mask=there[None, :], other=0.0)
            passed = tl.dot(errors, unit, passed, input_precision=PRECISION)
        pending -= passed
        for j in range(start, tl.minimum(start + PANEL, K)):
            mine = tl.load(order_ptr + j)
            group = tl.cast(tl.cast(mine, tl.int32) // GROUP, tl.int64) * N + rows
            step = tl.load(scale_ptr + group, mask=inside, other=1.0)
            lowest, highest = low, high
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + group, mask=inside, other=0.0)
                lowest, highest = low - zero, high - zero
            wanted = tl.load(target_ptr + mine * N + rows, mask=inside, other=0.0)
            onward = tl.load(unit_ptr + tl.cast(j, tl.int64) * K + columns, mask=there, other=0.0)
            pivot = tl.load(pivots_ptr + j)
            # a group of zeros may have a scale of zero
            inverse = 1.0 / tl.maximum(step, 1.1754943508222875e-38)
            now, later = (columns == j)[None, :], (columns > j)[None, :]
            aim = tl.sum(tl.where(now, pending, 0.0), axis=1)
            code = snapped(aim * inverse, lowest, highest, values_ptr, edges_ptr, STEPS)
            value = code * step
            # chosen codes stay, the sign of a zero included
            moved = tl.where(later, pending - (value - wanted)[:, None] * onward[None, :], pending)
            pending = tl.where(now, code[:, None], moved)
            cost += pivot * (value - aim) * (value - aim)
        # `pending` now holds codes
        step = tl.load(
            scale_ptr + (place.to(tl.int32) // GROUP).to(tl.int64)[None, :] * N + rows[:, None], mask=mask, other=0.0
        )
        wanted = tl.load(target_ptr + at_panel, mask=mask, other=0.0)
        tl.store(codes_ptr + at_panel, pending, mask=mask)
        tl.store(delta_ptr + at_panel, pending * step - wanted, mask=mask)
        # every thread's errors are written before any of this program reads them
        tl.debug_barrier()
    tl.store(cost_ptr + rows, cost, mask=inside)


@torch.library.custom_op("quantkit::choose", mutates_args=())
def choose(
    target: Tensor, unit: Tensor, pivots: Tensor, order: Tensor, scale: Tensor, zero: Tensor | None,
    values: Tensor | None, edges: Tensor | None, low: float, high: float, group: int, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return values in units of their scale [K, N], errors [K, N] and the cost of each row [N], all float32.

    Args:
        target: [K, N] float32, the weights.
        unit, pivots, order: parts of the `Factor`.
        scale, zero: [K / group, N] float32.
        values, edges, low, high: parts of the `Grid`.
        group: columns that share a scale.
        precision: precision of the products: `ieee`, `tf32x3` or `tf32`.
    """
    require_contiguous(target, unit, pivots, order, scale, zero)
    columns, rows = target.shape
    codes, delta, cost = _empty(target)
    choose_rows[(triton.cdiv(rows, ROWS),)](
        target, unit, pivots, order, scale, zero, values, edges, codes, delta, cost,
        low, high, rows, columns, group,
        STEPS=search_steps(values), PRECISION=precision, ROWS=ROWS, PANEL=PANEL, CHUNK=CHUNK,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return codes, delta, cost


@choose.register_fake
def _(target, *_):
    return _empty(target)


def _empty(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(target), torch.empty_like(target), target.new_empty(target.shape[1])


# --- sweeps -----------------------------------------------------------------------------------------------------------


@triton.jit
def product(
    of_ptr, hessian_ptr, first, last, N, K, rows, columns, there,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply columns `first` to `last` of [K, N] with some `columns` of the Hessian: [ROWS, BLOCK]."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(first, last, CHUNK):
        other = (k + tl.arange(0, CHUNK)).to(tl.int64)
        known = other < last
        mask = (rows < N)[:, None] & known[None, :]
        values = tl.load(of_ptr + other[None, :] * N + rows[:, None], mask=mask, other=0.0)
        at = hessian_ptr + other[:, None] * K + columns[None, :]
        hessian = tl.load(at, mask=known[:, None] & there[None, :], other=0.0)
        total = tl.dot(values, hessian, total, input_precision=PRECISION)
    return total


@triton.jit
def descend_rows(
    target_ptr,  # [K, N] float32
    codes_ptr,  # [K, N] float32, in units of the scale; changed
    delta_ptr,  # [K, N] float32; changed
    hessian_ptr,  # [K, K] float32
    scale_ptr,  # [K / GROUP, N] float32; changed if REFIT
    zero_ptr,  # the same, or None
    values_ptr, edges_ptr, low, high,
    least,  # bounds of a scale
    most, N, K, GROUP, SWEEPS,
    EVEN: tl.constexpr, HALF: tl.constexpr, REFIT: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sweep over some rows, as described in the module."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    block = tl.arange(0, BLOCK)
    pieces = (GROUP + BLOCK - 1) // BLOCK
    visits = (K + GROUP - 1) // GROUP * pieces
    for visit in range(0, SWEEPS * visits):
        group = visit % visits // pieces
        start = group * GROUP + visit % pieces * BLOCK
        # a block has one scale, so it ends with its group
        stop = tl.minimum(tl.minimum(start + BLOCK, group * GROUP + GROUP), K)
        columns = start + block
        there = columns < stop
        mask = inside[:, None] & there[None, :]
        at = columns.to(tl.int64)[None, :] * N + rows[:, None]
        gradient = product(delta_ptr, hessian_ptr, 0, K, N, K, rows, columns, there, PRECISION, ROWS, BLOCK, CHUNK)
        place = tl.cast(group, tl.int64) * N + rows
        scale = tl.load(scale_ptr + place, mask=inside, other=1.0)
        change = tl.zeros((ROWS,), tl.float32)
        if REFIT:
            code = tl.load(codes_ptr + at, mask=mask, other=0.0)
            bent = product(
                codes_ptr, hessian_ptr, start, stop, N, K, rows, columns, there, PRECISION, ROWS, BLOCK, CHUNK
            )
            step = scale - tl.math.div_rn(tl.sum(code * gradient, axis=1), tl.sum(code * bent, axis=1))
            fits = (step > 0.0) & (step < float("inf"))
            step = tl.where(fits, kept(tl.where(fits, step, scale), least, most, EVEN, HALF), scale)
            change = step - scale
            gradient += change[:, None] * bent
            scale = step
            # every thread has read the old scale
            tl.debug_barrier()
            tl.store(scale_ptr + place, scale, mask=inside)
        lowest, highest = low, high
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + place, mask=inside, other=0.0)
            lowest, highest = low - zero, high - zero
        # a group of zeros may have a scale of zero
        inverse = 1.0 / tl.maximum(scale, 1.1754943508222875e-38)
        for j in range(start, stop):
            mine = tl.cast(j, tl.int64) * N + rows
            wanted = tl.load(target_ptr + mine, mask=inside, other=0.0)
            error = tl.load(delta_ptr + mine, mask=inside, other=0.0)
            if REFIT:
                error += change * tl.load(codes_ptr + mine, mask=inside, other=0.0)
            curve = tl.cast(j, tl.int64) * K
            onward = tl.load(hessian_ptr + curve + columns, mask=there, other=0.0)
            now, later = (columns == j)[None, :], (columns > j)[None, :]
            # the unconstrained change of the column's error is -gradient / curvature
            slope = tl.sum(tl.where(now, gradient, 0.0), axis=1) / tl.load(hessian_ptr + curve + j)
            code_j = snapped((wanted + error - slope) * inverse, lowest, highest, values_ptr, edges_ptr, STEPS)
            moved = code_j * scale - wanted - error
            # chosen codes stay, the sign of a zero included
            gradient = tl.where(later, gradient + moved[:, None] * onward[None, :], gradient)
            gradient = tl.where(now, code_j[:, None], gradient)
        # every thread has read its old columns
        tl.debug_barrier()
        # `gradient` now holds codes
        wanted = tl.load(target_ptr + at, mask=mask, other=0.0)
        tl.store(codes_ptr + at, gradient, mask=mask)
        tl.store(delta_ptr + at, gradient * scale[:, None] - wanted, mask=mask)
        # every thread's errors are written before any of this program reads them
        tl.debug_barrier()


def block_of(group: int) -> int:
    """Return the columns of a block for a group size; at least 32, since warps need a tile of that size."""
    return max(32, min(BLOCK, int(triton.next_power_of_2(group))))


@torch.library.custom_op("quantkit::descend", mutates_args=("codes", "delta", "scale"))
def descend(
    target: Tensor, codes: Tensor, delta: Tensor, hessian: Tensor, scale: Tensor, zero: Tensor | None,
    values: Tensor | None, edges: Tensor | None, low: float, high: float, bounds: list[float], dropped: list[int],
    group: int, sweeps: int, refit: bool, precision: str,
) -> None:  # fmt: skip
    """Improve codes, in units of their scale, and errors [K, N] in place; scales too if `refit`, for groups up to 64.

    Args:
        target: [K, N] float32, the weights.
        codes, delta: [K, N] float32, codes and errors.
        hessian: [K, K] float32, rows contiguous.
        scale, zero: [K / group, N] float32.
        values, edges, low, high: parts of the grid.
        bounds, dropped: storage of scales, as for `search_integers`.
        group: columns that share a scale.
        sweeps: number of sweeps.
        refit: True to fit scales too.
        precision: precision of the products: `ieee`, `tf32x3` or `tf32`.
    """
    require_contiguous(target, codes, delta, hessian, scale, zero)
    columns, rows = target.shape
    descend_rows[(triton.cdiv(rows, ROWS),)](
        target, codes, delta, hessian, scale, zero, values, edges, low, high, *bounds, rows, columns, group, sweeps,
        EVEN=dropped[0], HALF=dropped[1], REFIT=refit, STEPS=search_steps(values), PRECISION=precision,
        ROWS=ROWS, BLOCK=block_of(group), CHUNK=CHUNK,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@descend.register_fake
def _(*_):
    return None
