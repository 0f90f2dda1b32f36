"""Conversion of a solver's result into stored codes, and of stored codes back into values: one launch each.

`integers` turns values in units of their scale into codes in rows, with scales and zero points; `loss` dequantizes
codes
and measures their error. They equal `_tensor` in `passes/solvers/gptq.py` and `Block.assign`
(`model/structure/block.py`); `QuantTensor` defines the value of a code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# side of a square of codes to transpose; rows and columns of codes to read back; warps
SQUARE, ROWS, COLUMNS, WARPS = 64, 16, 128, 4


@triton.jit
def turn_codes(
    units_ptr,  # [K, N] float32
    scale_ptr,  # [K / GROUP, N] float32
    zero_ptr,  # the same, or None
    codes_ptr,  # [N, K] int8
    scales_ptr,  # [N, K / GROUP]
    zeros_ptr,  # the same, int8, or None
    N, K, GROUP,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """Transpose and store codes, as described in the module."""
    rows, start = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE
    columns = start + tl.arange(0, SQUARE)
    inside = (columns < K)[:, None] & (rows < N)[None, :]
    codes = tl.load(units_ptr + columns.to(tl.int64)[:, None] * N + rows[None, :], mask=inside, other=0.0)
    if zero_ptr is not None:
        place = (columns // GROUP).to(tl.int64)[:, None] * N + rows[None, :]
        codes += tl.load(zero_ptr + place, mask=inside, other=0.0)
    at = codes_ptr + rows.to(tl.int64)[None, :] * K + columns[:, None]
    tl.store(at, codes.to(tl.int8), mask=inside)
    # scales of the groups that begin in this square
    groups = K // GROUP
    for g in range((start + GROUP - 1) // GROUP, tl.minimum((start + SQUARE + GROUP - 1) // GROUP, groups)):
        of = tl.cast(g, tl.int64) * N + rows
        to = rows.to(tl.int64) * groups + g
        scale = tl.load(scale_ptr + of, mask=rows < N, other=0.0)
        tl.store(scales_ptr + to, scale.to(scales_ptr.dtype.element_ty), mask=rows < N)
        if zero_ptr is not None:
            tl.store(zeros_ptr + to, tl.load(zero_ptr + of, mask=rows < N, other=0.0).to(tl.int8), mask=rows < N)


@triton.jit
def read_back(
    weight_ptr,  # [N, K] float32, of any strides
    codes_ptr,  # [N, WIDTH]
    scale_ptr,  # [N, WIDTH / GROUP]
    zero_ptr,  # the same, int8, or None
    book_ptr,  # float32, or None
    whole_ptr,  # [] float32, or None
    values_ptr,  # [N, K] float32
    parts_ptr,  # [2, programs] float64
    down_stride, across_stride, N, K, WIDTH, GROUP,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize codes and measure their error, as described in the module."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    down, across = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    place = down * (WIDTH // GROUP) + across // GROUP
    code = tl.load(codes_ptr + down * WIDTH + across, mask=inside, other=0)
    if book_ptr is not None:
        value = tl.load(book_ptr + code.to(tl.int32), mask=inside, other=0.0)
    else:
        value = code.to(tl.float32)
    if zero_ptr is not None:
        value -= tl.load(zero_ptr + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scale_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if whole_ptr is not None:
        scale = scale * tl.load(whole_ptr)
    value = value * scale
    weight = tl.load(weight_ptr + down * down_stride + across * across_stride, mask=inside, other=0.0)
    tl.store(values_ptr + down * K + across, value, mask=inside)
    lost = tl.where(inside, weight - value, 0.0)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    every = tl.num_programs(0) * tl.num_programs(1)
    tl.store(parts_ptr + part, tl.sum(tl.sum(lost * lost, axis=1), axis=0).to(tl.float64))
    tl.store(parts_ptr + every + part, tl.sum(tl.sum(weight * weight, axis=1), axis=0).to(tl.float64))


@torch.library.custom_op("quantkit::integers", mutates_args=())
def integers(
    units: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K] int8, scales [N, K / group] and zero points int8; of symmetric grids [0].

    Args:
        units: [K, N] float32, integers: codes less their zero points.
        scale, zero: [K / group, N] float32.
        dtype: dtype of the scales.
        group: columns that share a scale.
    """
    result = _integers(units, scale, zero, dtype)
    columns, rows = units.shape
    turn_codes[(triton.cdiv(rows, SQUARE), triton.cdiv(columns, SQUARE))](
        units, scale.contiguous(), None if zero is None else zero.contiguous(), *result[:2],
        None if zero is None else result[2], rows, columns, group, SQUARE=SQUARE, num_warps=WARPS,
    )  # fmt: skip
    return result


@integers.register_fake
def _(units, scale, zero, dtype, _group):
    return _integers(units, scale, zero, dtype)


def _integers(units: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shape = (scale.shape[1], scale.shape[0])
    codes = units.new_empty((units.shape[1], units.shape[0]), dtype=torch.int8)
    zeros = units.new_empty((0,) if zero is None else shape, dtype=torch.int8)
    return codes, units.new_empty(shape, dtype=dtype), zeros


@torch.library.custom_op("quantkit::loss", mutates_args=())
def loss(
    weight: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, book: Tensor | None, whole: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dequantized values [N, K] float32, and squared error and energy [2, parts] float64, to be added up.

    Args:
        weight: [N, K] float32.
        codes, scale, zero, book, whole: parts of a `QuantTensor` with scales for every row; codes may be wider than
            `weight`.
    """
    values, parts = _read(weight)
    (rows, columns), width = weight.shape, codes.shape[1]
    read_back[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
        weight, codes.contiguous(), scale.contiguous(), None if zero is None else zero.contiguous(), book, whole,
        values, parts, weight.stride(0), weight.stride(1), rows, columns, width, width // scale.shape[1],
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return values, parts


@loss.register_fake
def _(weight, *_):
    return _read(weight)


def _read(weight: Tensor) -> tuple[Tensor, Tensor]:
    (rows, columns) = weight.shape
    parts = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    return weight.new_empty((rows, columns)), weight.new_empty((2, parts), dtype=torch.float64)
