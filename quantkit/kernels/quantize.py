"""Tokens to 8-bit codes, each with its own step: what comes before a product of codes.

    int8       step = max|x| / 127.5     code = round(clip(x / step, -128, 127)), ties to even
    fp8_e4m3   step = max|x| / 448       code = nearest element to clip(x / step, -448, 448)

computed in the dtype of x, as `formats/base/activation.py` does, bit for bit; a token of zeros takes the dtype's
epsilon for its step. One program a token; x is read twice, the second time out of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from quantkit.kernels.launch import begin, overlap

if TYPE_CHECKING:
    import torch

# half the distance from the lowest to the highest value
_REACH = {"int8": 127.5, "fp8_e4m3": 448.0}


@triton.jit
def rounded(values):
    """Nearest whole numbers below 2^21 in size, ties to even, in the low bits: 1.5 * 2^23 leaves none for fractions."""
    return (values + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def nearest_e4m3(values):
    """float32 within +-448 -> the bits of the nearest E4M3, ties to even, int8.

    Of a normal number the upper bits, rounded, with the exponent's bias changed from 127 to 7; below 2^-6 whole
    multiples of 2^-9, whose codes go on where the normal ones begin. By integers, so that it runs where there is no
    such conversion.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = rounded(tl.abs(values) * 512.0) & 255
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def quantize_token(
    x_ptr, code_ptr, step_ptr, K,
    REACH: tl.constexpr, EPSILON: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """See the module; one row of x [M, K]."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + row * K + k + column, mask=k + column < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    # rounded to the dtype of x, as if divided in it: float32 has more than twice its bits
    step = (tl.max(most, axis=0) / REACH).to(DTYPE).to(tl.float32)
    step = tl.where(step == 0.0, EPSILON, step)
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
    """x [M, K] -> codes [M, K] (int8 or float8_e4m3fn) and steps [M] float32.

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
