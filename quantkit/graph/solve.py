"""Codes of a graph's weights, and biases that give back what rounding has taken from the mean of each output.

Weights as for language models (`passes.solvers.gptq`): a convolution is a product of its patches. What a depthwise
channel sees is 3 x 3 numbers, and its codes are solved on those alone. Products are solved in the order in which the
graph runs, each on what the quantized ones before it have made of the calibration set; their errors are made up for as
far as the next weight can (`passes.gptq` calls that correction), and biases give back what is left of the mean (Nagel
et al. 2019, arXiv 1906.04721, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.calibrate.observed import Observed
from quantkit.graph.placement import Placement
from quantkit.graph.qdq import Codes, Range, bias_of, fits, node_of
from quantkit.graph.run import Feed, Runner
from quantkit.graph.sites import Site, patches
from quantkit.graph.stepwise import Stepwise
from quantkit.passes.solvers.gptq import gptq
from quantkit.passes.solvers.gptq_rows import gptq_rows
from quantkit.passes.solvers.unsaturated import neighbours as unsaturated_neighbours
from quantkit.scheme import ActivationScheme, WeightScheme

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]
Report = Callable[[float, str], None]
# rows of a Hessian from one batch at most: evenly spaced, they say as much
_ROWS = 4096


def ranges(
    model: ir.Model,
    placement: Placement,
    feeds: Iterable[Feed],
    scheme: ActivationScheme,
    *,
    report: Report | None = None,
    total: int = 1,
) -> dict[str, Range]:
    """The range of every tensor with a pair, from what comes through the float graph; nothing is kept whole.

    An activation behind a fused bound cannot lie beyond it, and neither can its range.
    """
    wanted = [name for name in placement.tensors if name not in placement.same]
    seen = {name: Observed(counted=scheme.range != "minmax") for name in wanted}
    runner = Runner(model, wanted)
    given = {str(value.name) for value in model.graph.inputs}
    for done, feed in enumerate(feeds):
        found = runner(feed)
        for name in wanted:
            array = feed[name] if name in given else found[name]
            seen[name].add(torch.from_numpy(np.ascontiguousarray(array, np.float32)).reshape(1, -1))
        if report is not None:
            report((done + 1) / total, "ranges")
    result = {}
    for name, observed in seen.items():
        settled, _, _ = observed.settle(scheme, torch.float32)
        scale = float(settled.scale.reshape(-1)[0])
        zero = 0 if settled.zero is None else int(settled.zero.reshape(-1)[0]) + 128
        result[name] = Range(scale, zero, signed=settled.zero is None)
    return result


def solved(
    model: ir.Model,
    quantized: Callable[[Mapping[str, Codes]], ir.Model],
    chosen: Sequence[Site],
    feeds: Sequence[Feed],
    scheme: WeightScheme,
    ranges_: Mapping[str, Range],
    placement: Placement,
    *,
    damping: float = 0.01,
    shrink: float = 0.3,
    ridge: float = 1.0,
    unsaturated: bool = False,
    known: Mapping[str, Codes] | None = None,
    report: Report | None = None,
) -> dict[str, Codes]:
    """Codes and biases of every chosen site, in the order in which the graph runs.

    With x what a product sees in the float graph and x̂ what it sees behind quantized ones, both over the same
    calibration inputs, the codes are of W' = W E[x x̂ᵀ] (E[x̂ x̂ᵀ] + λ)⁻¹, which makes up for what x̂ has lost, under the
    Hessian of x̂; then the bias gives back the rest of the mean: b + W E[x] − Ŵ E[x̂].

    Args:
        model: float, of the sites.
        quantized: makes the graph with pairs; sites without codes are float in it.
        chosen: what is quantized, in order.
        feeds: calibration batches; what is still to be read of them is held (`Stepwise`).
        scheme: of weights: int8, per channel or tensor, symmetric.
        ranges_: of the sites' inputs; none where they are quantized as the model runs.
        placement: of the pairs.
        damping, shrink: of `passes.solvers.gptq`.
        ridge: λ as a share of the mean diagonal.
        unsaturated: bound neighbouring codes (`passes.solvers.unsaturated`).
        known: codes of sites that come first, which are taken as they are.
        report: told the share of sites that is done.
    """
    found: dict[str, Codes] = {}
    plain, rounding = Stepwise(feeds), Stepwise(feeds)
    for done, site in enumerate(chosen):
        if known is not None and site.name in known:
            found[site.name] = known[site.name]
            continue
        own = ranges_.get(placement.same.get(site.input, site.input))
        made, rest = quantized(found), chosen[done + 1 :]
        given = plain.value(model, site.input, [later.input for later in rest])
        seen = _seen(
            site, own, given, rounding.value(made, _input(made, site), [_input(made, later) for later in rest])
        )
        other = neighbours(site) if unsaturated else None
        found[site.name] = _solved(site, seen, scheme, own, damping, shrink, ridge, other)
        if report is not None:
            report((done + 1) / len(chosen), site.name)
    return found


def _input(made: ir.Model, site: Site) -> str:
    """What a site reads in a graph with pairs: behind one, where its producer is quantized."""
    return str(node_of(made, site).inputs[0].name)  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Seen:
    """Means over calibration: of x̂ x̂ᵀ and x x̂ᵀ [groups, K, K], of x̂ and x [groups, K], of x in its own pair alone."""

    hessian: torch.Tensor
    cross: torch.Tensor
    mean: torch.Tensor
    wanted: torch.Tensor
    alone: torch.Tensor


def _seen(site: Site, own: Range | None, given: Sequence[Array], behind: Sequence[Array]) -> _Seen:
    """Of a site's input, in the float graph and behind quantized products, batch by batch."""
    sums: list[torch.Tensor] = []
    count = 0
    for pair in zip(given, behind, strict=True):
        rows = [patches(site, x, most=_ROWS) for x in pair]
        step = max(1, rows[0].shape[1] // _ROWS)
        x, x_hat = (torch.from_numpy(np.ascontiguousarray(part[:, ::step])) for part in rows)
        alone = x if own is None else torch.from_numpy(rounded(x.numpy(), own))
        parts = [x_hat.transpose(1, 2) @ x_hat, x.transpose(1, 2) @ x_hat, x_hat.sum(1), x.sum(1), alone.sum(1)]
        sums = [old + part for old, part in zip(sums, parts, strict=True)] if sums else parts
        count += x.shape[1]
    return _Seen(*(each.double() / count for each in sums))


def _solved(
    site: Site,
    seen: _Seen,
    scheme: WeightScheme,
    own: Range | None,
    damping: float,
    shrink: float,
    ridge: float,
    other: torch.Tensor | None = None,
) -> Codes:
    matrix = torch.from_numpy(site.matrix().copy())
    bias = bias_of(site)
    each, width = matrix.shape[0] // site.group, matrix.shape[1]
    apart = matrix.reshape(site.group, each, width).double()
    size = seen.hessian.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    eye = torch.eye(width, dtype=torch.float64)
    held = seen.hessian + ridge * size[:, None, None] * eye
    # W' − W = W (E[x x̂ᵀ] − E[x̂ x̂ᵀ]) (E[x̂ x̂ᵀ] + λ)⁻¹: with λ it is W that is fallen back to, not zero
    moved = torch.linalg.solve(held, (apart @ (seen.cross - seen.hessian)).transpose(1, 2)).transpose(1, 2)
    target = (apart + moved).float()
    codes, scales = [], []
    if site.depthwise:
        hessians = seen.hessian.repeat_interleave(each, 0)
        rows = gptq_rows(target.flatten(0, 1), hessians, scheme, damping=damping, shrink=shrink)
        codes, scales = [rows[0]], [rows[1]]
    for group in range(0 if site.depthwise else site.group):
        hessian = seen.hessian[group].float()
        if not bool(hessian.diagonal().sum() > 0):  # nothing ever came there: all codes are equally good
            hessian = torch.eye(width)
        tensor = gptq(target[group], hessian, scheme, damping=damping, shrink=shrink, neighbours=other).tensor
        codes.append(tensor.codes.to(torch.int8))
        scales.append(tensor.scale.float().reshape(-1))
    code, scale = torch.cat(codes).numpy(), torch.cat(scales).numpy()
    raised = fits(scale, bias, own)
    tiny = raised > scale
    code = np.where(tiny[:, None], np.rint(code * (scale / raised)[:, None]), code).astype(np.int8)
    made = Codes(code, raised.astype(np.float32), bias)
    if site.node.op_type == "MatMul":
        return made
    values = torch.from_numpy(made.values()).reshape(site.group, each, width).double()
    lost, alone = (
        (apart @ seen.wanted[:, :, None] - values @ mean[:, :, None]).reshape(-1).float().numpy()
        for mean in (seen.mean, seen.alone)
    )
    given = 0 if bias is None else bias
    return replace(made, bias=lost + given, alone=alone + given)


def neighbours(site: Site) -> torch.Tensor | None:
    """[K], which columns of a site's matrix are added up two by two in 16 bits; None where none are.

    Kernels of convolutions go through channels within each place of the kernel; those of depthwise ones multiply in 32
    bits.
    """
    if site.depthwise:
        return None
    width = site.matrix().shape[1]
    # in the order of the kernel, the columns of the matrix
    order = torch.arange(width)
    if site.is_conv:
        order = order.reshape(site.weight.shape[1], -1).T.reshape(-1)
    found = torch.empty_like(order)
    found[order] = order[unsaturated_neighbours(width)]
    return found


def rounded(x: Array, own: Range) -> Array:
    """x as a pair gives it on."""
    low, high = (-128, 127) if own.signed else (0, 255)
    codes = np.clip(np.rint(x / np.float32(own.scale)) + own.zero, low, high)
    found: Array = ((codes - own.zero) * np.float32(own.scale)).astype(np.float32)
    return found
