"""What the tests of kernels share: quantized weights, and how far a sum in float32 may be from float64."""

from __future__ import annotations

from typing import Any

import torch

from quantkit.formats import QuantTensor, load_format
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import pack
from quantkit.scheme import WeightScheme


def quantized(rows: int, columns: int, seed: int = 0, **scheme: Any) -> QuantTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    made = WeightScheme(**scheme)
    found: QuantTensor = load_format(made.format).quantize(weight, made)
    return found


def bound(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, decoded: float = 0.0, bits: int = 11
) -> torch.Tensor:
    """|y - x W^T| that rounding explains: K additions in float32, that of weights as decoded, that of y.

    With S = |x| |W|^T: (K + 4) 2^-23 S (a tensor core may truncate) + decoded S + 2^-bits |y| + 2^-24.
    """
    size = x.abs() @ weight.abs().T
    sums = (x.shape[1] + 4) * 2.0**-23
    return size * (sums + decoded) + y.double().abs() * 2.0**-bits * (1 + 2.0**-7) + 2.0**-24


def within_bounds(scheme: dict[str, Any], M: int, N: int, K: int, config: Config) -> None:
    """Hold a float16 product [M, N] twice against float64: it is within its bound, with the same bits again."""
    from quantkit.kernels.matmul import weight_only  # needs Triton, which the layout's tests do without

    tensor = quantized(N, K, **scheme)
    weight = load_format(scheme["format"]).dequantize(tensor).double()
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(7)).half()
    y = weight_only(x, pack(tensor), config)
    assert y.shape == (M, N) and y.dtype == torch.float16
    # float16 rounds the codebook of nf4 by 2^-11 of a value at most; all other codes are exact
    allowed = bound(x.double(), weight, y, decoded=2.0**-11 if scheme["format"] == "nf4" else 0.0)
    assert torch.all((y.double() - x.double() @ weight.T).abs() <= allowed)
    assert torch.equal(weight_only(x, pack(tensor), config), y)
