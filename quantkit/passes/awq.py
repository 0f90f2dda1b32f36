"""AWQ: scale inputs so that important ones are rounded finely, and fold the scales into the preceding operator.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration", 2024,
arXiv 2306.00978. One search (`solvers/awq.py`) per shared input, on the block's original weights; a scale is
folded where the block's structure proves that it can be. A later pass assigns the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from quantkit.content import Closed
from quantkit.passes import Outcome, Pass

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.calibrate.statistics.sums import InputStats
    from quantkit.passes import Block, Stats


class Awq(Pass):
    """Pass `awq`."""

    name = "awq"
    paper = "arXiv 2306.00978"
    needs = frozenset({"hessian"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "its scales are for groups of 4-bit weights; those of a graph have 8 bits and one scale a channel"

    class Settings(Closed):
        """Settings of the search for scales.

        Args:
            grid: number of exponents in (0, 1] to try for the scales; 0 folds nothing.
            cost: cost of rounding: `rounding` counts the whole error at the output, as the paper does; `gptq` counts
                the error left after later columns have compensated earlier ones, for a `gptq` that follows.
            shrink: share as in `gptq`; only with `cost: gptq`.
            clip: whether to clip weights to the range that costs least; for an assigner without a range search.
            sequences: number of calibration sequences for the search, the first ones; 0 uses all.
        """

        grid: int = Field(default=20, ge=0)
        cost: Literal["rounding", "gptq"] = "rounding"
        shrink: float = Field(default=0.5, ge=0, le=1)
        clip: bool = False
        sequences: int = Field(default=0, ge=0)

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Search, fold and clip."""
        from quantkit.model.structure.experts import expert_of
        from quantkit.passes.solvers import awq, device
        from quantkit.passes.solvers.factor import factor

        outcome = Outcome(False)
        groups = {block.group_name(group): group for group in block.groups()}
        folds, told = dict(block.folds), set[tuple[str, str]]()

        def search(seen: InputStats) -> tuple[Tensor | None, Tensor | None]:
            """Return the scales, and the Hessian if it is needed again: those of all experts would fill the memory."""
            group, fold = groups.get(seen.name), folds.get(seen.name)
            if group is None:
                return None, None
            hessian = seen.hessian if settings.clip else seen.taken()
            weights, scales = [block.weight(member) for member in group.members], None
            fits = all(weight.shape[1] == hessian.shape[0] for weight in weights)
            if fits and fold is not None and settings.grid:
                importance, costs = None, hessian
                if settings.cost == "gptq":
                    costs = hessian.diagonal().clone()  # factored in place if nobody needs it again
                    raised, own = stats.raised.get(seen.name, 0), not settings.clip
                    solved = factor(hessian, shrink=settings.shrink, raised=raised, own=own, whole=False)
                    stats.doubt(solved.pivots, seen.name, again=True)
                    importance = solved.importance
                scales = awq.search_scales(
                    weights,
                    costs,
                    block.scheme(group.members[0]),
                    grid=settings.grid,
                    producers=fold.index,
                    channels=fold.channels,
                    tied=fold.tied,
                    importance=importance,
                    over=None if stats.ranks is None else stats.over,
                ).scales
            return scales, hessian if fits and settings.clip else None

        def note(name: str, reason: str) -> None:
            """Note why an input is not scaled; once for the experts of a layer."""
            owner = expert_of(name, block.module)
            where = name if owner is None else f"{owner.rpartition('.')[0]}.*{name.removeprefix(owner)}"
            if (where, reason) not in told:
                outcome.note(self.name, "not-scaled", block.full_name(where), reason)
                told.add((where, reason))

        searched = stats.each(search, moments=False, sequences=settings.sequences or None)
        for name, group in groups.items():
            if name not in searched:
                note(name, "no calibration token reached it")
                continue
            scales, hessian = searched.pop(name)
            if any(block.scheme(member).padding(group.features) for member in group.members):
                note(name, "its last group is padded")
                continue
            if name not in folds:
                note(name, block.declined[name])
            elif scales is not None:
                # scales of one are folded too: they change no value, and testing them would wait for a GPU
                applied = block.fold(group, scales, device.folding(scales))
                if settings.clip and hessian is not None:
                    hessian = awq.transformed(hessian, applied)
                outcome.changed = True
            if settings.clip and hessian is not None:
                how = lambda one, seen=hessian: awq.clip(block.weight(one), seen, block.scheme(one))  # noqa: E731
                sizes = [block.weight(member).numel() for member in group.members]
                for member, weight in zip(group.members, stats.over(how, group.members, sizes), strict=True):
                    block.replace(member, weight)
                outcome.changed = True
        stats.outputs = None
        return outcome


PASS: Pass = Awq()
