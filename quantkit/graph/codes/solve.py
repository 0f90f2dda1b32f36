"""Codes of a graph's weights, and biases that give back what rounding has taken from the mean of each output.

Weights as for language models: a convolution is a product of its patches, each group with a Hessian of its own.
Products are solved in the order in which the graph runs, each on what the quantized ones before it have made of the
calibration set: its codes by the recipe's `gptq`, `rtn` or `hqq` (`passes/assign.py`), moved by `round` where that is
asked for (`rounding.py`); then its bias gives back what is left of the mean, b + W E[x] − Ŵ E[x̂] (Nagel et al. 2019,
arXiv 1906.04721, section 4.2), which is all that `bias_correct` asks for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from quantkit.bundle import Decision
from quantkit.calibrate.statistics.observed import Observed
from quantkit.errors import InputError
from quantkit.formats import QuantTensor
from quantkit.graph.codes.rounding import CalibrationRows, learned
from quantkit.graph.pairs.placement import Placement
from quantkit.graph.pairs.qdq import Codes, Range, bias_of, fits, node_of
from quantkit.graph.run import Feed, Runner, Stepwise
from quantkit.graph.sites import Site, patches
from quantkit.passes import decision
from quantkit.passes.assign import assigner, product
from quantkit.passes.gptq import Gptq
from quantkit.passes.round import Round
from quantkit.passes.solvers.moments import Moments
from quantkit.passes.solvers.unsaturated import neighbours as unsaturated_neighbours
from quantkit.scheme import ActivationScheme, WeightScheme

Array = NDArray[Any]
# Arm kernels of convolutions add two products of signed bytes up in 16 bits, into which two times (-128)(-128) does not
# fit: 2^15 becomes -2^15, and an input at the low end of its range is that byte (microsoft/onnxruntime#31573). The
# largest weight of a row, at 127.5 scales, is as far from -127 as from -128
LOWEST = -127
Report = Callable[[float, str], None]
Keep = Callable[[str, Codes, Sequence[Decision]], None]
# rows of a Hessian from one batch at most: evenly spaced, they say as much
_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Seen(Moments):
    """Moments of a product's inputs, and their means [groups, K], which its bias gives back: of x̂, of x, and of x in
    its own pair, as if nothing before were quantized.
    """

    mean: torch.Tensor
    wanted: torch.Tensor
    alone: torch.Tensor


def ranges(
    model: ir.Model,
    placement: Placement,
    feeds: Iterable[Feed],
    scheme: ActivationScheme,
    *,
    signed: bool = False,
    report: Report | None = None,
    total: int = 1,
    keeping: Callable[[Collection[str]], Sequence[str]] | None = None,
) -> dict[str, Range]:
    """Return the range of every tensor with a pair, from what comes through the float graph; nothing is kept whole.

    Args:
        feeds: calibration batches.
        scheme: of activations, with fixed scales.
        signed: whether codes of a symmetric scheme are stored as -128..127; else the same stand as 0..255, and 128 is
            zero. On x86 ONNX Runtime multiplies unsigned ones; it turns signed ones into these while it loads, but
            not those that two nodes read, and a product of codes of both kinds stays float.
        keeping: tensors -> what a recipe keeps in floats for none of them to have a pair.

    Raises:
        InputError: `activations-nonfinite`, `activations-constant`, naming the tensor.
    """
    wanted = [name for name in placement.tensors if name not in placement.same]
    seen = {name: Observed(counted=scheme.range != "minmax", name=name) for name in wanted}
    runner = Runner(model, wanted)
    given = {str(value.name) for value in model.graph.inputs}
    for done, feed in enumerate(feeds):
        found = runner(feed)
        for name in wanted:
            array = feed[name] if name in given else found[name]
            values = torch.from_numpy(np.ascontiguousarray(array, np.float32))
            seen[name].add(values.reshape(1, -1), len(values) if values.dim() > 1 else 1)
        if report is not None:
            report((done + 1) / total, "ranges")
    if constant := [name for name, observed in seen.items() if observed.constant]:
        kept = keeping(constant) if keeping is not None else []
        floats = f", or keep their products in floats: --set {shlex.quote(f'keep={json.dumps(kept)}')}" if kept else ""
        where, rule = ", ".join(constant[:3]), "a fixed range comes from what activations differ in"
        remedy = f"calibrate with more varied samples{floats}"
        raise InputError("activations-constant", where, "one value everywhere, whatever comes in", rule, remedy)
    result = {}
    for name, observed in seen.items():
        settled, _, _ = observed.settle(scheme, torch.float32)
        scale = float(settled.scale.reshape(-1)[0])
        zero = 0 if settled.zero is None else int(settled.zero.reshape(-1)[0])
        own = signed and scheme.symmetric
        result[name] = Range(scale, zero if own else zero + 128, signed=own)
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
    passes: Mapping[str, Any] | None = None,
    seed: int = 0,
    unsaturated: bool = False,
    known: Mapping[str, Codes] | None = None,
    again: Mapping[str, Codes] | None = None,
    keep: Keep | None = None,
    report: Report | None = None,
) -> dict[str, Codes]:
    """Return codes and biases of every chosen site, in the order in which the graph runs.

    A piece of a graph that is run apart has not the bits that it has inside of a larger one: ONNX Runtime fuses what it
    is given. So sites that were solved before an interruption are run piece by piece again, as they were then, as long
    as any site is still to be solved.

    Args:
        quantized: makes the graph with pairs; sites without codes are float in it.
        feeds: calibration batches; what is still to be read of them is held (`Stepwise`).
        scheme: of weights: int8, per channel or tensor, symmetric.
        ranges_: of the sites' inputs; none where they are quantized as the model runs.
        passes: the recipe's, name -> settings; those that choose codes are read. None: `gptq` with its correction.
        seed: of which samples `round` learns from when.
        unsaturated: bound neighbouring codes (`passes.solvers.unsaturated`).
        known: codes of sites that come first, which are taken as they are.
        again: codes of the sites after those, solved by a call just like this one that did not get to its end.
        keep: given the codes of each site once it is solved, and what was decided.
    """
    passes = {Gptq.name: Gptq.Settings(correction=1.0)} if passes is None else passes
    known, again = known or {}, again or {}
    if all(site.name in known or site.name in again for site in chosen):
        return {site.name: (known if site.name in known else again)[site.name] for site in chosen}
    found: dict[str, Codes] = {}
    plain, rounding = Stepwise(feeds), Stepwise(feeds)
    for done, site in enumerate(chosen):
        if site.name in known:
            found[site.name] = known[site.name]
            continue
        own = ranges_.get(placement.same.get(site.input, site.input))
        made, rest = quantized(found), chosen[done + 1 :]
        given = plain.value(model, site.input, [later.input for later in rest])
        behind = rounding.value(made, _input(made, site), [_input(made, later) for later in rest])
        if site.name in again:
            found[site.name] = again[site.name]
        else:
            rows = CalibrationRows([], []) if Round.name in passes else None
            other = neighbours(site) if unsaturated else None
            seen = _seen(site, own, given, behind, rows, other)
            weight = torch.from_numpy(site.matrix().copy())
            tensor = product(weight, seen, scheme, passes)
            taken = list(seen.decisions)
            if rows is not None:
                tensor, reason = _learned(site, seen, tensor, rows, passes[Round.name], other, seed + done)
                if reason:
                    taken.append(decision(Round.name, "no-better", site.name, reason))
            found[site.name] = _with_bias(site, seen, tensor, own)
            if keep is not None:
                keep(site.name, found[site.name], taken)
        if report is not None:
            report((done + 1) / len(chosen), site.name)
    return found


def _input(made: ir.Model, site: Site) -> str:
    """Return what a site reads in a graph with pairs: behind one, where its producer is quantized."""
    return str(node_of(made, site).inputs[0].name)  # type: ignore[union-attr]


def _seen(
    site: Site,
    own: Range | None,
    given: Sequence[Array],
    behind: Sequence[Array],
    kept: CalibrationRows | None,
    other: torch.Tensor | None,
) -> Seen:
    """Of a site's input, in the float graph and behind quantized products, batch by batch."""
    sums: list[torch.Tensor] = []
    halves: list[torch.Tensor] = []
    counts = [0, 0]
    for number, pair in enumerate(zip(given, behind, strict=True)):
        rows = [torch.from_numpy(patches(site, x, most=_ROWS)) for x in pair]
        if kept is not None:
            kept.add(rows[1], rows[0], samples=len(pair[0]), total=sum(map(len, given)))
        step = max(1, rows[0].shape[1] // _ROWS)
        x, x_hat = (part[:, ::step].contiguous() for part in rows)
        alone = x if own is None else torch.from_numpy(rounded(x.numpy(), own))
        parts = [x_hat.transpose(1, 2) @ x_hat, x.transpose(1, 2) @ x_hat, x_hat.sum(1), x.sum(1), alone.sum(1)]
        sums = [old + part for old, part in zip(sums, parts, strict=True)] if sums else parts
        if len(halves) < 2:
            halves.append(parts[0].clone())
        else:
            halves[number % 2] += parts[0]
        counts[number % 2] += x.shape[1]
    means = [each.double() / sum(counts) for each in sums]
    apart = tuple(half.double() / count for half, count in zip(halves, counts[: len(halves)], strict=True))
    return Seen(
        means[0], means[1], apart, site.depthwise, other, site.name, mean=means[2], wanted=means[3], alone=means[4]
    )


def _learned(
    site: Site,
    seen: Seen,
    start: QuantTensor,
    rows: CalibrationRows,
    settings: Any,
    other: torch.Tensor | None,
    seed: int,
) -> tuple[QuantTensor, str]:
    """Return what `round` makes of the codes, and why that is what they were, "" where it is not."""
    if len(rows.found) < 2:
        return start, "one sample leaves none to hold out"
    bias = bias_of(site)
    given = None if bias is None else torch.from_numpy(bias.copy())
    order = torch.Generator().manual_seed(seed)
    tensor, better = learned(site, start, rows, (seen.mean, seen.wanted), given, settings, order, other)
    return tensor, "" if better else "nothing that was learned did better on the held-out samples"


def _with_bias(site: Site, seen: Seen, tensor: QuantTensor, own: Range | None) -> Codes:
    bias = bias_of(site)
    code, scale = tensor.codes.numpy(), tensor.scale.float().reshape(-1).numpy()
    raised = fits(scale, bias, own)
    tiny = raised > scale
    code = np.where(tiny[:, None], np.rint(code * (scale / raised)[:, None]), code)
    code = np.maximum(code, LOWEST).astype(np.int8)
    made = Codes(code, raised.astype(np.float32), bias)
    if site.node.op_type == "MatMul":
        return made
    weight = torch.from_numpy(site.matrix().copy())
    apart, values = (
        each.reshape(site.group, -1, weight.shape[1]).double() for each in (weight, torch.from_numpy(made.values()))
    )
    lost, alone = (
        (apart @ seen.wanted[:, :, None] - values @ mean[:, :, None]).reshape(-1).float().numpy()
        for mean in (seen.mean, seen.alone)
    )
    given = 0 if bias is None else bias
    return replace(made, bias=lost + given, alone=alone + given)


def neighbours(site: Site) -> torch.Tensor | None:
    """[K], which columns of a site's matrix are added up two by two in 16 bits, channel by channel within each place of
    the kernel; None where none are, as in depthwise convolutions, which multiply in 32 bits.
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


def weights_alone(
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
    """Site -> its weight [N, K] in codes, for products in floats; errors of earlier products are not made up for.

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
    # inputs of all sites are shown: ONNX Runtime fuses a graph that shows fewer otherwise, and its bits differ
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
