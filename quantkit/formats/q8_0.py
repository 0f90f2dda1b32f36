"""8-bit integers in blocks of 32 under a float16 scale: GGUF Q8_0.

    d = max|w| / 127        q = round(w / d), half a step away from zero        -127 ... 127

-128 is never used: ggml's kernels take the codes' magnitude as a signed byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.formats import Format, QuantTensor
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.layout import split
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


class Q80(BlockFormat):
    """Format `q8_0`."""

    @property
    def low(self) -> float:
        """Smallest value, of the same magnitude as the largest."""
        return -self.high

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round as ggml's reference does. Raises InputError: `group-indivisible`."""
        parts = split(weight.float(), scheme)
        scale = parts.abs().amax(dim=2) / self.high
        units = parts * torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(2)
        codes = units.sign() * torch.floor(units.abs() + 0.5)
        return self.on(self.coded(codes.reshape(weight.shape)), self.held(scale, None), scheme)


FORMAT: Format = Q80("q8_0", 8, -128)
