"""GPTQ's pass over the columns in one launch: rows of a weight are independent, given the factor of the Hessian.

    q_j = snap((w_j - sum_{i<j} d_i U_ij) / s)        d_j = q_j s - w_j        cost = sum_j p_j (q_j s - aim_j)²

A program owns some rows. It goes from panel to panel of columns: what the columns before the panel pass on is one
product of their errors with `U`, which this program wrote and reads again; in the panel columns are rounded one by
one, on chip, and each updates those after it. It is the twin of `_choose` in `passes/solvers/gptq.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.search import require_contiguous, search_steps, snapped

# rows a program, columns a panel, columns a product, warps: no spill on SM 8.0 and 9.0 (benchmarks/kernel_resources.py)
ROWS, PANEL, CHUNK, WARPS, STAGES = 16, 64, 32, 4, 2


@triton.jit
def choose_rows(
    target_ptr,  # [K, N] float32
    unit_ptr,  # [K, K] float32, in the order of choice
    pivots_ptr,  # [K] float32, in the order of choice
    order_ptr,  # [K] int64
    scale_ptr,  # [K / GROUP, N] float32
    zero_ptr,  # the same, or None
    values_ptr,
    edges_ptr,
    codes_ptr,  # [K, N] float32
    delta_ptr,  # [K, N] float32
    cost_ptr,  # [N] float32
    low,
    high,
    N,
    K,
    GROUP,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """See the module."""
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
            # what was chosen stays, the sign of a zero included
            moved = tl.where(later, pending - (value - wanted)[:, None] * onward[None, :], pending)
            pending = tl.where(now, code[:, None], moved)
            cost += pivot * (value - aim) * (value - aim)
        # what was to be rounded has become codes
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
    target: Tensor,
    unit: Tensor,
    pivots: Tensor,
    order: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    values: Tensor | None,
    edges: Tensor | None,
    low: float,
    high: float,
    group: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values in units of their scale [K, N], errors [K, N] and the cost of each row [N], all float32.

    Args:
        target: [K, N] float32, the weights.
        unit, pivots, order: of the `Factor`.
        scale, zero: [K / group, N] float32.
        values, edges, low, high: of the `Grid`.
        group: columns that share a scale.
        precision: of the products: `ieee`, `tf32x3` or `tf32`.
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
def _(target, unit, pivots, order, scale, zero, values, edges, low, high, group, precision):
    return _empty(target)


def _empty(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(target), torch.empty_like(target), target.new_empty(target.shape[1])
