"""Products of 8-bit codes with 8-bit codes (W8A8): INT8 with int32 sums, FP8 (E4M3) with float32 sums.

    y[m, n] = scale[n] * step[m] * sum over k of codes[n, k] * x[m, k]

scale belongs to a row of the weight, step to a token of the activations (`quantize_tokens`). As in `matmul` the weight
is the left operand and K is split, but nothing is decoded: rows go to shared memory as they are stored, where Hopper's
tensor core reads them, and the kernel is its own raw twin. Above 32 rows of x torch has products of its own
(`multiply`).

int8: exact up to |sum| < 2^31, K < 131072. FP8: tensor cores keep about 14 bits of a sum of FP8 products (Hopper:
DeepSeek-V3 technical report, 2024, arXiv 2412.19437, section 3.3.2; Ada: SageAttention2, 2024, arXiv 2411.10958), so a
step of 32 `unroll` columns is summed there and added to a float32 sum outside. FP8 needs SM 8.9 or later, int8 SM 8.0.

**Tokens to codes**, each with its own step:

    int8       step = max|x| / 127.5     code = round(clip(x / step, -128, 127)), ties to even
    fp8_e4m3   step = max|x| / 448       code = nearest element to clip(x / step, -448, 448)

computed in the dtype of x, bit for bit as in `formats/base/activation.py`; a token of zeros has the dtype's epsilon as
its step. A token with a NaN or an infinity has NaN as its step, and so NaN as its row of y. One program per token; x is
read twice, the second time from the cache.

**torch's own products**, `torch._int_mm` and `torch._scaled_mm`, for batches limited by arithmetic. Both read the
weight's rows as `layout` stores them, so there is no second copy. On CUDA they require operands that lie along K, so
the right one in columns; N and K in multiples of 8 or 16; for integers more than 16 rows of x; and scales by row and
column give bfloat16 everywhere, other types only on some GPUs (torch's `Blas.cpp` and `ScaledBlas.cpp`). For float16,
FP8 sums therefore come out in float32 and are scaled outside, as int32 sums are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from quantkit.errors import InputError
from quantkit.kernels.dispatch import INT_MM, SCALED_MM, Config
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import begin, finish, overlap, prepared
from quantkit.kernels.workspace import Workspace

if TYPE_CHECKING:
    import torch

KINDS = ("int8.native", "fp8_e4m3.native")
# first architecture with products of the type, and its families
_FROM = {"int8.native": (80, "Ampere, Ada, Hopper"), "fp8_e4m3.native": (89, "Ada, Hopper")}


def require(kind: str, sm: int) -> None:
    """Refuse codes without products on a device of compute capability `sm` (80, 89, 90).

    Raises:
        InputError: `device-lacks-format`.
    """
    first, who = _FROM[kind]
    if sm < first:
        rule = f"its products run from SM {first / 10} on ({who}); an emulation would not measure them"
        remedy = "multiply the weights by 16-bit inputs instead"
        raise InputError("device-lacks-format", kind.removesuffix(".native"), f"SM {sm / 10}", rule, remedy)


@triton.jit
def codes_of_step(at, inside, WHOLE: tl.constexpr):
    """Load codes, with zeros outside of the mask."""
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
    M, N, K,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,  # columns at a time
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the product, as described in the module."""
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
            # a bound on the sums inside keeps the compiler from moving `acc` into the tensor core
            acc += tl.dot(w, tl.trans(x), max_num_imprecise_acc=STEP)
    scale = tl.load(scale_ptr + rows, mask=rows < N, other=0).to(tl.float32)
    token = tl.load(step_ptr + batch, mask=batch < M, other=0.0)
    total = acc.to(tl.float32) * scale[:, None] * token[None, :]
    finish(total, y_ptr, sums_ptr, count_ptr, rows, batch, pid_m, pid_n, pid_k, M, N, BLOCK_N, BLOCK_M, SPLIT)


