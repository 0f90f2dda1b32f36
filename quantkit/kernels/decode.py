"""Product of a weight of few bits and a few rows of x, the whole K in one program: the kernel of decode steps.

    y[m, n] = sum over groups g of  scale[n, g] * sum over k in g of  value(codes[n, k], zero[n, g]) * x[m, k]

- **The warps of a program split K.** A program takes 16 rows of the weight, or 32. Each of its warps streams its own
  tiles through registers and multiplies them (`mma.m16n8k16`). The sums meet once, in shared memory. Nothing goes
  through global memory: no workspace, no counter, no second pass, and the same bits every time.
- **Triton sees one batched product**, [warps, rows, k] by [warps, k, columns], and puts the batch on the warps. Words
  and x are loaded in the order in which a tensor core takes them (`layout`): neither passes through shared memory, and
  no barrier stands in the loop.
- **The first step's words, scales and zero points are on their way before the wait** for the previous kernel
  (`matmul`), which writes x and reads y but leaves weights alone. Each later step is loaded while the one before it is
  multiplied.
- **Bytes in flight** of a program: warps * unroll * block_n / 16 * 512 during the wait, up to twice that in the loop.

The order of k within a tile is free as long as the weight and x agree. A thread has two neighbouring columns of a
fragment, 16 i + 8 rh + 2 t + h; Triton's operand has `RUN` neighbours. `in_runs` renames the columns of both operands,
and compiles to no instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantkit.kernels.decoders import DECODERS, as_read, beside, effective, undecoded
from quantkit.kernels.layout import KINDS, ROWS, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from quantkit.kernels.dispatch import Config


@triton.jit
def in_runs(values, LINES: tl.constexpr, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Rename the columns of [LINES, 16 COUNT] so that RUN columns of a thread are neighbours."""
    SIDE: tl.constexpr = RUN // 2 if RUN // 2 < COUNT else COUNT
    values = tl.reshape(values, (LINES, COUNT // SIDE, SIDE, 2, 4, 2))  # j, i, rh, t, h
    if RUN > 2 * COUNT:
        values = tl.permute(values, (0, 1, 4, 3, 2, 5))
    else:
        values = tl.permute(values, (0, 1, 3, 4, 2, 5))
    return tl.reshape(values, (LINES, 16 * COUNT))


@triton.jit
def keep_order():
    """Keep loads above this line there; ptxas, to save registers, would move the next step's to the end of this one."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fragment_of_x(at, column, K, EVEN_K: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr):
    """Load 16 columns of 8 rows of x for each warp, two columns a word, zeros beyond K: [8 WARPS, 16]."""
    if EVEN_K:
        words = tl.join(tl.load(at), tl.load(at + 4))
    else:
        low = tl.load(at, mask=column < K, other=0)
        words = tl.join(low, tl.load(at + 4, mask=column + 8 < K, other=0))
    values = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    values = tl.reshape(values, (WARPS * 8, 4, 2, 2))  # g, t, rh, h
    return tl.reshape(tl.permute(values, (0, 2, 1, 3)), (WARPS * 8, 16))


@triton.jit
def rows_of_x(
    at, column, K,
    COUNT: tl.constexpr, RUN: tl.constexpr, EVEN_K: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load COUNT fragments of 8 rows of x: [8 WARPS, 16 COUNT], columns renamed."""
    parts = ()
    for i in tl.static_range(COUNT):
        part = fragment_of_x(at + 8 * i, column + 16 * i, K, EVEN_K, WARPS, DTYPE)
        parts = parts + (part,)  # type: ignore[assignment]
    values = beside(parts[0], parts[1], WARPS * 8, 32)  # type: ignore[misc]
    if COUNT == 4:
        second = beside(parts[2], parts[3], WARPS * 8, 32)  # type: ignore[misc]
        values = beside(values, second, WARPS * 8, 64)
    return in_runs(values, WARPS * 8, COUNT, RUN)


@triton.jit
def words_of_step(at, turn, TILES, UNROLL: tl.constexpr, EVEN_K: tl.constexpr, more):
    """Load the words of each warp's turn, UNROLL tiles; beyond the last tile, zeros without a read."""
    words = ()
    for u in tl.static_range(UNROLL):
        # they are read once: the first-level cache is left to x
        if EVEN_K:
            loaded = tl.load(at + u * 128, mask=more, cache_modifier=".cg")
        else:
            loaded = tl.load(at + u * 128, mask=turn * UNROLL + u < TILES, other=0, cache_modifier=".cg")
        words = words + (loaded,)  # type: ignore[assignment]
    return words


@triton.jit
def of_rows(at, rows, STRIDE, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load scales or zero points of BLOCK_N rows for each warp; `at` points at the first 16: [WARPS, BLOCK_N]."""
    # 16 rows a load: Triton moves a larger one through shared memory
    values = tl.load(at)
    if BLOCK_N == 32:
        more = tl.load(at + 16) if EVEN_N else tl.load(at + 16, mask=rows + 16 < STRIDE, other=0)
        values = tl.reshape(tl.permute(tl.join(values, more), (0, 2, 1)), (at.shape[0], 32))
    return values


@triton.jit
def group_of(warp, step, number, GROUPS, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN_K: tl.constexpr):
    """Return a group of each warp's STEP columns in a step: [WARPS]; beyond the last one, that one."""
    turn = step * warp.shape[0] + warp
    g = turn // (GROUP // STEP) if GROUP > STEP else turn * (STEP // GROUP) + number
    return g if EVEN_K else tl.minimum(g, GROUPS - 1)


@triton.jit
def groups_of_step(
    ptr, first, warp, step, STRIDE, GROUPS,
    GROUP: tl.constexpr, STEP: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load scales or zero points of each warp's groups in a step, each [WARPS, BLOCK_N]."""
    rows = first + tl.arange(0, 16)[None, :]
    values = ()
    for i in tl.static_range((STEP + GROUP - 1) // GROUP):
        if EVEN_K and GROUP <= STEP:
            # one address in the loop, and a uniform step
            at = ptr + (warp * (STEP // GROUP))[:, None] * STRIDE + rows
            at += (step * (warp.shape[0] * (STEP // GROUP)) + i) * STRIDE
        else:
            at = ptr + group_of(warp, step, i, GROUPS, GROUP, STEP, EVEN_K)[:, None] * STRIDE + rows
        values = values + (of_rows(at, rows, STRIDE, EVEN_N, BLOCK_N),)  # type: ignore[assignment]
    return values


@triton.jit
def scales_of(
    stored, absmax_ptr, values_ptr, offset_ptr, first, g, N, GROUPS, GAIN: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return `effective` of BLOCK_N rows from `first` on: [WARPS, BLOCK_N]; of nested ones, 16 rows a load."""
    rows = first + tl.arange(0, 16)[None, :]
    if absmax_ptr is None or BLOCK_N == 16:
        scale = effective(stored, absmax_ptr, values_ptr, offset_ptr, rows, g, N, GROUPS, GAIN)
    else:
        halves = tl.reshape(stored, (stored.shape[0], 2, 16))
        low, high = tl.split(tl.permute(halves, (0, 2, 1)))
        low = effective(low, absmax_ptr, values_ptr, offset_ptr, rows, g, N, GROUPS, GAIN)
        high = effective(high, absmax_ptr, values_ptr, offset_ptr, rows + 16, g, N, GROUPS, GAIN)
        scale = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (stored.shape[0], 32))
    return scale


@triton.jit
def line(values, WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Order zero points as `decoders` do, row tiles first: [WARPS, BLOCK_N] -> [WARPS * BLOCK_N]."""
    values = tl.reshape(values, (WARPS, BLOCK_N // 16, 16))
    return tl.reshape(tl.permute(values, (1, 0, 2)), (WARPS * BLOCK_N,))


# one compilation for every M, also 1 and multiples of 16
@triton.jit(do_not_specialize=["M"])
def whole_k_matmul(
    x_ptr,  # [M, K / 2] int32: two columns each
    words_ptr,  # [Np / 16, TILES, 128] int32
    scale_ptr,  # [GROUPS, Np]
    zero_ptr,  # [GROUPS, Np] uint8, or None
    absmax_ptr,  # of nested scales, or None
    values_ptr, offset_ptr,
    y_ptr,  # [M, N], of the dtype of x
    M, N, K, TILES,
    STRIDE,  # Np
    GROUPS,
    magic,  # of the decoder
    decode: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a tile
    GROUP: tl.constexpr,  # columns that share a scale; 0: a row
    RUN: tl.constexpr,  # neighbouring columns of a thread in Triton's operands
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    UNROLL: tl.constexpr,  # tiles of a warp a step
    WARPS: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the product, as described in the module."""
    if OVERLAP:
        gdc_launch_dependents()
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    R: tl.constexpr = BLOCK_N // 16
    PARTS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1
    WIDTH: tl.constexpr = COLUMNS // PARTS
    COUNT: tl.constexpr = WIDTH // 16
    STEP: tl.constexpr = UNROLL * COLUMNS
    first = pid_n * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    warp = tl.arange(0, WARPS)

    # words: row tile, warp, word of a tile
    lane = tl.arange(0, R * WARPS * 128)
    row_tile = pid_n * R + lane // (WARPS * 128)
    if not EVEN_N:
        row_tile = tl.minimum(row_tile, STRIDE // 16 - 1)
    turn_of_lane = lane // 128 % WARPS
    words_at = words_ptr + row_tile.to(tl.int64) * (TILES * 128) + turn_of_lane * (UNROLL * 128) + lane % 128
    words = words_of_step(words_at, turn_of_lane, TILES, UNROLL, EVEN_K, TILES > 0)
    row_zero = None
    if GROUP > 0:
        stored = groups_of_step(scale_ptr, first, warp, 0, STRIDE, GROUPS, GROUP, STEP, EVEN_N, EVEN_K, BLOCK_N)
        if zero_ptr is not None:
            zeros = groups_of_step(zero_ptr, first, warp, 0, STRIDE, GROUPS, GROUP, STEP, EVEN_N, EVEN_K, BLOCK_N)
    else:
        row_scale = tl.load(scale_ptr + rows, mask=rows < STRIDE, other=0)
        if zero_ptr is not None:
            of_first = (first + warp * 0)[:, None] + tl.arange(0, 16)[None, :]
            row_zero = of_rows(zero_ptr + of_first, of_first, STRIDE, EVEN_N, BLOCK_N)
    if OVERLAP:
        gdc_wait()

    # x: warp, row g, columns 2 t and 2 t + 1; a column of the product beyond M is never written, so any row will do
    x_lane = tl.arange(0, WARPS * 32)
    x_row = pid_m * BLOCK_M + x_lane // 4 % 8
    column = x_lane // 32 * STEP + x_lane % 4 * 2
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    steps = tl.cdiv(TILES, WARPS * UNROLL)
    for step in range(steps):
        more, after = step + 1 < steps, (step + 1) * WARPS
        next_words = words_of_step(words_at + after * (UNROLL * 128), after + turn_of_lane, TILES, UNROLL, EVEN_K, more)
        if GROUP > 0:
            # the last step loads its own again
            then = tl.minimum(step + 1, steps - 1)
            next_stored = groups_of_step(
                scale_ptr, first, warp, then, STRIDE, GROUPS, GROUP, STEP, EVEN_N, EVEN_K, BLOCK_N
            )
            if zero_ptr is not None:
                next_zeros = groups_of_step(
                    zero_ptr, first, warp, then, STRIDE, GROUPS, GROUP, STEP, EVEN_N, EVEN_K, BLOCK_N
                )
        if ON_GPU:
            keep_order()
        part = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
        for u in tl.static_range(UNROLL):
            for p in tl.static_range(PARTS):
                k = step * (WARPS * STEP) + u * COLUMNS + p * WIDTH
                taken = ()
                for m in tl.static_range(BLOCK_M // 8):
                    x_at = x_ptr + tl.minimum(x_row + m * 8, M - 1).to(tl.int64) * (K // 2) + (k + column) // 2
                    loaded = rows_of_x(x_at, column + k, K, COUNT, RUN, EVEN_K, WARPS, DTYPE)
                    taken = taken + (loaded,)  # type: ignore[assignment]
                if ON_GPU:
                    keep_order()
                x = taken[0]  # type: ignore[misc]
                if BLOCK_M == 16:
                    x = tl.join(taken[0], taken[1])  # type: ignore[misc]
                elif BLOCK_M == 32:
                    x = tl.join(tl.join(taken[0], taken[2]), tl.join(taken[1], taken[3]))  # type: ignore[misc]
                x = tl.reshape(x, (WARPS, 8, 16 * COUNT, BLOCK_M // 8))
                x = tl.reshape(tl.permute(x, (0, 2, 3, 1)), (WARPS, 16 * COUNT, BLOCK_M))
                zero = row_zero
                if GROUP > 0 and zero_ptr is not None:
                    zero = zeros[(u * COLUMNS + p * WIDTH) // GROUP]
                if DECODE:
                    ready = None
                    if zero_ptr is not None:
                        ready = line(zero, WARPS, BLOCK_N)
                    w = decode(words[u], ready, magic, p * COUNT, COUNT, WARPS * BLOCK_N, DTYPE, ON_GPU)
                else:
                    w = undecoded(words[u], p * COUNT, COUNT, WARPS * BLOCK_N, DTYPE)
                w = tl.reshape(in_runs(w, WARPS * BLOCK_N, COUNT, RUN), (R, WARPS, 16, 16 * COUNT))
                w = tl.reshape(tl.permute(w, (1, 0, 2, 3)), (WARPS, BLOCK_N, 16 * COUNT))
                if not ON_GPU:
                    # the interpreter multiplies the bits of bfloat16
                    w, x = w.to(tl.float32), x.to(tl.float32)
                if GROUP == 0:
                    acc = tl.dot(w, x, acc)
                else:
                    part = tl.dot(w, x, part)
                    if (u * COLUMNS + (p + 1) * WIDTH) % GROUP == 0 or (u == UNROLL - 1 and p == PARTS - 1):
                        g = group_of(warp, step, (u * COLUMNS + p * WIDTH) // GROUP, GROUPS, GROUP, STEP, EVEN_K)
                        scale = scales_of(
                            stored[(u * COLUMNS + p * WIDTH) // GROUP], absmax_ptr, values_ptr, offset_ptr,
                            first, g[:, None], N, GROUPS, GAIN, BLOCK_N,
                        )  # fmt: skip
                        if zero_ptr is not None and not DECODE:
                            scale += as_read(zero)
                        acc += part * scale[:, :, None]
                        part = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
        words = next_words
        if GROUP > 0:
            stored = next_stored
            if zero_ptr is not None:
                zeros = next_zeros
    total = tl.sum(acc, 0)
    if GROUP == 0:
        scale = effective(row_scale, absmax_ptr, values_ptr, offset_ptr, rows, 0, N, GROUPS, GAIN)
        if zero_ptr is not None and not DECODE:
            scale += as_read(tl.max(row_zero, 0))
        total = total * scale[:, None]
    batch = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    place = batch[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(y_ptr + place, total.to(DTYPE), mask=(rows < N)[:, None] & (batch < M)[None, :])


def run_of(group: int, *, zero: bool) -> int:
    """Return RUN: 32 bits of the narrowest load behind an operand, halved by `tl.join`; a loop hides what it carries.

    (Triton 3.6, `computeOrigBitWidth` of AccelerateMatmul.cpp. Another answer costs time, not accuracy: weights move
    between lanes, which the tests of the machine code show.)
    """
    return 8 if zero and not group else 4


def whole_groups(unroll: int, columns: int, group: int) -> int:
    """Lower the tiles of a step until it holds whole groups, or a group whole steps; `columns`: of a tile."""
    while unroll > 1 and group and (unroll * columns) % group and group % (unroll * columns):
        unroll //= 2
    return unroll


def whole_k(
    x: torch.Tensor,
    weight: PackedWeight,
    y: torch.Tensor,
    config: Config,
    *,
    decode: bool,
    on_gpu: bool,
    options: Mapping[str, bool],
) -> None:
    """Write x [M, K] times the transposed weight [N, K] to y [M, N].

    The weight must be complete before the previous kernel of the stream begins.

    Args:
        x: float16 or bfloat16, rows contiguous; an odd K is copied to an even one.
        weight: packed weight on the same device.
        y: result, in the dtype of x.
        config: tile sizes; 16 or 32 rows of the weight, 8, 16 or 32 of x.
        decode: False for the raw twin.
        on_gpu: False under Triton's interpreter.
        options: launch options, with `OVERLAP`.
    """
    import torch

    (rows, columns), form, decoder = weight.shape, KINDS[weight.kind], DECODERS[weight.kind]
    absmax, values, offset = weight.nested or (None, None, None)
    if columns % 2 or x.data_ptr() % 4:
        x = torch.nn.functional.pad(x, (0, columns % 2)).clone()
    group = 0 if weight.groups == 1 else weight.group
    unroll = whole_groups(config.unroll, form.columns, group)
    grid = (triton.cdiv(x.shape[0], config.block_m), triton.cdiv(rows, config.block_n))
    whole_k_matmul[grid](
        x.view(torch.int32), weight.words, weight.scale, weight.zero, absmax, values, offset, y,
        x.shape[0], rows, x.shape[1], weight.words.shape[1], weight.words.shape[0] * ROWS, weight.groups,
        decoder.MAGIC, decode=decoder.decode, DECODE=decode, GAIN=decoder.GAIN, COLUMNS=form.columns, GROUP=group,
        RUN=run_of(group, zero=weight.zero is not None), EVEN_N=weight.words.shape[0] % (config.block_n // ROWS) == 0,
        EVEN_K=columns % (config.warps * unroll * form.columns) == 0, BLOCK_N=config.block_n, BLOCK_M=config.block_m,
        UNROLL=unroll, WARPS=config.warps, ON_GPU=on_gpu, num_warps=config.warps, num_stages=1, **options,
    )  # fmt: skip
