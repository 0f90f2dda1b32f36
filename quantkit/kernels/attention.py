"""Attention of a decode step over a KV cache that is split among programs.

    y = softmax(s q Kᵀ + mask) V      q [G, D] of one token, K [S, D], V [S, E]; s the scale, masked positions at -inf

- **A program takes one sequence, one KV head and every SPLITS-th block of positions** ("Flash-Decoding", Dao et al.,
  2023). A program a head would leave most multiprocessors idle: at batch 1 a Llama-3-8B has 8 KV heads.
- **The G query heads of a KV head share the keys and values that are loaded**: they are the rows of one product, padded
  to the 16 of a tensor core.
- **Softmax is computed block by block** (Milakov and Gimelshein, 2018, arXiv 1805.02867). With the largest score so far
  m, the sum of weights l and the weighted sum of values a, a block with scores t gives

      m' = max(m, max t)      l' = l 2^(m - m') + sum 2^(t - m')      a' = a 2^(m - m') + 2^(t - m') V

  in float32, t in units of log 2. The weights 2^(t - m') are rounded to the dtype of V for their product with V.
- **Every program leaves (m, l, a) in a workspace**; the last to arrive, by an integer counter, joins them in a fixed
  order and writes y (as `matmul.finish`). One launch, and the same bits every time.
- **The mask is transformers'**: a boolean for each sequence and position, on the device. So padding and windows are
  right, and a captured graph is right at every position. A program first looks for its last position that counts, and
  reads no key beyond it; where there is none, it ends. The splits depend on shapes alone.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.matmul import begin, interpreted, overlap
from quantkit.kernels.workspace import Workspace, present

# positions that a program looks through at once for its last
_SCAN = 512
# query heads of a KV head, times D or E: what registers, and shared memory of 99 KB, hold
_LARGEST = 4096
_MOST_SPLITS, _PROGRAMS, WARPS, STAGES = 32, 4, 4, 3
_LOG2_E, _ON_CPU = 1.4426950408889634, interpreted()


@triton.jit
def last_seen(mask_ptr, split, S, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SCAN: tl.constexpr):
    """Return the number of positions up to the last that counts among a program's; 0 if none does."""
    lane = tl.arange(0, SCAN)
    end = 0
    for first in range(0, tl.cdiv(S, BLOCK * SPLITS) * BLOCK, SCAN):
        at = ((first + lane) // BLOCK * SPLITS + split) * BLOCK + lane % BLOCK
        seen = tl.load(mask_ptr + at, mask=at < S, other=0)
        end = tl.maximum(end, tl.max(tl.where(seen != 0, at + 1, 0)))
    return end


@triton.jit
def rows_of_cache(ptr, at, end, STRIDE, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys or values of some positions, zeros from `end` on and beyond SIZE: [BLOCK, WIDTH]."""
    column, inside = tl.arange(0, WIDTH), (at < end)[:, None]
    if SIZE < WIDTH:
        inside = inside & (column < SIZE)[None, :]
    return tl.load(ptr + at[:, None].to(tl.int64) * STRIDE + column[None, :], mask=inside, other=0.0)


@triton.jit
def joined_splits(
    sums_ptr, top_ptr, weights_ptr, y_ptr, pair,
    G: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Write y of a sequence and KV head from the sums of all splits, SOME at a time."""
    row, column, first = tl.arange(0, HEADS), tl.arange(0, WIDTH), pair * SPLITS * G
    every = first + tl.arange(0, SPLITS)[:, None] * G + row[None, :]
    top = tl.max(tl.load(top_ptr + every, mask=(row < G)[None, :], other=float("-inf"), cache_modifier=".cg"), 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    total, weights = tl.zeros((HEADS, WIDTH), tl.float32), tl.zeros((HEADS,), tl.float32)
    for split in range(0, SPLITS, SOME):
        at = first + (split + tl.arange(0, SOME))[:, None] * G + row[None, :]
        mine = (row < G)[None, :] & (at >= 0)
        inside = mine[:, :, None] & (column < SIZE)[None, None, :]
        places = at[:, :, None] * SIZE + column[None, None, :]
        values = tl.load(sums_ptr + places, mask=inside, other=0.0, cache_modifier=".cg")
        own = tl.load(top_ptr + at, mask=mine, other=float("-inf"), cache_modifier=".cg")
        factor = tl.exp2(own - top[None, :])
        weights += tl.sum(factor * tl.load(weights_ptr + at, mask=mine, other=0.0, cache_modifier=".cg"), 0)
        total += tl.sum(factor[:, :, None] * values, 0)
    write(y_ptr, total, weights, pair, G, HEADS, SIZE, WIDTH)


@triton.jit
def write(y_ptr, total, weights, pair, G: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Write y of a sequence and KV head, [G, SIZE]; zeros where no position counts, as torch does."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    y = total / tl.where(weights > 0, weights, 1.0)[:, None]
    inside = (row < G)[:, None] & (column < SIZE)[None, :]
    place = (pair * G + row[:, None]).to(tl.int64) * SIZE + column[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


# one compilation for every length of a cache
@triton.jit(do_not_specialize=["S", "mask_batch"])
def split_attention(
    q_ptr,  # [B, H, 1, D]
    k_ptr, v_ptr,  # [B, KV heads, S, D or E]
    mask_ptr,  # [B, S] uint8
    y_ptr,  # [B, 1, H, E]
    sums_ptr,  # [B, KV heads, SPLITS, G, E] float32, then as many m and l without E, or None
    count_ptr,  # [B, KV heads] int32, zero before and after, or None
    scale,  # times log2 e
    S,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch,  # strides
    G: tl.constexpr, ROWS: tl.constexpr,  # query heads of a KV head, and padded
    D: tl.constexpr, WIDTH: tl.constexpr,  # of q and K, and padded
    E: tl.constexpr, WIDTH_V: tl.constexpr,  # of V, and padded
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SCAN: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend, as described in the module."""
    begin(OVERLAP)
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair, pairs = tl.program_id(2) * tl.num_programs(1) + head, tl.num_programs(2) * tl.num_programs(1)
    mask_ptr += batch * mask_batch
    k_ptr += batch * k_batch + head.to(tl.int64) * k_head
    v_ptr += batch * v_batch + head.to(tl.int64) * v_head
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q_at = q_ptr + batch * q_batch + (head * G + row)[:, None] * q_head + column[None, :]
    q = tl.load(q_at, mask=(row < G)[:, None] & (column < D)[None, :], other=0.0)
    end = last_seen(mask_ptr, split, S, BLOCK, SPLITS, SCAN)
    if not ON_GPU:
        # the interpreter multiplies the bits of bfloat16
        q = q.to(tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    weights, acc = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH_V), tl.float32)
    for first in range(split * BLOCK, end, SPLITS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        seen = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        k = rows_of_cache(k_ptr, at, end, k_row, D, WIDTH)
        v = rows_of_cache(v_ptr, at, end, v_row, E, WIDTH_V)
        if not ON_GPU:
            k = k.to(tl.float32)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        top = tl.maximum(m, tl.max(scores, 1))
        # a row that has seen nothing yet: its weights are 0, not NaN
        base = tl.where(top > float("-inf"), top, 0.0)
        p, factor = tl.exp2(scores - base[:, None]), tl.exp2(m - base)
        weights = weights * factor + tl.sum(p, 1)
        p = p.to(v.dtype)
        if not ON_GPU:
            p, v = p.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(p, v, acc * factor[:, None])
        m = top

    if SPLITS == 1:
        write(y_ptr, acc, weights, pair, G, ROWS, E, WIDTH_V)
    else:
        top_ptr = sums_ptr + pairs * SPLITS * G * E
        weights_ptr = top_ptr + pairs * SPLITS * G
        at, columns = (pair * SPLITS + split) * G + row, tl.arange(0, WIDTH_V)[None, :]
        tl.store(top_ptr + at, m, mask=row < G)
        tl.store(weights_ptr + at, weights, mask=row < G)
        tl.store(sums_ptr + at[:, None] * E + columns, acc, mask=(row < G)[:, None] & (columns < E))
        # every thread's sums are written before this program counts itself, and the last one sees all of them
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + pair, 1, sem="acq_rel") == SPLITS - 1:
            HEADS: tl.constexpr = triton.next_power_of_2(G)
            # as many loads at once as 32 registers of a thread hold
            SOME: tl.constexpr = min(SPLITS, max(1, 4096 // (HEADS * WIDTH_V)))
            joined_splits(sums_ptr, top_ptr, weights_ptr, y_ptr, pair, G, HEADS, E, WIDTH_V, SPLITS, SOME)
            tl.store(count_ptr + pair, 0)


def fits(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> bool:
    """Tell whether the kernel takes this attention: see `attend`."""
    if seen is None or seen.ndim != 4 or not (query.is_cuda or _ON_CPU):
        return False
    batch, heads, tokens, size = query.shape
    return (
        tokens == 1
        and heads % keys.shape[1] == 0
        and max(8, heads // keys.shape[1]) * max(size, values.shape[-1]) <= _LARGEST
        and keys.shape[:3] == values.shape[:3]
        and seen.dtype == torch.bool
        and seen.shape == (batch, 1, 1, keys.shape[2])
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
    )


@torch.library.custom_op("quantkit::attend", mutates_args=())
def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend with one token of every sequence, as described in the module: y [B, 1, H, E], in the dtype of q.

    Args:
        query: [B, H, 1, D], float16 or bfloat16; a multiple of the KV heads.
        keys: [B, KV heads, S, D].
        values: [B, KV heads, S, E].
        seen: [B, 1, 1, S], True for positions that count.
        scale: factor of the scores.
    """
    with torch.cuda.device_of(query):
        return split_kv(query, keys, values, seen, scale)


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    return query.new_empty((query.shape[0], 1, query.shape[1], values.shape[-1]))


@torch.library.custom_op("quantkit::kept", mutates_args=())
def kept(seen: Tensor) -> Tensor:
    """Copy a mask: torch.compile computes anew for each layer what is no operator's output."""
    return seen.clone(memory_format=torch.contiguous_format)


kept.register_fake(partial(torch.empty_like, memory_format=torch.contiguous_format))


def split_kv(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    *,
    splits: int = 0,
    workspace: Workspace | None = None,
) -> Tensor:
    """Compute `attend`, with a chosen number of splits.

    Args:
        query, keys, values, seen, scale: see `attend`.
        splits: programs of a sequence and KV head, a power of two; 0: by the multiprocessors.
        workspace: memory for the partial sums; None for that of the present stream or graph.
    """
    parts = (query, keys, values, seen.view(torch.uint8))
    query, keys, values, mask = (part if part.stride(-1) == 1 else part.contiguous() for part in parts)
    (batch, heads, _, size), (_, kv_heads, length, value_size) = query.shape, values.shape
    meta = sizes(heads // kv_heads, size, value_size)
    splits = splits or splits_of(batch * kv_heads, length, meta["BLOCK"], multiprocessors(query.device))
    y, sums, counts = query.new_empty((batch, 1, heads, value_size)), None, None
    if splits > 1:
        rows = batch * heads * splits
        sums, counts = (workspace or present(query.device)).of(rows * (value_size + 2), batch * kv_heads, query.device)
    split_attention[(splits, kv_heads, batch)](
        query, keys, values, mask, y, sums, counts, scale * _LOG2_E, length,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], mask.stride(0),
        **meta, SPLITS=splits, ON_GPU=not interpreted(), num_warps=WARPS, num_stages=STAGES, **overlap(),
    )  # fmt: skip
    return y


def sizes(group: int, size: int, value_size: int) -> dict[str, int]:
    """Return the kernel's compile-time sizes for G query heads of a KV head, D and E: 32 KB of K and V a block."""
    rows, width, width_v = (max(16, triton.next_power_of_2(number)) for number in (group, size, value_size))
    block = max(16, min(64, 8192 // max(width, width_v)))
    known = {"G": group, "ROWS": rows, "D": size, "WIDTH": width, "E": value_size, "WIDTH_V": width_v}
    return known | {"BLOCK": block, "SCAN": _SCAN}


def splits_of(pairs: int, length: int, block: int, many: int) -> int:
    """Return a power of two: about four programs a multiprocessor, at most one a block of positions.

    Args:
        pairs, length: sequences times KV heads, positions in the cache.
        block, many: positions of a block, multiprocessors.
    """
    return int(triton.next_power_of_2(min(_MOST_SPLITS, -(-length // block), -(-_PROGRAMS * many // pairs))))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
