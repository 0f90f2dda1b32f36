"""Insertion of Q/DQ pairs into a graph, with integer weights and 32-bit biases.

    x -> QuantizeLinear -> DequantizeLinear -> Conv(x, DequantizeLinear(W), DequantizeLinear(b)) -> pair -> ...

A bias has the scale of its sums, s_x · s_w[o], so that a runtime can add it to integers. If that scale is too small for
the bias to fit 32 bits (a channel of almost zero weights), the weight's scale is raised until it fits (`fits`). Codes
of weights are signed with zero point 0, or unsigned with zero point 128: some CPUs multiply bytes of one signedness
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.graph.fuse.activation_bounds import remove_absorbed
from quantkit.graph.pairs.placement import Placement
from quantkit.graph.sites import Site
from quantkit.graph.sites import sites as products
from quantkit.graph.values import constant, drop_unread, free, initializer, name_apart, parts_of, values_of

Array = NDArray[Any]
WeightType = Literal["int8", "uint8"]
_MOST = 2.0**31 - 2**16


@dataclass(frozen=True)
class Range:
    """Grid of one activation: x = (q - zero) · scale.

    Args:
        scale: step of the grid.
        zero: code of 0.
        signed: True for q in -128..127, False for 0..255.
    """

    scale: float
    zero: int
    signed: bool = False


@dataclass(frozen=True)
class Codes:
    """A weight as integers.

    Args:
        codes: codes [N, K], int8.
        scale: scale [N] float32, or [1] for the whole weight.
        bias: bias [N] float32, added to the sums.
        alone: bias [N] for a graph in which nothing before this product is quantized.
    """

    codes: Array
    scale: Array
    bias: Array | None = None
    alone: Array | None = None

    def values(self) -> Array:
        """Return the dequantized weight, [N, K] float32."""
        values: Array = self.codes.astype(np.float32) * self.scale[:, None]
        return values


def unsigned(codes: Array) -> Array:
    """Return signed codes as unsigned bytes with zero point 128."""
    shifted: Array = (codes.astype(np.int16) + 128).astype(np.uint8)
    return shifted


def bias_of(site: Site) -> Array | None:
    """Return the constant bias of a product, [N]; None for a MatMul."""
    if site.node.op_type == "MatMul" or len(site.node.inputs) < 3 or site.node.inputs[2] is None:
        return None
    bias = constant(site.node.inputs[2])
    if bias is None:
        return None
    beta = site.node.attributes.get_float("beta", 1.0) if site.node.op_type == "Gemm" else 1.0
    rows = site.weight.shape[site.rows]
    return np.broadcast_to(beta * bias.reshape(-1), (rows,)).astype(np.float32)


def insert(
    model: ir.Model,
    placement: Placement,
    ranges: Mapping[str, Range],
    weights: Mapping[str, Codes],
    sites: Mapping[str, Site],
    *,
    weight_type: WeightType | Mapping[str, WeightType] = "uint8",
) -> ir.Model:
    """Return a copy of the float graph with pairs, integer weights and integer biases.

    Args:
        model: the float graph.
        placement: the tensors that get a pair.
        ranges: tensor -> range, for each tensor of the placement.
        weights: name of a site -> codes; other sites stay float.
        sites: name -> site of `model`.
        weight_type: storage type of all weights, or by site; unsigned codes never saturate.
    """
    types = weight_type if isinstance(weight_type, Mapping) else dict.fromkeys(weights, weight_type)
    graph = model.clone()
    known = parts_of(graph.graph)
    nodes = {_key(node): node for node in graph.graph}
    for name, codes in weights.items():
        site = sites[name]
        _weigh(graph, nodes[_key(site.node)], site, codes, ranges[_source(placement, site.input)], types[name])
    values = {str(value.name): value for value in graph.graph.inputs}
    values |= {str(value.name): value for node in graph.graph for value in node.outputs}
    for site in products(model):
        if site.name not in weights:
            # a pair of its output comes behind
            values[site.output] = _hold(graph, nodes[_key(site.node)])
    for name in placement.tensors:
        own = ranges[_source(placement, name)]
        _pair(graph, values[name], name, own)
    remove_absorbed(graph)
    for name in weights:
        node = nodes[_key(sites[name].node)]  # not by name: until `name_apart` two values may share one
        if _fused(node):
            _hold(graph, node)
    drop_unread(graph.graph)  # float weights that codes have replaced
    name_apart(graph.graph, known)
    return graph


def _stored(graph: ir.Graph, values: Array, *, name: str) -> ir.Value:
    """Add a constant to a graph, with a name that no other constant has."""
    return initializer(graph, values, name=name, taken=graph.initializers)


def _source(placement: Placement, name: str) -> str:
    return placement.same.get(name, name)


def _key(node: ir.Node) -> str:
    return str(node.outputs[0].name) if node.outputs else str(node.name)


def _fused(node: ir.Node) -> bool:
    """Tell whether ONNX Runtime would leave a quantized matrix product in floats because of its readers.

    It fuses Relu and Clip into a quantizer behind them; it turns a MatMul and a sum of known size into a Gemm with a
    float
    bias (MatMulAddFusion); and a value with other readers than a quantizer cannot be the output of an integer kernel.
    """
    value = node.outputs[0]
    gemm = node.op_type == "MatMul" and (value.shape is None or len(value.shape) == 2 or value.shape.is_static())
    kinds = {reader.op_type for reader, _ in value.uses()}
    summed = [reader for reader, _ in value.uses() if reader.op_type == "Add"]
    return node.op_type != "Conv" and (
        not kinds.isdisjoint(("Relu", "Clip"))
        or ("QuantizeLinear" in kinds and (len(value.uses()) > 1 or value.is_graph_output()))
        or (gemm and any(all(constant(operand) is None for operand in reader.inputs) for reader in summed))
    )


def _hold(graph: ir.Model, node: ir.Node) -> ir.Value:
    """Separate a product from its readers by max(y, y), which equals y.

    Otherwise ONNX Runtime quantizes a product with float weights between a DequantizeLinear and a QuantizeLinear by
    itself
    (WeightBiasQuantization), with one scale for all channels; for quantized weights see `_fused`.
    """
    value = node.outputs[0]
    readers = list(value.uses())
    if not readers:
        return value
    hold = ir.node("Max", [value, value], name=f"{value.name}/float")
    hold.outputs[0].name = f"{value.name}.float"
    for reader, place in readers:
        reader.replace_input_with(place, hold.outputs[0])
    graph.graph.insert_after(node, hold)
    return hold.outputs[0]


def node_of(graph: ir.Model, site: Site) -> ir.Node:
    """Return a site's product in a graph with pairs, also if a pair has taken over the name of its output."""
    node = next(node for node in graph.graph if any(value.name == site.output for value in node.outputs))
    while node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        before = node.inputs[0].producer()  # type: ignore[union-attr]
        assert before is not None
        node = before
    return node


