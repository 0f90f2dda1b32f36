"""SmoothQuant: balance inputs and weights before both are quantized, by scales folded into the preceding operator.

Xiao et al., "SmoothQuant", 2023, arXiv 2211.10438; the mathematics is in `solvers/smoothquant.py`. A scale is
folded where the block's structure proves that it can be: into a norm, as in the paper, and also into the value
projection and the up projection, whose outputs hold the largest outliers of a gated block.
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
    """Pass `smoothquant`."""

    name = "smoothquant"
    paper = "arXiv 2211.10438"
    needs = frozenset({"absmax"})
    requires = frozenset({"unassigned"})
    ensures = frozenset({"folded"})
    on_graphs = "its scales go into the norms of a transformer; in a graph `equalize` moves what convolutions take"

    class Settings(Closed):
        """Strength of the balancing.

        Args:
            alpha: share of the outliers that moves into the weights; `search` takes, for every shared input, the one
                with the least error at the output of some calibration tokens, weights and inputs rounded.
            grid: steps of α from 0 to 1; only with `alpha: search`.
            through: `norms` smooths outputs of norms, as the paper does; `all` also outputs of linears.
        """

        alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = 0.5
        grid: int = Field(default=10, ge=1)
        through: Literal["norms", "all"] = "all"

    def run(self, block: Block, stats: Stats, settings: Settings) -> Outcome:
        """Measure, choose and fold the scales."""
        from quantkit.passes.solvers import device, smoothquant

        outcome = Outcome(False)
        reaches = stats.each(lambda seen: (seen.absmax, seen.sample), products=False)
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
                # scales of one are folded too: they change no value, and testing them would wait for a GPU
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
    """Return a function from a weight [N, K] to its plain rounding under the linear's scheme."""
    scheme = block.scheme(linear)
    form = load_grid(scheme.format)

    def rounded(weight: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(weight, (0, scheme.padding(weight.shape[1])))
        values: Tensor = form.dequantize(form.quantize(padded, scheme))
        return values[:, : weight.shape[1]]

    return rounded


def _seen(block: Block, linear: str) -> Callable[[Tensor], Tensor]:
    """Return a function from an input to its rounding by the linear's kernel; a fixed scale comes from the sample."""
    from quantkit.formats.base import activation

    hook = block.inputs.get(linear)
    return (lambda x: x) if hook is None else lambda x: activation.fake_quantize(x, hook.scheme)


PASS: Pass = SmoothQuant()
