"""4-bit indices into a table of integers, in blocks of 32 under a float16 scale of either sign: GGUF IQ4_NL."""

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
# midpoints of two values are multiples of one half: index of the value for units above one half, up to the next
_HALVES = [sum(half > low + high for low, high in pairwise(VALUES)) for half in range(-256, 257)]


class Iq4Nl(BlockFormat):
    """IQ4_NL; codes are uint8, indices into the table."""

    @property
    def low(self) -> float:
        """First value of the table."""
        return VALUES[0]

    @property
    def high(self) -> float:
        """Last value of the table."""
        return VALUES[-1]

    def codebook(self) -> Tensor:
        """Return [16] float32, ascending."""
        return torch.tensor(VALUES, dtype=torch.float32)

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest values."""
        return _looked_up(_tables()[0], _half(units))

    def coded(self, values: Tensor) -> Tensor:
        """Return the nearest indices; halfway between two, the lower one."""
        return _looked_up(_tables()[1], _half(values))

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Look up the values and multiply them by the scale."""
        return _looked_up(self.codebook(), codes.int()) * scale.float()

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Choose the nearest codes, with the largest weight on the first value; ggml's reference fits the scale.

        Raises InputError: `group-indivisible`.
        """
        return self.nearest(weight, *self.parameters(*extremes(weight, scheme), scheme), scheme)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack two indices in a byte, the first in the low half."""
        return packed_bits(codes, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return unpacked_bits(packed, self.bits, columns)


def _half(units: Tensor) -> Tensor:
    """Round up to a multiple of one half, counted from 0 at -128."""
    return units.float().mul(2).clamp_(-256, 256).ceil_().add_(256).int()


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Return the value and the index for every multiple of one half."""
    places = torch.tensor(_HALVES)
    return torch.tensor(VALUES, dtype=torch.float32)[places], places.to(torch.uint8)


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    # asynchronous: no wait for the device
    values = table.to(places.device, non_blocking=True)
    return values.index_select(0, places.reshape(-1)).reshape(places.shape)


FORMAT: Format = Iq4Nl("iq4_nl", 4, VALUES[0])
