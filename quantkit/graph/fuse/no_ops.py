"""Removal of nodes without effect: f(x) = x for every possible x.

    one node      Identity, Dropout outside of training, Cast to its own type, Reshape and Expand to its own shape,
                  Transpose and Slice and Pad that change nothing, Concat and Sum of one, x + 0, x - 0, x * 1, x / 1
    two nodes     Transpose(Transpose) = the product of both permutations, Reshape(Reshape) = the last one,
                  Squeeze(Unsqueeze) and Unsqueeze(Squeeze) over the same axes,
                  Cast(Cast) back to the first type, if the type in between holds all its values

Guard: shapes and arguments are known. An output of the graph keeps its name. If it would then have to be an input, a
constant, another output, or a value of an outer graph, its node stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import bypass, constant, name_of, scalar

_FAR = (1 << 31) - 1
_TYPE = ir.DataType
_BYTES = (_TYPE.INT32, _TYPE.INT64, _TYPE.FLOAT, _TYPE.DOUBLE)
# type -> types that hold each of its values
_WIDER = {
    _TYPE.FLOAT16: (_TYPE.FLOAT, _TYPE.DOUBLE),
    _TYPE.BFLOAT16: (_TYPE.FLOAT, _TYPE.DOUBLE),
    _TYPE.FLOAT: (_TYPE.DOUBLE,),
    _TYPE.INT32: (_TYPE.INT64, _TYPE.DOUBLE),
    _TYPE.INT8: (_TYPE.INT16, *_BYTES),
    _TYPE.UINT8: (_TYPE.INT16, *_BYTES),
    _TYPE.BOOL: (_TYPE.UINT8, *_BYTES),
}


class NoOps:
    """Removes nodes without effect, as described in the module."""

    name = "no_ops"

    def run(self, model: ir.Model) -> list[Fused]:
        """Remove in place, and repeat, because a removal may bring another pair together."""
        done: list[Fused] = []
        kept: dict[str, Fused] = {}
        changed = True
        while changed:
            changed = False
            for node in nodes(model, *_SOURCES):
                source = _SOURCES[node.op_type](node)
                if source is None:
                    continue
                name, reason = name_of(node), bypass(node.outputs[0], source)
                if reason:
                    kept[name] = Fused(name, self.name, False, reason)
                    continue
                assert node.graph is not None
                node.graph.remove(node, safe=True)
                done.append(Fused(name, self.name, True))
                changed = True
            for node in nodes(model, *_SHORTER):
                if _SHORTER[node.op_type](node):
                    done.append(Fused(name_of(node), self.name, True))
                    changed = True
        common.RemoveUnusedNodesPass()(model)
        return done + list(kept.values())


def _input(node: ir.Node, index: int = 0) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _single(node: ir.Node) -> ir.Value | None:
    return _input(node) if len(node.inputs) == 1 else None


def _dropout(node: ir.Node) -> ir.Value | None:
    training = _input(node, 2)
    on = None if training is None else constant(training)
    off = training is None or (on is not None and not on.any())
    return _input(node) if off and not any(output.uses() for output in node.outputs[1:]) else None


def _cast(node: ir.Node) -> ir.Value | None:
    x, to = _input(node), node.attributes.get_int("to", 0)
    if x is not None and x.dtype is not None and x.dtype == to:
        return x
    first = _producer(node, "Cast")
    start = first.inputs[0] if first is not None else None
    if first is None or start is None or start.dtype is None or start.dtype != to:
        return None
    return start if first.attributes.get_int("to", 0) in _WIDER.get(start.dtype, ()) else None


def _reshape(node: ir.Node) -> ir.Value | None:
    x, shape = _input(node), constant(_input(node, 1))
    if x is None or x.shape is None or shape is None or len(x.shape) != shape.size or (shape == -1).sum() > 1:
        return None
    copies = not node.attributes.get_int("allowzero", 0)
    same = all(
        size == -1 or (size == 0 and copies) or size == had for size, had in zip(shape.tolist(), x.shape, strict=True)
    )
    return x if same else None


def _expand(node: ir.Node) -> ir.Value | None:
    x, shape = _input(node), constant(_input(node, 1))
    if x is None or x.shape is None or shape is None or len(x.shape) < shape.size:
        return None
    tail = list(x.shape)[len(x.shape) - shape.size :]
    return x if all(size in (1, had) for size, had in zip(shape.tolist(), tail, strict=True)) else None


def _transpose(node: ir.Node) -> ir.Value | None:
    order = node.attributes.get_ints("perm")
    if order is not None and list(order) == list(range(len(order))):
        return _input(node)
    first, both = _permuted(node)
    return first.inputs[0] if first is not None and both == list(range(len(both))) else None


def _permuted(node: ir.Node) -> tuple[ir.Node | None, list[int]]:
    """Return the Transpose in front of a Transpose, and the permutation of both together."""
    first, order = _producer(node, "Transpose"), node.attributes.get_ints("perm")
    inner = None if first is None else first.attributes.get_ints("perm")
    return (None, []) if inner is None or order is None else (first, [inner[axis] for axis in order])


def _pad(node: ir.Node) -> ir.Value | None:
    widths = constant(_input(node, 1)) if len(node.inputs) > 1 else node.attributes.get_ints("pads")
    return _input(node) if widths is not None and not np.any(widths) else None


def _slice(node: ir.Node) -> ir.Value | None:
    x, starts, ends = _input(node), constant(_input(node, 1)), constant(_input(node, 2))
    axes, steps = _input(node, 3), _input(node, 4)
    if x is None or starts is None or ends is None or np.any(starts):
        return None
    step = constant(steps)
    if steps is not None and (step is None or np.any(step != 1)):
        return None
    over = list(range(len(starts))) if axes is None else constant(axes)
    if over is None:
        return None
    sizes = [x.shape[int(axis)] if x.shape is not None else None for axis in over]
    whole = (end >= _FAR or (isinstance(size, int) and end >= size) for end, size in zip(ends, sizes, strict=True))
    return x if all(whole) else None


def _neutral(number: float, sides: Sequence[int]) -> Callable[[ir.Node], ir.Value | None]:
    """Match a node with this number as one operand, at one of `sides`, if it does not broadcast the other."""

    def source(node: ir.Node) -> ir.Value | None:
        for side in sides:
            x, other = _input(node, 1 - side), _input(node, side)
            if x is not None and other is not None and scalar(other) == number:
                rank = len(other.shape) if other.shape is not None else 0
                if rank == 0 or (x.shape is not None and len(x.shape) >= rank):
                    return x
        return None

    return source


def _axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a Squeeze or Unsqueeze; an attribute before opset 13, an input since."""
    axes = constant(_input(node, 1)) if len(node.inputs) > 1 else node.attributes.get_ints("axes")
    return None if axes is None else sorted(int(axis) for axis in axes)


