"""Super-blocks of 256 weights as GGUF files have them: scales are whole numbers under a float16 for all 256.

    w = (d sc) q - (dmin mn)     q = 0 ... 2^b - 1             q2_k: 16 by 16, sc and mn of 4 bits
                                                               q4_k, q5_k: 8 by 32, sc and mn of 6 bits
    w = (d sc) q                 q = -2^(b-1) ... 2^(b-1)-1    q3_k: 16 by 16, sc = -32 ... 31
                                                               q6_k: 16 by 16, sc = -128 ... 127

Products in brackets are rounded to float32 first, as ggml does. A row is whole super-blocks. ggml has no reference that
only rounds: `quantize` spans each group, and then rounds the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.formats import QuantTensor, SuperBlocks
from quantkit.formats.base.blocks import BlockFormat, BlockGrid, float16
from quantkit.formats.base.layout import extremes
from quantkit.lazy import torch
from quantkit.plugins import Rules

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.scheme import WeightScheme

SUPER_BLOCK = 256


@dataclass(frozen=True)
class SuperBlockFormat(BlockFormat):
    """Whole numbers from `lowest` up, in super-blocks.

    Args:
        group: weights that share a scale.
        scale_bits: of one scale, and of one offset.
    """

    group: int
    scale_bits: int

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        """Groups of one size, in super-blocks."""
        groups = (self.group,)
        return Rules({"group": self.group}, (not self.has_offset,), ("super",), groups=groups, multiple=SUPER_BLOCK)

    @property
    def scales(self) -> tuple[int, int]:
        """The smallest and the largest whole number of a scale; those of an offset go from 0 to the same."""
        half = int(2 ** (self.scale_bits - 1))
        return (0, 2 * half - 1) if self.has_offset else (-half, half - 1)

    @property
    def reach(self) -> float:
        """See `BlockFormat`: whole numbers are between."""
        return super().reach * max(-self.scales[0], self.scales[1] if self.has_offset else 1)

    def held(self, scale: Tensor, offset: Tensor | None) -> BlockGrid:
        """Wanted scales and offsets [N, G] as the nearest under d and dmin that span those of each super-block."""
        low, high = self.scales
        parts = self.together(scale)
        largest = parts.gather(2, parts.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        d = float16(largest / (high if self.has_offset else low))
        sc = self.whole(parts, d, low, high)
        if offset is None:
            return self.grid(SuperBlocks(d, sc))
        below = self.together(-offset).clamp(min=0)
        dmin = float16(below.amax(dim=2) / high)
        return self.grid(SuperBlocks(d, sc, dmin, self.whole(below, dmin, 0, high)))

    def together(self, values: Tensor) -> Tensor:
        """[N, G] as [N, K / 256, groups in 256]."""
        found: Tensor = values.float().unflatten(1, (-1, SUPER_BLOCK // self.group))
        return found

    def whole(self, wanted: Tensor, step: Tensor, low: int, high: int) -> Tensor:
        """[N, S, g] in whole numbers of the float16 steps [N, S], as int8 [N, G]."""
        step = step.float().unsqueeze(2)
        found = torch.where(step == 0, 0.0, wanted / step).round().clamp(low, high)
        return found.to(torch.int8).flatten(1)

    def grid(self, found: SuperBlocks) -> BlockGrid:
        """The effective scales and offsets."""
        offset = None
        if found.dmin is not None and found.mn is not None:
            offset = -(self._spread(found.dmin) * found.mn.float())
        return BlockGrid(self._spread(found.d) * found.sc.float(), offset, found)

    def _spread(self, values: Tensor) -> Tensor:
        return values.float().repeat_interleave(SUPER_BLOCK // self.group, dim=1)

    def quantize(self, weight: Tensor, scheme: WeightScheme) -> QuantTensor:
        """Nearest codes, each scale spanning its group.

        Raises:
            InputError: `group-indivisible`.
        """
        return self.nearest(weight, *self.parameters(*extremes(weight, scheme), scheme), scheme)

    def _fields(self, grid: BlockGrid, where: torch.device) -> dict[str, Any]:
        return {"scale": grid.scale, "offset": grid.offset, "super_blocks": grid.super_blocks}

    def bits_per_weight(self, shape: tuple[int, int], scheme: WeightScheme) -> float:
        """q2_k 2.625, q3_k 3.4375, q4_k 4.5, q5_k 5.5, q6_k 6.5625."""
        kinds = 2 if self.has_offset else 1
        return self.bits + kinds * (self.scale_bits / self.group + 16 / SUPER_BLOCK)
