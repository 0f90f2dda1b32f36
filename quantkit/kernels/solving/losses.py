"""Search of AWQ, one launch per step: sizes of inputs, scalings to try, loss of each, choice of the least.

    d_k = snap(w_k p_k / s) s / p_k - w_k        cost = sum_k a_k d_k²        p: one of the scalings to try

Integer grids span each group's scaled weights. A program owns some rows of one group under one scaling, and stores
their
cost, or the errors themselves, for a product with a whole Hessian. The kernels equal `_shared`, `_power`, `_cost` in
`passes/solvers/awq.py`. `absorbed` folds the chosen scaling into a norm, as `absorbed` in `model/structure/fold.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.solving.search import kept, piece_of, require_contiguous, spanned, whole

# inputs per program, inputs at a time, warps
TILE, AT_ONCE, FEW = 16, 64, 4
# the single program that compares costs: parts at a time, warps
PARTS, MANY = 4096, 8
# rows per program, columns per piece, warps: no spill on SM 8.0 and 9.0 (benchmarks/kernel_resources.py)
ROWS, PIECE, WARPS = 32, 32, 4


@triton.jit
def rounding_losses(
    target_ptr,  # [K, N] float32
    powers_ptr,  # [A, K] float32: the scalings
    importance_ptr,  # [K] float32, or None
    given_ptr,  # [A, 2] float32: scale and zero point of all rows, or None
    cost_ptr,  # [A, K / length, tiles of rows] float32, or None
    error_ptr,  # [K, A, N] float32, or None
    low, high,
    least,  # bounds of a scale
    most, N, K, length,
    SYMMETRIC: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Measure the loss of rounding, as described in the module."""
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
    target: Tensor, powers: Tensor, importance: Tensor | None, fixed: Tensor | None, length: int, low: float,
    high: float, symmetric: bool, bounds: list[float], dropped: list[int],
) -> Tensor:  # fmt: skip
    """Return the costs of each scaling [A, parts], to be added up; without importance the errors [K, A, N]; float32.

    Args:
        target: [K, N] float32.
        powers: [A, K] float32, positive: the scalings.
        importance: [K] float32.
        fixed: [A, 2] float32, scale and zero point for all rows; None if each group spans its own grid.
        length: weights of a column that share a scale.
        low, high, symmetric, bounds, dropped: as for `search_integers`.
    """
    require_contiguous(target, powers, importance, fixed)
    result = _room(target, powers, importance, length)
    groups, tiles = target.shape[0] // length, triton.cdiv(target.shape[1], ROWS)
    rounding_losses[(tiles, groups, len(powers))](
        target, powers, importance, fixed,
        None if importance is None else result, result if importance is None else None,
        low, high, *bounds, target.shape[1], target.shape[0], length,
        SYMMETRIC=symmetric, EVEN=dropped[0], HALF=dropped[1], PIECE=PIECE, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return result


@losses.register_fake
def _(target, powers, importance, fixed, length, *_):
    return _room(target, powers, importance, length)


def _room(target: Tensor, powers: Tensor, importance: Tensor | None, length: int) -> Tensor:
    (columns, rows), tried = target.shape, powers.shape[0]
    if importance is None:
        return target.new_empty((columns, tried, rows))
    return target.new_empty((tried, columns // length * triton.cdiv(rows, ROWS)))


@triton.jit
def shared_sizes(
    squares_ptr,  # [K] float32, of any stride
    producers_ptr,  # [K] int64
    sizes_ptr,  # [K] float32
    stride, K,
    TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return for each input the mean square over all inputs from the same channel."""
    mine = tl.program_id(0) * TILE + tl.arange(0, TILE)
    channel = tl.load(producers_ptr + mine, mask=mine < K, other=-1)
    total = tl.zeros((TILE,), tl.float64)
    times = tl.zeros((TILE,), tl.int32)
    for start in range(0, K, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(producers_ptr + other, mask=other < K, other=-2)
        square = tl.maximum(tl.load(squares_ptr + other.to(tl.int64) * stride, mask=other < K, other=0.0), 0.0)
        same = channel[:, None] == theirs[None, :]
        total += tl.sum(tl.where(same, square[None, :], 0.0).to(tl.float64), axis=1)
        times += tl.sum(same.to(tl.int32), axis=1)
    tl.store(sizes_ptr + mine, (total / tl.maximum(times, 1).to(tl.float64)).to(tl.float32), mask=mine < K)


@triton.jit
def powers_of_sizes(
    squares_ptr,  # [K] float32, of any stride
    powers_ptr,  # [A, K] float32
    stride,
    K,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Raise sizes to exponent a / (A - 1), centred so that largest and smallest are inverses; 1 where a size is 0."""
    exponent = tl.program_id(1).to(tl.float64) / tl.maximum(tl.num_programs(1) - 1, 1).to(tl.float64)
    top = tl.zeros((AT_ONCE,), tl.float32)
    least = tl.full((AT_ONCE,), float("inf"), tl.float32)
    for start in range(0, K, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        size = tl.load(squares_ptr + other.to(tl.int64) * stride, mask=other < K, other=0.0)
        size = tl.math.sqrt_rn(tl.maximum(size, 0.0))
        top = tl.maximum(top, size)
        least = tl.minimum(least, tl.where(size > 0.0, size, float("inf")))
    largest = tl.max(top, axis=0)
    floor = 1e-4 * largest + 1e-30
    smallest = tl.minimum(tl.min(least, axis=0), largest)  # infinite if nothing was ever seen
    lowest, highest = tl.maximum(smallest, floor).to(tl.float64), tl.maximum(largest, floor).to(tl.float64)
    centre = (tl.log2(lowest) + tl.log2(highest)) / 2
    mine = tl.program_id(0) * TILE + tl.arange(0, TILE)
    size = tl.load(squares_ptr + mine.to(tl.int64) * stride, mask=mine < K, other=0.0)
    size = tl.math.sqrt_rn(tl.maximum(size, 0.0))
    power = tl.exp2(exponent * (tl.log2(tl.maximum(size, floor).to(tl.float64)) - centre))
    place = powers_ptr + tl.program_id(1).to(tl.int64) * K + mine
    tl.store(place, tl.where(size > 0.0, power, 1.0).to(tl.float32), mask=mine < K)


@triton.jit
def least_of(
    parts_ptr,  # [A, parts]
    powers_ptr,  # [A, K] float32
    scales_ptr,  # [K] float32
    found_ptr,  # [3] float64: exponent, its cost, cost of the first scaling
    tried, number, K,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Add up costs in a fixed order, and return the scaling with the least; ties take the first."""
    at, plain = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    least = tl.full((), float("inf"), tl.float64)
    for a in range(tried):
        total = tl.zeros((PARTS,), tl.float64)
        for start in range(0, number, PARTS):
            part = start + tl.arange(0, PARTS)
            total += tl.load(parts_ptr + a * number + part, mask=part < number, other=0.0).to(tl.float64)
        cost = tl.sum(total, axis=0)
        plain = tl.where(a == 0, cost, plain)
        at = tl.where(cost < least, a, at)
        least = tl.minimum(cost, least)
    for start in range(0, K, PARTS):
        place = start + tl.arange(0, PARTS)
        tl.store(scales_ptr + place, tl.load(powers_ptr + at * K + place, mask=place < K, other=1.0), mask=place < K)
    tl.store(found_ptr, at.to(tl.float64) / tl.maximum(tried - 1, 1).to(tl.float64))
    tl.store(found_ptr + 1, least)
    tl.store(found_ptr + 2, plain)


@triton.jit
def absorb_scales(
    weight_ptr,  # [C] float32, or None
    scales_ptr,  # [K] float32
    index_ptr,  # [K] int64
    new_ptr,  # [C] float32; without a weight, the scale of each channel
    applied_ptr,  # [K] float32, or None
    offset, C, K,
    STORED: tl.constexpr,  # type that the weight is rounded to: "bfloat16", "float16", "float32", or "" for none
    TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Fold scales into a norm's weight; a program owns some channels, and the inputs from them."""
    mine = tl.program_id(0) * TILE + tl.arange(0, TILE)
    scale = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, K, AT_ONCE):
        inputs = start + tl.arange(0, AT_ONCE)
        channel = tl.load(index_ptr + inputs, mask=inputs < K, other=-1)
        scales = tl.load(scales_ptr + inputs, mask=inputs < K, other=1.0)
        same = mine[:, None] == channel[None, :]
        scale = tl.maximum(scale, tl.max(tl.where(same, scales[None, :], float("-inf")), axis=1))
    scale = tl.where(scale == float("-inf"), 1.0, scale)  # a channel without inputs
    if weight_ptr is None:
        tl.store(new_ptr + mine, scale, mask=mine < C)
    else:
        weight = tl.load(weight_ptr + mine, mask=mine < C, other=1.0)
        exact = weight + offset
        new = tl.where(scale == 1.0, weight, tl.math.div_rn(exact, scale) - offset)
        if STORED != "":
            if STORED == "bfloat16":
                new = kept(new, float("-inf"), float("inf"), 16, 0)
            elif STORED == "float16":
                new = new.to(tl.float16).to(tl.float32)
            used = new + offset
            scale = tl.where(used != 0.0, tl.math.div_rn(exact, tl.where(used != 0.0, used, 1.0)), scale)
        tl.store(new_ptr + mine, new, mask=mine < C)
        for start in range(0, K, AT_ONCE):
            inputs = start + tl.arange(0, AT_ONCE)
            channel = tl.load(index_ptr + inputs, mask=inputs < K, other=-1)
            same = (mine[:, None] == channel[None, :]) & (mine < C)[:, None]
            of = tl.sum(tl.where(same, scale[:, None], 0.0), axis=0)
            tl.store(applied_ptr + inputs, of, mask=tl.max(same.to(tl.int32), axis=0) > 0)


@torch.library.custom_op("quantkit::sizes", mutates_args=())
def sizes(squares: Tensor, producers: Tensor) -> Tensor:
    """Return the mean square over the inputs of one channel, [K] float32.

    Args:
        squares: [K] float32, of any stride: mean squares of inputs.
        producers: [K] int64, channel of each input.
    """
    result, columns = squares.new_empty(squares.shape), len(squares)
    shared_sizes[(triton.cdiv(columns, TILE),)](
        squares, producers, result, squares.stride(0), columns, TILE=TILE, AT_ONCE=AT_ONCE, num_warps=FEW
    )
    return result


@sizes.register_fake
def _(squares, producers):
    return squares.new_empty(squares.shape)


@torch.library.custom_op("quantkit::powers", mutates_args=())
def powers(squares: Tensor, tried: int) -> Tensor:
    """Return scalings [tried, K] float32: sizes to exponents from 0 to 1, centred between the largest and the smallest.

    Args:
        squares: [K] float32, of any stride: squares of the sizes.
        tried: number of exponents.
    """
    columns = len(squares)
    result = squares.new_empty((tried, columns))
    powers_of_sizes[(triton.cdiv(columns, TILE), tried)](
        squares, result, squares.stride(0), columns, TILE=TILE, AT_ONCE=AT_ONCE, num_warps=FEW
    )
    return result


@powers.register_fake
def _(squares, tried):
    return squares.new_empty((tried, len(squares)))


@torch.library.custom_op("quantkit::cheapest", mutates_args=())
def cheapest(parts: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scaling with the least cost, [K] float32; its exponent, its cost and the first one's, [3] float64.

    Args:
        parts: [A, parts], float32 or float64, to be added up.
        powers: [A, K] float32.
    """
    scales, summary = powers.new_empty(powers.shape[1]), powers.new_empty(3, dtype=torch.float64)
    tried, number = parts.shape
    least_of[(1,)](
        parts.contiguous(), powers, scales, summary, tried, number, powers.shape[1], PARTS=PARTS, num_warps=MANY
    )
    return scales, summary


@cheapest.register_fake
def _(parts, powers):
    return powers.new_empty(powers.shape[1]), powers.new_empty(3, dtype=torch.float64)


@torch.library.custom_op("quantkit::absorbed", mutates_args=())
def absorbed_at_once(
    weight: Tensor, scales: Tensor, index: Tensor, offset: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Compute `absorbed` of `model/structure/fold.py`: weight [C] and scales [K], both float32."""
    require_contiguous(weight, scales, index)
    new, applied = torch.empty_like(weight), torch.empty_like(scales)
    channels, columns = len(weight), len(index)
    absorb_scales[(triton.cdiv(channels, TILE),)](
        weight, scales, index, new, applied, offset, channels, columns,
        STORED=str(dtype).removeprefix("torch.") if dtype else "", TILE=TILE, AT_ONCE=AT_ONCE, num_warps=FEW,
    )  # fmt: skip
    return new, applied


@absorbed_at_once.register_fake
def _(weight, scales, index, offset, dtype):
    return torch.empty_like(weight), torch.empty_like(scales)


@torch.library.custom_op("quantkit::spread", mutates_args=())
def spread_at_once(scales: Tensor, index: Tensor, channels: int) -> Tensor:
    """Compute `spread` of `model/structure/fold.py`: [channels] float32."""
    require_contiguous(scales, index)
    result = scales.new_empty(channels)
    absorb_scales[(triton.cdiv(channels, TILE),)](
        None, scales, index, result, None, 0.0, channels, len(index),
        STORED="", TILE=TILE, AT_ONCE=AT_ONCE, num_warps=FEW,
    )  # fmt: skip
    return result


@spread_at_once.register_fake
def _(scales, index, channels):
    return scales.new_empty(channels)
