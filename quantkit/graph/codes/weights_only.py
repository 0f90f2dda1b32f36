"""Codes of weights whose products compute in floats: 4-bit integers, 8-bit floats, whatever a format holds.

E[x xᵀ] of each product's inputs is from one pass of the calibration set through the float graph. Errors of earlier
products are not made up for: `solve.py` does that for integer products, whose biases it corrects as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from quantkit.bundle import Decision
from quantkit.formats import QuantTensor
from quantkit.graph.run import Feed, Runner
from quantkit.graph.sites import Site, patches
from quantkit.passes.assign import assigner, product
from quantkit.passes.solvers.moments import Moments
from quantkit.scheme import WeightScheme

Report = Callable[[float, str], None]


def rounded(
    model: ir.Model,
    sites: Sequence[Site],
    feeds: Iterable[Feed],
    scheme: WeightScheme,
    passes: Mapping[str, Any],
    *,
    again: Mapping[str, QuantTensor] | None = None,
    keep: Callable[[str, QuantTensor, Sequence[Decision]], None] | None = None,
    report: Report | None = None,
) -> dict[str, QuantTensor]:
    """Site -> its weight [N, K] in codes.

    Args:
        feeds: calibration batches; each runs once.
        passes: that choose codes, name -> settings; the feeds are looked at for one that needs a Hessian.
        again: site -> its codes, of those that a call just like this one had come to before it was interrupted.
        keep: given the codes of each site once they are chosen, and what was done otherwise than asked.
    """
    again = again or {}
    left = [site for site in sites if site.name not in again]
    solver = assigner(passes)
    looks = solver is not None and "hessian" in solver.needs
    moments = _moments(model, sites, left, feeds) if left and looks else {}
    found = {}
    for done, site in enumerate(sites):
        if site.name in again:
            found[site.name] = again[site.name]
            continue
        matrix = torch.from_numpy(site.matrix().copy())
        seen = moments.get(site.name)
        found[site.name] = product(matrix, seen, scheme, passes)
        if keep is not None:
            keep(site.name, found[site.name], [] if seen is None else seen.decisions)
        if report is not None:
            report((done + 1) / len(sites), site.name)
    return found


def _moments(model: ir.Model, sites: Sequence[Site], left: Sequence[Site], feeds: Iterable[Feed]) -> dict[str, Moments]:
    """Site -> E[x xᵀ] [groups, K, K] of those that are left; none for products that nothing but zeros came to."""
    given = {str(value.name) for value in model.graph.inputs}
    runner = Runner(model, [site.input for site in sites if site.input not in given])
    sums: dict[str, torch.Tensor] = {}
    for feed in feeds:
        seen = {**feed, **runner(feed)}
        for site in left:
            rows = torch.from_numpy(np.ascontiguousarray(patches(site, seen[site.input])))
            part = (rows.transpose(1, 2) @ rows).double() / rows.shape[1]
            sums[site.name] = sums[site.name] + part if site.name in sums else part
    alive = {name for name, total in sums.items() if bool((total.diagonal(dim1=1, dim2=2).sum(1) > 0).all())}
    return {name: Moments(total, name=name) for name, total in sums.items() if name in alive}
