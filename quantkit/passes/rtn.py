"""Round to nearest: each weight to its closest code, after choosing the range of every group.

`minmax` spans all weights of a group; `mse` searches the range with the least squared rounding error; neither needs
data. `importance` weighs each error by the mean square of the input that it will meet, which takes one forward over the
calibration set and no more: an importance matrix, as llama.cpp calls it (`llama-imatrix`; Kawrakow, 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from quantkit.content import Closed
from quantkit.formats import QuantTensor, apart
from quantkit.formats.base.grid import load_grid
from quantkit.passes import Outcome, Pass, decision

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.statistics.collected import Stats
    from quantkit.calibrate.statistics.sums import InputStats
    from quantkit.model.structure.block import Block
    from quantkit.model.structure.traced import SharedInput
    from quantkit.planning.compiling.work import SharedLinears, WorkCounts
    from quantkit.scheme import WeightScheme

# smallest, steps, refinements. Where nothing else makes an error good, looking further for the grid pays: 8 % of the KL
WIDE = (0.55, 6, 2)


class Rtn(Pass):
    """See the module."""

    name = "rtn"
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

    def needs_with(self, settings: Settings) -> frozenset[str]:
        """Squared inputs, where the range weighs by them."""
        return self.needs | {"mean_square"} if settings.range == "importance" else self.needs

    def work(self, settings: Settings, linears: SharedLinears) -> WorkCounts:
        """A range of each group."""
        if settings.range == "minmax":
            return linears.searched("minmax")
        return linears.searched("wide" if settings.range == "importance" else "searched")

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block."""
        outcome = Outcome(True)

        def visit(group: SharedInput, seen: InputStats) -> None:
            for linear, tensor in _rounded(block, group.members, seen.mean_square):
                outcome.errors[linear] = block.assign(linear, tensor)

        if settings.range == "importance":
            stats.staged(visit, products=False)
        for group in block.groups():
            left = [linear for linear in group.members if linear not in block.tensors]
            for linear, tensor in _rounded(block, left, None, settings.range == "minmax"):
                if settings.range == "importance":
                    reason = "no calibration token reached it; its inputs count alike"
                    outcome.decisions.append(decision(self.name, "no-importance", block.full_name(linear), reason))
                outcome.errors[linear] = block.assign(linear, tensor)
                stats.outputs = None
        return outcome


def _rounded(
    block: Block, linears: Sequence[str], importance: Tensor | None, minmax: bool = False
) -> Iterator[tuple[str, QuantTensor]]:
    """Linears that share an input, each with its codes; as one matrix where they have a scale in common."""
    import torch

    for names in block.alike(linears):
        scheme = block.scheme(names[0])
        together = load_grid(scheme.format).shares_scale(scheme)
        for some in [names] if together else [[name] for name in names]:
            weights = [block.weight(name) for name in some]
            tensor = _nearest(torch.cat(weights), scheme, importance, minmax)
            yield from zip(some, apart(tensor, [len(weight) for weight in weights]), strict=True)


def _nearest(weight: Tensor, scheme: WeightScheme, importance: Tensor | None, minmax: bool) -> QuantTensor:
    import torch

    from quantkit.passes.solvers import ranges

    form = load_grid(scheme.format)
    if minmax:
        tensor = form.quantize(weight, scheme)
    else:
        if importance is not None:
            importance = torch.nn.functional.pad(importance, (0, weight.shape[1] - len(importance)))
        search = None if importance is None else ranges.Search(*WIDE)
        tensor = form.nearest(weight, *ranges.searched(weight, scheme, importance, search), scheme)
    assert isinstance(tensor, QuantTensor)
    return tensor


PASS: Pass = Rtn()
