"""Normal form of products for quantization: a matrix [K, N] on the right, other terms added separately.

    Gemm(A, B, C; α, β, transA)  =  Gemm(Aᵀ, α B) + β C      a C of one number a column stays inside
    x · W [1, ..., K, N]         =  x · W [K, N]
    Einsum("...k,kn->...n")      =  x · W                    with W transposed for "nk"

Guard: the weight is a constant, read by this node alone. If x has fewer dimensions than W, the missing leading
dimensions are added to the result.

Then a product and its bias become one node:

    Add(MatMul(x, W), b) = Gemm(x, W, b)                                    x [M, K]
                         = Reshape(Gemm(Reshape(x, [M, K]), W, b), shape)   x [..., K] of a fixed shape, M rows in all

Gemm takes matrices. ONNX Runtime makes the second form itself when it loads a graph whose shapes are all fixed, and a
float bias there keeps the product out of the integer kernel; written here, the bias is quantized with the product.
With a free size ONNX Runtime keeps MatMul and Add (MatMulIntegerToFloat and Add), and so does this fusion.
Guard: W [K, N] and b (one number a column) are constants, the shape of x is known, no other node reads the product.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused
from quantkit.graph.values import Array, constant, initializer, name_of, per_channel, set_input


class PlainProducts:
    """Brings products into their normal form, as described in the module."""

    name = "plain_products"

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite in place."""
        done = []
        for node in _rule.nodes(model, "Gemm", "MatMul", "Einsum"):
            weight = constant(node.inputs[1]) if len(node.inputs) > 1 else None
            if weight is None or weight.dtype != np.float32:
                continue
            changed = _FORMS[node.op_type](node, weight)
            done += [Fused(name_of(node), self.name, True)] if changed else []
        return done


def _gemm(node: ir.Node, weight: Array) -> bool:
    """Fold alpha and transA of a Gemm, and move out a C that is no bias."""
    alpha, beta = (node.attributes.get_float(key, 1.0) for key in ("alpha", "beta"))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    values = constant(bias)
    turned = node.attributes.get_int("transA", 0)
    columns = weight.shape[0 if node.attributes.get_int("transB", 0) else 1]
    inside = values is not None and values.ndim <= 2 and per_channel(values, 2, columns) is not None
    if alpha == 1 and not turned and (bias is None or (inside and beta == 1)):
        return False
    y = node.outputs[0]
    if alpha != 1:
        set_input(node, 1, np.float32(alpha) * weight, name=f"{y.name}.scaled")
    if turned:
        x = _before(node, "Transpose", [node.inputs[0]], f"{y.name}.turned", perm=[1, 0])
        node.replace_input_with(0, x)
    for key in ("alpha", "beta", "transA"):
        node.attributes.pop(key, None)
    if values is not None and inside and beta != 1:
        set_input(node, 2, np.float32(beta) * values, name=f"{y.name}.bias")
    elif bias is not None and not inside:
        node.replace_input_with(2, None)
        node.resize_inputs(2)
        if beta != 1:
            assert node.graph is not None
            factor = initializer(node.graph, np.array(beta, np.float32), name=f"{y.name}.beta")
            bias = _before(node, "Mul", [bias, factor], f"{y.name}.added")
        _behind(node, "Add", bias)
    return True


def _squeezed(node: ir.Node, weight: Array) -> bool:
    """Remove leading dimensions of size 1 from a MatMul's weight."""
    x, more = node.inputs[0], weight.ndim - 2
    if more < 1 or any(size != 1 for size in weight.shape[:-2]) or x is None or x.shape is None or len(x.shape) < 2:
        return False
    set_input(node, 1, weight.reshape(weight.shape[-2:]), name=f"{node.outputs[0].name}.matrix")
    missing = weight.ndim - len(x.shape)
    if missing > 0:
        assert node.graph is not None
        axes = initializer(node.graph, np.arange(missing), name=f"{node.outputs[0].name}.axes")
        _behind(node, "Unsqueeze", axes)
    return True


def _multiplied(node: ir.Node, weight: Array) -> bool:
    """Turn an Einsum into a MatMul, if it is a matrix product."""
    operands, _, result = node.attributes.get_string("equation", "").replace(" ", "").partition("->")
    x, _, matrix = operands.partition(",")
    if len(matrix) != 2 or weight.ndim != 2 or not x or x[-1] not in matrix:
        return False
    column = matrix.replace(x[-1], "")
    if len(column) != 1 or column in x or x[-1] in x[:-1] or result != x[:-1] + column:
        return False
    if matrix[0] == column:
        set_input(node, 1, np.ascontiguousarray(weight.T), name=f"{node.outputs[0].name}.matrix")
    node.op_type = "MatMul"
    node.attributes.pop("equation")
    return True


def _before(node: ir.Node, kind: str, inputs: list[ir.Value | None], name: str, **attributes: list[int]) -> ir.Value:
    added = ir.node(kind, inputs, attributes=attributes, name=name)
    added.outputs[0].name, added.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
    assert node.graph is not None
    node.graph.insert_before(node, added)
    return added.outputs[0]


def _behind(node: ir.Node, kind: str, other: ir.Value) -> None:
    """Insert an operator on a node's output and another value; readers get its result under the old name."""
    y = node.outputs[0]
    added = ir.node(kind, [y, other], name=f"{name_of(node)}/{kind}")
    new = added.outputs[0]
    new.name, new.shape, new.type = y.name, y.shape, y.type
    for reader, place in list(y.uses()):
        if reader is not added:
            reader.replace_input_with(place, new)
    graph = node.graph
    assert graph is not None
    if y.is_graph_output():
        graph.outputs[list(graph.outputs).index(y)] = new
    y.name = f"{new.name}.product"
    y.shape = None
    graph.insert_after(node, added)


_FORMS = {"Gemm": _gemm, "MatMul": _squeezed, "Einsum": _multiplied}


class _Gemm(_rule.Rule):
    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Add(op.MatMul(x, weight), bias, _outputs=["y"])

    def refuses(self, context: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> str | None:
        W, b = constant(weight), constant(bias)
        if W is None or b is None or W.ndim != 2:
            return None
        if x.shape is None:
            return f"the shape of {x.name} is not known"
        if len(x.shape) != 2 and not x.shape.is_static():
            return f"{x.name} has {len(x.shape)} dimensions, not all of them fixed; Gemm takes matrices"
        return (
            ""
            if b.ndim <= 2 and per_channel(b, 2, W.shape[1]) is not None
            else "the bias does not have one number per column"
        )

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> Any:
        name = _rule.keep_name(y)
        if x.shape is None or len(x.shape) == 2:
            return op.Gemm(x, weight, bias, _name=name)
        *leading, K = x.shape.numpy()
        W = constant(weight)
        assert W is not None
        M, N = math.prod(leading), W.shape[1]
        flat = op.Reshape(x, op.initializer(ir.tensor(np.array([M, K])), name=f"{y.name}.rows"))
        product = op.Gemm(flat, weight, bias, _name=name)
        for value, shape in ((flat, (M, K)), (product, (M, N))):
            value.shape, value.type = ir.Shape(shape), x.type
        return op.Reshape(product, op.initializer(ir.tensor(np.array([*leading, N])), name=f"{y.name}.shape"))


class LinearBias:
    """Merges a product and its bias, as described in the module."""

    name = "linear_bias"

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite in place."""
        return _rule.apply(model, [_Gemm(self.name)])
