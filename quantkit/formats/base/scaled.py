"""Formats whose values are a scale times an element without zero point: floats, and anything else around zero.

    s = max|w| / top        code = nearest element to w / s

The scale is rounded to what it is stored in before codes are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.formats.base.elements import Element
from quantkit.formats.base.grid import GridFormat
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class ScaledFormat(GridFormat):
    """A format of scaled elements."""

    element: Element

    @property
    def low(self) -> float:
        """The smallest value."""
        return -self.element.top

    @property
    def high(self) -> float:
        """The largest value."""
        return self.element.top

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """The scale that puts the largest magnitude on the largest element, as stored."""
        return self.stored(torch.maximum(-low, high) / self.element.top, scheme, global_scale), None

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """The nearest elements."""
        return self.element.snap(units)

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Nearest codes."""
        return self.element.encode(weight.float() / scale.float())

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Element times scale, float32."""
        return self.element.decode(codes) * scale.float()

    def kept(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None) -> dict[str, Any]:
        """Scales, and the codebook if there is one."""
        return {**super().kept(scale, scheme, global_scale), "codebook": self.element.codebook(scale.device)}

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [N, K] as uint8 [N, ceil(K * bits / 8)]."""
        return self.element.pack(codes)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return self.element.unpack(packed, columns)


@dataclass(frozen=True)
class Fp8Format(ScaledFormat):
    """8-bit floats under a scale of a wider float type."""

    rules: ClassVar[Rules] = Rules(
        granularities={"channel": None, "tensor": None, "group": None, "block": 128},
        symmetric=(True,),
        scales=("float32", "bfloat16", "float16"),
        activations=True,
    )

    def shares_scale(self, scheme: WeightScheme) -> bool:
        """Per tensor: vLLM multiplies fused linears under the largest of their scales, and rounds the others again."""
        return scheme.granularity == "tensor"


@dataclass(frozen=True)
class MxFormat(ScaledFormat):
    """Microscaling: 32 elements share a power of two, E8M0 (OCP Microscaling Formats v1.0, section 6.3).

        s = 2^(floor(log2 max|w|) - emax)        emax: the exponent of the largest element, 2 of E2M1, 8 of E4M3

    as the specification says (and torchao's default, `ScaleCalculationMode.FLOOR`); the largest weights may then lie
    beyond the largest element, and saturate. compressed-tensors goes one power up where the mantissa of max|w| is 1.75
    or more. A range search tries both, and takes what fits the weights best.

    Args:
        exponent: emax.
    """

    exponent: int

    rules: ClassVar[Rules] = Rules(granularities={"group": 32}, symmetric=(True,), scales=("e8m0",), groups=(32,))
    stretches: ClassVar[tuple[float, ...]] = (2.0,)

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """A power of two, float32. A group of zeros gets the smallest one."""
        amax = torch.maximum(-low, high).float()
        return _power_of_two(torch.frexp(amax).exponent - 1 - self.exponent, amax), None

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """The power of two nearest in ratio."""
        mantissa, exponent = torch.frexp(scale.float())
        return _power_of_two(exponent - 1 + (mantissa >= 0.5**0.5).int(), scale)


def _power_of_two(exponent: Tensor, of: Tensor) -> Tensor:
    """2^exponent as E8M0 has it, -127 to 127, float32; the lowest where `of` is 0."""
    code = torch.where(of > 0, exponent + 127, 0).clamp(0, 254)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu).float()
