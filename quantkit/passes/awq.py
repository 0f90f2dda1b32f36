"""AWQ: scale inputs so that what matters most is rounded most finely, and fold the scales into what produces them.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration", 2024,
arXiv 2306.00978. One search (`solvers/awq.py`) per shared input, on the block's original weights; a scale goes where
the block's structure proves that it can. Codes are assigned by the pass that follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats


class Awq(Pass):
    """See the module."""

    name = "awq"
    paper = "arXiv 2306.00978"
    needs = frozenset({"hessian"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "its scales are for groups of 4-bit weights; those of a graph have 8 bits and one scale a channel"

    class Settings(Closed):
        """How scales are searched.

        Args:
            grid: how many exponents in (0, 1] are tried for the scales; 0 folds nothing.
            cost: what rounding costs: `rounding` counts the whole error at the output, as the paper does; `gptq` counts
                what is left of it once later columns have made up for earlier ones, for a `gptq` that follows.
            shrink: as in `gptq`; only with `cost: gptq`.
            clip: also cut weights to the range that costs least; for an assigner without a range search of its own.
            sequences: how many calibration sequences the search looks at, the first ones; null looks at all.
        """

        grid: int = Field(default=20, ge=0)
        cost: Literal["rounding", "gptq"] = "rounding"
        shrink: float = Field(default=0.5, ge=0, le=1)
        clip: bool = False
        sequences: int | None = Field(default=None, ge=1)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Search, fold and clip."""
        from quantkit.passes.solvers import awq, device
        from quantkit.passes.solvers.factor import factor

        outcome = Outcome(False)
        hessians = stats.each(lambda seen: seen.hessian, sequences=settings.sequences)
        for group in block.groups():
            name = block.group_name(group)
            where, hessian, fold = block.full_name(name), hessians.get(name), block.folds.get(name)
            if hessian is None:
                outcome.note(self.name, "not-scaled", where, "no calibration token reached it")
                continue
            weights = [block.weight(member) for member in group.members]
            if any(weight.shape[1] != hessian.shape[0] for weight in weights):
                outcome.note(self.name, "not-scaled", where, "its last group is padded")
                continue
            if fold is None:
                outcome.note(self.name, "not-scaled", where, block.declined[name])
            elif settings.grid:
                importance = None
                if settings.cost == "gptq":
                    solved = factor(hessian, shrink=settings.shrink, raised=stats.raised.get(name, 0))
                    stats.doubt(solved.pivots, name, again=True)
                    importance = solved.importance
                scales = awq.search_scales(
                    weights,
                    hessian,
                    block.scheme(group.members[0]),
                    grid=settings.grid,
                    producers=fold.index,
                    channels=fold.channels,
                    tied=fold.tied,
                    importance=importance,
                ).scales
                # where nothing is better than ones, they are folded: no value changes, and a GPU is not waited for
                applied = block.fold(group, scales, device.folding(scales))
                if settings.clip:
                    hessian = awq.transformed(hessian, applied)
                outcome.changed = True
            if settings.clip:
                for member in group.members:
                    block.replace(member, awq.clip(block.weight(member), hessian, block.scheme(member)))
                outcome.changed = True
        stats.outputs = None
        return outcome


PASS: Pass = Awq()
