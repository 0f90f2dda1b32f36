"""8-bit codes times 8-bit codes (W8A8): INT8 with int32 sums, FP8 (E4M3) with float32 sums.

    y[m, n] = scale[n] * step[m] * sum over k of codes[n, k] * x[m, k]

scale is a weight's row's, step an activation's token's (`quantize`). As in `matmul` the weight is the left operand and
K is split, but there is nothing to decode: its rows go to shared memory as they are stored, where Hopper's tensor core
reads them, and the kernel is its own raw twin. Beyond 32 rows of x torch's own products are at hand (`operators`).

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
from quantkit.kernels.launch import Workspace, begin, overlap
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import finish, prepared

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


@triton.jit
def codes_of_step(at, inside, WHOLE: tl.constexpr):
    """Codes, with zeros for those that are not there."""
    if WHOLE:
        codes = tl.load(at, mask=inside, other=0)
    else:
        codes = tl.load(at, mask=inside, other=0.0)
    return codes


@triton.jit(do_not_specialize=["M"])
def native_matmul(
    x_ptr,  # [M, K] int8 or float8e4nv
    step_ptr,  # [M] float32
    words_ptr,  # [N, K], in the type of x
    scale_ptr,  # [1, N]
    y_ptr,  # [M, N]
    sums_ptr,  # [SPLIT, M, N] float32, or None
    count_ptr,  # [tiles of y] int32, zero before and after, or None
    M,
    N,
    K,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,  # columns at a time
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See the module."""
    begin(OVERLAP)
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, STEP)
    row_at = rows if EVEN_N else tl.minimum(rows, N - 1)
    w_at = words_ptr + row_at[:, None].to(tl.int64) * K + column[None, :]
    x_at = x_ptr + batch[:, None].to(tl.int64) * K + column[None, :]
    inside = (batch < M)[:, None]
    WHOLE: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if WHOLE else tl.float32

    acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    steps = tl.cdiv(K, STEP)
    for step in range(steps * pid_k // SPLIT, steps * (pid_k + 1) // SPLIT):
        k = step * STEP
        if EVEN_K:
            w = tl.load(w_at + k)
            x = codes_of_step(x_at + k, inside, WHOLE)
        else:
            within = (k + column < K)[None, :]
            w = codes_of_step(w_at + k, within, WHOLE)
            x = codes_of_step(x_at + k, inside & within, WHOLE)
        if WHOLE:
            acc = tl.dot(w, tl.trans(x), acc, out_dtype=SUM)
        else:
            acc += tl.dot(w, tl.trans(x))
    scale = tl.load(scale_ptr + rows, mask=rows < N, other=0).to(tl.float32)
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
    grid = (triton.cdiv(x.shape[0], config.block_m), triton.cdiv(rows, config.block_n), config.split)
    native_matmul[grid](
        x, step, weight.words, weight.scale, y, sums, counts, x.shape[0], rows, columns,
        EVEN_N=rows % config.block_n == 0, EVEN_K=columns % (32 * config.unroll) == 0,
        BLOCK_N=config.block_n, BLOCK_M=config.block_m, STEP=32 * config.unroll, SPLIT=config.split,
        num_warps=config.warps, num_stages=config.stages, **overlap(),
    )  # fmt: skip
    return y
