"""Fusion of GELU from its parts (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Gelu(x)                     = ½ x (1 + erf(x / √2))
    Gelu(x, approximate="tanh") = ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))

The three factors ½, x and 1 + ... match in any order and nesting, and x³ as a Pow or as products. A linear layer with
bias and GELU then is Gemm (or MatMul and Add) and Gelu.
Guard: the operator exists (opset 20), the constants are these, no other node reads a value in between.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes import common

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import name_of, other_readers, scalar

_OPSET = 20
_CLOSE = 1e-4


class Gelu:
    """Fuses GELU, as described in the module."""

    name = "gelu"

    def run(self, model: ir.Model) -> list[Fused]:
        """Replace in place; an Erf or Tanh that belongs to no GELU is not listed."""
        listed = []
        for node in nodes(model, "Erf", "Tanh"):
            x = _argument(node)
            path = None if x is None else _path(node, x)
            if x is None or path is None:
                continue
            reason = f"opset {_rule.opset(model)} has no Gelu, {_OPSET} has" if _rule.opset(model) < _OPSET else ""
            for step, then in zip([node, *path], path, strict=False):
                reason = reason or other_readers(step.outputs[0], (then,))
            if not reason:
                _replace(path[-1], x, "none" if node.op_type == "Erf" else "tanh")
            listed.append(Fused(name_of(path[-1]), self.name, not reason, reason))
        common.RemoveUnusedNodesPass()(model)
        return listed


def _replace(last: ir.Node, x: ir.Value, approximate: str) -> None:
    old = last.outputs[0]
    new = ir.node("Gelu", [x], attributes={"approximate": approximate}, name=last.name)
    assert last.graph is not None
    ir.convenience.replace_nodes_and_values(last.graph, last, [last], [new], [old], [new.outputs[0]])


def _is(number: float | None, expected: float) -> bool:
    return number is not None and math.isclose(number, expected, rel_tol=_CLOSE)


def _split(value: ir.Value | None, kind: str) -> tuple[float, ir.Value] | None:
    """Return the scalar and the other operand of a Mul or Add (a Div counts as a Mul by the inverse)."""
    node = value.producer() if value is not None else None
    if node is None or len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return None
    left, right = scalar(node.inputs[0]), scalar(node.inputs[1])
    if node.op_type == "Div" and kind == "Mul" and right:
        return 1 / right, node.inputs[0]
    if node.op_type != kind or (left is None) == (right is None):
        return None
    return (left, node.inputs[1]) if left is not None else (right or 0.0, node.inputs[0])


def _argument(node: ir.Node) -> ir.Value | None:
    """Return x of erf(x / √2) or tanh(√(2/π) (x + 0.044715 x³))."""
    scaled = _split(node.inputs[0], "Mul")
    if scaled is None:
        return None
    factor, inner = scaled
    if node.op_type == "Erf":
        return inner if _is(factor, math.sqrt(0.5)) else None
    total = inner.producer()
    if not _is(factor, math.sqrt(2 / math.pi)) or total is None or total.op_type != "Add":
        return None
    for x, cubic in (total.inputs, reversed(total.inputs)):
        if x is not None and cubic is not None:
            number, powers = _factors(cubic, x)
            if _is(number, 0.044715) and powers == [x, x, x]:
                return x
    return None


def _factors(value: ir.Value, x: ir.Value) -> tuple[float, list[ir.Value]]:
    """Split a product into a number and its other factors; x itself is never split."""
    number, node = scalar(value), value.producer()
    if number is not None:
        return number, []
    if value is x or node is None or len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return 1.0, [value]
    left, right = node.inputs[0], node.inputs[1]
    exponent = scalar(right)
    if node.op_type == "Pow" and exponent in (2.0, 3.0):
        return 1.0, [left] * int(exponent or 0)
    if node.op_type == "Div" and exponent:
        number, rest = _factors(left, x)
        return number / exponent, rest
    if node.op_type != "Mul":
        return 1.0, [value]
    (one, these), (other, those) = _factors(left, x), _factors(right, x)
    return one * other, these + those


def _path(node: ir.Node, x: ir.Value) -> list[ir.Node] | None:
    """Return the nodes from the Erf or Tanh to the end of ½ x (1 + ...), or None."""
    plus = _reader(node, "Add")
    one = _split(plus.outputs[0], "Add") if plus is not None else None
    if plus is None or one is None or one[0] != 1 or one[1] is not node.outputs[0]:
        return None
    path, number, others = [plus], 1.0, list[ir.Value]()
    while not (others == [x] and _is(number, 0.5)):
        last = path[-1]
        then = _reader(last, "Mul") or _reader(last, "Div")
        if then is None or len(path) > 3:
            return None
        other = next((value for value in then.inputs if value is not last.outputs[0]), None)
        if other is None or (then.op_type == "Div" and then.inputs[0] is not last.outputs[0]):
            return None
        factor, rest = _factors(other, x)
        if then.op_type == "Div":
            if rest or not factor:
                return None
            factor = 1 / factor
        number, others = number * factor, others + rest
        path.append(then)
    return path


def _reader(node: ir.Node, kind: str) -> ir.Node | None:
    return next((reader for reader, _ in node.outputs[0].uses() if reader.op_type == kind), None)
