"""Round to nearest: each weight to its closest code, after choosing the range of every group.

`minmax` spans all weights of a group; `mse` searches the range with the least squared rounding error. No data needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from quantkit import registry
from quantkit.content import Closed
from quantkit.formats import QuantTensor
from quantkit.passes import Outcome

if TYPE_CHECKING:
    from quantkit.calibrate.statistics import Stats
    from quantkit.model.block import Block


class Rtn:
    """See the module."""

    name = "rtn"
    paper = ""
    scope = "block"
    needs: frozenset[str] = frozenset()
    requires = frozenset({"unassigned"})
    ensures = frozenset({"codes"})

    class Settings(Closed):
        """How ranges are chosen.

        Args:
            range: `minmax`, or `mse`: the least squared rounding error.
        """

        range: Literal["minmax", "mse"] = "mse"

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Assign codes to every linear of the block."""
        from quantkit.passes.solvers import ranges

        outcome = Outcome(True)
        for linear in block.linears():
            scheme = block.scheme(linear)
            weight = block.weight(linear)
            form = registry.load("formats", scheme.format)
            if settings.range == "minmax":
                tensor = form.quantize(weight, scheme)
            else:
                scale, zero = ranges.searched(weight, scheme)
                tensor = form.nearest(weight, scale, zero, scheme)
            assert isinstance(tensor, QuantTensor)
            outcome.errors[linear] = block.assign(linear, tensor)
        stats.outputs = None
        return outcome


PASS = Rtn()