def _weigh(model: ir.Model, node: ir.Node, site: Site, codes: Codes, own: Range, weight_type: WeightType) -> None:
    graph, stem, whole = model.graph, site.stem, codes.scale.size == 1
    scale = codes.scale.astype(np.float32)
    # unsigned codes have zero point 128
    stored = codes.codes if weight_type == "int8" else unsigned(codes.codes)
    zero = np.full(scale.shape, 0 if weight_type == "int8" else 128, stored.dtype)

    def dequantize(place: int, axis: int, prefix: str, values: ir.Value, **others: Array) -> None:
        """Let the product read the stored values times their scale."""
        parts = [values]
        for kind, other in others.items():
            parts.append(_stored(graph, other.reshape(()) if whole else other, name=f"{stem}.{prefix}{kind}"))
        axes = {} if whole else {"axis": axis}
        read = ir.node("DequantizeLinear", parts, attributes=axes, name=f"{stem}/{prefix}dq")
        read.outputs[0].name = f"{stem}.{prefix}values"
        graph.insert_before(node, read)
        node.replace_input_with(place, read.outputs[0])

    dequantize(1, site.rows, "", _stored(graph, site.shaped(stored), name=f"{stem}.codes"), scale=scale, zero=zero)
    if codes.bias is None:
        return
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    sums = (own.scale * scale.astype(np.float64)).astype(np.float32)
    units = np.clip(np.rint(codes.bias.astype(np.float64) / sums), -_MOST, _MOST).astype(np.int32)
    dequantize(2, 0, "bias_", _stored(graph, units, name=f"{stem}.bias"), scale=sums)
    node.attributes.pop("beta", None)


def fits(scale: Array, bias: Array | None, own: Range | None) -> Array:
    """Return scales [N], raised where a bias would not fit 32 bits of s_x · s_w; without a range the bias is float."""
    if bias is None or own is None:
        return scale
    least = np.abs(bias.astype(np.float64)) / (own.scale * _MOST)
    return np.maximum(scale, least.astype(np.float32) if scale.size == bias.size else np.float32(least.max(initial=0)))


def _pair(model: ir.Model, value: ir.Value, name: str, own: Range) -> None:
    """Insert Q and DQ behind a value; all its readers read the DQ."""
    graph = model.graph
    kind = np.int8 if own.signed else np.uint8
    parts = [
        _stored(graph, np.array(own.scale, np.float32), name=f"{name}.scale"),
        _stored(graph, np.array(own.zero, kind), name=f"{name}.zero"),
    ]
    readers = list(value.uses())
    quantize = ir.node("QuantizeLinear", [value, *parts], name=f"{name}/q")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], *parts], name=f"{name}/dq")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{name}.quantized", f"{name}.values"
    for reader, place in readers:
        reader.replace_input_with(place, dequantize.outputs[0])
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], [quantize, dequantize])
    else:
        graph.insert_after(producer, [quantize, dequantize])
    if value.is_graph_output():
        output, old = dequantize.outputs[0], str(value.name)
        value.replace_all_uses_with(output, replace_graph_outputs=True)
        quantize.replace_input_with(0, value)
        value.name, output.name = free(f"{old}.floats", {other.name for other in values_of(graph)}), old
        output.type, output.shape = value.type, value.shape
