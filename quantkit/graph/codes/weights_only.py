"""Codes of weights whose products compute in floats: 4-bit integers, 8-bit floats, whatever a format holds.

The Hessian of each product's inputs, E[x xᵀ], from one pass of the calibration set through the float graph; then
second-order rounding (`passes.solvers.gptq`), or rounding to nearest without a solver. Errors of earlier products are
not made up for: `graph.solve` does that for integer products, whose biases it corrects as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantkit.formats import QuantTensor, joined
from quantkit.formats.base.grid import load_grid
from quantkit.graph.run import Feed, Runner
from quantkit.graph.sites import Site, patches
from quantkit.passes.solvers import ranges
from quantkit.passes.solvers.gptq import gptq
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import onnx_ir as ir

Report = Callable[[float, str], None]


def rounded(
    model: ir.Model,
    sites: Sequence[Site],
    feeds: Iterable[Feed],
    scheme: WeightScheme,
    settings: Mapping[str, Any] | None,
    *,
    search: bool = True,
    again: Mapping[str, QuantTensor] | None = None,
    keep: Callable[[str, QuantTensor], None] | None = None,
    report: Report | None = None,
) -> dict[str, QuantTensor]:
    """Site -> its weight [N, K] in codes.

    Args:
        model: float, of the sites.
        sites: what is quantized.
        feeds: calibration batches; each runs once.
        scheme: of weights.
        settings: `damping` and `shrink` of `passes.solvers.gptq`; None rounds to nearest, without a look at the feeds.
        search: whether rounding to nearest searches its ranges (`range: mse`), or spans all of a weight (`minmax`).
        again: site -> its codes, of those that a call just like this one had come to before it was interrupted.
        keep: given the codes of each site once they are chosen.
        report: told the share of sites that is done.
    """
    form = load_grid(scheme.format)
    again = again or {}
    left = [site for site in sites if site.name not in again]
    hessians = _hessians(model, sites, left, feeds) if left and settings is not None else {}
    found = {}
    for done, site in enumerate(sites):
        if site.name in again:
            found[site.name] = again[site.name]
            continue
        matrix = torch.from_numpy(site.matrix().copy())
        if site.name not in hessians or (site.group > 1 and not scheme.rows_apart):
            found[site.name] = (
                form.nearest(matrix, *ranges.searched(matrix, scheme), scheme)
                if search
                else (form.quantize(matrix, scheme))
            )
        else:
            parts = matrix.chunk(site.group)
            own = hessians[site.name].float()
            found[site.name] = joined(
                [gptq(part, own[at], scheme, **(settings or {})).tensor for at, part in enumerate(parts)]
            )
        if keep is not None:
            keep(site.name, found[site.name])
        if report is not None:
            report((done + 1) / len(sites), site.name)
    return found


def _hessians(
    model: ir.Model, sites: Sequence[Site], left: Sequence[Site], feeds: Iterable[Feed]
) -> dict[str, torch.Tensor]:
    """Site -> E[x xᵀ] [groups, K, K] of those that are left; none for products that nothing but zeros came to.

    The inputs of all sites are shown all the same: a graph that shows fewer is fused otherwise, and has other bits.
    """
    given = {str(value.name) for value in model.graph.inputs}
    runner = Runner(model, [site.input for site in sites if site.input not in given])
    sums: dict[str, torch.Tensor] = {}
    for feed in feeds:
        seen = {**feed, **runner(feed)}
        for site in left:
            rows = torch.from_numpy(np.ascontiguousarray(patches(site, seen[site.input])))
            part = (rows.transpose(1, 2) @ rows).double() / rows.shape[1]
            sums[site.name] = sums[site.name] + part if site.name in sums else part
    return {name: total for name, total in sums.items() if bool((total.diagonal(dim1=1, dim2=2).sum(1) > 0).all())}
