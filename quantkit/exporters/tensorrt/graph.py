"""Convert a float graph to the network of a TensorRT engine: plain Q/DQ, strongly typed in 16 bits.

    Conv            codes [O, I/g, ...] under DequantizeLinear, a scale a channel; its bias stays float
    Gemm, MatMul    codes [K, N] under DequantizeLinear, by tensor, channel or block; a bias is added after it
    inputs          a Q/DQ pair (`graph.pairs.placement.before`) with one scale and zero point 0

Biases are added in floats: TensorRT would treat 32-bit integers under a DequantizeLinear as another product. Scales are
exact float16 numbers if the solver chose them so; see `weights.fitting`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.bundle import stopping_when_full
from quantkit.exporters.tensorrt.dialect import TYPES, codes, stored
from quantkit.exporters.trace.rewrite import is_producer
from quantkit.graph.values import drop_unread, initializer, name_apart, parts_of

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor
    from quantkit.graph.sites import Site

Array = NDArray[Any]
BATCH = "batch"
WIDE, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


@dataclass(frozen=True)
class NetworkProduct:
    """One product of the network: its site in the float graph, its codes [N, K], and its bias [N], if any."""

    site: Site
    weight: QuantTensor
    bias: Array | None

    def dense(self) -> Array:
        """Expand the codes, [N, K] float32."""
        return np.asarray(self.weight.dense().float().numpy())


def network(model: ir.Model, products: Mapping[str, NetworkProduct], pairs: Mapping[str, float], kind: str) -> ir.Model:
    """Copy a float graph for TensorRT.

    Args:
        model: float32 graph, which is not changed.
        products: products by the name of their site; others stay in 16 bits.
        pairs: scale of the pair after each tensor.
        kind: format of the pairs: `int8` or `fp8_e4m3`.
    """
    copied = model.clone()
    graph = copied.graph
    known = parts_of(graph)
    nodes = {str(node.outputs[0].name): node for node in graph if node.outputs}
    for product in products.values():
        _quantize(nodes[product.site.output], product)
    values = {str(value.name): value for value in graph.inputs}
    values |= {str(value.name): value for node in graph for value in node.outputs}
    weights = {f"{product.site.stem}.values" for product in products.values()}
    for name, scale in pairs.items():
        _pair(graph, values[name], scale, kind, weights)
    drop_unread(graph)  # floats that codes replace
    for value in graph.inputs:
        # a free first size is the batch, which has this name in profiles
        if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
            value.shape = ir.Shape([BATCH, *list(value.shape)[1:]])
    halved(copied)
    name_apart(graph, known)
    copied.metadata_props.clear()
    # a bundle is known by the bytes of this file, so the word that stood here before `network` stays
    copied.metadata_props.update({"quantkit.kind": "vision", "quantkit.type": "float16"})
    for node in graph:
        node.metadata_props.clear()
    return copied


def _before(node: ir.Node, operator: str, inputs: list[ir.Value | None], name: str, **attributes: Any) -> ir.Value:
    new = ir.node(operator, inputs, attributes=attributes, name=f"{name}/{operator}")
    new.outputs[0].name, new.outputs[0].type = name, ir.TensorType(WIDE)
    assert node.graph is not None
    node.graph.insert_before(node, new)
    return new.outputs[0]


def _quantize(node: ir.Node, product: NetworkProduct) -> None:
    """Let a product read codes; a Gemm becomes a MatMul, and an Add if it has a bias."""
    site, stem, graph = product.site, product.site.stem, node.graph
    assert graph is not None
    parts = stored(product.weight, np.dtype(np.float16))
    # float32, like the whole graph before `halved`; the values are exactly those of 16 bits
    scale = np.asarray(parts.scale, np.float16).astype(np.float32)
    shaped, how = codes(product.weight), parts.options
    if site.is_conv:
        shaped, how = site.shaped(np.ascontiguousarray(shaped.T)), {} if parts.axis is None else {"axis": 0}
    inputs: list[ir.Value | None] = [
        initializer(graph, shaped, name=f"{stem}.codes"),
        initializer(graph, scale, name=f"{stem}.scale"),
    ]
    values = _before(node, "DequantizeLinear", inputs, f"{stem}.values", **how)
    if site.is_conv or node.op_type == "MatMul":
        node.replace_input_with(1, values)
        if site.is_conv and product.bias is not None:
            if len(node.inputs) < 3:
                node.resize_inputs(3)
            node.replace_input_with(2, initializer(graph, product.bias.astype(np.float32), name=f"{stem}.bias"))
        return
    output = node.outputs[0]
    if product.bias is None:
        last = ir.node("MatMul", [node.inputs[0], values], name=node.name)
    else:
        sums = _before(node, "MatMul", [node.inputs[0], values], f"{stem}.sums")
        bias = initializer(graph, product.bias.astype(np.float32), name=f"{stem}.bias")
        last = ir.node("Add", [sums, bias], name=node.name)
    last.outputs[0].name, last.outputs[0].type, last.outputs[0].shape = output.name, output.type, output.shape
    output.name = None
    graph.insert_before(node, last)
    output.replace_all_uses_with(last.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _pair(graph: ir.Graph, value: ir.Value, scale: float, kind: str, weights: Collection[str]) -> None:
    """Add a pair after a value, for products with these weights and for sums; other readers get the unrounded value."""
    name = str(value.name)
    readers = [(node, place) for node, place in value.uses() if node.op_type == "Add" or _multiplies(node, weights)]
    parts = [
        initializer(graph, np.array(scale, np.float32), name=f"{name}.scale"),
        initializer(graph, np.array(0).astype(TYPES[kind]), name=f"{name}.zero"),
    ]
    quantize = ir.node("QuantizeLinear", [value, *parts], name=f"{name}/q")
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], *parts], name=f"{name}/dq")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{name}.quantized", f"{name}.values"
    dequantize.outputs[0].type = ir.TensorType(WIDE)
    _read_instead(readers, dequantize.outputs[0])
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], [quantize, dequantize])
    else:
        graph.insert_after(producer, [quantize, dequantize])


def _multiplies(node: ir.Node, weights: Collection[str]) -> bool:
    return any(value is not None and value.name in weights for value in node.inputs)


def _read_instead(readers: Iterable[tuple[ir.Node, int]], value: ir.Value) -> None:
    for reader, place in readers:
        reader.replace_input_with(place, value)


# --- 16 bits ----------------------------------------------------------------------------------------------------------
# A strongly typed network computes in the types of its tensors, so constants and results become float16. Inputs and
# outputs of the graph stay float32, with a Cast at each end. Inputs that ONNX defines only in float32 keep that type
# (sizes of Resize). Values beyond 65504, such as masks of -3.4e38, are clipped to it.

_MOST = float(np.finfo(np.float16).max)
# inputs that are always float32 in ONNX, by operator
_SIZES = {"Resize": (1, 2), "Upsample": (1,)}
# operators without a float16 kernel in ONNX Runtime, although ONNX defines it
_WHOLE = ("Multinomial",)
# attributes that name a type
_TYPES = {"Cast": "to", "EyeLike": "dtype", "RandomNormal": "dtype", "RandomUniform": "dtype"}


def halved(model: ir.Model) -> ir.Model:
    """Convert a graph in place."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    wide = _wide_constants(model, opset)
    for graph in [model.graph, *model.graph.subgraphs()]:
        for name, value in graph.initializers.items():
            if value.dtype == WIDE and name not in wide and value.const_value is not None:
                value.const_value = ir.tensor(_half(value.const_value.numpy()), name=name)
                value.type = ir.TensorType(HALF)
    for node in list(model.graph.all_nodes()):
        _node(node, wide, opset)
    for inner in model.graph.subgraphs():
        for value in inner.inputs:
            if value.dtype == WIDE:
                value.type = ir.TensorType(HALF)
    _ends(model.graph)
    return model


