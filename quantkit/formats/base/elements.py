"""Small floating-point numbers, as elements of a format: a grid without a scale.

    fp8_e4m3   ±448     1 sign, 4 exponent, 3 mantissa bits; no infinity, NaN is S.1111.111
    fp8_e5m2   ±57344   1, 5, 2; infinity and NaN as in IEEE 754
    fp4_e2m1   ±6       1, 2, 1: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; neither infinity nor NaN

Rounding is to nearest, ties to the even mantissa; what lies beyond the range, infinity included, becomes the largest
finite number of its sign. NaN stays NaN where the element has one; elsewhere weights have to be finite.
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433; OCP Microscaling Formats v1.0.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quantkit.formats.base.layout import packed_bits, unpacked_bits
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# of either sign; the code is the place, plus 8 for negative numbers
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Element(Protocol):
    """A grid: what a code stands for in units of the scale."""

    @property
    def top(self) -> float:
        """The largest value."""

    def snap(self, units: Tensor) -> Tensor:
        """The nearest values, float32."""

    def encode(self, units: Tensor) -> Tensor:
        """Their codes."""

    def decode(self, codes: Tensor) -> Tensor:
        """What codes stand for, float32."""

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [N, K] as uint8 [N, ceil(K * bits / 8)]."""

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""

    def codebook(self, device: torch.device | None = None) -> Tensor | None:
        """[2^bits] float32, what each code stands for; None where the code is a number itself."""


@dataclass(frozen=True)
class Fp8:
    """An 8-bit float that torch has; codes are of its dtype.

    Args:
        dtype: its name in torch.
        top: the largest finite number.
    """

    dtype: str
    top: float

    def snap(self, units: Tensor) -> Tensor:
        """The nearest values, float32."""
        return self.encode(units).float()

    def encode(self, units: Tensor) -> Tensor:
        """Saturating cast: torch's own overflows to NaN or infinity."""
        found: Tensor = units.float().clamp(-self.top, self.top).to(getattr(torch, self.dtype))
        return found

    def decode(self, codes: Tensor) -> Tensor:
        """Exact."""
        return codes.float()

    def pack(self, codes: Tensor) -> Tensor:
        """The bytes, uint8 [N, K]."""
        return codes.contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return packed[:, :columns].contiguous().view(getattr(torch, self.dtype))

    def codebook(self, device: torch.device | None = None) -> None:
        """None."""


@dataclass(frozen=True)
class Fp4:
    """E2M1; codes are uint8, 0..15: sign bit, then the place of the magnitude among `FP4_VALUES`."""

    top: float = 6.0

    def snap(self, units: Tensor) -> Tensor:
        """The nearest values, float32: whole multiples of half the power of two below, ties to even."""
        units = units.float().clamp(-self.top, self.top)
        size = units.abs()
        step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
        return torch.round(units / step) * step

    def encode(self, units: Tensor) -> Tensor:
        """A small negative number becomes minus zero, code 8, as in `ml_dtypes.float4_e2m1fn`."""
        place = torch.bucketize(self.snap(units).abs(), self.codebook(units.device)[: len(FP4_VALUES)])
        return (place + 8 * torch.signbit(units)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Exact."""
        return self.codebook(codes.device)[codes.int()]

    def pack(self, codes: Tensor) -> Tensor:
        """Two a byte, the first in the low half, as compressed-tensors does."""
        return packed_bits(codes, 4)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return unpacked_bits(packed, 4, columns)

    def codebook(self, device: torch.device | None = None) -> Tensor:
        """[16]: the positive numbers, then the negative ones."""
        values = torch.tensor(FP4_VALUES)
        # without waiting for what the device does at the time
        return torch.cat([values, -values]).to(device, non_blocking=True)


FP8_E4M3 = Fp8("float8_e4m3fn", 448.0)
FP8_E5M2 = Fp8("float8_e5m2", 57344.0)
FP4_E2M1 = Fp4()
