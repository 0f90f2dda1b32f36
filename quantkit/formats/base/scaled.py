"""Floating-point formats: small numbers with a scale, as elements of a grid, and plain ones, which are a cast.

    fp8_e4m3   ±448     1 sign, 4 exponent, 3 mantissa bits; no infinity, NaN is S.1111.111
    fp8_e5m2   ±57344   1, 5, 2; infinity and NaN as in IEEE 754
    fp4_e2m1   ±6       1, 2, 1: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; neither infinity nor NaN

    s = max|w| / top        code = nearest element to w / s

The scale is rounded to its storage type before codes are chosen. Rounding is to nearest, ties to the even mantissa;
values beyond the range, infinity included, become the largest finite number of their sign. NaN stays NaN if the element
has one; otherwise weights must be finite. (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv
2209.05433; OCP Microscaling Formats v1.0.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quantkit.formats import QuantTensor
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.layout import packed_bits, unpacked_bits
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

# magnitudes; the code is the index, plus 8 for negative numbers
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Element(Protocol):
    """Grid of a format: values of the codes in units of the scale."""

    @property
    def top(self) -> float:
        """Largest value."""

    def snap(self, units: Tensor) -> Tensor:
        """Return the nearest values, float32."""

    def encode(self, units: Tensor) -> Tensor:
        """Return the nearest codes."""

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32."""

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [N, K] as uint8 [N, ceil(K * bits / 8)]."""

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""

    def codebook(self, device: torch.device | None = None) -> Tensor | None:
        """Return the value of every code, [2^bits] float32; None if the code is itself a number."""


@dataclass(frozen=True)
class Fp8:
    """An 8-bit float type of torch; codes are of its dtype."""

    dtype: str  # name in torch
    top: float  # largest finite number

    def snap(self, units: Tensor) -> Tensor:
        """Return the nearest values, float32."""
        return self.encode(units).float()

    def encode(self, units: Tensor) -> Tensor:
        """Cast with saturation: torch's own cast overflows to NaN or infinity."""
        return units.float().clamp(-self.top, self.top).to(getattr(torch, self.dtype))

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32, exactly."""
        return codes.float()

    def pack(self, codes: Tensor) -> Tensor:
        """Return the bytes, uint8 [N, K]."""
        return codes.contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return packed[:, :columns].contiguous().view(getattr(torch, self.dtype))

    def codebook(self, device: torch.device | None = None) -> None:
        """Return None: a code is itself a number."""


@dataclass(frozen=True)
class Fp4:
    """E2M1; codes are uint8, 0..15: sign bit, then the index of the magnitude in `FP4_VALUES`."""

    top: float = 6.0

    def snap(self, units: Tensor) -> Tensor:
        """Round to multiples of half the power of two below, ties to even, float32."""
        units = units.float().clamp(-self.top, self.top)
        size = units.abs()
        step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
        return torch.round(units / step) * step

    def encode(self, units: Tensor) -> Tensor:
        """Return the nearest codes; a small negative number becomes minus zero, as in `ml_dtypes.float4_e2m1fn`."""
        place = torch.bucketize(self.snap(units).abs(), self.codebook(units.device)[: len(FP4_VALUES)])
        return (place + 8 * torch.signbit(units)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32, exactly."""
        return self.codebook(codes.device)[codes.int()]

    def pack(self, codes: Tensor) -> Tensor:
        """Pack two codes in a byte, the first in the low half, as compressed-tensors does."""
        return packed_bits(codes, 4)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return unpacked_bits(packed, 4, columns)

    def codebook(self, device: torch.device | None = None) -> Tensor:
        """Return [16]: the positive numbers, then the negative ones."""
        values = torch.tensor(FP4_VALUES)
        # asynchronous: no wait for the device
        return torch.cat([values, -values]).to(device, non_blocking=True)


FP8_E4M3 = Fp8("float8_e4m3fn", 448.0)
FP8_E5M2 = Fp8("float8_e5m2", 57344.0)
FP4_E2M1 = Fp4()


