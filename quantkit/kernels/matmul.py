"""Product of weights of few bits and 16-bit activations: one kernel for every format and batch.

    y[m, n] = sum over groups g of  scale[n, g] * sum over k in g of  value(codes[n, k], zero[n, g]) * x[m, k]

- **The weight is the left operand.** y^T = W x^T: a tile is decoded in the registers from which the tensor core reads
it
  (`layout`), so that it never returns to shared memory, and a batch of 1 fills the narrow side of a product (8), not
  the
  wide one (64).
- **Codes are multiplied as integers**, exact in 16 bits; a group's sum is scaled in float32. `code * scale` is never
  rounded, and there is no multiplication per weight.
- **Few columns of x (decode): K is split over programs**, so that all multiprocessors stream. Each program leaves its
  float32 sums in a buffer; the last to arrive, by an integer counter, adds them in the order of K and writes y. One
  launch, and the same bits every time: no float is added atomically. (Osama et al., "Stream-K", 2023, arXiv 2301.03598,
  has the fix-up by flags; this is the plain split of K.)
- **Many columns (prefill): larger tiles, no split**; each weight is decoded once for `block_m` rows of x.
- **The raw twin** (`decode=False`) is the same kernel with words taken as numbers: same loads, same products.
  t(twin) - bound is the streaming loss, t(kernel) - t(twin) the cost of decoding.

Triton pipelines the words and x (16-byte asynchronous copies, `stages` deep).

**Programmatic dependent launch** (SM 9.0 and later): a kernel is set up while the one before it still runs. A decode
step is hundreds of dependent kernels of a few microseconds. A kernel launched this way may take its place on a
multiprocessor as soon as all programs of the previous one have begun. It reads and writes nothing before `begin` has
waited for the end of the previous kernel, memory included. The next kernel waits for it in turn, or is launched as
usual, after its end. (PTX ISA, `griddepcontrol`.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.driver import driver

from quantkit.errors import InputError
from quantkit.kernels.decode import whole_groups, whole_k
from quantkit.kernels.decoders import DECODERS, as_read, effective, undecoded
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import KINDS, PackedWeight
from quantkit.kernels.workspace import Workspace, present

if TYPE_CHECKING:
    import torch

_FROM = 90


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Wait for the previous kernel; must come before any read or write."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap() -> dict[str, bool]:
    """Return launch arguments for a kernel that starts with `begin(OVERLAP)`, for the present device."""
    able = not interpreted() and driver.active.get_current_target().arch >= _FROM
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


def interpreted() -> bool:
    """Tell whether Triton's interpreter runs the kernels: TRITON_INTERPRET=1, set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@triton.jit
def of_row(ptr, rows, g, STRIDE):
    """Load a scale, its code, or a zero point of `rows` for group g."""
    return tl.load(ptr + g * STRIDE + rows, mask=rows < STRIDE, other=0)