def _half(values: Array) -> Array:
    return np.asarray(np.clip(values, -_MOST, _MOST).astype(np.float16))


def _wide_constants(model: ir.Model, opset: int) -> set[str]:
    """List initializers read only by float32 inputs, which stay float32."""
    names = set()
    for graph in [model.graph, *model.graph.subgraphs()]:
        for name, value in graph.initializers.items():
            readers = [at in _SIZES.get(reader.op_type, ()) or _whole(reader, opset) for reader, at in value.uses()]
            if readers and all(readers):
                names.add(name)
    return names


def _whole(node: ir.Node, opset: int) -> bool:
    """Return True if ONNX defines an operator in float32 but not in float16: Celu, Range, NonMaxSuppression, ..."""
    if node.domain not in ("", "ai.onnx"):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset)
    types = {kind for side in (*schema.inputs, *schema.outputs) for kind in side.types}
    return node.op_type in _WHOLE or ("tensor(float)" in types and "tensor(float16)" not in types)


def _node(node: ir.Node, wide: set[str], opset: int) -> None:
    whole = _whole(node, opset)
    assert node.graph is not None
    for at, value in enumerate(node.inputs):
        apart = whole or at in _SIZES.get(node.op_type, ())
        if apart and value is not None and value.name not in wide and value.dtype in (WIDE, HALF):
            cast = _cast(value, WIDE, f"{node.outputs[0].name}.input{at}")
            node.graph.insert_before(node, cast)
            node.replace_input_with(at, cast.outputs[0])
    key = _TYPES.get(node.op_type)
    if key is not None and node.attributes.get_int(key, 0) == int(WIDE):
        node.attributes[key] = ir.AttrInt64(key, int(HALF))
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == WIDE:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_half(attribute.as_tensor().numpy())))
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float16)))
    for value in node.outputs:
        if value.dtype == WIDE:
            # a new type object for each value: several may share one
            value.type = ir.TensorType(WIDE if whole else HALF)
            if whole:
                readers = list(value.uses())
                cast = _cast(value, HALF, f"{value.name}.half")
                node.graph.insert_after(node, cast)
                _read_instead(readers, cast.outputs[0])


