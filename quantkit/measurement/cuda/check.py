"""Whether a product is right: against float64, within the bound that rounding explains."""

from __future__ import annotations

import torch

from quantkit.kernels.quantize import quantize_tokens
from quantkit.kernels.workspace import interpreted
from quantkit.measurement.cuda.weights import FormatVariant


def exact_inputs(variant: FormatVariant, x: torch.Tensor) -> torch.Tensor:
    """x [M, K] as the product sees it, float64: rounded to 8 bits by token where the variant multiplies those."""
    if not variant.native:
        return x.double()
    codes, step = quantize_tokens(x, variant.format)
    return codes.double() * step.double()[:, None]


def error(
    variant: FormatVariant, plain: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, rounded: float = 0.0
) -> float:
    """The largest error of y [M, N] as a share of what is allowed; at most 1 is right.

    Args:
        plain: what the weight stands for, [N, K] float64.
        x: inputs [M, K], float16 or bfloat16.
        y: the product, in the dtype of x.
        rounded: share by which a way to multiply rounds weights besides.
    """
    # the interpreter cuts to bfloat16 where a GPU rounds
    bits = 11 if x.dtype == torch.float16 else 7 if interpreted() else 8
    decoded = rounded + (2.0**-bits if variant.kind == "nf4" else 0.0)
    # Hopper keeps 14 bits of a sum of FP8 products, and truncates: 32 unroll columns of them before float32
    kept = 2.0**-13 if variant.kind == "fp8_e4m3.native" else 0.0
    exact = exact_inputs(variant, x)
    want, size = exact @ plain.T, exact.abs() @ plain.abs().T
    sums = (x.shape[1] + 4) * 2.0**-23 + kept
    allowed = size * (sums + decoded) + want.abs() * 2.0**-bits * 1.01 + 2.0**-24
    worst = float(((y.double() - want).abs() / allowed).max())
    return worst if worst == worst else float("inf")  # noqa: PLR0124 (NaN)
