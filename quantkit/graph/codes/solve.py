"""Integer codes of a graph's weights, and biases that restore the mean of each output.

Weights are quantized as in language models; a convolution is a product of its patches, and each group has its own
Hessian. Products are solved in graph order, each on inputs that the quantized products before it have computed from the
calibration set. The recipe's `gptq`, `rtn` or `hqq` chooses the codes (`passes/assign.py`), `round` refines them
(`rounding.py`). Then the bias restores the mean: b + W E[x] − Ŵ E[x̂] (Nagel et al. 2019, arXiv 1906.04721,
section 4.2). The pass `bias_correct` does this alone.
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
# Arm kernels of convolutions add two products of signed bytes in 16 bits. Two times (-128)(-128) = 2^15 overflows to
# -2^15, and an input at the low end of its range is -128 (microsoft/onnxruntime#31573). -127 costs no accuracy: the
# largest weight of a row, at 127.5 scales, is equally far from -127 and -128
LOWEST = -127
Report = Callable[[float, str], None]
Keep = Callable[[str, Codes, Sequence[Decision]], None]
# most rows of one batch in a Hessian, evenly spaced
_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Seen(Moments):
    """Moments of a product's inputs, and the means [groups, K] for its bias correction.

    Args:
        mean: E[x̂], behind quantized products.
        wanted: E[x], in the float graph.
        alone: E[x] after the input's own quantizer, as if nothing before it were quantized.
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
    """Return the range of every tensor that gets a Q/DQ pair, observed in the float graph.

    Activations are reduced to statistics batch by batch; none is stored whole.

    Args:
        model: the float graph.
        placement: the tensors that get a pair.
        feeds: calibration batches.
        scheme: scheme of activations, with fixed scales.
        signed: True to store codes of a symmetric scheme as -128..127, False as 0..255 with zero point 128. ONNX
            Runtime multiplies unsigned codes on x86. It converts signed codes as it loads, except for tensors with two
            readers, and a product of both kinds stays float.
        report: callback for progress.
        total: number of batches, for progress.
        keeping: function from tensors to the products that a recipe must keep in floats so that none of these tensors
            has a pair; for the remedy of an error.

    Raises:
        InputError: `activations-nonfinite`, `activations-constant`, with the tensor's name.
    """
    wanted = [name for name in placement.tensors if name not in placement.same]
    seen = {name: Observed(counted=scheme.range != "minmax", name=name) for name in wanted}
    runner = Runner(model, wanted)
    inputs = {str(value.name) for value in model.graph.inputs}
    for done, feed in enumerate(feeds):
        outputs = runner(feed)
        for name in wanted:
            array = feed[name] if name in inputs else outputs[name]
            values = torch.from_numpy(np.ascontiguousarray(array, np.float32))
            seen[name].add(values.reshape(1, -1), len(values) if values.dim() > 1 else 1)
        if report is not None:
            report((done + 1) / total, "ranges")
    if constant := [name for name, observed in seen.items() if observed.constant]:
        kept = keeping(constant) if keeping is not None else []
        floats = f", or keep their products in floats: --set {shlex.quote(f'keep={json.dumps(kept)}')}" if kept else ""
        where, rule = ", ".join(constant[:3]), "activations with a fixed range must vary"
        remedy = f"calibrate with more varied samples{floats}"
        raise InputError("activations-constant", where, "the same value for every input", rule, remedy)
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
    """Return codes and biases of every chosen site, in graph order.

    ONNX Runtime fuses the graph that it loads, so a part run alone differs in its last bits from the same part in a
    larger
    graph. After an interruption, the parts in front of solved sites therefore run again one by one, while any site is
    left.

    Args:
        model: the float graph.
        quantized: function that builds the graph with pairs; sites without codes stay float in it.
        chosen: sites to solve, in graph order.
        feeds: calibration batches; values that later sites read are kept in memory (`Stepwise`).
        scheme: scheme of weights: int8, per channel or per tensor, symmetric.
        ranges_: ranges of the sites' inputs; empty for dynamic quantization.
        placement: the tensors with pairs.
        passes: name -> settings of the recipe's passes; those that choose codes are used. None: `gptq` with correction.
        seed: seed for the order of samples in `round`.
        unsaturated: True to bound neighbouring codes (`passes.solvers.unsaturated`).
        known: codes of leading sites, taken as they are.
        again: codes of the sites after those, from an interrupted call with the same arguments.
        keep: callback with a site's name, codes and decisions, once it is solved.
        report: callback for progress.
    """
    passes = {Gptq.name: Gptq.Settings(correction=1.0)} if passes is None else passes
    known, again = known or {}, again or {}
    if all(site.name in known or site.name in again for site in chosen):
        return {site.name: (known if site.name in known else again)[site.name] for site in chosen}
    codes: dict[str, Codes] = {}
    plain, rounding = Stepwise(feeds), Stepwise(feeds)
    for done, site in enumerate(chosen):
        if site.name in known:
            codes[site.name] = known[site.name]
            continue
        own = ranges_.get(placement.same.get(site.input, site.input))
        graph, rest = quantized(codes), chosen[done + 1 :]
        original = plain.value(model, site.input, [later.input for later in rest])
        behind = rounding.value(graph, _input(graph, site), [_input(graph, later) for later in rest])
        if site.name in again:
            codes[site.name] = again[site.name]
        else:
            rows = CalibrationRows([], []) if Round.name in passes else None
            other = neighbours(site) if unsaturated else None
            seen = _seen(site, own, original, behind, rows, other)
            weight = torch.from_numpy(site.matrix().copy())
            tensor = product(weight, seen, scheme, passes)
            taken = list(seen.decisions)
            if rows is not None:
                tensor, reason = _learned(site, seen, tensor, rows, passes[Round.name], other, seed + done)
                if reason:
                    taken.append(decision(Round.name, "no-better", site.name, reason))
            codes[site.name] = _with_bias(site, seen, tensor, own)
            if keep is not None:
                keep(site.name, codes[site.name], taken)
        if report is not None:
            report((done + 1) / len(chosen), site.name)
    return codes


