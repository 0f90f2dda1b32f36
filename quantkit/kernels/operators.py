"""torch's own products of 8-bit codes, for batches that arithmetic binds: `torch._int_mm` and `torch._scaled_mm`.

    y[m, n] = scale[n] * step[m] * sum over k of codes[n, k] * x[m, k]

Both read the weight's rows as `layout` stores them, so that nothing is kept besides. On CUDA they ask for operands that
lie along K, so the right one in columns; for N and K in multiples of 8 or 16; of whole numbers for more than 16 rows of
x; and scales by row and column give bfloat16 everywhere, other types on some GPUs alone (torch's `Blas.cpp` and
`ScaledBlas.cpp`). For float16 FP8 sums come out in float32 therefore, and are scaled outside, as int32 ones are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.kernels.dispatch import INT_MM, SCALED_MM

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.layout import PackedWeight

# kind of the weight -> the operator, and what its sizes have to be multiples of
_ASKED = {"int8.native": (INT_MM, 8), "fp8_e4m3.native": (SCALED_MM, 16)}
# rows of x that `_int_mm` is not content with
_FEW = 16


def of(weight: PackedWeight) -> str:
    """The operator that multiplies by this weight; "" where none does."""
    name, multiple = _ASKED.get(weight.kind, ("", 1))
    return "" if any(size % multiple for size in weight.shape) else name


def multiply(codes: torch.Tensor, step: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Codes x [M, K] with steps [M] times the weight [N, K] transposed, by `of(weight)`: y [M, N].

    Args:
        codes: int8 or float8_e4m3fn, rows contiguous.
        step: float32, what a code of each token stands for.
        weight: of a `.native` kind.
        dtype: of y: float16 or bfloat16.

    Raises:
        RuntimeError: torch cannot, with its reason.
    """
    import torch

    rows, columns, scale = len(codes), weight.words.T, weight.scale.float()
    if of(weight) == SCALED_MM:
        if dtype == torch.bfloat16:
            return torch._scaled_mm(codes, columns, step.unsqueeze(1), scale, out_dtype=dtype)
        one = torch.ones((), device=codes.device)
        sums = torch._scaled_mm(codes, columns, one, one, out_dtype=torch.float32)
    else:
        if rows <= _FEW:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, 2 * _FEW - rows))
        sums = torch._int_mm(codes, columns).narrow(0, 0, rows)
    # rounded as it is written: an output of M x N is passed over twice, not three times
    return torch.mul(sums * step.unsqueeze(1), scale, out=torch.empty(sums.shape, dtype=dtype, device=sums.device))
