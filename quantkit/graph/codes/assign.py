"""Codes of one product's weight, by the passes of a recipe that choose codes: `gptq`, `rtn`, `hqq`.

Settings mean what they mean for language models. `gptq` sees a convolution as a product of its patches, each group with
a Hessian of its own; its `correction` is W' = W E[x x̂ᵀ] (E[x̂ x̂ᵀ] + λ)⁻¹, with x what the product sees in the float
graph and x̂ what it sees behind quantized ones. `rtn` and `hqq` round W itself. A weight with one scale and several
groups is rounded to nearest by `gptq` too, which finds a scale for each group that it solves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quantkit.formats import QuantTensor, joined
from quantkit.formats.base.grid import load_grid
from quantkit.passes.gptq import Gptq
from quantkit.passes.hqq import Hqq
from quantkit.passes.rtn import WIDE, Rtn
from quantkit.passes.solvers import ranges
from quantkit.passes.solvers.gptq import gptq
from quantkit.passes.solvers.gptq_rows import gptq_rows
from quantkit.passes.solvers.hqq import half_quadratic

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.graph.sites import Site
    from quantkit.scheme import WeightScheme

# a recipe's passes: name -> settings
Passes = Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """Means over the rows of calibration, of a product with `groups` groups and K inputs each.

    Args:
        hessian: of x̂ x̂ᵀ, [groups, K, K].
        cross: of x x̂ᵀ, [groups, K, K].
        mean: of x̂, [groups, K].
        wanted: of x, [groups, K].
        alone: of x in its own pair, as if nothing before were quantized, [groups, K].
        halves: `hessian` over every other batch, and over the rest; one, where there was one batch.
    """

    hessian: Tensor
    cross: Tensor
    mean: Tensor
    wanted: Tensor
    alone: Tensor
    halves: tuple[Tensor, ...]

    @property
    def noise(self) -> float:
        """How much of the Hessian beside its diagonal is chance, 0..1; as `calibrate.statistics.InputStats.noise`."""
        if len(self.halves) < 2:
            return 1.0
        size = self.hessian.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        size = torch.where(size > 0, size, torch.inf)
        scale = size.unsqueeze(2) * size.unsqueeze(1)
        first, second, whole = ((each / scale).triu(1) for each in (*self.halves, self.hessian))
        both = float(whole.square().sum())
        return min(1.0, float((first - second).square().sum()) / 4 / both) if both > 0 else 1.0


def assigned(
    site: Site, seen: Seen, scheme: WeightScheme, passes: Passes, neighbours: Tensor | None = None
) -> QuantTensor:
    """The codes [N, K] that the assigning pass chooses; of none of them those nearest to W, as `round` starts from.

    Args:
        site: one product.
        seen: what it multiplies.
        scheme: of its weight, symmetric, per channel or tensor.
        passes: of the recipe.
        neighbours: [K], by which `gptq` bounds codes (`passes.solvers.unsaturated`); None: it does not.
    """
    weight = torch.from_numpy(site.matrix().copy())
    given = passes.get("gptq")
    if isinstance(given, Gptq.Settings) and (scheme.rows_apart or site.group == 1):
        return _by_gptq(weight, site, seen, scheme, given, neighbours)
    form = load_grid(scheme.format)
    given = passes.get("hqq")
    if isinstance(given, Hqq.Settings):
        found: QuantTensor = form.nearest(weight, *half_quadratic(weight, scheme, **given.model_dump()), scheme)
        return found
    given = passes.get("rtn", Rtn.Settings())
    if given.range == "minmax":
        found = form.quantize(weight, scheme)
        return found
    if given.range == "mse":
        found = form.nearest(weight, *ranges.searched(weight, scheme), scheme)
        return found
    importance = seen.hessian.diagonal(dim1=1, dim2=2).float()
    search = ranges.Search(*WIDE)
    if not scheme.rows_apart:
        found = form.nearest(weight, *ranges.searched(weight, scheme, importance.mean(0), search), scheme)
        return found
    return joined(
        [
            form.nearest(part, *ranges.searched(part, scheme, own, search), scheme)
            for part, own in zip(weight.chunk(site.group), importance, strict=True)
        ]
    )


def _by_gptq(
    weight: Tensor, site: Site, seen: Seen, scheme: WeightScheme, given: Gptq.Settings, neighbours: Tensor | None
) -> QuantTensor:
    groups = site.group
    each, width = weight.shape[0] // groups, weight.shape[1]
    apart = weight.reshape(groups, each, width).double()
    if given.correction:
        size = seen.hessian.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
        held = seen.hessian + given.ridge * size[:, None, None] * torch.eye(width, dtype=torch.float64)
        # W' − W = W (E[x x̂ᵀ] − E[x̂ x̂ᵀ]) (E[x̂ x̂ᵀ] + λ)⁻¹: with λ it is W that is fallen back to, not zero
        moved = torch.linalg.solve(held, (apart @ (seen.cross - seen.hessian)).transpose(1, 2)).transpose(1, 2)
        apart = apart + given.correction * moved
    shrink = seen.noise if given.shrink == "auto" else given.shrink
    if site.depthwise and (given.act_order, given.range, given.sweeps) == (True, "hessian", 0):
        hessians = seen.hessian.repeat_interleave(each, 0)
        codes, scale = gptq_rows(apart.flatten(0, 1).float(), hessians, scheme, damping=given.damping, shrink=shrink)
        return QuantTensor(codes, scale[:, None], None, scheme)
    found = []
    for group in range(groups):
        hessian = seen.hessian[group].float()
        if not bool(hessian.diagonal().sum() > 0):  # nothing ever came there: all codes are equally good
            hessian = torch.eye(width)
        found.append(
            gptq(
                apart[group].float(),
                hessian,
                scheme,
                damping=given.damping,
                shrink=shrink,
                act_order=given.act_order,
                range=given.range,
                sweeps=given.sweeps,
                refit=given.refit,
                neighbours=neighbours,
            ).tensor
        )
    return joined(found)
