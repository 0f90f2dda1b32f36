"""Statistics of inputs, a launch or two each: moments, distance between two halves of the tokens, a quotient of sums.

Moments are sums, sums of squares and ranges of every input. A program owns some columns of some tokens; the parts are
added in a fixed order, in float64. They equal those of `InputStats.add` (`calibrate/statistics/sums.py`).

Correlations of two halves of the tokens, over the upper triangle, as in `InputStats.noise`, which divides the first by
the second:

    ¼ sum_{i<j} (R₁ - R₂)²    and    sum_{i<j} R²        r_ij = h_ij / sqrt(h_ii h_jj)

A quotient divides one sum of parts by another, in a fixed order, in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# tokens and columns at a time, most parts of the tokens, warps
ROWS, COLUMNS, PARTS, WARPS = 32, 64, 64, 4
# correlations: columns of a square, warps; quotient: parts at a time
SQUARE, CHANCE_WARPS, QUOTIENT_PARTS = 64, 8, 1024


@triton.jit
def column_moments(
    inputs_ptr,  # [T, K] float32
    share_ptr,  # [T] float32, or None
    parts_ptr,  # [4, parts, K] float32
    T, K,
    LENGTH,  # tokens of a part
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute sum, sum of (weighted) squares, smallest and largest of one part."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inside = columns < K
    total = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    low = tl.full((COLUMNS,), float("inf"), tl.float32)
    high = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for start in range(part * LENGTH, tl.minimum(part * LENGTH + LENGTH, T), ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows < tl.minimum(part * LENGTH + LENGTH, T))[:, None] & inside[None, :]
        x = tl.load(inputs_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=there, other=0.0)
        weighed = x
        if share_ptr is not None:
            weighed = x * tl.load(share_ptr + rows, mask=rows < T, other=0.0)[:, None]
        total += tl.sum(x, axis=0)
        squares += tl.sum(weighed * weighed, axis=0)
        low = tl.minimum(low, tl.min(tl.where(there, x, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(there, x, float("-inf")), axis=0))
    at = parts_ptr + tl.cast(part, tl.int64) * K + columns
    every = tl.cast(tl.num_programs(1), tl.int64) * K
    tl.store(at, total, mask=inside)
    tl.store(at + every, squares, mask=inside)
    tl.store(at + 2 * every, low, mask=inside)
    tl.store(at + 3 * every, high, mask=inside)


@triton.jit
def joined_moments(
    parts_ptr,  # [4, parts, K] float32
    before_sums_ptr,  # [2, K] float64, or None
    before_ends_ptr,  # [2, K] float32, or None
    sums_ptr, ends_ptr, number, K,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Join all parts with the earlier result."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < K
    part = tl.arange(0, PARTS)
    there = (part < number)[:, None] & inside[None, :]
    at = parts_ptr + part.to(tl.int64)[:, None] * K + columns[None, :]
    every = tl.cast(number, tl.int64) * K
    total = tl.sum(tl.load(at, mask=there, other=0.0).to(tl.float64), axis=0)
    squares = tl.sum(tl.load(at + every, mask=there, other=0.0).to(tl.float64), axis=0)
    low = tl.min(tl.load(at + 2 * every, mask=there, other=float("inf")), axis=0)
    high = tl.max(tl.load(at + 3 * every, mask=there, other=float("-inf")), axis=0)
    if before_sums_ptr is not None:
        total += tl.load(before_sums_ptr + columns, mask=inside, other=0.0)
        squares += tl.load(before_sums_ptr + K + columns, mask=inside, other=0.0)
        low = tl.minimum(low, tl.load(before_ends_ptr + columns, mask=inside, other=0.0))
        high = tl.maximum(high, tl.load(before_ends_ptr + K + columns, mask=inside, other=0.0))
    tl.store(sums_ptr + columns, total, mask=inside)
    tl.store(sums_ptr + K + columns, squares, mask=inside)
    tl.store(ends_ptr + columns, low, mask=inside)
    tl.store(ends_ptr + K + columns, high, mask=inside)


@triton.jit
def inverse_sizes_of_tokens(
    stream_ptr,  # [T, W] float32
    share_ptr,  # [T] float32
    T,
    W,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the inverse of the root mean square of each token; 0 for a token of zeros."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, W, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = (rows < T)[:, None] & (columns < W)[None, :]
        x = tl.load(stream_ptr + rows.to(tl.int64)[:, None] * W + columns[None, :], mask=there, other=0.0)
        squares += tl.sum(x * x, axis=1)
    size = tl.math.sqrt_rn(squares / W)
    share = tl.where(size > 0.0, 1.0 / tl.where(size > 0.0, size, 1.0), 0.0)
    tl.store(share_ptr + rows, share, mask=rows < T)


@torch.library.custom_op("quantkit::inverse_sizes", mutates_args=())
def inverse_sizes(stream: Tensor) -> Tensor:
    """Return one over the root mean square of each token of [T, W] float32, [T] float32; 0 for a token of zeros."""
    tokens, width = stream.shape
    result = stream.new_empty(tokens)
    inverse_sizes_of_tokens[(triton.cdiv(tokens, ROWS),)](
        stream.contiguous(), result, tokens, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return result


@inverse_sizes.register_fake
def _(stream):
    return stream.new_empty(stream.shape[0])


@torch.library.custom_op("quantkit::moments_of_parts", mutates_args=())
def moments_of_parts(inputs: Tensor, share: Tensor | None) -> Tensor:
    """Return sum, weighted sum of squares, smallest and largest of parts of the tokens, [4, parts, K] float32.

    Args:
        inputs: [T, K] float32.
        share: [T] float32, weights of the tokens in the squares.
    """
    result, length = _parts(inputs)
    tokens, width = inputs.shape
    column_moments[(triton.cdiv(width, COLUMNS), result.shape[1])](
        inputs, share, result, tokens, width, length, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return result


@moments_of_parts.register_fake
def _(inputs, share):
    return _parts(inputs)[0]


@torch.library.custom_op("quantkit::moments_joined", mutates_args=())
def moments_joined(parts: Tensor, sums: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums and sums of squares [2, K] float64, smallest and largest [2, K] float32.

    Args:
        parts: result of `moments_of_parts`.
        sums, ends: results for earlier tokens.
    """
    result = _joined(parts)
    number, width = parts.shape[1:]
    joined_moments[(triton.cdiv(width, COLUMNS),)](
        parts, sums, ends, *result, number, width,
        PARTS=triton.next_power_of_2(number), COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return result


@moments_joined.register_fake
def _(parts, sums, ends):
    return _joined(parts)


def _parts(inputs: Tensor) -> tuple[Tensor, int]:
    """Allocate the parts, and return the tokens of each; both depend on the shape alone."""
    tokens, width = inputs.shape
    length = max(ROWS, triton.cdiv(tokens, PARTS * ROWS) * ROWS)
    return inputs.new_empty((4, max(1, triton.cdiv(tokens, length)), width)), length


def _joined(parts: Tensor) -> tuple[Tensor, Tensor]:
    shape = (2, parts.shape[2])
    return parts.new_empty(shape, dtype=torch.float64), parts.new_empty(shape)


# --- two halves of the tokens -----------------------------------------------------------------------------------------


@triton.jit
def size_of(halves_ptr, place, tokens, K):
    """Return square roots of the diagonal; infinite where it is zero, so that a division by it gives zero."""
    at = halves_ptr + place.to(tl.int64) * K + place
    first = tl.load(at, mask=place < K, other=0.0)
    second = tl.load(at + tl.cast(K, tl.int64) * K, mask=place < K, other=0.0)
    square = tl.math.div_rn(first + second, tl.zeros_like(first) + tokens)
    return tl.where(square > 0.0, tl.math.sqrt_rn(tl.maximum(square, 0.0)), float("inf"))


@triton.jit
def apart_and_both(
    halves_ptr,  # [2, K, K] float32
    parts_ptr,  # [2, squares, squares] float64
    tokens, first_count, second_count, K,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Compute both sums over correlations, as described in the module."""
    across, down = tl.program_id(0), tl.program_id(1)
    rows = down * SQUARE + tl.arange(0, SQUARE)
    columns = across * SQUARE + tl.arange(0, SQUARE)
    apart = tl.zeros((SQUARE,), tl.float32)
    both = tl.zeros((SQUARE,), tl.float32)
    if across >= down:
        # past the last column a size is infinite too
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
    """Return parts of both sums, [2, squares] float64, for `quotient`.

    Args:
        halves: [2, K, K] float32, sums of products over each half.
        counts: tokens of each half, neither 0.
        tokens: tokens of both halves.
    """
    result = _room(halves)
    squares = triton.cdiv(halves.shape[1], SQUARE)
    apart_and_both[(squares, squares)](
        halves, result, float(tokens), float(counts[0]), float(counts[1]), halves.shape[1],
        SQUARE=SQUARE, num_warps=CHANCE_WARPS,
    )  # fmt: skip
    return result


@chance.register_fake
def _(halves, counts, tokens):
    return _room(halves)


def _room(halves: Tensor) -> Tensor:
    return halves.new_empty((2, triton.cdiv(halves.shape[1], SQUARE) ** 2), dtype=torch.float64)


# --- a quotient of sums -----------------------------------------------------------------------------------------------


@triton.jit
def quotient_of_sums(
    parts_ptr,  # [2, parts] float64
    found_ptr,  # [] float64
    number,
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Divide two sums of parts, as described in the module."""
    above = tl.zeros((PARTS,), tl.float64)
    below = tl.zeros((PARTS,), tl.float64)
    for start in range(0, number, PARTS):
        part = start + tl.arange(0, PARTS)
        above += tl.load(parts_ptr + part, mask=part < number, other=0.0)
        below += tl.load(parts_ptr + number + part, mask=part < number, other=0.0)
    top, bottom = tl.sum(above, axis=0), tl.sum(below, axis=0)
    there = bottom > 0.0
    ratio = top / tl.where(there, bottom, 1.0)
    if CAPPED:
        ratio = tl.where(there, tl.minimum(ratio, 1.0), 1.0)
    tl.store(found_ptr, ratio)


@torch.library.custom_op("quantkit::quotient", mutates_args=())
def quotient(parts: Tensor, capped: bool) -> Tensor:
    """Return the first sum divided by the second, [] float64.

    Args:
        parts: [2, parts] float64, to be added up.
        capped: True to limit it to 1, and return 1 if the second sum is not positive; False to return the first sum
            then.
    """
    ratio = parts.new_empty(())
    quotient_of_sums[(1,)](parts, ratio, parts.shape[1], CAPPED=capped, PARTS=QUOTIENT_PARTS, num_warps=WARPS)
    return ratio


@quotient.register_fake
def _(parts, capped):
    return parts.new_empty(())