def _ends(graph: ir.Graph) -> None:
    """Add casts after the inputs and before the outputs."""
    first = graph[0]
    for value in graph.inputs:
        readers = list(value.uses())
        if value.dtype == WIDE and readers:
            cast = _cast(value, HALF, f"{value.name}.half")
            graph.insert_before(first, cast)
            _read_instead(readers, cast.outputs[0])
    outputs = [value for value in graph.outputs if value.dtype in (HALF, None) and value.producer() is not None]
    for value in dict.fromkeys(outputs):
        producer, name = value.producer(), str(value.name)
        assert producer is not None
        cast = _cast(value, WIDE, name)
        cast.outputs[0].shape = value.shape
        value.name = f"{name}.half"
        graph.insert_after(producer, cast)
        for place, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[place] = cast.outputs[0]


def _cast(value: ir.Value, kind: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], attributes={"to": int(kind)}, name=f"{name}/cast")
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(kind)
    return node


# --- Q/DQ pairs of products' inputs -----------------------------------------------------------------------------------
# A product without its pair multiplies 16-bit inputs with its quantized weight.

_PRODUCT = "/output"
# pairs of a cache are part of its storage and stay
_CACHE = "/read"
_BLOCK = re.compile(r"\.\d+\.")


def groups(network: Path) -> dict[str, tuple[str, ...]]:
    """Group the linears of every pair, over all blocks: `q_proj k_proj v_proj`, `o_proj`, ...

    The nodes of a graph have arbitrary names, so its products of one shape are a group: `Conv 96x16x1x1`.
    """
    grouped: dict[str, list[str]] = {}
    for node in ir.load(network).graph:
        if _quantizer(node) is None:
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        kinds = dict.fromkeys(_kind(reader) for reader in readers)
        grouped.setdefault(" ".join(kinds), []).extend(_name(reader) for reader in readers)
    return {name: tuple(linears) for name, linears in grouped.items()}


def without(network: Path, to: Path, linears: Collection[str]) -> int:
    """Write the network without the pairs of these linears, and count the removed pairs.

    `to` must be beside a copy of the data file: weights are not written again. `linears` must name all readers of a
    pair, or none.
    """
    model = ir.load(network)
    gone = 0
    for node in list(model.graph):
        codes, values = _quantizer(node), node.outputs[0]
        if codes is None or not {_name(use.node) for use in values.uses()} <= set(linears):
            continue
        assert codes.inputs[0] is not None, values.name
        ir.convenience.replace_all_uses_with(values, codes.inputs[0])
        model.graph.remove(node, safe=True)
        if not codes.outputs[0].uses():
            model.graph.remove(codes, safe=True)
        gone += 1
    drop_unread(model.graph)
    with stopping_when_full(to.parent):
        # references to the data file do not change
        ir.save(model, to)
    return gone


def _quantizer(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear of a pair before products, from its DequantizeLinear; None for other nodes."""
    if node.op_type != "DequantizeLinear" or str(node.outputs[0].name).endswith(_CACHE):
        return None
    return is_producer(node.inputs[0], "QuantizeLinear")


def _name(reader: ir.Node) -> str:
    """Return the name for recipes: a linear, or a node of a graph."""
    output = str(reader.outputs[0].name)
    return output.removesuffix(_PRODUCT) if output.endswith(_PRODUCT) else str(reader.name)


def _kind(reader: ir.Node) -> str:
    if str(reader.outputs[0].name).endswith(_PRODUCT):
        return _BLOCK.split(_name(reader))[-1].rpartition(".")[2]
    weight = is_producer(reader.inputs[1] if len(reader.inputs) > 1 else None, "DequantizeLinear")
    codes = weight.inputs[0] if weight is not None else None
    if codes is None or not codes.is_initializer() or codes.shape is None:
        return reader.op_type
    return f"{reader.op_type} {'x'.join(map(str, codes.shape))}"
