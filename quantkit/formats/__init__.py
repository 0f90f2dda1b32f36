"""Number formats, one a file: quantize, dequantize, pack, unpack, bits per weight. Reference, exact.

`QuantTensor` is all that exporters, runtimes and kernels see of a quantized weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from quantkit.recipe import WeightScheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantTensor:
    """A quantized matrix: `w[n, k] = (codes[n, k] - zero[n, g(k)]) * scale[n, g(k)]`.

    For weights [4096, 4096] in groups of 128: codes [4096, 4096], scale and zero [4096, 32]; per channel G = 1; per
    tensor scale is [1, 1].

    Args:
        codes: [N, K], unpacked; int8 for integer formats, of either symmetry (int4 codes lie in -8..7).
        scale: [N, G] (or [1, 1]), in the dtype it is stored in.
        zero: [N, G], int8, in the range of the codes; None when symmetric.
        scheme: how codes are to be read.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    scheme: WeightScheme

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.codes.shape[0], self.codes.shape[1]

    def replace(self, **changes: object) -> QuantTensor:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


class Format(Protocol):
    """What a format's constant `FORMAT` offers. Tensors are torch's; inputs are never modified."""

    name: str
    bits: float

    def quantize(self, weight: torch.Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round [N, K] to nearest with min-max ranges."""

    def dequantize(self, tensor: QuantTensor) -> torch.Tensor:
        """The values that the codes stand for, [N, K] float32."""

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [N, K] as densely packed bytes, uint8 [N, ceil(K * bits / 8)]."""

    def unpack(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        """The inverse of `pack`; K = columns."""

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Stored bits per weight of a [N, K] matrix: codes, scales and zero points."""