def _input(graph: ir.Model, site: Site) -> str:
    """Return the name of a site's input in a graph with pairs."""
    return str(node_of(graph, site).inputs[0].name)  # type: ignore[union-attr]


def _seen(
    site: Site,
    own: Range | None,
    original: Sequence[Array],
    behind: Sequence[Array],
    kept: CalibrationRows | None,
    other: torch.Tensor | None,
) -> Seen:
    sums: list[torch.Tensor] = []
    halves: list[torch.Tensor] = []
    counts = [0, 0]
    for number, pair in enumerate(zip(original, behind, strict=True)):
        rows = [torch.from_numpy(patches(site, x, most=_ROWS)) for x in pair]
        if kept is not None:
            kept.add(rows[1], rows[0], samples=len(pair[0]), total=sum(map(len, original)))
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
    means = [total.double() / sum(counts) for total in sums]
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
    """Return the codes after `round`, and the reason if they did not change."""
    if len(rows.quantized) < 2:
        return start, "one sample leaves none to hold out"
    bias = bias_of(site)
    offset = None if bias is None else torch.from_numpy(bias.copy())
    order = torch.Generator().manual_seed(seed)
    tensor, better = learned(site, start, rows, (seen.mean, seen.wanted), offset, settings, order, other)
    return tensor, "" if better else "no learned state was better on the held-out samples"


