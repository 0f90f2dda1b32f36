"""Blocks of 32 weights as in GGUF files: a float16 scale, and in some formats a float16 offset.

    w = d q         q = -2^(b-1) ... 2^(b-1) - 1      q4_0, q5_0, q8_0; d of either sign
    w = d q + m     q = 0 ... 2^b - 1                 q4_1, q5_1
    w = d v[q]      v sixteen whole numbers           iq4_nl; d of either sign

The lowest value is larger in magnitude than the highest; the sign of the scale puts the largest weight there.
`quantize` rounds as ggml's own reference does, to the last bit (`ggml-quants.c`, `quantize_row_*_ref`; the `gguf`
package): codes are chosen under the exact scale, which is then rounded to float16. `nearest` and `laid` choose them
under the scale that is stored. A row has whole blocks: there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.formats import QuantTensor, SuperBlocks
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.layout import against, extremes, packed_bits, split, unpacked_bits
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

_BLOCK = 32
# largest float16
FLOAT16 = 65504.0


@dataclass(frozen=True)
class BlockGrid:
    """Effective scale [N, G] and offset [N, G] or None, float32; `super_blocks` if they are stored as such."""

    scale: Tensor
    offset: Tensor | None
    super_blocks: SuperBlocks | None = None


@dataclass(frozen=True)
class BlockFormat(GridFormat):
    """Integers from `lowest` up, in blocks."""

    lowest: int  # 0 in formats with offsets, else negative

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        """Rules for its schemes: blocks of one size."""
        return Rules({"group": _BLOCK}, (not self.has_offset,), ("float16",), groups=(_BLOCK,))

    @property
    def has_offset(self) -> bool:
        """True if an offset is added."""
        return self.lowest == 0

    @property
    def low(self) -> float:
        """Smallest value of a code."""
        return self.lowest

    @property
    def high(self) -> float:
        """Largest value of a code."""
        return self.lowest + int(2**self.bits) - 1

    @property
    def reach(self) -> float:
        """Largest magnitude under a float16 scale and offset."""
        return FLOAT16 * (1 if self.has_offset else -self.low)

    def codebook(self) -> Tensor | None:
        """Return the values of the codes, [2^bits] float32, ascending; None if the codes are the values."""
        return None

    def parameters(
        self, low: Tensor, high: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return scale and offset (or None), float32, that span `low` to `high`, zero included."""
        if not self.has_offset:
            return torch.where(-low >= high, low, high).float() / self.low, None
        low, high = low.float().clamp(max=0.0), high.float().clamp(min=0.0)
        return (high - low) / self.high, low

    def held(self, scale: Tensor, offset: Tensor | None) -> BlockGrid:
        """Round scales and offsets [N, G] to the nearest storable ones."""
        return BlockGrid(float16(scale).float(), None if offset is None else float16(offset).float())

    def stored(self, scale: Tensor, scheme: WeightScheme, global_scale: Tensor | None = None) -> Tensor:
        """Round scales of blocks to the nearest storable ones, of any shape and sign, zero included."""
        return self.held(scale.float(), None).scale

    @property
    def unit(self) -> int:
        """Number of neighbours chosen together."""
        return 1

    def snap(self, units: Tensor, zero: Tensor | None = None) -> Tensor:
        """Return the nearest values for weights minus their offset, in units of the scale."""
        return units.float().round().clamp(self.low, self.high)

    def folded(self, weight: Tensor, dim: int) -> Tensor:
        """Return weights without the signs that cost nothing; neighbours lie along `dim`."""
        return weight

    def near(self, units: Tensor, dim: int) -> Tensor:
        """Return the nearest possible values for `folded` weights; neighbours along `dim` are chosen together."""
        return self.snap(units)

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the nearest codes; `zero` is the offset."""
        shifted = weight.float() if zero is None else weight.float() - zero.float()
        scale = scale.float()
        # a block of zeros has a scale of 0
        return self.coded(self.snap(torch.where(scale == 0, 0.0, shifted / scale)))

    def coded(self, values: Tensor) -> Tensor:
        """Return the codes of values on the grid, in units of the scale."""
        return values.to(torch.int8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Multiply by the scale, then add the offset `zero`, with float32 rounding after each, as ggml does."""
        values = codes.float() * scale.float()
        return values if zero is None else values + zero.float()

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Round as ggml's reference does: half a step above the lowest code becomes the next code.

        Raises InputError: `group-indivisible`.
        """
        parts = split(weight.float(), scheme)
        if self.has_offset:
            low, high = extremes(weight, scheme)
            scale, offset = (high - low) / self.high, low
            parts = parts - offset.unsqueeze(2)
        else:
            largest = parts.abs().argmax(dim=2, keepdim=True)
            scale, offset = parts.gather(2, largest).squeeze(2) / self.low, None
        inverse = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(2)
        codes = torch.floor(parts * inverse + (0.5 - self.low)).clamp(0, self.high - self.low) + self.low
        return self.on(self.coded(codes.reshape(weight.shape)), self.held(scale, offset), scheme)

    def nearest(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        scheme: WeightScheme,
        global_scale: Tensor | None = None,
    ) -> QuantTensor:
        """Round [N, K] to the nearest codes under the nearest storable scales and offsets [N, G].

        Raises InputError: `group-indivisible`.
        """
        return self.laid(weight, self.held(scale.float(), None if zero is None else zero.float()), scheme)

    def laid(self, weight: Tensor, grid: BlockGrid, scheme: WeightScheme) -> QuantTensor:
        """Round [N, K] to the nearest codes on a grid."""
        shape = (weight.shape[0], weight.shape[1])
        offset = None if grid.offset is None else against(grid.offset, shape, scheme)
        codes = self.encode(split(weight, scheme), against(grid.scale, shape, scheme), offset)
        return self.on(codes.reshape(shape), grid, scheme)

    def on(self, codes: Tensor, grid: BlockGrid, scheme: WeightScheme) -> QuantTensor:
        """Make a tensor of codes [N, K] and their grid."""
        return QuantTensor(codes, zero=None, scheme=scheme, **self._fields(grid, codes.device))

    def _fields(self, grid: BlockGrid, where: torch.device) -> dict[str, Any]:
        """Return the fields of a `QuantTensor` for the grid."""
        offset, book = None if grid.offset is None else grid.offset.to(torch.float16), self.codebook()
        book = None if book is None else book.to(where, non_blocking=True)
        return {"scale": grid.scale.to(torch.float16), "offset": offset, "codebook": book}

    def dequantize(self, tensor: QuantTensor) -> Tensor:
        """Dequantize as `Format.dequantize` does."""
        shift = None if tensor.offset is None else against(tensor.offset, tensor.shape, tensor.scheme)
        scale = against(tensor.scale, tensor.shape, tensor.scheme)
        return self.decode(split(tensor.codes, tensor.scheme), scale, shift).reshape(tensor.shape)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes minus the lowest, least significant bit first: int8 [N, K] as uint8 [N, ceil(K * bits / 8)]."""
        return packed_bits(codes.to(torch.int16) - self.lowest, self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Invert `pack`."""
        return (unpacked_bits(packed, self.bits, columns).to(torch.int16) + self.lowest).to(torch.int8)

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Count the stored bits per weight: q4_0 4.5, q4_1 5, q8_0 8.5."""
        return self.bits + (32 if self.has_offset else 16) / _BLOCK


def float16(values: Tensor) -> Tensor:
    """Round to the nearest finite float16."""
    return values.clamp(-FLOAT16, FLOAT16).to(torch.float16)


# --- super-blocks -----------------------------------------------------------------------------------------------------
# 256 weights, whose scales are integers times one float16 for all of them.
#
#     w = (d sc) q - (dmin mn)     q = 0 ... 2^b - 1             q2_k: 16 by 16, sc and mn of 4 bits
#                                                                q4_k, q5_k: 8 by 32, sc and mn of 6 bits
#     w = (d sc) q                 q = -2^(b-1) ... 2^(b-1)-1    q3_k: 16 by 16, sc = -32 ... 31
#                                                                q6_k: 16 by 16, sc = -128 ... 127
#
# Products in brackets are rounded to float32 first, as ggml does. A row has whole super-blocks. ggml has no reference
# that only rounds: `quantize` spans every group, and then rounds the scales.

SUPER_BLOCK = 256


@dataclass(frozen=True)
class SuperBlockFormat(BlockFormat):
    """Integers from `lowest` up, in super-blocks."""

    group: int  # weights that share a scale
    scale_bits: int  # bits of a scale, and of an offset

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        """Rules for its schemes: groups of one size, in super-blocks."""
        groups = (self.group,)
        return Rules({"group": self.group}, (not self.has_offset,), ("super",), groups=groups, multiple=SUPER_BLOCK)

    @property
    def scales(self) -> tuple[int, int]:
        """Smallest and largest integer of a scale; integers of an offset go from 0 to the same."""
        half = int(2 ** (self.scale_bits - 1))
        return (0, 2 * half - 1) if self.has_offset else (-half, half - 1)

    @property
    def reach(self) -> float:
        """Largest magnitude of a value: d and dmin times their largest integers."""
        return super().reach * max(-self.scales[0], self.scales[1] if self.has_offset else 1)

    def held(self, scale: Tensor, offset: Tensor | None) -> BlockGrid:
        """Round scales and offsets [N, G] to the nearest ones under a d and dmin that span every super-block."""
        low, high = self.scales
        parts = self.together(scale)
        largest = parts.gather(2, parts.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        d = float16(largest / (low if low < 0 else high))
        sc = self._integers(parts, d, self.whole)
        if offset is None:
            return self.grid(SuperBlocks(d, sc))
        below = self.together(-offset).clamp(min=0)
        dmin = float16(below.amax(dim=2) / high)
        mn = self._integers(below, dmin, lambda units: units.round().clamp(0, high))
        return self.grid(SuperBlocks(d, sc, dmin, mn))

    def together(self, values: Tensor) -> Tensor:
        """Reshape [N, G] to [N, K / 256, groups in 256]."""
        return values.float().unflatten(1, (-1, SUPER_BLOCK // self.group))  # type: ignore[no-any-return, no-untyped-call]

    def whole(self, units: Tensor) -> Tensor:
        """Round to the nearest integers of a scale."""
        return units.round().clamp(*self.scales)

    def _integers(self, wanted: Tensor, step: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Round [N, S, g] to integers in units of the float16 steps [N, S], as int8 [N, G]."""
        step = step.float().unsqueeze(2)
        return whole(torch.where(step == 0, 0.0, wanted / step)).to(torch.int8).flatten(1)

    def grid(self, stored: SuperBlocks) -> BlockGrid:
        """Return the effective scales and offsets."""
        offset = None
        if stored.dmin is not None and stored.mn is not None:
            offset = -(self._spread(stored.dmin) * stored.mn.float())
        return BlockGrid(self._spread(stored.d) * stored.sc.float(), offset, stored)

    def _spread(self, values: Tensor) -> Tensor:
        return values.float().repeat_interleave(SUPER_BLOCK // self.group, dim=1)

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Choose the nearest codes; every scale spans its group. Raises InputError: `group-indivisible`."""
        return self.nearest(weight, *self.parameters(*extremes(weight, scheme), scheme), scheme)

    def _fields(self, grid: BlockGrid, where: torch.device) -> dict[str, Any]:
        book = super()._fields(grid, where)["codebook"]
        return {"scale": grid.scale, "offset": grid.offset, "codebook": book, "super_blocks": grid.super_blocks}

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """Count the stored bits per weight: q2_k 2.625, q3_k 3.4375, q4_k 4.5, q5_k 5.5, q6_k 6.5625."""
        kinds = 2 if self.has_offset else 1
        return self.bits + kinds * (self.scale_bits / self.group + 16 / SUPER_BLOCK)
