"""What rounding to nearest loses under many scalings of the inputs, in one launch: AWQ's search.

    d_k = snap(w_k p_k / s) s / p_k - w_k        cost = sum_k a_k d_k²        p: one of the scalings that are tried

Grids of whole numbers span each group's weights once they are scaled. A program owns some rows of one group under one
scaling, and leaves their cost, or the errors themselves, for a product with a whole Hessian. It is the twin of `_cost`
in `passes/solvers/awq.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.grid import require_contiguous, spanned, whole
from quantkit.kernels.solving.search import piece_of

# rows a program, columns a piece, warps: no spill on SM 8.0 and 9.0 (benchmarks/kernel_resources.py)
ROWS, PIECE, WARPS = 32, 32, 4


@triton.jit
def rounding_losses(
    target_ptr,  # [K, N] float32
    powers_ptr,  # [A, K] float32: the scalings
    importance_ptr,  # [K] float32, or None
    given_ptr,  # [A, 2] float32: scale and zero point of all rows, or None
    cost_ptr,  # [A, K / length, tiles of rows] float32, or None
    error_ptr,  # [K, A, N] float32, or None
    low,
    high,
    least,  # bounds of a scale
    most,
    N,
    K,
    length,
    SYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr,
    HALF: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See the module."""
    tile, g, a = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    at = tl.cast(g, tl.int64) * length
    power_at = powers_ptr + tl.cast(a, tl.int64) * K + at
    if given_ptr is not None:
        scale = tl.zeros((ROWS,), tl.float32) + tl.load(given_ptr + 2 * a)
        zero = tl.zeros((ROWS,), tl.float32) + tl.load(given_ptr + 2 * a + 1)
    else:
        bottom = tl.zeros((ROWS,), tl.float32)
        top = tl.zeros((ROWS,), tl.float32)
        for start in range(0, length, PIECE):
            w, there = piece_of(target_ptr, at, length, start, N, rows, PIECE)
            power = tl.load(power_at + start + tl.arange(0, PIECE), mask=there, other=1.0)
            w *= power[:, None]
            bottom = tl.minimum(bottom, tl.min(w, axis=0))
            top = tl.maximum(top, tl.max(w, axis=0))
        scale, zero = spanned(bottom, top, low, high, least, most, SYMMETRIC, EVEN, HALF)
    lowest, highest = (low - zero)[None, :], (high - zero)[None, :]
    cost = tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, PIECE):
        w, there = piece_of(target_ptr, at, length, start, N, rows, PIECE)
        column = start + tl.arange(0, PIECE)
        power = tl.load(power_at + column, mask=there, other=1.0)[:, None]
        units = tl.math.div_rn(w * power, tl.zeros_like(w) + scale[None, :])
        value = whole(tl.minimum(tl.maximum(units, lowest), highest)) * scale[None, :]
        error = tl.math.div_rn(value, tl.zeros_like(w) + power) - w
        if cost_ptr is not None:
            weight = tl.load(importance_ptr + at + column, mask=there, other=0.0)[:, None]
            cost += tl.sum(error * weight * error, axis=0)
        if error_ptr is not None:
            place = ((at + column)[:, None] * tl.num_programs(2) + a) * N + rows[None, :]
            tl.store(error_ptr + place, error, mask=there[:, None] & (rows < N)[None, :])
    if cost_ptr is not None:
        place = (tl.cast(a, tl.int64) * tl.num_programs(1) + g) * tl.num_programs(0) + tile
        tl.store(cost_ptr + place, tl.sum(tl.where(rows < N, cost, 0.0), axis=0))


@torch.library.custom_op("quantkit::losses", mutates_args=())
def losses(
    target: Tensor,
    powers: Tensor,
    importance: Tensor | None,
    given: Tensor | None,
    length: int,
    low: float,
    high: float,
    symmetric: bool,
    bounds: list[float],
    dropped: list[int],
) -> Tensor:
    """Under each scaling: costs [A, parts], to be added up, or with no importance errors [K, A, N]; float32.

    Args:
        target: [K, N] float32.
        powers: [A, K] float32, positive: the scalings.
        importance: [K] float32.
        given: [A, 2] float32, scale and zero point where all rows have one; None: each group spans its own.
        length: weights of a column that share a scale.
        low, high, symmetric, bounds, dropped: as of `search_integers`.
    """
    require_contiguous(target, powers, importance, given)
    made = _made(target, powers, importance, length)
    groups, tiles = target.shape[0] // length, triton.cdiv(target.shape[1], ROWS)
    rounding_losses[(tiles, groups, len(powers))](
        target, powers, importance, given, None if importance is None else made, made if importance is None else None,
        low, high, *bounds, target.shape[1], target.shape[0], length,
        SYMMETRIC=symmetric, EVEN=dropped[0], HALF=dropped[1], PIECE=PIECE, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return made


@losses.register_fake
def _(target, powers, importance, given, length, low, high, symmetric, bounds, dropped):
    return _made(target, powers, importance, length)


def _made(target: Tensor, powers: Tensor, importance: Tensor | None, length: int) -> Tensor:
    (columns, rows), tried = target.shape, powers.shape[0]
    if importance is None:
        return target.new_empty((columns, tried, rows))
    return target.new_empty((tried, columns // length * triton.cdiv(rows, ROWS)))
