"""A float graph as the network of a TensorRT engine: plain Q/DQ, strongly typed in 16 bits.

    Conv            codes [O, I/g, ...] under DequantizeLinear, a scale a channel; its bias stays float
    Gemm, MatMul    codes [K, N] under DequantizeLinear, by tensor, channel or block; a bias is added behind
    inputs          a pair (`graph.pairs.placement.before`), one scale, zero point 0

TensorRT adds biases to sums in floats: as 32-bit integers under a DequantizeLinear they would be a product of their
own. Scales are those of float16, exactly, wherever the solver chose them so; see `weights.fitting`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporters.tensorrt.network.halves import halved
from quantkit.exporters.tensorrt.network.weights import TYPES, codes, stored
from quantkit.graph.values import drop_unread, free, name_apart, parts_of

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor
    from quantkit.graph.sites import Site

Array = NDArray[Any]
BATCH = "batch"


@dataclass(frozen=True)
class NetworkProduct:
    """What becomes of one product.

    Args:
        site: in the float graph.
        weight: its codes [N, K].
        bias: [N] float32; None where nothing is added.
    """

    site: Site
    weight: QuantTensor
    bias: Array | None


def network(model: ir.Model, products: Mapping[str, NetworkProduct], pairs: Mapping[str, float], kind: str) -> ir.Model:
    """A copy of a float graph for TensorRT.

    Args:
        model: float32; unchanged.
        products: by the site's name; other products stay in 16 bits.
        pairs: tensor -> scale of the pair behind it.
        kind: format of the pairs: `int8` or `fp8_e4m3`.
    """
    made = model.clone()
    graph = made.graph
    known = parts_of(graph)
    nodes = {str(node.outputs[0].name): node for node in graph if node.outputs}
    for product in products.values():
        node = nodes[product.site.output]
        _convolution(node, product) if product.site.is_conv else _linear(node, product)
    values = {str(value.name): value for value in graph.inputs}
    values |= {str(value.name): value for node in graph for value in node.outputs}
    mine = {f"{product.site.stem}.values" for product in products.values()}
    for name, scale in pairs.items():
        _pair(graph, values[name], scale, kind, mine)
    drop_unread(graph)  # the floats that codes stand in for
    _name_batch(graph)
    halved(made)
    name_apart(graph, known)
    made.metadata_props.clear()
    # a bundle is known by the bytes of this file, so the word that stood here before `network` stays
    made.metadata_props.update({"quantkit.kind": "vision", "quantkit.type": "float16"})
    for node in graph:
        node.metadata_props.clear()
    return made


def _name_batch(graph: ir.Graph) -> None:
    """The first size of inputs, where it is free, is the batch: profiles know it by this name."""
    for value in graph.inputs:
        if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
            value.shape = ir.Shape([BATCH, *list(value.shape)[1:]])


def _constant(graph: ir.Graph, values: Array, name: str) -> ir.Value:
    name = free(name, graph.initializers)
    tensor = ir.tensor(values, name=name)
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _before(node: ir.Node, operator: str, inputs: list[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
    made = ir.node(operator, inputs, attributes=attributes, name=f"{name}/{operator}")
    made.outputs[0].name, made.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return made.outputs[0]


def _convolution(node: ir.Node, product: NetworkProduct) -> None:
    site, weight, stem = product.site, product.weight, product.site.stem
    graph = node.graph
    assert graph is not None
    found = stored(weight, np.dtype(np.float16))
    shaped = site.shaped(np.ascontiguousarray(codes(weight).T))
    parts = [_constant(graph, shaped, f"{stem}.codes"), _constant(graph, _wide(found.scale), f"{stem}.scale")]
    axis = {} if found.axis is None else {"axis": 0}
    node.replace_input_with(1, _before(node, "DequantizeLinear", [*parts], f"{stem}.values", **axis))
    if product.bias is not None:
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, _constant(graph, product.bias.astype(np.float32), f"{stem}.bias"))


def _linear(node: ir.Node, product: NetworkProduct) -> None:
    stem = product.site.stem
    graph = node.graph
    assert graph is not None
    found = stored(product.weight, np.dtype(np.float16))
    parts = [
        _constant(graph, codes(product.weight), f"{stem}.codes"),
        _constant(graph, _wide(found.scale), f"{stem}.scale"),
    ]
    values = _before(node, "DequantizeLinear", [*parts], f"{stem}.values", **found.options)
    if node.op_type == "MatMul":
        node.replace_input_with(1, values)
        return
    output = node.outputs[0]
    if product.bias is None:
        made = ir.node("MatMul", [node.inputs[0], values], name=node.name)
    else:
        sums = _before(node, "MatMul", [node.inputs[0], values], f"{stem}.sums")
        bias = _constant(graph, product.bias.astype(np.float32), f"{stem}.bias")
        made = ir.node("Add", [sums, bias], name=node.name)
    made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = output.name, output.type, output.shape
    output.name = None
    graph.insert_before(node, made)
    output.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _wide(scale: Array) -> Array:
    """In float32, as all of the graph before it is halved; exactly what will be stored."""
    return np.asarray(scale, np.float16).astype(np.float32)


def _pair(graph: ir.Graph, value: ir.Value, scale: float, kind: str, weights: Collection[str]) -> None:
    """A pair behind a value, for the products of these weights and for sums; whatever else reads it reads it whole."""
    name = str(value.name)
    readers = [(node, place) for node, place in value.uses() if node.op_type == "Add" or _multiplies(node, weights)]
    parts = [
        _constant(graph, np.array(scale, np.float32), f"{name}.scale"),
        _constant(graph, np.array(0).astype(TYPES[kind]), f"{name}.zero"),
    ]
    quantize = ir.node("QuantizeLinear", [value, *parts], name=f"{name}/q")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], *parts], name=f"{name}/dq")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{name}.quantized", f"{name}.values"
    dequantize.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    for reader, place in readers:
        reader.replace_input_with(place, dequantize.outputs[0])
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], [quantize, dequantize])
    else:
        graph.insert_after(producer, [quantize, dequantize])


def _multiplies(node: ir.Node, weights: Collection[str]) -> bool:
    return any(value is not None and value.name in weights for value in node.inputs)
