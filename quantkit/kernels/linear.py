"""A linear layer on a packed weight: for each number of rows, the kernel that was the fastest when it was measured.

    y = x Wᵀ + b      x [..., K] float16 or bfloat16, W [N, K] packed (`layout`), y [..., N] in the dtype of x

A table of choices (`dispatch`) names one of two ways for M rows of x: `quantkit`, the format's own kernel with the tile
sizes it was measured with, or `dequantize_matmul`, torch's product with a weight that is expanded into scratch. Neither
keeps a copy of the weight in high precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from quantkit.errors import InputError
from quantkit.kernels.configs import Config, candidates
from quantkit.kernels.dequantize import dequantize
from quantkit.kernels.dispatch import EXPANDED, OURS, Choice, Table
from quantkit.kernels.matmul import weight_only
from quantkit.kernels.native import native
from quantkit.kernels.quantize import quantize_tokens

if TYPE_CHECKING:
    from quantkit.kernels.layout import PackedWeight
    from quantkit.kernels.workspace import Workspace

# rows at which a product is bound by arithmetic, which torch's own does best
_MANY = 256


class QuantLinear(torch.nn.Module):
    """See the module.

    Args:
        packed: the weight, on the device of the inputs.
        bias: [N] or None.
        table: what is the fastest; None: `unmeasured`.
        memory: for the sums of a split K, shared by layers that run one after the other.

    Raises:
        InputError: `kernel-unsupported`, a choice that this layer cannot run; `shape-unmeasured`.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        table: Table | None = None,
        memory: Workspace | None = None,
    ) -> None:
        super().__init__()
        self.packed, self.bias, self.memory = packed, bias, memory
        self.table = table or unmeasured(packed)
        self.table.choose(packed.shape, 1)
        for choice in self.table.choices[packed.shape]:
            expandable = not packed.kind.endswith(".native")
            if not (choice.candidate == OURS and choice.config) and not (choice.candidate == EXPANDED and expandable):
                raise InputError(
                    "kernel-unsupported",
                    where=f"{packed.kind}, batch {choice.batch}",
                    value=choice.candidate,
                    rule=f"a layer runs {OURS} with its tile sizes, or {EXPANDED} where inputs are floats",
                    remedy="choose among these alone: `dispatch.fastest` of their timings",
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        choice = self.table.choose(self.packed.shape, flat.shape[0])
        if choice.candidate == EXPANDED:
            y = linear(flat, dequantize(self.packed, x.dtype))
        else:
            assert choice.config is not None
            config = Config.of(choice.config)
            if self.packed.kind.endswith(".native"):
                codes, step = quantize_tokens(flat, self.packed.kind.removesuffix(".native"))
                y = native(codes, step, self.packed, config, dtype=x.dtype, workspace=self.memory)
            else:
                y = weight_only(flat, self.packed, config, workspace=self.memory)
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])


def unmeasured(packed: PackedWeight) -> Table:
    """Choices where nothing was measured: the first tile sizes of each width; expanded beyond 128 rows."""
    size = packed.resident_bytes
    batches = [16, 32, 64, 128, _MANY]
    found = [Choice(batch, OURS, candidates(batch)[0].as_dict(), float("nan"), size) for batch in batches]
    if not packed.kind.endswith(".native"):
        found[-1] = Choice(_MANY, EXPANDED, None, float("nan"), size)
    return Table({packed.shape: tuple(found)})
