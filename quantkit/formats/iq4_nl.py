"""4-bit places in a table of whole numbers, in blocks of 32 under a float16 scale of either sign: GGUF IQ4_NL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.formats import Format, QuantTensor
from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.layout import extremes, packed_bits, unpacked_bits
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

# dense around zero, as weights are; `kvalues_iq4nl` of ggml
VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Iq4Nl(BlockFormat):
    """Codes are uint8, places in the table."""

    @property
    def low(self) -> float:
        """The first value."""
        return VALUES[0]

    @property
    def high(self) -> float:
        """The last value."""
        return VALUES[-1]

    def codebook(self) -> Tensor:
        """[16] float32, rising."""
        return torch.tensor(VALUES, dtype=torch.float32)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """The nearest values."""
        return self._values(units)[self.coded(units).int()]

    def coded(self, values: Tensor) -> Tensor:
        """The nearest places; halfway between two, the lower one."""
        table = self._values(values)
        return torch.bucketize(values.float(), (table[1:] + table[:-1]) / 2).to(torch.uint8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """A look-up, times the scale."""
        return self._values(codes)[codes.int()] * scale.float()

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Nearest codes, the largest weight on the first value. (ggml's reference fits the scale: see solvers.)

        Raises:
            InputError: `group-indivisible`.
        """
        return self.nearest(weight, *self.parameters(*extremes(weight, scheme), scheme), scheme)

    def pack(self, codes: Tensor) -> Tensor:
        """Places, the first in the low half of a byte."""
        return packed_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """The inverse of `pack`."""
        return unpacked_bits(packed, self.bits, columns)

    def _values(self, like: Tensor) -> Tensor:
        return self.codebook().to(like.device, non_blocking=True)


FORMAT: Format = Iq4Nl("iq4_nl", 4, VALUES[0])
