"""A float32 graph in 16 bits: what TensorRT computes in, around what is quantized.

A strongly typed network is computed in the types that its tensors have, so every constant and every operator's result
becomes float16. What a graph takes and gives stays float32: a Cast stands at each end. Operators whose inputs ONNX
defines in float32 alone keep them (sizes of Resize); bounds beyond 65504, such as masks of -3.4e38, become that.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

WIDE, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_MOST = float(np.finfo(np.float16).max)
# operator -> inputs that are float32 in ONNX, whatever the others are
_SIZES = {"Resize": (1, 2), "Upsample": (1,)}
# of which ONNX Runtime has no kernel in float16, though ONNX defines it
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


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    found: NDArray[np.float16] = np.clip(values, -_MOST, _MOST).astype(np.float16)
    return found


def _wide_constants(model: ir.Model, opset: int) -> set[str]:
    """Initializers that only inputs read which stay float32."""
    found = set()
    for graph in [model.graph, *model.graph.subgraphs()]:
        for name, value in graph.initializers.items():
            readers = [at in _SIZES.get(reader.op_type, ()) or _whole(reader, opset) for reader, at in value.uses()]
            if readers and all(readers):
                found.add(name)
    return found


def _whole(node: ir.Node, opset: int) -> bool:
    """Tell whether ONNX defines an operator in float32 and not in float16: Celu, Range, NonMaxSuppression, ..."""
    if node.domain not in ("", "ai.onnx"):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset)
    types = {kind for each in (*schema.inputs, *schema.outputs) for kind in each.types}
    return node.op_type in _WHOLE or ("tensor(float)" in types and "tensor(float16)" not in types)


def _node(node: ir.Node, wide: set[str], opset: int) -> None:
    whole = _whole(node, opset)
    for at, value in enumerate(node.inputs):
        apart = whole or at in _SIZES.get(node.op_type, ())
        if apart and value is not None and value.name not in wide and value.dtype in (WIDE, HALF):
            assert node.graph is not None
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
            # types are changed for a value alone: several may hold one object
            value.type = ir.TensorType(WIDE if whole else HALF)
            if whole:
                assert node.graph is not None
                readers = list(value.uses())
                cast = _cast(value, HALF, f"{value.name}.half")
                node.graph.insert_after(node, cast)
                for reader, place in readers:
                    reader.replace_input_with(place, cast.outputs[0])


def _ends(graph: ir.Graph) -> None:
    """Casts behind what comes in and before what goes out."""
    first = graph[0]
    for value in graph.inputs:
        readers = list(value.uses())
        if value.dtype != WIDE or not readers:
            continue
        cast = _cast(value, HALF, f"{value.name}.half")
        graph.insert_before(first, cast)
        for reader, place in readers:
            reader.replace_input_with(place, cast.outputs[0])
    given = [value for value in graph.outputs if value.dtype in (HALF, None) and value.producer() is not None]
    for value in dict.fromkeys(given):
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
