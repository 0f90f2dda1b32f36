"""Removal of clips that a quantizer makes redundant: ReLU, ReLU6, the inner clip of a hard-swish.

A quantizer q(x) = clamp(round(x / s) + z, lowest, highest) is monotonic, so it commutes with a clip of its input:

    q(clip(x, a, b)) = clamp(q(x), q(a), q(b))    =    q(x)  where  q(a) = lowest and q(b) = highest

If both bounds of a clip have the outermost codes, removing the clip changes no code (Jacob et al. 2018,
arXiv 1712.05877, § 2.4). This depends on the calibrated range, so it is no fusion of `fuse`: `behind(y)` is the tensor
to observe and quantize, and `remove_absorbed` removes the clips once QuantizeLinear is in the graph. An asymmetric
range
that starts at 0 absorbs a ReLU. A symmetric one does not: its lowest code does not stand for 0. Guard: the bounds are
constants, only quantizers with one constant scale read the clip, and all of them absorb it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import bypass, constant, name_of, scalar

NAME = "activation_bounds"
CLIPS = ("Relu", "Clip", "Max", "Min")
_BEFORE = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")


@dataclass(frozen=True)
class Grid:
    """Grid of a quantizer with one scale s > 0.

    Args:
        scale: s.
        zero_point: code of 0.
        lowest: lowest code, -128 for int8.
        highest: highest code, 127 for int8.
    """

    scale: float
    zero_point: int
    lowest: int
    highest: int

    def code(self, value: float) -> int:
        """Return q(value) as QuantizeLinear computes it: in float32, halves to even."""
        if math.isinf(value):
            return self.highest if value > 0 else self.lowest
        with np.errstate(over="ignore"):
            place = np.rint(np.float32(value) / np.float32(self.scale))
        if np.isinf(place):  # a huge bound that means "no bound"
            return self.highest if value > 0 else self.lowest
        rounded = int(place)
        return min(max(rounded + self.zero_point, self.lowest), self.highest)


def bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return a and b of a Relu, a Clip, or a Max or Min with a scalar; None for other nodes and computed bounds."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type == "Clip":
        ends = []
        for place, (key, default) in enumerate((("min", -math.inf), ("max", math.inf)), 1):
            bound = node.inputs[place] if len(node.inputs) > place else None
            ends.append(scalar(bound) if bound is not None else node.attributes.get_float(key, default))
        low, high = ends
        return (low, high) if low is not None and high is not None else None
    if node.op_type in ("Max", "Min") and len(node.inputs) == 2:
        number = next((operand for operand in map(scalar, node.inputs) if operand is not None), None)
        if number is not None:
            return (number, math.inf) if node.op_type == "Max" else (-math.inf, number)
    return None


def behind(value: ir.Value) -> ir.Value:
    """Return the tensor to quantize in place of a value: the output of its clip, if a clip is its only reader."""
    readers = {reader for reader, _ in value.uses()}
    if value.is_graph_output() or len(readers) != 1:
        return value
    node = readers.pop()
    return behind(node.outputs[0]) if node.op_type in CLIPS and bounds(node) is not None else value


def absorbed(node: ir.Node, grid: Grid) -> str:
    """Return the reason why a quantizer does not absorb the clip in front of it; "" if it does."""
    ends = bounds(node)
    if ends is None:
        return "its bounds are not constants"
    for end, outermost in zip(ends, (grid.lowest, grid.highest), strict=True):
        if grid.code(end) != outermost:
            return f"{end:g} has code {grid.code(end)}, the outermost is {outermost}"
    return ""


def remove_absorbed(model: ir.Model) -> list[Fused]:
    """Remove every absorbed clip, in place.

    Lists the clips behind a product or a sum, and those in front of a quantizer; one that stays has a reason.
    """
    listed = []
    for node in nodes(model, *CLIPS):
        source = next((value for value in node.inputs if value is not None and scalar(value) is None), None)
        readers = {reader for reader, place in node.outputs[0].uses() if place == 0}
        quantizers = {reader for reader in readers if reader.op_type == "QuantizeLinear"}
        before = source.producer() if source is not None else None
        if source is None or bounds(node) is None:
            continue
        if not quantizers and (before is None or before.op_type not in _BEFORE):
            continue
        reason = _why_not(node, quantizers) or bypass(node.outputs[0], source)
        if not reason:
            assert node.graph is not None
            node.graph.remove(node, safe=True)
        listed.append(Fused(name_of(node), NAME, not reason, reason))
    return listed


def _why_not(node: ir.Node, quantizers: set[ir.Node]) -> str:
    if node.outputs[0].is_graph_output():
        return f"{node.outputs[0].name} is an output of the graph"
    for reader, _ in node.outputs[0].uses():
        if reader not in quantizers:
            return f"{name_of(reader)} reads it without a quantizer"
        grid = grid_of(reader)
        if grid is None:
            return f"{name_of(reader)} has no single constant scale"
        reason = absorbed(node, grid)
        if reason:
            return reason
    return "" if quantizers else "nothing reads it"


def grid_of(quantizer: ir.Node) -> Grid | None:
    """Return the grid of a QuantizeLinear with one constant scale; None for any other."""
    scale = scalar(quantizer.inputs[1])
    point = quantizer.inputs[2] if len(quantizer.inputs) > 2 else None
    zero = constant(point)
    if scale is None or (point is not None and (zero is None or zero.size != 1)):
        return None
    kind = point.dtype if point is not None else ir.DataType(quantizer.attributes.get_int("output_dtype", 0) or 2)
    if kind is None or not kind.is_integer():
        return None
    return Grid(scale, 0 if zero is None else int(zero.reshape(-1)[0]), int(kind.min), int(kind.max))
