"""Clips that a quantizer does anyway: ReLU, ReLU6, the inner clip of a hard-swish.

A quantizer q(x) = clamp(round(x / s) + z, lowest, highest) never falls, so it goes past a clip of its input:

    q(clip(x, a, b)) = clamp(q(x), q(a), q(b))    =    q(x)  where  q(a) = lowest and q(b) = highest

A clip is absorbed where both of its bounds have the outermost codes, and can be left out without changing one code
(Jacob et al. 2018, arXiv 1712.05877, § 2.4). Which it is depends on the range that calibration chooses, so this is no
fusion of `fuse`: `behind(y)` is the tensor to observe and to quantize, and `remove_absorbed` takes out the clips that
can go once QuantizeLinear stands in the graph. An asymmetric range that starts at 0 absorbs a ReLU; a symmetric one
does not: its lowest code is not that of 0. Guard: bounds are constants, only quantizers with one constant scale read
the clip, all of them absorb it.
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
    """A quantizer of one scale s > 0: the code of 0, and the lowest and highest codes, -128 and 127 of int8."""

    scale: float
    zero_point: int
    lowest: int
    highest: int

    def code(self, value: float) -> int:
        """q(value) as QuantizeLinear computes it: in float32, halves to even."""
        if math.isinf(value):
            return self.highest if value > 0 else self.lowest
        with np.errstate(over="ignore"):
            place = np.rint(np.float32(value) / np.float32(self.scale))
        if np.isinf(place):  # a bound that was meant to be none
            return self.highest if value > 0 else self.lowest
        rounded = int(place)
        return min(max(rounded + self.zero_point, self.lowest), self.highest)


def bounds(node: ir.Node) -> tuple[float, float] | None:
    """a and b of a Relu, a Clip, or a Max or Min with a scalar; None of anything else, and where they are computed."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type == "Clip":
        ends = []
        for place, (key, default) in enumerate((("min", -math.inf), ("max", math.inf)), 1):
            given = node.inputs[place] if len(node.inputs) > place else None
            ends.append(scalar(given) if given is not None else node.attributes.get_float(key, default))
        low, high = ends
        return (low, high) if low is not None and high is not None else None
    if node.op_type in ("Max", "Min") and len(node.inputs) == 2:
        number = next((each for each in map(scalar, node.inputs) if each is not None), None)
        if number is not None:
            return (number, math.inf) if node.op_type == "Max" else (-math.inf, number)
    return None


def behind(value: ir.Value) -> ir.Value:
    """What to quantize in place of a tensor: the output of the clip that alone reads it, and so on; else itself."""
    readers = {reader for reader, _ in value.uses()}
    if value.is_graph_output() or len(readers) != 1:
        return value
    node = readers.pop()
    return behind(node.outputs[0]) if node.op_type in CLIPS and bounds(node) is not None else value


def absorbed(node: ir.Node, grid: Grid) -> str:
    """Tell why a quantizer of the clip's output does not absorb the clip; "" where it does."""
    ends = bounds(node)
    if ends is None:
        return "its bounds are not constants"
    for end, outermost in zip(ends, (grid.lowest, grid.highest), strict=True):
        if grid.code(end) != outermost:
            return f"{end:g} has code {grid.code(end)}, the outermost is {outermost}"
    return ""


def remove_absorbed(model: ir.Model) -> list[Fused]:
    """Take every clip out that its quantizers absorb, in place.

    Listed are clips behind a product or a sum, and all that a quantizer reads; what stays says why.
    """
    found = []
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
        found.append(Fused(name_of(node), NAME, not reason, reason))
    return found


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
    """Return the grid of a QuantizeLinear with one constant scale; None of any other."""
    scale = scalar(quantizer.inputs[1])
    given = quantizer.inputs[2] if len(quantizer.inputs) > 2 else None
    zero = constant(given)
    if scale is None or (given is not None and (zero is None or zero.size != 1)):
        return None
    kind = given.dtype if given is not None else ir.DataType(quantizer.attributes.get_int("output_dtype", 0) or 2)
    if kind is None or not kind.is_integer():
        return None
    return Grid(scale, 0 if zero is None else int(zero.reshape(-1)[0]), int(kind.min), int(kind.max))
