"""4-bit floats (E2M1) in groups of 16 under E4M3 scales, and one float32 scale for the whole tensor.

    g = max|W| / (448 · 6)        s = e4m3(max|w| / 6 / g)        w = code · s · g

so the scale of the largest group is E4M3's largest number. W is all linears that share an input: vLLM fuses them, and
keeps one g. compressed-tensors and vLLM store the reciprocal: their `weight_global_scale` is 1/g. A scale that E4M3
would round to zero becomes its smallest number, 2^-9. (NVIDIA, "Introducing NVFP4 for Efficient and Accurate
Low-Precision Inference", 2025.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.formats import Format
from quantkit.formats.base.scaled import FP4_E2M1, FP8_E4M3, ScaledFormat
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


class Nvfp4(ScaledFormat):
    """Format `nvfp4`."""

    rules: ClassVar[Rules] = Rules(granularities={"group": 16}, symmetric=(True,), scales=("fp8_e4m3",), groups=(16,))
    # also try the largest weight on 4 instead of 6: between these two there is no value
    # (Cook et al., "Four Over Six", 2025)
    stretches: ClassVar[tuple[float, ...]] = (1.5,)

    def global_scale(self, amax: Tensor, scheme: WeightScheme) -> Tensor:
        """Return `g` for a matrix with the largest magnitude `amax`; 1 for zeros."""
        whole = amax.float() / (FP8_E4M3.top * self.element.top)
        return torch.where(whole >= torch.finfo(torch.float32).tiny, whole, torch.ones_like(whole))

    def shares_scale(self, scheme: WeightScheme) -> bool:
        """Tell whether linears share a scale: always."""
        return True

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Return the nearest `s · g`."""
        whole = self.global_scale(scale.max() * self.element.top, scheme) if global_scale is None else global_scale
        return FP8_E4M3.snap((scale.float() / whole).clamp(min=2**-9)) * whole

    def kept(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None) -> dict[str, Any]:
        """Return effective scales as `s` and `g`."""
        assert global_scale is not None
        fields = super().kept(scale / global_scale, scheme, global_scale)
        return {**fields, "global_scale": global_scale.float()}


FORMAT: Format = Nvfp4("nvfp4", 4, FP4_E2M1)
