"""Statistics of inputs, a launch or two each: moments, how far two halves of the tokens are apart, a quotient of sums.

Moments are sums, sums of squares and ranges of every input: a program owns some columns of some tokens; what the
programs found is added up in a fixed order, in float64. They are the twin of the lines of the same work in
`InputStats.add` (`calibrate/statistics/sums.py`).

Correlations of two halves of the tokens, over the upper triangle, the twin of `InputStats.noise`, which is the first by
the second:

    ¼ sum_{i<j} (R₁ - R₂)²    and    sum_{i<j} R²        r_ij = h_ij / sqrt(h_ii h_jj)

A quotient is one sum over another, of what the programs of a launch have found, in a fixed order, in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# tokens and columns at a time, parts at most that the tokens are cut into, warps
ROWS, COLUMNS, PARTS, WARPS = 32, 64, 64, 4
# of correlations: columns of a square, warps; of a quotient: parts at a time
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
    """Of one part: sum, sum of squares (weighed), smallest and largest."""
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
    """All parts, and what was there before."""
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
    """One over the root mean square of each token; 0 where that is 0."""
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
    """[T] float32: one over the root mean square of each token of [T, W] float32, 0 where that is 0."""
    tokens, width = stream.shape
    made = stream.new_empty(tokens)
    inverse_sizes_of_tokens[(triton.cdiv(tokens, ROWS),)](
        stream.contiguous(), made, tokens, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return made


@inverse_sizes.register_fake
def _(stream):
    return stream.new_empty(stream.shape[0])


@torch.library.custom_op("quantkit::moments_of_parts", mutates_args=())
def moments_of_parts(inputs: Tensor, share: Tensor | None) -> Tensor:
    """[4, parts, K] float32: sum, weighed sum of squares, smallest and largest, of parts of the tokens.

    Args:
        inputs: [T, K] float32.
        share: [T] float32, by which a token is weighed in squares.
    """
    made, length = _parts(inputs)
    tokens, width = inputs.shape
    column_moments[(triton.cdiv(width, COLUMNS), made.shape[1])](
        inputs, share, made, tokens, width, length, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return made


@moments_of_parts.register_fake
def _(inputs, share):
    return _parts(inputs)[0]


@torch.library.custom_op("quantkit::moments_joined", mutates_args=())
def moments_joined(parts: Tensor, sums: Tensor | None, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares [2, K] float64, smallest and largest [2, K] float32.

    Args:
        parts: of `moments_of_parts`.
        sums, ends: those of earlier tokens.
    """
    made = _joined(parts)
    number, width = parts.shape[1:]
    joined_moments[(triton.cdiv(width, COLUMNS),)](
        parts, sums, ends, *made, number, width,
        PARTS=triton.next_power_of_2(number), COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return made


@moments_joined.register_fake
def _(parts, sums, ends):
    return _joined(parts)


def _parts(inputs: Tensor) -> tuple[Tensor, int]:
    """Room for the parts, and the tokens of each: how many there are depends on the shape alone."""
    tokens, width = inputs.shape
    length = max(ROWS, triton.cdiv(tokens, PARTS * ROWS) * ROWS)
    return inputs.new_empty((4, max(1, triton.cdiv(tokens, length)), width)), length


def _joined(parts: Tensor) -> tuple[Tensor, Tensor]:
    shape = (2, parts.shape[2])
    return parts.new_empty(shape, dtype=torch.float64), parts.new_empty(shape)


# --- two halves of the tokens -----------------------------------------------------------------------------------------


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
    tokens, first_count, second_count, K,
    SQUARE: tl.constexpr,
):  # fmt: skip
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
        SQUARE=SQUARE, num_warps=CHANCE_WARPS,
    )  # fmt: skip
    return made


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
    """See the module."""
    above = tl.zeros((PARTS,), tl.float64)
    below = tl.zeros((PARTS,), tl.float64)
    for start in range(0, number, PARTS):
        part = start + tl.arange(0, PARTS)
        above += tl.load(parts_ptr + part, mask=part < number, other=0.0)
        below += tl.load(parts_ptr + number + part, mask=part < number, other=0.0)
    top, bottom = tl.sum(above, axis=0), tl.sum(below, axis=0)
    there = bottom > 0.0
    found = top / tl.where(there, bottom, 1.0)
    if CAPPED:
        found = tl.where(there, tl.minimum(found, 1.0), 1.0)
    tl.store(found_ptr, found)


@torch.library.custom_op("quantkit::quotient", mutates_args=())
def quotient(parts: Tensor, capped: bool) -> Tensor:
    """The first sum by the second, [] float64.

    Args:
        parts: [2, parts] float64, to be added up.
        capped: at most 1, and 1 where the second sum is not positive; else the first is then taken as it is.
    """
    found = parts.new_empty(())
    quotient_of_sums[(1,)](parts, found, parts.shape[1], CAPPED=capped, PARTS=QUOTIENT_PARTS, num_warps=WARPS)
    return found


@quotient.register_fake
def _(parts, capped):
    return parts.new_empty(())
