"""8-bit codes times 8-bit codes (W8A8): INT8 with int32 sums, FP8 (E4M3) with float32 sums.

    y[m, n] = scale[n] * step[m] * sum over k of codes[n, k] * x[m, k]

scale is a weight's row's, step an activation's token's (`quantize`). Skeleton and layout are those of `matmul`: the
weight is the left operand, its bytes go from memory to the tensor core's registers as they are. There is nothing to
decode, so that the kernel is its own raw twin.

int8: exact up to |sum| < 2^31, K < 131072. FP8: Hopper's tensor core keeps about 14 bits of a sum of FP8 products
(DeepSeek-V3 technical report, 2024, arXiv 2412.19437, section 3.3.2), so a step of 32 `unroll` columns is summed there
and added to a float32 sum outside. FP8 needs SM 8.9 or later, int8 SM 8.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from quantkit.errors import InputError
from quantkit.kernels.configs import Config
from quantkit.kernels.decoders.fragment import bytes_of
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import finish, place_of_weight, prepared
from quantkit.kernels.workspace import Workspace

if TYPE_CHECKING:
    import torch

KINDS = ("int8.native", "fp8_e4m3.native")
# the first architecture with products of the type, and who has it
_FROM = {"int8.native": (80, "Ampere, Ada, Hopper"), "fp8_e4m3.native": (89, "Ada, Hopper")}


def require(kind: str, sm: int) -> None:
    """Refuse codes that a device of compute capability `sm` (80, 89, 90) cannot multiply.

    Raises:
        InputError: `device-lacks-format`.
    """
    first, who = _FROM[kind]
    if sm < first:
        raise InputError(
            "device-lacks-format",
            where=kind.removesuffix(".native"),
            value=f"SM {sm / 10}",
            rule=f"its products run from SM {first / 10} on ({who}); an emulation would not measure them",
            remedy="multiply the weights by 16-bit inputs instead",
        )


@triton.jit(do_not_specialize=["M"])
def native_matmul(
    x_ptr,  # [M, K] int8 or float8e4nv
    step_ptr,  # [M] float32
    words_ptr,  # [Np / 16, TILES, 128] int32
    scale_ptr,  # [1, Np]
    y_ptr,  # [M, N]
    sums_ptr,  # [SPLIT, M, N] float32, or None
    count_ptr,  # [tiles of y] int32, zero before and after, or None
    M,
    N,
    K,
    TILES,
    STRIDE,  # Np
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """See the module."""
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    words_at, rows = place_of_weight(words_ptr, pid_n, TILES, STRIDE, BLOCK_N, EVEN_N)
    batch = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, 32)
    x_at = x_ptr + batch[:, None].to(tl.int64) * K + column[None, :]
    inside = (batch < M)[:, None]
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32

    acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    steps = tl.cdiv(TILES, UNROLL)
    for step in range(steps * pid_k // SPLIT, steps * (pid_k + 1) // SPLIT):
        part = tl.zeros((BLOCK_N, BLOCK_M), SUM)
        for u in tl.static_range(UNROLL):
            tile = step * UNROLL + u
            at = tile if EVEN_K else tl.minimum(tile, TILES - 1)
            w = bytes_of(tl.load(words_at + at * 128), BLOCK_N, x_ptr.dtype.element_ty)
            x_mask = inside if EVEN_K else inside & ((tile * 32 + column) < K)[None, :]
            if SUM == tl.int32:
                x = tl.load(x_at + tile * 32, mask=x_mask, other=0)
                acc = tl.dot(w, tl.trans(x), acc, out_dtype=SUM)
            else:
                x = tl.load(x_at + tile * 32, mask=x_mask, other=0.0)
                part = tl.dot(w, tl.trans(x), part)
        if SUM == tl.float32:
            acc += part
    scale = tl.load(scale_ptr + rows, mask=rows < STRIDE, other=0).to(tl.float32)
    token = tl.load(step_ptr + batch, mask=batch < M, other=0.0)
    total = acc.to(tl.float32) * scale[:, None] * token[None, :]
    finish(total, y_ptr, sums_ptr, count_ptr, rows, batch, pid_m, pid_n, pid_k, M, N, BLOCK_N, BLOCK_M, SPLIT)


def native(
    x: torch.Tensor,
    step: torch.Tensor,
    weight: PackedWeight,
    config: Config,
    *,
    dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Codes x [M, K] with steps [M] times the weight [N, K] transposed: y [M, N].

    Args:
        x: int8 or float8_e4m3fn, rows contiguous.
        step: float32, what a code of each token stands for.
        weight: packed with `native=True`.
        config: tile sizes; `unroll` counts 32 columns each.
        dtype: of y; None is float16.
        workspace: see `matmul.weight_only`.

    Raises:
        InputError: `kernel-unsupported`, `kernel-shape`, `device-lacks-format`.
    """
    y, sums, counts = prepared(x, weight, config, workspace, KINDS, dtype)
    if x.is_cuda:
        import torch

        major, minor = torch.cuda.get_device_capability(x.device)
        require(weight.kind, 10 * major + minor)
    rows, columns = weight.shape
    tiles, row_tiles = weight.words.shape[1], weight.words.shape[0]
    grid = (triton.cdiv(x.shape[0], config.block_m), triton.cdiv(rows, config.block_n), config.split)
    native_matmul[grid](
        x, step, weight.words, weight.scale, y, sums, counts, x.shape[0], rows, columns, tiles, row_tiles * 16,
        EVEN_N=row_tiles % (config.block_n // 16) == 0, EVEN_K=columns % (32 * config.unroll) == 0,
        BLOCK_N=config.block_n, BLOCK_M=config.block_m, UNROLL=config.unroll, SPLIT=config.split,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return y
