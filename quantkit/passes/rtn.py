"""Round to nearest: each weight to its closest code, after choosing the range of every group.

`minmax` spans all weights of a group; `mse` searches the range with the least squared rounding error; neither needs
data. `importance` weighs each error by the mean square of the input that it will meet, which takes one forward over the
calibration set and no more: an importance matrix, as llama.cpp calls it (`llama-imatrix`; Kawrakow, 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quantkit import registry
from quantkit.content import Closed
from quantkit.formats import QuantTensor
from quantkit.passes import Outcome, decision

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.statistics import InputStats, Stats
    from quantkit.model.block import Block
    from quantkit.model.structure import SharedInput

# smallest, steps, refinements. Where nothing else makes an error good, looking further for the grid pays: 8 % of the KL
WIDE = (0.55, 6, 2)


class Rtn:
    """See the module."""

    name = "rtn"
    paper = ""
    scope = "block"
    needs: frozenset[str] = frozenset()
    requires = frozenset({"unassigned"})
    ensures = frozenset({"codes"})
    on_graphs = ""

    class Settings(Closed):
        """How ranges are chosen.

        Args:
            range: `minmax`; `mse`: the least squared rounding error; or `importance`: the same weighted by the mean
                square of each input.
        """

        range: Literal["minmax", "mse", "importance"] = "mse"

        @property
        def needs(self) -> frozenset[str]:
            """What only some settings need."""
            return frozenset({"mean_square"} if self.range == "importance" else ())

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block."""
        outcome = Outcome(True)

        def visit(group: SharedInput, seen: InputStats) -> None:
            for linear in group.members:
                if block.schemes.get(linear) is not None:
                    outcome.errors[linear] = block.assign(linear, _rounded(block, linear, seen.mean_square))

        if settings.range == "importance":
            stats.staged(visit, products=False)
        for linear in block.linears():
            if linear in block.tensors:
                continue
            if settings.range == "importance":
                reason = "no calibration token reached it; its inputs count alike"
                outcome.decisions.append(decision(self.name, "no-importance", block.full_name(linear), reason))
            outcome.errors[linear] = block.assign(linear, _rounded(block, linear, None, settings.range == "minmax"))
            stats.outputs = None
        return outcome


def _rounded(block: Block, linear: str, importance: Tensor | None, minmax: bool = False) -> QuantTensor:
    import torch

    from quantkit.passes.solvers import ranges

    scheme, weight = block.scheme(linear), block.weight(linear)
    form = registry.load("formats", scheme.format)
    if minmax:
        tensor = form.quantize(weight, scheme)
    else:
        if importance is not None:
            importance = torch.nn.functional.pad(importance, (0, weight.shape[1] - len(importance)))
        search = None if importance is None else ranges.Search(*WIDE)
        tensor = form.nearest(weight, *ranges.searched(weight, scheme, importance, search), scheme)
    assert isinstance(tensor, QuantTensor)
    return tensor


PASS = Rtn()