def native(
    x: torch.Tensor, step: torch.Tensor, weight: PackedWeight, config: Config, *, dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return codes x [M, K] with steps [M] times the transposed weight [N, K]: y [M, N].

    Args:
        x: int8 or float8_e4m3fn, rows contiguous.
        step: float32, step of each token.
        weight: weight packed with `native=True`.
        config: tile sizes; `unroll` counts 32 columns each.
        dtype: dtype of y; None for float16.
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


# --- tokens to codes --------------------------------------------------------------------------------------------------

# half the distance from the lowest to the highest value
_REACH = {"int8": 127.5, "fp8_e4m3": 448.0}


@triton.jit
def rounded(values):
    """Round numbers below 2^21 in size to integers, ties to even, in the low bits: 1.5 * 2^23 leaves no bits for
    fractions.
    """
    return (values + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def nearest_e4m3(values):
    """Return the bits of the E4M3 nearest to a float32 within +-448, ties to even, int8.

    A normal number keeps its upper bits, rounded, with the exponent's bias changed from 127 to 7. Below 2^-6 values are
    multiples of 2^-9, whose codes end where the normal ones begin. Integer operations only, for devices without such a
    conversion.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = rounded(tl.abs(values) * 512.0) & 255
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, NaN if one is NaN; a GPU's maximum drops NaN unless told otherwise."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_token(
    x_ptr, code_ptr, step_ptr, K,
    REACH: tl.constexpr, EPSILON: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Quantize one row of x [M, K], as described in the module."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + column, mask=k + column < K, other=0.0).to(tl.float32)
        most = larger(most, tl.abs(x))
    largest = tl.reduce(most, 0, larger)
    # rounding to the dtype of x equals a division in it, since float32 has more than twice its bits
    step = (largest / REACH).to(DTYPE).to(tl.float32)
    step = tl.where(step == 0.0, EPSILON, step)
    step = tl.where(largest < float("inf"), step, float("nan"))
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + column, mask=k + column < K, other=0.0).to(tl.float32)
        units = (x / step).to(DTYPE).to(tl.float32)
        if WHOLE:
            code = (rounded(tl.minimum(tl.maximum(units, -128.0), 127.0)) & 255).to(tl.int8)
        else:
            code = nearest_e4m3(tl.minimum(tl.maximum(units, -448.0), 448.0))
        tl.store(code_ptr + row * K + k + column, code, mask=k + column < K)
    tl.store(step_ptr + tl.program_id(0), step)


def quantize_tokens(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] to codes [M, K] (int8 or float8_e4m3fn) and steps [M] float32.

    Args:
        x: float16 or bfloat16, rows contiguous.
        fmt: `int8` or `fp8_e4m3`.
    """
    import torch

    codes = torch.empty(x.shape, dtype=torch.int8 if fmt == "int8" else torch.float8_e4m3fn, device=x.device)
    step = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(x.shape[1]), 4096)
    quantize_token[(x.shape[0],)](
        x, codes.view(torch.int8), step, x.shape[1],
        REACH=_REACH[fmt], EPSILON=torch.finfo(x.dtype).eps, WHOLE=fmt == "int8", BLOCK=block, num_warps=8,
        **overlap(),
    )  # fmt: skip
    return codes, step


# --- torch's own products ---------------------------------------------------------------------------------------------

# kind of the weight -> operator, and required divisor of its sizes
_ASKED = {"int8.native": (INT_MM, 8), "fp8_e4m3.native": (SCALED_MM, 16)}
# `_int_mm` needs more rows of x than this
_FEW = 16


def torch_product(weight: PackedWeight) -> str:
    """Return the operator of torch that multiplies by this weight; "" if there is none."""
    name, multiple = _ASKED.get(weight.kind, ("", 1))
    return "" if any(size % multiple for size in weight.shape) else name


def multiply(codes: torch.Tensor, step: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Multiply codes x [M, K] with steps [M] by the transposed weight [N, K], with `torch_product(weight)`: y [M, N].

    Args:
        codes: int8 or float8_e4m3fn, rows contiguous.
        step: float32, step of each token.
        weight: weight of a `.native` kind.
        dtype: dtype of y: float16 or bfloat16.

    Raises:
        RuntimeError: if torch refuses, with its reason.
    """
    import torch

    rows, columns, scale = len(codes), weight.words.T, weight.scale.float()
    if torch_product(weight) == SCALED_MM:
        if dtype == torch.bfloat16:
            return torch._scaled_mm(codes, columns, step.unsqueeze(1), scale, out_dtype=dtype)
        one = torch.ones((), device=codes.device)
        sums = torch._scaled_mm(codes, columns, one, one, out_dtype=torch.float32)
    else:
        if rows <= _FEW:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, 2 * _FEW - rows))
        sums = torch._int_mm(codes, columns).narrow(0, 0, rows)
    # rounds while it writes: two passes over the output of M x N, not three
    return torch.mul(sums * step.unsqueeze(1), scale, out=torch.empty(sums.shape, dtype=dtype, device=sums.device))
