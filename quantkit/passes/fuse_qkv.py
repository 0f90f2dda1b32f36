"""Mark linears that share an input (q/k/v, gate/up) to be stored as one, if the export gains from it.

    [q; k; v] = [Wq; Wk; Wv] x        one product instead of three: the input is read once, and one kernel is launched

Outputs are concatenated along N (`formats.joined`); nothing is rounded again. The classes of a checkpoint keep the
linears separate; exporters that build their own graph read the marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats


class FuseQkv(Pass):
    """Pass `fuse_qkv`."""

    name = "fuse_qkv"
    requires = frozenset({"codes"})
    on_graphs = "the products of a graph stay as they are written"

    class Settings(Closed):
        """No settings."""

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Mark every shared input if its quantized members have one scheme."""
        groups = [group.members for group in block.groups() if len(group.members) > 1]
        if not groups:
            return declined(self.name, block.name, "no two quantized linears share an input")
        if not block.fuses:
            names = ", ".join(name.rpartition(".")[2] for name in groups[0])
            return declined(self.name, block.name, f"no export gains: a checkpoint's class loads {names} separately")
        outcome = Outcome(False)
        for members in groups:
            schemes = {block.scheme(name) for name in members}
            if len(schemes) > 1 or not block.scheme(members[0]).rows_apart:
                reason = "its members have different schemes" if len(schemes) > 1 else "rows of a tensor share scales"
                outcome.note(self.name, "not-fused", block.full_name(members[0]), reason)
                continue
            block.fusions.append(members)
            outcome.changed = True
        return outcome


PASS: Pass = FuseQkv()
