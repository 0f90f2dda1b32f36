"""Sweeps of coordinate descent over codes and scales in one launch: rows of a weight are independent.

    q_j = snap((w_j + d_j - (D H)_j / H_jj) / s)        s = s0 - (c · (D H)_g) / (c H_gg c)        D = q s - w

A program owns some rows, and visits the columns of a group, or 64 of them at a time. What all errors make of a block's
gradient is one product, with errors that this program wrote; in the block each change moves the gradient of the columns
after it, on chip. It is the twin of `_descend` in `passes/solvers/gptq.py`, which carries the gradient along instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.search import kept, require_contiguous, search_steps, snapped

# rows a program, columns a block at most, columns a product, warps: no spill (benchmarks/kernel_resources.py)
ROWS, BLOCK, CHUNK, WARPS, STAGES = 16, 64, 32, 4, 2


@triton.jit
def product(
    of_ptr, hessian_ptr, first, last, N, K, rows, columns, there,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What columns from `first` to `last` of [K, N] make of some `columns` of the Hessian, [ROWS, BLOCK]."""
    made = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(first, last, CHUNK):
        other = (k + tl.arange(0, CHUNK)).to(tl.int64)
        known = other < last
        mask = (rows < N)[:, None] & known[None, :]
        values = tl.load(of_ptr + other[None, :] * N + rows[:, None], mask=mask, other=0.0)
        at = hessian_ptr + other[:, None] * K + columns[None, :]
        hessian = tl.load(at, mask=known[:, None] & there[None, :], other=0.0)
        made = tl.dot(values, hessian, made, input_precision=PRECISION)
    return made


@triton.jit
def descend_rows(
    target_ptr,  # [K, N] float32
    codes_ptr,  # [K, N] float32, in units of the scale; changed
    delta_ptr,  # [K, N] float32; changed
    hessian_ptr,  # [K, K] float32
    scale_ptr,  # [K / GROUP, N] float32; changed if REFIT
    zero_ptr,  # the same, or None
    values_ptr,
    edges_ptr,
    low,
    high,
    least,  # bounds of a scale
    most,
    N,
    K,
    GROUP,
    SWEEPS,
    EVEN: tl.constexpr,
    HALF: tl.constexpr,
    REFIT: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """See the module."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    block = tl.arange(0, BLOCK)
    pieces = (GROUP + BLOCK - 1) // BLOCK
    visits = (K + GROUP - 1) // GROUP * pieces
    for visit in range(0, SWEEPS * visits):
        group = visit % visits // pieces
        start = group * GROUP + visit % pieces * BLOCK
        # a block has one scale, so it never reaches over the end of a group
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
            # every thread has read what the scale was
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
            # what the column would add to its error if it could: -gradient / curvature
            slope = tl.sum(tl.where(now, gradient, 0.0), axis=1) / tl.load(hessian_ptr + curve + j)
            code_j = snapped((wanted + error - slope) * inverse, lowest, highest, values_ptr, edges_ptr, STEPS)
            moved = code_j * scale - wanted - error
            # what was chosen stays, the sign of a zero included
            gradient = tl.where(later, gradient + moved[:, None] * onward[None, :], gradient)
            gradient = tl.where(now, code_j[:, None], gradient)
        # every thread has read what its columns were
        tl.debug_barrier()
        # what was the gradient has become codes
        wanted = tl.load(target_ptr + at, mask=mask, other=0.0)
        tl.store(codes_ptr + at, gradient, mask=mask)
        tl.store(delta_ptr + at, gradient * scale[:, None] - wanted, mask=mask)
        # every thread's errors are written before any of this program reads them
        tl.debug_barrier()


def block_of(group: int) -> int:
    """Columns a block, where so many share a scale; more than are there, rather than a tile too small for the warps."""
    return max(32, min(BLOCK, int(triton.next_power_of_2(group))))


@torch.library.custom_op("quantkit::descend", mutates_args=("codes", "delta", "scale"))
def descend(
    target: Tensor,
    codes: Tensor,
    delta: Tensor,
    hessian: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    values: Tensor | None,
    edges: Tensor | None,
    low: float,
    high: float,
    bounds: list[float],
    dropped: list[int],
    group: int,
    sweeps: int,
    refit: bool,
    precision: str,
) -> None:
    """Change codes, in units of their scale, and errors [K, N], and scales too if `refit`, which needs groups up to 64.

    Args:
        target: [K, N] float32, the weights.
        hessian: [K, K] float32, rows contiguous.
        scale, zero: [K / group, N] float32.
        values, edges, low, high: of the grid.
        bounds, dropped: how scales are stored; as of `search_integers`.
        group: columns that share a scale.
        precision: of the products: `ieee`, `tf32x3` or `tf32`.
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
