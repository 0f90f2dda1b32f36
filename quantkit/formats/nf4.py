"""4-bit quantiles of the normal distribution (NormalFloat), in groups of 64; `double` quantizes their scales to 8 bits.

    w = codebook[code] · max|w|        codebook: -1 … 1; all values are equally likely for normal weights

The scale maps the largest magnitude to ±1. With `scale: double` the scales, minus their mean, are stored as 8-bit codes
of a dynamic floating-point type with a float32 for every 256: 4.127 bits a weight instead of 4.5. Codes, scales and
values equal those of bitsandbytes to the last bit. For this a weight is multiplied by the rounded reciprocal of its
scale, codes are chosen before scales are doubled, and these go through a table of 2^16 entries. A row has whole groups
(groups of bitsandbytes run across the ends of rows; the two agree if the group divides K). (Dettmers et al., "QLoRA",
2023, arXiv 2305.14314; Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015, arXiv 1511.04561.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.formats import Format, Nested
from quantkit.formats.base.scaled import ScaledFormat
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

# quantiles of the normal distribution, zero and both ends included, as bitsandbytes rounds them
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# steps of the table in a unit; a step holds at most one midpoint, and none lies on its edge
_FINE = 2048
# scales that share an absmax when they are quantized themselves
_NESTED = 256


@dataclass(frozen=True)
class NormalFloat:
    """Codebook of NF4; codes are uint8, indices in ascending order."""

    top: float = 1.0

    def snap(self, units: Tensor) -> Tensor:
        """Return the nearest values, float32."""
        return self.decode(self.encode(units))

    def encode(self, units: Tensor) -> Tensor:
        """Return the nearest indices; halfway between two, the lower one."""
        values = self.codebook()
        middles = torch.cat([(values[1:] + values[:-1]) / 2, torch.tensor([torch.inf])])
        # torch.bucketize takes five times as long: with a table of fine steps, one comparison is left
        below = torch.bucketize(torch.arange(2 * _FINE + 1) / _FINE - 1, middles[:-1], out_int32=True)
        # asynchronous: no wait for the device
        middles, below = (table.to(units.device, non_blocking=True) for table in (middles, below))
        exact = units.float().reshape(-1)
        place = exact.clamp(-1, 1).nan_to_num_(1.0).add_(1).mul_(_FINE).int()
        codes = below.index_select(0, place)
        codes += exact > middles.index_select(0, codes)
        return codes.to(torch.uint8).reshape(units.shape)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of codes, float32."""
        return self.codebook(codes.device).index_select(0, codes.int().reshape(-1)).reshape(codes.shape)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack two codes in a byte, the first in the high half, as bitsandbytes does; odd rows are padded."""
        even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        return (even[:, ::2] << 4) | even[:, 1::2]

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return torch.stack([packed >> 4, packed & 15], dim=2).reshape(packed.shape[0], -1)[:, :columns]

    def codebook(self, device: torch.device | None = None) -> Tensor:
        """Return [16] float32, ascending."""
        return torch.tensor(VALUES).to(device, non_blocking=True)


class Nf4(ScaledFormat):
    """Format `nf4`."""

    rules: ClassVar[Rules] = Rules(
        granularities={"group": 64},
        symmetric=(True,),
        scales=("float32", "double"),
        groups=(32, 64, 128, 256, 512, 1024, 2048, 4096),
    )

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Return scales unchanged; a group of zeros has scale 0."""
        return scale.float()

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes."""
        return self.element.encode(weight.float() * (1.0 / scale.float().clamp(min=1e-38)))

    def kept(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None) -> dict[str, Any]:
        """Return the scales, quantized if the scheme says `double`."""
        fields = super().kept(scale, scheme, global_scale)
        if scheme.scale == "double":
            nested = doubled(fields["scale"])
            fields |= {"nested": nested, "scale": undoubled(nested).reshape(scale.shape)}
        return fields


def dynamic_values() -> Tensor:
    """List the values of the 8-bit type for scales, [256] float32, ascending: seven decades."""
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        positive = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += [positive, -positive]
    return torch.cat(values).sort().values


def doubled(scale: Tensor) -> Nested:
    """Quantize scales of any shape, row by row, to 8-bit codes."""
    flat = scale.float().reshape(-1)
    offset = flat.mean()
    parts = torch.nn.functional.pad(flat - offset, (0, -len(flat) % _NESTED)).reshape(-1, _NESTED)
    absmax = parts.abs().amax(dim=1)
    # equal scales leave 0 / 0; any code then has the value 0
    units = (parts / absmax.unsqueeze(1)).nan_to_num(-1.0).clamp(-1, 1).reshape(-1)
    places = (((units + 1) * 0.5) * 65535 + 0.5).int()
    values = dynamic_values()
    nearest = torch.bucketize(torch.arange(65536) / 65535 * 2 - 1, (values[1:] + values[:-1]) / 2)
    return Nested(nearest.to(flat.device, non_blocking=True)[places][: len(flat)].to(torch.uint8), absmax, offset)


def undoubled(nested: Nested) -> Tensor:
    """Read the scales back, flat float32."""
    values = dynamic_values().to(nested.codes.device, non_blocking=True)[nested.codes.int()]
    return values * nested.absmax.repeat_interleave(_NESTED)[: len(values)] + nested.offset


FORMAT: Format = Nf4("nf4", 4, NormalFloat())
