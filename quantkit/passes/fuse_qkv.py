"""Mark linears that share an input (q/k/v, gate/up) to be stored as one, where the destination gains from it.

    [q; k; v] = [Wq; Wk; Wv] x        one product instead of three: the input is read once, and one kernel is launched

Outputs are concatenated along N, so codes, scales and zero points are too; nothing is rounded again. The model's
classes still have the linears apart, so a checkpoint gains nothing and keeps them apart; exporters that build their own
graph read the marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, decision, declined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.passes import Block, QuantTensor, Stats


def fuse(tensors: Sequence[QuantTensor]) -> QuantTensor:
    """Several quantized linears of one input as a single one: [N1, K], [N2, K] -> [N1 + N2, K].

    Raises:
        ValueError: different schemes, or one scale for a whole tensor, which the others do not share.
    """
    from quantkit.formats import joined

    return joined(tensors)


class FuseQkv(Pass):
    """See the module."""

    name = "fuse_qkv"
    requires = frozenset({"codes"})
    on_graphs = "the products of a graph stay as they are written"

    class Settings(Closed):
        """None."""

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Mark every shared input whose quantized members have one scheme."""
        groups = [group.members for group in block.groups() if len(group.members) > 1]
        if not groups:
            return declined(self.name, block.name, "no two quantized linears share an input")
        if not block.fuses:
            names = ", ".join(name.rpartition(".")[2] for name in groups[0])
            return declined(self.name, block.name, f"no destination gains: a checkpoint's class loads {names} apart")
        outcome = Outcome(False)
        for members in groups:
            schemes = {block.scheme(name) for name in members}
            if len(schemes) > 1 or not block.scheme(members[0]).rows_apart:
                reason = "its members have different schemes" if len(schemes) > 1 else "rows of a tensor share scales"
                outcome.decisions.append(decision(self.name, "not-fused", block.full_name(members[0]), reason))
                continue
            block.fusions.append(members)
            outcome.changed = True
        return outcome


PASS: Pass = FuseQkv()
