"""SmoothQuant: even out inputs and weights before both are quantized, by scales folded into what produces the inputs.

Xiao et al., "SmoothQuant", 2023, arXiv 2211.10438; the mathematics is in `solvers/smoothquant.py`. A scale goes where
the block's structure proves that it can: a norm, as in the paper, and also the value projection and the up projection,
whose products hold the largest outliers of a gated block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from quantkit.content import Closed
from quantkit.formats.base.grid import load_grid
from quantkit.lazy import torch
from quantkit.passes import Outcome, Pass

if TYPE_CHECKING:
    from quantkit.passes import Block, Stats, Tensor


class SmoothQuant(Pass):
    """See the module."""

    name = "smoothquant"
    paper = "arXiv 2211.10438"
    needs = frozenset({"absmax"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "its scales go into the norms of a transformer; in a graph `equalize` moves what convolutions take"

    class Settings(Closed):
        """How much is moved.

        Args:
            alpha: the share of the outliers that goes into the weights; `search` takes, for each shared input, the one
                with the least error at the output of some calibration tokens, weights and inputs rounded as the recipe
                says.
            grid: steps of α from 0 to 1; only with `alpha: search`.
            through: `norms` smooths what norms put out, as the paper does; `all` also what linears do.
        """

        alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = 0.5
        grid: int = Field(default=10, ge=1)
        through: Literal["norms", "all"] = "all"

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Measure, choose and fold."""
        from quantkit.passes.solvers import device, smoothquant

        outcome = Outcome(False)
        reaches = stats.each(lambda seen: (seen.absmax, seen.sample))
        for group in block.groups():
            name = block.group_name(group)
            fold = block.folds.get(name)
            reason = ""
            if name not in reaches:
                reason = "no calibration token reached it"
            elif fold is None:
                reason = block.declined[name]
            elif fold.form == "linear" and settings.through == "norms":
                reason = "a linear produces it"
            if reason or fold is None:
                outcome.note(self.name, "not-smoothed", block.full_name(name), reason)
                continue
            reach, sample = reaches[name]
            weights = [block.weight(member)[:, : group.features] for member in group.members]
            if settings.alpha == "search":
                rounded = [_rounded(block, member) for member in group.members]
                seen = [_seen(block, member) for member in group.members]
                # where nothing is better than ones, they are folded: no value changes, and a GPU is not waited for
                scales = smoothquant.search(
                    sample, reach, weights, rounded, seen, settings.grid, fold.index, fold.channels
                ).scales
            else:
                scales = smoothquant.scales(reach, weights, settings.alpha, fold.index, fold.channels)
            block.fold(group, scales, device.folding(scales))
            outcome.changed = True
        stats.outputs = None
        return outcome


def _rounded(block: Block, linear: str) -> Callable[[Tensor], Tensor]:
    """Return a weight [N, K] -> what plain rounding makes of it under the linear's scheme."""
    scheme = block.scheme(linear)
    form = load_grid(scheme.format)

    def rounded(weight: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(weight, (0, scheme.padding(weight.shape[1])))
        values: Tensor = form.dequantize(form.quantize(padded, scheme))
        return values[:, : weight.shape[1]]

    return rounded


def _seen(block: Block, linear: str) -> Callable[[Tensor], Tensor]:
    """Return an input -> what the linear's kernel sees of it; a scale that will be fixed is the sample's for now."""
    from quantkit.formats.base import activation

    hook = block.inputs.get(linear)
    return (lambda x: x) if hook is None else lambda x: activation.fake_quantize(x, hook.scheme)


PASS: Pass = SmoothQuant()