@dataclass(frozen=True)
class ScaledFormat(GridFormat):
    """Format of scaled elements: floats, and other grids around zero."""

    element: Element

    @property
    def low(self) -> float:
        """Smallest value."""
        return -self.element.top

    @property
    def high(self) -> float:
        """Largest value."""
        return self.element.top

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Map the largest magnitude to the largest element; returns the scale as stored."""
        return self.stored(torch.maximum(-low, high) / self.element.top, scheme, global_scale), None

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest elements."""
        return self.element.snap(units)

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes."""
        return self.element.encode(weight.float() / scale.float())

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Multiply elements by the scale, float32."""
        return self.element.decode(codes) * scale.float()

    def kept(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None) -> dict[str, Any]:
        """Return the scales, and the codebook if there is one."""
        return {**super().kept(scale, scheme, global_scale), "codebook": self.element.codebook(scale.device)}

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes as the element does."""
        return self.element.pack(codes)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return self.element.unpack(packed, columns)


@dataclass(frozen=True)
class Fp8Format(ScaledFormat):
    """8-bit floats with a scale of a wider float type."""

    rules: ClassVar[Rules] = Rules(
        granularities={"channel": None, "tensor": None, "group": None, "block": 128},
        symmetric=(True,),
        scales=("float32", "bfloat16", "float16"),
        activations=True,
    )

    def shares_scale(self, scheme: WeightScheme) -> bool:
        """Tell whether linears share a scale: per tensor, vLLM multiplies fused linears under the largest one."""
        return scheme.granularity == "tensor"


@dataclass(frozen=True)
class MxFormat(ScaledFormat):
    """Microscaling: 32 elements share a power of two, E8M0 (OCP Microscaling Formats v1.0, section 6.3).

        s = 2^(floor(log2 max|w|) - emax)        emax: the exponent of the largest element, 2 of E2M1, 8 of E4M3

    This is the specification's rule (and torchao's default, `ScaleCalculationMode.FLOOR`); the largest weights may then
    lie beyond the largest element, and saturate. compressed-tensors takes the next power if the mantissa of max|w| is
    1.75 or more. A range search tries both, and takes the one that fits the weights best.
    """

    exponent: int  # emax

    rules: ClassVar[Rules] = Rules(granularities={"group": 32}, symmetric=(True,), scales=("e8m0",), groups=(32,))
    stretches: ClassVar[tuple[float, ...]] = (2.0,)

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Choose a power of two, float32. A group of zeros gets the smallest one."""
        amax = torch.maximum(-low, high).float()
        return _power_of_two(torch.frexp(amax).exponent - 1 - self.exponent, amax), None

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Return the power of two that is nearest in ratio."""
        mantissa, exponent = torch.frexp(scale.float())
        return _power_of_two(exponent - 1 + (mantissa >= 0.5**0.5).int(), scale)


def _power_of_two(exponent: Tensor, of: Tensor) -> Tensor:
    """Return 2^exponent as E8M0 can store it, -127 to 127, float32; the lowest where `of` is 0."""
    code = torch.where(of > 0, exponent + 127, 0).clamp(0, 254)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu).float()


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point dtype of torch: a cast, no scale."""

    name: str  # name in recipes and in torch
    bits: int
    rules: ClassVar[Rules] = Rules(granularities={"tensor": None}, symmetric=(True,), scales=("float32",), codes=False)

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round to nearest even in this dtype; the scale is 1."""
        return QuantTensor(weight.to(getattr(torch, self.name)), torch.ones(1, 1, device=weight.device), None, scheme)

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """Cast to float32."""
        return tensor.codes.float()

    def pack(self, codes: Tensor) -> Tensor:
        """Return little-endian bytes, uint8 [N, K * bits / 8]."""
        return codes.contiguous().view(torch.uint8).reshape(codes.shape[0], -1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return packed.contiguous().view(getattr(torch, self.name)).reshape(packed.shape[0], columns)

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Return the width of the dtype."""
        return float(self.bits)