def _undone(by: str) -> Callable[[ir.Node], ir.Value | None]:
    def source(node: ir.Node) -> ir.Value | None:
        first, axes = _producer(node, by), _axes(node)
        return first.inputs[0] if first is not None and axes is not None and axes == _axes(first) else None

    return source


def _producer(node: ir.Node, kind: str) -> ir.Node | None:
    """Return the producer of a node's input, if it has this operator and stands in the same graph."""
    x = _input(node)
    first = x.producer() if x is not None else None
    same = first is not None and first.op_type == kind and first.domain == node.domain and first.graph is node.graph
    return first if same else None


def _shorter_transpose(node: ir.Node) -> bool:
    first, both = _permuted(node)
    if first is None:
        return False
    node.attributes["perm"] = ir.AttrInt64s("perm", both)
    node.replace_input_with(0, first.inputs[0])
    return True


def _shorter_reshape(node: ir.Node) -> bool:
    first, shape = _producer(node, "Reshape"), constant(_input(node, 1))
    if first is None or shape is None or (shape == 0).any():
        return False
    node.replace_input_with(0, first.inputs[0])
    return True


# operator -> function to the value that the first output equals; None if the node has an effect
_SOURCES: Mapping[str, Callable[[ir.Node], ir.Value | None]] = {
    "Identity": _input,
    "Dropout": _dropout,
    "Cast": _cast,
    "Reshape": _reshape,
    "Expand": _expand,
    "Transpose": _transpose,
    "Pad": _pad,
    "Slice": _slice,
    "Concat": _single,
    "Sum": _single,
    "Add": _neutral(0, (0, 1)),
    "Sub": _neutral(0, (1,)),
    "Mul": _neutral(1, (0, 1)),
    "Div": _neutral(1, (1,)),
    "Squeeze": _undone("Unsqueeze"),
    "Unsqueeze": _undone("Squeeze"),
}
# operator -> function that merges it with a node of the same operator in front; tells whether it did
_SHORTER: Mapping[str, Callable[[ir.Node], bool]] = {"Transpose": _shorter_transpose, "Reshape": _shorter_reshape}