def _with_bias(site: Site, seen: Seen, tensor: QuantTensor, own: Range | None) -> Codes:
    bias = bias_of(site)
    code, scale = tensor.codes.numpy(), tensor.scale.float().reshape(-1).numpy()
    raised = fits(scale, bias, own)
    tiny = raised > scale
    code = np.where(tiny[:, None], np.rint(code * (scale / raised)[:, None]), code)
    code = np.maximum(code, LOWEST).astype(np.int8)
    codes = Codes(code, raised.astype(np.float32), bias)
    if site.node.op_type == "MatMul":
        return codes
    weight = torch.from_numpy(site.matrix().copy())
    apart, values = (
        matrix.reshape(site.group, -1, weight.shape[1]).double()
        for matrix in (weight, torch.from_numpy(codes.values()))
    )
    lost, alone = (
        (apart @ seen.wanted[:, :, None] - values @ mean[:, :, None]).reshape(-1).float().numpy()
        for mean in (seen.mean, seen.alone)
    )
    offset = 0 if bias is None else bias
    return replace(codes, bias=lost + offset, alone=alone + offset)


def neighbours(site: Site) -> torch.Tensor | None:
    """Return for each column [K] of a site's matrix the column whose product is added to its own in 16 bits.

    Columns pair up channel by channel within each place of the kernel. Depthwise convolutions multiply in 32 bits and
    have
    no pairs: None.
    """
    if site.depthwise:
        return None
    width = site.matrix().shape[1]
    # columns of the matrix in the order in which the kernel reads them
    order = torch.arange(width)
    if site.is_conv:
        order = order.reshape(site.weight.shape[1], -1).T.reshape(-1)
    partners = torch.empty_like(order)
    partners[order] = order[unsaturated_neighbours(width)]
    return partners


def rounded(x: Array, own: Range) -> Array:
    """Return x after quantization and dequantization with a range."""
    low, high = (-128, 127) if own.signed else (0, 255)
    codes = np.clip(np.rint(x / np.float32(own.scale)) + own.zero, low, high)
    values: Array = ((codes - own.zero) * np.float32(own.scale)).astype(np.float32)
    return values


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
    """Return the codes [N, K] of each site's weight, for products that compute in floats.

    Later products do not compensate errors of earlier ones.

    Args:
        model: the float graph.
        sites: products to quantize.
        feeds: calibration batches, run once each, and only if a pass needs a Hessian.
        scheme: scheme of the weights.
        passes: name -> settings of the passes that choose codes.
        again: site -> codes, from an interrupted call with the same arguments.
        keep: callback with a site's name, codes and decisions, once they are chosen.
        report: callback for progress.
    """
    again = again or {}
    left = [site for site in sites if site.name not in again]
    solver = assigner(passes)
    looks = solver is not None and "hessian" in solver.needs
    moments = _moments(model, sites, left, feeds) if left and looks else {}
    codes = {}
    for done, site in enumerate(sites):
        if site.name in again:
            codes[site.name] = again[site.name]
            continue
        matrix = torch.from_numpy(site.matrix().copy())
        seen = moments.get(site.name)
        codes[site.name] = product(matrix, seen, scheme, passes)
        if keep is not None:
            keep(site.name, codes[site.name], [] if seen is None else seen.decisions)
        if report is not None:
            report((done + 1) / len(sites), site.name)
    return codes


def _moments(model: ir.Model, sites: Sequence[Site], left: Sequence[Site], feeds: Iterable[Feed]) -> dict[str, Moments]:
    """Return E[x xᵀ] [groups, K, K] of each remaining site; sites with all-zero inputs are left out."""
    inputs = {str(value.name) for value in model.graph.inputs}
    # shows the inputs of all sites: with fewer, ONNX Runtime fuses the graph differently, and the last bits change
    runner = Runner(model, [site.input for site in sites if site.input not in inputs])
    sums: dict[str, torch.Tensor] = {}
    for feed in feeds:
        seen = {**feed, **runner(feed)}
        for site in left:
            rows = torch.from_numpy(np.ascontiguousarray(patches(site, seen[site.input])))
            part = (rows.transpose(1, 2) @ rows).double() / rows.shape[1]
            sums[site.name] = sums[site.name] + part if site.name in sums else part
    alive = {name for name, total in sums.items() if bool((total.diagonal(dim1=1, dim2=2).sum(1) > 0).all())}
    return {name: Moments(total, name=name) for name, total in sums.items() if name in alive}
