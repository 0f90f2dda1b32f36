"""Placement of Q/DQ pairs, so that a runtime that fuses them computes in integers from end to end.

A product becomes an integer kernel if its input, its weight and, for a Conv, its output are quantized. An operator
between two products stays in integers if it is in `THROUGH` and all its inputs are quantized. So a tensor has a pair if

    a quantized product reads it
    a quantized Conv, or its fused activation, computes it
    an operator of THROUGH computes it, and all activations that this operator reads have a pair

Outputs of the graph stay float, except a Conv's. An activation between a product and its pair (Relu, Clip) is absorbed
if the pair's range is within its bounds. Codes without a zero point absorb none. There the input of the activation has
a
pair too, with the same scale: the product ends in integers, and the second pair changes nothing, but half of the codes
stay unused. Zero points are more exact, and no slower in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quantkit.graph.fuse.activation_bounds import behind
from quantkit.graph.sites import Site
from quantkit.graph.values import constant

# operators with an integer kernel in ONNX Runtime between quantized inputs and outputs
THROUGH = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid")
# operators that only move values: output and input have the same scale
MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Slice", "Gather", "Split", "Identity")


@dataclass(frozen=True)
class Placement:
    """Tensors with a pair, in the order in which they are computed.

    Args:
        tensors: names of the tensors.
        same: tensor -> tensor whose scale it shares, since both hold the same values.
        bounds: output of a Relu or Clip -> its input.
    """

    tensors: tuple[str, ...]
    same: dict[str, str]
    bounds: dict[str, str]


NOWHERE = Placement((), {}, {})


def place(model: ir.Model, sites: Sequence[Site], chosen: Collection[str], *, absorbing: bool = True) -> Placement:
    """Return the pairs for some products.

    Args:
        model: the float graph.
        sites: all products of the graph.
        chosen: names of the products to quantize.
        absorbing: True if codes have zero points, so that a pair can absorb an activation.
    """
    mine = {site.node: site for site in sites if site.name in chosen}
    read = {site.input for site in mine.values()}
    outputs = {value.name for value in model.graph.outputs}
    quantized: dict[str, None] = {}
    same: dict[str, str] = {}
    bounds: dict[str, str] = {}

    def ending(name: str, end: str) -> None:
        if end != name:
            bounds[end] = name
            if not absorbing:
                quantized[name] = None
                same[name] = end
        quantized[end] = None

    for value in model.graph.inputs:
        if value.name in read:
            quantized[str(value.name)] = None
    for node in model.graph:
        if not node.outputs:
            continue
        quantized |= dict.fromkeys(str(other.name) for other in node.outputs[1:] if other.name in read)
        value = node.outputs[0]
        name = str(value.name)
        if name in read and node.op_type not in MOVING:
            quantized[name] = None
        end = str(behind(value).name)
        if node in mine and mine[node].is_conv:
            quantized.pop(name, None)
            ending(name, end)
        elif node.op_type in THROUGH and name not in bounds:
            taken = _activations(node)
            if taken and all(other in quantized for other in taken) and name not in outputs:
                ending(name, end)
        elif node.op_type in MOVING and node.inputs[0] is not None:
            source = str(node.inputs[0].name)
            if source in quantized and len(node.outputs) == 1 and name not in outputs:
                quantized[name] = None
                same[name] = same.get(source, source)
            elif name in read:
                quantized[name] = None
    return Placement(tuple(quantized), same, bounds)


def _activations(node: ir.Node) -> list[str]:
    """Return the names of a node's non-constant inputs; [] for an Add or Mul with a constant."""
    if node.op_type in ("Add", "Mul") and any(constant(value) is not None for value in node.inputs):
        return []
    return [str(value.name) for value in node.inputs if value is not None and constant(value) is None]


def without(
    tensors: Collection[str],
    sites: Sequence[Site],
    chosen: Collection[str],
    placed: Callable[[Collection[str]], Placement],
) -> list[str]:
    """Return the products to keep in floats so that none of these tensors has a pair.

    These are the products that read such a tensor and, if it still has a pair, those that compute it.

    Args:
        tensors: names of tensors that must not have a pair.
        sites: all products of the graph.
        chosen: names of the products to quantize.
        placed: function from products to their pairs.

    Returns:
        Names of products; [] if it would be all of them, or if even that does not help.
    """
    left = [site for site in sites if site.name in chosen]
    while left:
        placement = placed([site.name for site in left])
        paired = {name for name in placement.tensors if placement.same.get(name, name) in tensors}
        if not paired:
            names = {site.name for site in left}
            return [site.name for site in sites if site.name in chosen and site.name not in names]
        reading = [site for site in left if site.input in paired]
        making = [site for site in left if {site.output, str(behind(site.node.outputs[0]).name)} & paired]
        if not (drop := reading or making):
            break
        left = [site for site in left if site not in drop]
    return []


def before(model: ir.Model, sites: Sequence[Site]) -> Placement:
    """Return the pairs for TensorRT: in front of products, and on one input of a sum behind a convolution.

    TensorRT moves pairs itself and fuses the operators between a DequantizeLinear and the next QuantizeLinear into the
    product. Outputs have no pair of their own: their readers decide whether they are quantized. In a sum behind a
    convolution the other input is quantized, so that the sum becomes part of that convolution. (NVIDIA TensorRT
    documentation, "Q/DQ Layer-Placement Recommendations".)
    """
    paired = dict.fromkeys(site.input for site in sites)
    summed = {site.output for site in sites if site.is_conv}
    for node in model.graph:
        if node.op_type != "Add" or any(value is None or constant(value) is not None for value in node.inputs):
            continue
        first, second = (value for value in node.inputs if value is not None)
        if first is second:
            continue
        if _only(second, summed):
            paired[str(first.name)] = None
        elif _only(first, summed):
            paired[str(second.name)] = None
    order = [str(value.name) for value in model.graph.inputs]
    order += [str(value.name) for node in model.graph for value in node.outputs]
    return Placement(tuple(name for name in order if name in paired), {}, {})


def _only(value: ir.Value, outputs: set[str]) -> bool:
    """Tell whether a convolution computes a value that only this sum reads."""
    return value.name in outputs and len(value.uses()) == 1 and not value.is_graph_output()
