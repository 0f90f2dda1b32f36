"""A packed weight as 16-bit floats [N, K]: what is multiplied where no kernel of few bits wins.

    w[n, k] = value(codes[n, k], zero[n, g(k)]) * scale[n, g(k)]      rounded once, to the dtype asked for

It reads each word once and writes each weight once; the same decoding as in `matmul`. The result is scratch: followed
by a product and freed, no copy of the weight in high precision stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from quantkit.errors import InputError
from quantkit.kernels.configs import Config
from quantkit.kernels.layout import KINDS, PackedWeight
from quantkit.kernels.matmul import DECODERS, constants, effective, of_row

if TYPE_CHECKING:
    import torch


@triton.jit
def dequantize_tile(
    words_ptr, scale_ptr, zero_ptr, absmax_ptr, values_ptr, offset_ptr, w_ptr, N, K, TILES, STRIDE, GROUPS, magic,
    decode: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One tile of 16 BLOCK_N / 16 rows."""
    pid_n, tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK_N * 8)
    row_tile = tl.minimum(pid_n * (BLOCK_N // 16) + lane // 128, STRIDE // 16 - 1)
    words = tl.load(words_ptr + (row_tile.to(tl.int64) * TILES + tile) * 128 + lane % 128)
    rows = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1
    WIDTH: tl.constexpr = COLUMNS // PARTS
    column = tl.arange(0, WIDTH)
    for p in tl.static_range(PARTS):
        k = tile * COLUMNS + p * WIDTH
        group = 0
        if GROUP > 0:
            group = tl.minimum(k // GROUP, GROUPS - 1)
        zero = None
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + group * STRIDE + rows, mask=rows < STRIDE, other=0)
        w = decode(words, zero, magic, p * (WIDTH // 16), WIDTH // 16, BLOCK_N, tl.float16, ON_GPU).to(tl.float32)
        stored = of_row(scale_ptr, rows, group, STRIDE)
        scale = effective(stored, absmax_ptr, values_ptr, offset_ptr, rows, group, N, GROUPS, GAIN)
        inside = (rows < N)[:, None] & ((k + column) < K)[None, :]
        at = w_ptr + rows[:, None].to(tl.int64) * K + (k + column)[None, :]
        tl.store(at, (w * scale[:, None]).to(w_ptr.dtype.element_ty), mask=inside)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in a float dtype, on its device.

    Raises:
        InputError: `kernel-unsupported`.
    """
    import torch

    if weight.kind not in DECODERS:
        raise InputError(
            "kernel-unsupported",
            where=weight.kind,
            value="packed for 8-bit inputs",
            rule=f"one of {', '.join(DECODERS)}",
        )
    (rows, columns), form = weight.shape, KINDS[weight.kind]
    w = torch.empty((rows, columns), dtype=dtype, device=weight.words.device)
    absmax, values, offset = weight.nested or (None, None, None)
    meta = constants(weight, Config(64, 16, 1, 1, 4, 1))
    grid = (triton.cdiv(rows, 64), weight.words.shape[1])
    dequantize_tile[grid](
        weight.words, weight.scale, weight.zero, absmax, values, offset, w, rows, columns,
        weight.words.shape[1], weight.words.shape[0] * 16, weight.groups,
        DECODERS[weight.kind].MAGIC, **meta, COLUMNS=form.columns, num_warps=4,
    )  # fmt: skip
    return w
