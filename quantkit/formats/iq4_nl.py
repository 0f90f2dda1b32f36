"""4-bit places in a table of whole numbers, in blocks of 32 under a float16 scale of either sign: GGUF IQ4_NL."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
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
# the middle of two is a whole number of halves: the place of all that lies above one half and up to the next
_HALVES = [sum(half > low + high for low, high in pairwise(VALUES)) for half in range(-256, 257)]


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
        """Return [16] float32, rising."""
        return torch.tensor(VALUES, dtype=torch.float32)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest values."""
        return _looked_up(_tables()[0], _half(units))

    def coded(self, values: Tensor) -> Tensor:
        """Return the nearest places; halfway between two, the lower one."""
        return _looked_up(_tables()[1], _half(values))

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Look up, times the scale."""
        return _looked_up(self.codebook(), codes.int()) * scale.float()

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Choose the nearest codes, the largest weight on the first value; ggml's reference fits the scale.

        Raises InputError: `group-indivisible`.
        """
        return self.nearest(weight, *self.parameters(*extremes(weight, scheme), scheme), scheme)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack places, the first in the low half of a byte."""
        return packed_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """See `Format`."""
        return unpacked_bits(packed, self.bits, columns)


def _half(units: Tensor) -> Tensor:
    """The half that units lie below or on, from 0."""
    return units.float().mul(2).clamp_(-256, 256).ceil_().add_(256).int()


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Of each half the value and the place."""
    places = torch.tensor(_HALVES)
    return torch.tensor(VALUES, dtype=torch.float32)[places], places.to(torch.uint8)


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    # without waiting for what the device does at the time
    values = table.to(places.device, non_blocking=True)
    return values.index_select(0, places.reshape(-1)).reshape(places.shape)


FORMAT: Format = Iq4Nl("iq4_nl", 4, VALUES[0])
