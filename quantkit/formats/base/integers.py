"""Uniform integer formats of any width up to 8 bits.

    symmetric:   q = clip(round(w / s), -2^(b-1), 2^(b-1) - 1)            s = max|w| / (2^(b-1) - 0.5)
    asymmetric:  q = clip(round(w / s) + z, -2^(b-1), 2^(b-1) - 1)        s = (max - min) / (2^b - 1)

where min <= 0 <= max, so that zero is a code. Rounding is to nearest, ties to even (torch.round). The scale is rounded
to its storage dtype *before* codes are chosen, so that the codes fit the scale that is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantkit.formats import load_format
from quantkit.formats.base import grid
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.layout import packed_bits, unpacked_bits
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme


def stored(scale: Tensor, scheme: WeightScheme) -> Tensor:
    """Round a scale to its storage dtype; never zero, never infinite there.

    Runtimes multiply in the dtype of the scale. A float16 scale of a format with up to 4 bits keeps only so many
    significant bits that every product with a code is exact in float16 (11 bits: 7 for int4 with a zero point, 8
    without). So a runtime computes exactly the values that were chosen here. It costs 0.2 % of the rounding error,
    since codes are chosen for the stored scale.
    """
    bounded = grid.stored(scale, scheme)
    bits = exact_bits(scheme)
    if bits is None:
        return bounded
    # round off the last bits of the mantissa; a carry runs into the exponent, as it should
    dropped = 11 - bits
    word = bounded.clamp(max=torch.finfo(bounded.dtype).max / 2).view(torch.int16)
    return word.add(1 << (dropped - 1)).bitwise_and_(-1 << dropped).view(bounded.dtype)


def exact_bits(scheme: WeightScheme) -> int | None:
    """Count the significant bits of a scale whose products with codes are exact in its dtype; None: not limited."""
    bits = load_format(scheme.format).bits
    if scheme.scale != "float16" or bits > 4:
        return None
    # codes minus their zero point span 2^b - 1 steps; without one, the lowest code is a power of two
    return 11 - (bits - 1 if scheme.symmetric else bits)


@dataclass(frozen=True)
class IntegerFormat(GridFormat):
    """A uniform integer format of 1 to 8 bits."""

    rules: ClassVar[Rules] = Rules(
        granularities={"channel": None, "tensor": None, "group": None},
        symmetric=(True, False),
        scales=("float16", "bfloat16", "float32"),
        activations=True,
    )

    @property
    def low(self) -> int:
        """Smallest code."""
        return -int(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def ends(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return self.low, self.high

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Choose scale (stored dtype) and zero point (int8, None if symmetric) for values between `low` and `high`."""
        if scheme.symmetric:
            return stored(torch.maximum(-low, high) / (2 ** (self.bits - 1) - 0.5), scheme), None
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        scale = stored((high - low) / (2**self.bits - 1), scheme)
        zero = torch.round(self.low - low / scale.float()).clamp(self.low, self.high)
        return scale, zero.to(torch.int8)

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Round scales as the function `stored` does."""
        return stored(scale, scheme)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Round to integers, ties to even, between the lowest and the highest code minus the zero point."""
        shift = 0.0 if zero is None else zero.float()
        return units.float().round().clamp(self.low - shift, self.high - shift)  # type: ignore[arg-type]

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes, int8; `scale` and `zero` broadcast against `weight`."""
        codes = torch.round(weight.float() / scale.float())
        if zero is not None:
            codes = codes + zero.float()
        return codes.clamp(self.low, self.high).to(torch.int8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return `(codes - zero) * scale` in float32, by broadcasting."""
        values = codes.float() if zero is None else codes - zero.float()
        scale = scale.float()
        alone = values is not codes and values.shape == torch.broadcast_shapes(values.shape, scale.shape)
        return values.mul_(scale) if alone else values * scale

    def pack(self, codes: Tensor) -> Tensor:
        """Pack unsigned codes (code - low), least significant bit first, rows padded to whole bytes.

        int8 [N, K] -> uint8 [N, ceil(K * bits / 8)]; int4 [4096, 4096] -> [4096, 2048].
        """
        return packed_bits(codes.to(torch.int16) - self.low, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Unpack uint8 [N, ceil(K * bits / 8)] -> int8 [N, K]."""
        return (unpacked_bits(packed, self.bits, columns).to(torch.int16) + self.low).to(torch.int8)
