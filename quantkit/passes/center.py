"""Center and scale the channels of inputs that a kernel quantizes with one fixed scale.

    x' = (x - m) / c        W' = W diag(c)        b' = b + W m        W' x' + b' = W x + b

m_k is the middle of channel k's range in calibration, c_k half its width to the power of α. (Wei et al., "Outlier
Suppression+", 2023, arXiv 2304.09145. They fold both into the norm before; here they are part of quantizing the input,
so that they also work behind norms that feed a residual stream.) It costs a subtraction and a product for every input
value, and needs an export that can hold them: `onnx`, `tensorrt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from quantkit.content import Closed
from quantkit.lazy import torch
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, SharedInput, Stats, Tensor


def moves(low: Tensor, high: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return shift and scale of channels between `low` and `high` [K]; the scales' geometric mean is 1."""
    half = ((high - low) / 2).double()
    reach = torch.maximum(half, half.max() * 1e-4)
    scale = torch.where(reach > 0, reach, 1.0).log() * alpha
    return ((low + high) / 2).float(), (scale - scale.mean()).exp().float()


class Center(Pass):
    """Pass `center`."""

    name = "center"
    paper = "arXiv 2304.09145"
    needs = frozenset({"absmax"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"moved"})
    on_graphs = "it evens out what norms of a transformer give out; inputs of a graph's products stay as they are"
    for_blocks = True

    class Settings(Closed):
        """Strength of the scaling.

        Args:
            alpha: exponent: 0 leaves the widths of channels as they are, 1 makes them equal.
        """

        alpha: float = Field(default=0.5, ge=0, le=1)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Measure the channels, and move every shared input with a fixed scale."""
        from quantkit.formats.base.activation import Moved

        groups = [group for group in block.groups() if _fixed(block, group)]
        if not groups:
            return declined(self.name, block.name, "no input is quantized with a fixed scale")
        reaches = stats.each(lambda seen: (seen.low, seen.high), products=False)
        outcome = Outcome(False)
        for group in groups:
            name = block.group_name(group)
            if name not in reaches:
                outcome.note(self.name, "not-centered", block.full_name(name), "no calibration token reached it")
                continue
            shift, scale = moves(*reaches[name], settings.alpha)
            if any(block.module.get_submodule(member).bias is None for member in group.members):
                shift = shift.new_zeros(shift.shape)  # no bias could take W m
            for member in group.members:
                block.move(member, Moved(shift.clone(), scale.clone()))  # stored separately
            outcome.changed = True
        stats.outputs = None
        return outcome


def _fixed(block: Block, group: SharedInput) -> bool:
    hooks = [block.inputs.get(member) for member in group.members]
    return all(hook is not None and not hook.scheme.dynamic for hook in hooks)


PASS: Pass = Center()
