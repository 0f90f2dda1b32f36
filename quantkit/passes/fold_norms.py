"""Fold a norm's weight into the linears after it, so that their columns are comparable.

    W (w * n(x)) = (W diag(w)) n(x)

With a norm's weight of one, only the linears determine how much an input matters. Exact; declined if a weight is too
close to zero to divide by, or if another operator reads the norm's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass, declined

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats

_SMALLEST = 1e-4


class FoldNorms(Pass):
    """Pass `fold_norms`."""

    name = "fold_norms"
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "batch norms are in the convolutions before any pass comes (`conv_batch_norm`), other norms stay"

    class Settings(Closed):
        """No settings."""

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Divide every norm by its weight."""
        outcome = Outcome(False)
        for group in block.groups():
            fold = block.folds.get(block.group_name(group))
            if fold is None or fold.form == "linear":
                continue
            weight = block.module.get_parameter(f"{fold.producer}.weight").detach()
            scales = weight + 1.0 if fold.form == "one_plus_weight" else weight
            if float(scales.abs().min()) < _SMALLEST:
                reason = f"a weight below {_SMALLEST:g} cannot be divided by"
                outcome.note(self.name, "norm-kept", block.full_name(fold.producer), reason)
                continue
            block.fold(group, scales[fold.index])
            outcome.changed = True
        if not outcome.changed and not outcome.decisions:
            return declined(self.name, block.name, "no norm feeds linears alone in this block")
        return outcome


PASS: Pass = FoldNorms()
