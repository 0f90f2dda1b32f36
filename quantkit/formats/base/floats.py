"""Plain floating-point formats: a cast, no scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantkit.formats import QuantTensor
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point dtype that torch has.

    Args:
        name: its name in recipes and in torch.
        bits: stored bits of one value.
    """

    name: str
    bits: int
    rules: ClassVar[Rules] = Rules(granularities={"tensor": None}, symmetric=(True,), scales=("float32",), codes=False)

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round to nearest even in this dtype; the scale is 1."""
        return QuantTensor(weight.to(getattr(torch, self.name)), torch.ones(1, 1, device=weight.device), None, scheme)

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """[N, K] float32."""
        return tensor.codes.float()

    def pack(self, codes: Tensor) -> Tensor:
        """Little-endian bytes, uint8 [N, K * bits / 8]."""
        return codes.contiguous().view(torch.uint8).reshape(codes.shape[0], -1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return packed.contiguous().view(getattr(torch, self.name)).reshape(packed.shape[0], columns)

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """The dtype's width."""
        return float(self.bits)