@triton.jit
def of_step(ptr, rows, step, STRIDE, GROUPS, GROUP: tl.constexpr, STEP: tl.constexpr):
    """Load values of `rows` for each group in a step of STEP columns; past the end, those of the last group."""
    loaded = ()
    for i in tl.static_range((STEP + GROUP - 1) // GROUP):
        g = tl.minimum((step * STEP + i * GROUP) // GROUP, GROUPS - 1)
        loaded = loaded + (of_row(ptr, rows, g, STRIDE),)  # type: ignore[assignment]
    return loaded


@triton.jit
def effective_of_step(
    stored, absmax_ptr, values_ptr, offset_ptr, rows, step, N, GROUPS,
    GROUP: tl.constexpr, STEP: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Return `effective` for the values of `of_step`."""
    scales = ()
    for i in tl.static_range((STEP + GROUP - 1) // GROUP):
        g = tl.minimum((step * STEP + i * GROUP) // GROUP, GROUPS - 1)
        ready = effective(stored[i], absmax_ptr, values_ptr, offset_ptr, rows, g, N, GROUPS, GAIN)
        scales = scales + (ready,)  # type: ignore[assignment]
    return scales


@triton.jit
def place_of_weight(words_ptr, pid_n, TILES, STRIDE, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """Return pointers to a program's words of the first tile, [BLOCK_N * 8], and its rows of the weight, [BLOCK_N]."""
    lane = tl.arange(0, BLOCK_N * 8)
    row_tile = pid_n * (BLOCK_N // 16) + lane // 128
    if not EVEN_N:
        row_tile = tl.minimum(row_tile, STRIDE // 16 - 1)
    words_at = words_ptr + row_tile.to(tl.int64) * (TILES * 128) + lane % 128
    return words_at, pid_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def finish(
    acc, y_ptr, sums_ptr, count_ptr, rows, batch, pid_m, pid_n, pid_k, M, N,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write sums [BLOCK_N, BLOCK_M] as y^T; for a split K, the last program to arrive adds all of them, in order."""
    inside = (rows < N)[:, None] & (batch < M)[None, :]
    place = batch[None, :].to(tl.int64) * N + rows[:, None]
    if SPLIT > 1:
        tl.store(sums_ptr + pid_k.to(tl.int64) * M * N + place, acc, mask=inside)
        # every thread's sums are written before this program counts itself, and the last one sees all of them
        tl.debug_barrier()
        tile = pid_m * tl.num_programs(1) + pid_n
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for s in range(SPLIT):
                at = sums_ptr + tl.cast(s, tl.int64) * M * N + place
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(count_ptr + tile, 0)
    else:
        tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=inside)


# one compilation for every M, also 1 and multiples of 16
@triton.jit(do_not_specialize=["M"])
def weight_only_matmul(
    x_ptr,  # [M, K] float16 or bfloat16
    words_ptr,  # [Np / 16, TILES, 128] int32
    scale_ptr,  # [GROUPS, Np]
    zero_ptr,  # [GROUPS, Np] uint8, or None
    absmax_ptr,  # of nested scales, or None
    values_ptr, offset_ptr,
    y_ptr,  # [M, N]
    sums_ptr,  # [SPLIT, M, N] float32, or None
    count_ptr,  # [tiles of y] int32, zero before and after, or None
    M, N, K, TILES,
    STRIDE,  # Np
    GROUPS,
    magic,  # of the decoder
    decode: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a tile
    GROUP: tl.constexpr,  # columns that share a scale; 0: a row
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    UNROLL: tl.constexpr,  # tiles a step
    SPLIT: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the product, as described in the module."""
    begin(OVERLAP)
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    words_at, rows = place_of_weight(words_ptr, pid_n, TILES, STRIDE, BLOCK_N, EVEN_N)
    # a tile is one product; groups of half a tile make it two
    PARTS: tl.constexpr = COLUMNS // GROUP if GROUP > 0 and GROUP < COLUMNS else 1
    WIDTH: tl.constexpr = COLUMNS // PARTS
    batch = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, WIDTH)
    x_at = x_ptr + batch[:, None].to(tl.int64) * K + column[None, :]
    inside = (batch < M)[:, None]

    row_zero = None
    if GROUP == 0 and zero_ptr is not None:
        row_zero = tl.load(zero_ptr + rows, mask=rows < STRIDE, other=0)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEP: tl.constexpr = UNROLL * COLUMNS
    steps = tl.cdiv(TILES, UNROLL)
    first = steps * pid_k // SPLIT
    # scales and zero points are too narrow for asynchronous copies, and a plain load would stall: they are loaded two
    # steps ahead (for nested scales the code; its value one step ahead)
    if GROUP > 0:
        stored = of_step(scale_ptr, rows, first, STRIDE, GROUPS, GROUP, STEP)
        scales = effective_of_step(
            stored, absmax_ptr, values_ptr, offset_ptr, rows, first, N, GROUPS, GROUP, STEP, GAIN
        )
        stored = of_step(scale_ptr, rows, first + 1, STRIDE, GROUPS, GROUP, STEP)
        if zero_ptr is not None:
            zeros = of_step(zero_ptr, rows, first, STRIDE, GROUPS, GROUP, STEP)
    for step in range(first, steps * (pid_k + 1) // SPLIT):
        if GROUP > 0:
            next_scales = effective_of_step(
                stored, absmax_ptr, values_ptr, offset_ptr, rows, step + 1, N, GROUPS, GROUP, STEP, GAIN
            )
            stored = of_step(scale_ptr, rows, step + 2, STRIDE, GROUPS, GROUP, STEP)
            if zero_ptr is not None:
                next_zeros = of_step(zero_ptr, rows, step + 1, STRIDE, GROUPS, GROUP, STEP)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for u in tl.static_range(UNROLL):
            tile = step * UNROLL + u
            if EVEN_K:
                words = tl.load(words_at + tile * 128)
            else:
                # past the end x is zero, whatever the weight
                words = tl.load(words_at + tl.minimum(tile, TILES - 1) * 128)
            for p in tl.static_range(PARTS):
                k = tile * COLUMNS + p * WIDTH
                zero = row_zero
                if GROUP > 0 and zero_ptr is not None:
                    zero = zeros[(u * PARTS + p) * WIDTH // GROUP]
                x_mask = inside if EVEN_K else inside & ((k + column) < K)[None, :]
                x = tl.load(x_at + k, mask=x_mask, other=0.0)
                if DECODE:
                    w = decode(
                        words, zero, magic, p * (WIDTH // 16), WIDTH // 16, BLOCK_N, x_ptr.dtype.element_ty, ON_GPU
                    )
                else:
                    w = undecoded(words, p * (WIDTH // 16), WIDTH // 16, BLOCK_N, x_ptr.dtype.element_ty)
                if not ON_GPU:
                    # the interpreter multiplies the bits of bfloat16
                    w, x = w.to(tl.float32), x.to(tl.float32)
                if GROUP == 0:
                    acc = tl.dot(w, tl.trans(x), acc)
                else:
                    part = tl.dot(w, tl.trans(x), part)
                    if ((u * PARTS + p + 1) * WIDTH) % GROUP == 0 or (u == UNROLL - 1 and p == PARTS - 1):
                        scale = scales[(u * PARTS + p) * WIDTH // GROUP]
                        if zero_ptr is not None and not DECODE:
                            scale += as_read(zero)
                        acc += part * scale[:, None]
                        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if GROUP > 0:
            scales = next_scales
            if zero_ptr is not None:
                zeros = next_zeros
    if GROUP == 0:
        stored_row = of_row(scale_ptr, rows, 0, STRIDE)
        scale = effective(stored_row, absmax_ptr, values_ptr, offset_ptr, rows, 0, N, GROUPS, GAIN)
        if zero_ptr is not None and not DECODE:
            scale += as_read(row_zero)
        acc = acc * scale[:, None]
    finish(acc, y_ptr, sums_ptr, count_ptr, rows, batch, pid_m, pid_n, pid_k, M, N, BLOCK_N, BLOCK_M, SPLIT)


def weight_only(
    x: torch.Tensor, weight: PackedWeight, config: Config, *, workspace: Workspace | None = None, decode: bool = True
) -> torch.Tensor:
    """Return x [M, K] times the transposed weight [N, K]: y [M, N], in the dtype of x; sums are float32.

    Args:
        x: float16 or bfloat16, rows contiguous.
        weight: packed weight on the same device.
        config: tile sizes.
        workspace: memory for the sums of a split K; None for that of the present stream or graph. A whole K
            (`Config.whole_k`) needs none.
        decode: False for the raw twin, whose result is meaningless.

    Raises:
        InputError: `kernel-unsupported`, `kernel-shape`.
    """
    y, sums, counts = prepared(x, weight, config, workspace, DECODERS, x.dtype)
    if config.whole_k:
        whole_k(x, weight, y, config, decode=decode, on_gpu=not interpreted(), options=overlap())
        return y
    (rows, columns), form = weight.shape, KINDS[weight.kind]
    absmax, values, offset = weight.nested or (None, None, None)
    meta = constants(weight, config, decode=decode)
    grid = (triton.cdiv(x.shape[0], config.block_m), triton.cdiv(rows, config.block_n), config.split)
    weight_only_matmul[grid](
        x, weight.words, weight.scale, weight.zero, absmax, values, offset, y, sums, counts,
        x.shape[0], rows, columns, weight.words.shape[1], weight.words.shape[0] * 16, weight.groups,
        DECODERS[weight.kind].MAGIC, **meta, COLUMNS=form.columns, num_warps=config.warps, num_stages=config.stages,
        **overlap(),
    )  # fmt: skip
    return y


def constants(weight: PackedWeight, config: Config, *, decode: bool = True) -> dict[str, Any]:
    """Return the kernel's compile-time arguments for a weight, except the tile's columns."""
    form, decoder = KINDS[weight.kind], DECODERS[weight.kind]
    row_tiles = weight.words.shape[0]
    group = 0 if weight.groups == 1 else weight.group
    unroll = whole_groups(config.unroll, form.columns, group)
    return {
        "decode": decoder.decode,
        "DECODE": decode,
        "GAIN": decoder.GAIN,
        "GROUP": group,
        "EVEN_N": row_tiles % (config.block_n // 16) == 0,
        "EVEN_K": weight.shape[1] % (unroll * form.columns) == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "UNROLL": unroll,
        "SPLIT": config.split,
        "ON_GPU": not interpreted(),
    }


def prepared(
    x: torch.Tensor,
    weight: PackedWeight,
    config: Config,
    workspace: Workspace | None,
    kinds: Iterable[str],
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return y, and the sums and counters of a split K; refuse arguments that do not match."""
    import torch

    if weight.kind not in kinds:
        raise InputError("kernel-unsupported", weight.kind, "packed for another kernel", f"one of {', '.join(kinds)}")
    if x.ndim != 2 or x.shape[1] != weight.shape[1] or x.shape[0] < 1 or not x.is_contiguous():
        rule = "x is [M, K], M at least 1, rows contiguous"
        raise InputError("kernel-shape", weight.kind, f"x {list(x.shape)}, weight {list(weight.shape)}", rule)
    rows = weight.shape[0]
    y = torch.empty((x.shape[0], rows), dtype=dtype or torch.float16, device=x.device)
    if config.split == 1:
        return y, None, None
    memory = workspace or present(x.device)
    blocks = triton.cdiv(x.shape[0], config.block_m) * triton.cdiv(rows, config.block_n)
    return y, *memory.of(config.split * x.shape[0] * rows, blocks, x.device)


# --- expanded to floats -----------------------------------------------------------------------------------------------


# rows in a program, as in a tile of cuBLAS (64 take 21 to 50 % more instructions a weight); an H100's cache, for a CPU
_BLOCK, _CACHE = 128, 50 << 20


@triton.jit
def dequantize_tile(
    words_ptr, scale_ptr, zero_ptr, absmax_ptr, values_ptr, offset_ptr, w_ptr,
    first,  # row of the weight that is row 0 of w; a multiple of BLOCK_N
    N, K, TILES, STRIDE, GROUPS, magic,
    decode: tl.constexpr, DECODE: tl.constexpr, GAIN: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr,
    SPLIT: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile of BLOCK_N rows."""
    pid_n, tile = tl.program_id(0) + first // BLOCK_N, tl.program_id(1)
    words_at, rows = place_of_weight(words_ptr, pid_n, TILES, STRIDE, BLOCK_N, EVEN_N)
    words = tl.load(words_at + tile * 128)
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
            zero = of_row(zero_ptr, rows, group, STRIDE)
        w = decode(words, zero, magic, p * (WIDTH // 16), WIDTH // 16, BLOCK_N, tl.float16, ON_GPU).to(tl.float32)
        stored = of_row(scale_ptr, rows, group, STRIDE)
        scale = effective(stored, absmax_ptr, values_ptr, offset_ptr, rows, group, N, GROUPS, GAIN)
        inside = (rows < N)[:, None] & ((k + column) < K)[None, :]
        at = w_ptr + (rows - first)[:, None].to(tl.int64) * K + (k + column)[None, :]
        tl.store(at, (w * scale[:, None]).to(w_ptr.dtype.element_ty), mask=inside)


def dequantize(
    weight: PackedWeight, dtype: torch.dtype, *, first: int = 0, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight [N, K] in a float dtype, on its device.

    Args:
        weight: packed weight.
        dtype: dtype of the values.
        first: first row, a multiple of `_BLOCK`.
        into: memory [rows, K] for some rows, a multiple of `_BLOCK` or all that are left; None for all rows.

    Raises InputError: `kernel-unsupported`.
    """
    import torch

    if weight.kind not in DECODERS:
        raise InputError("kernel-unsupported", weight.kind, "packed for 8-bit inputs", f"one of {', '.join(DECODERS)}")
    (rows, columns), form = weight.shape, KINDS[weight.kind]
    w = torch.empty((rows, columns), dtype=dtype, device=weight.words.device) if into is None else into
    absmax, values, offset = weight.nested or (None, None, None)
    meta = constants(weight, Config(_BLOCK, 16, 1, 1, 4, 1))
    grid = (triton.cdiv(w.shape[0], _BLOCK), weight.words.shape[1])
    dequantize_tile[grid](
        weight.words, weight.scale, weight.zero, absmax, values, offset, w, first, rows, columns,
        weight.words.shape[1], weight.words.shape[0] * 16, weight.groups,
        DECODERS[weight.kind].MAGIC, **meta, COLUMNS=form.columns, num_warps=4,
    )  # fmt: skip
    return w


def by_slabs(x: torch.Tensor, weight: PackedWeight, *, rows: int = 0) -> torch.Tensor:
    """Return x [M, K] times the transposed weight [N, K] by torch's product, a slab of the weight's rows at a time.

        y[:, a:b] = x dequantize(weight[a:b])ᵀ

    A slab is written and read while it is in the second-level cache; all slabs share one memory (`workspace`). torch
    gives the columns of y to cuBLAS as they lie (a leading dimension of N).

    Args:
        x: float16 or bfloat16.
        weight: packed weight on the same device.
        rows: rows of a slab, a multiple of `_BLOCK`; 0 for `slab_rows`.

    Raises InputError: `kernel-unsupported`.
    """
    import torch

    count, columns = weight.shape
    rows = rows or slab_rows(count, columns, x.device)
    slab = present(x.device).floats(min(rows, count), columns, x.dtype, x.device)
    y = torch.empty((x.shape[0], count), dtype=x.dtype, device=x.device)
    for first in range(0, count, rows):
        part = dequantize(weight, x.dtype, first=first, into=slab[: count - first])
        torch.mm(x, part.T, out=y[:, first : first + rows])
    return y


def slab_rows(rows: int, columns: int, device: torch.device) -> int:
    """Return the rows of a slab: at most 2,048, and in 16 bits at most half of the second-level cache.

    2,048 rows by 2,048 of x are 128 tiles of 128 by 256: one wave of the 132 multiprocessors of an H100. Slabs of a
    weight are equal but for whole tiles: (4096, 14336) is 4 slabs of 1,024 rows on an H200, whose cache has 60 MiB.
    """
    import torch

    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CACHE
    most = min(2048, max(_BLOCK, cache // 2 // (2 * columns) // _BLOCK * _BLOCK))
    return -(-rows // -(-rows // most) // _BLOCK) * _BLOCK
