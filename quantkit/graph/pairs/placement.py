"""Where Q/DQ pairs go, so that a runtime that fuses them computes in integers from end to end.

A product becomes an integer kernel where its input, its weight and, of a Conv, its output are quantized. What lies
between two products stays in integers if it is one of `THROUGH` and all that it reads is quantized. So a tensor has a
pair if

    a quantized product reads it
    a quantized Conv computes it, or what its fused activation makes of it
    an operator of THROUGH computes it, and all activations that this reads have a pair

What a graph gives out stays float, but for a Conv's. An activation between a product and its pair (Relu, Clip) is
absorbed where the pair's range is within its bounds. Codes without a zero point absorb none: there, what the activation
reads has a pair too, of the same scale, so that the product ends in integers and the second pair changes nothing.
Half of such codes stand for nothing then: zero points are more exact, and no slower in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quantkit.graph.fuse.activation_bounds import behind
from quantkit.graph.sites import Site
from quantkit.graph.values import constant

# with integer kernels in ONNX Runtime between quantized inputs and outputs
THROUGH = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid")
# that only move values: what they give has the scale of what they take
MOVING = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Slice", "Gather", "Split", "Identity")


@dataclass(frozen=True)
class Placement:
    """Tensors that have a pair, in the order in which they are computed.

    Args:
        same: tensor -> the one whose scale it takes, as it holds the same values.
        bounds: tensor -> what the Relu or Clip that computes it reads.
    """

    tensors: tuple[str, ...]
    same: dict[str, str]
    bounds: dict[str, str]


NOWHERE = Placement((), {}, {})


def place(model: ir.Model, sites: Sequence[Site], chosen: Collection[str], *, absorbing: bool = True) -> Placement:
    """Where pairs go for the products in `chosen`, by name; `absorbing`: codes have zero points, so that they can take
    an activation's place.
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
    """What a node reads that is no constant; [] where it reads a constant that matters (Add of one, Mul by one)."""
    if node.op_type in ("Add", "Mul") and any(constant(value) is not None for value in node.inputs):
        return []
    return [str(value.name) for value in node.inputs if value is not None and constant(value) is None]


def without(
    tensors: Collection[str],
    sites: Sequence[Site],
    chosen: Collection[str],
    placed: Callable[[Collection[str]], Placement],
) -> list[str]:
    """Products among `chosen` that stay in floats where none of these tensors may have a pair: those that read it, and,
    if it has one still, those that make it; [] where that is all of them, or does not help. `placed`: products -> their
    pairs.
    """
    left = [site for site in sites if site.name in chosen]
    while left:
        found = placed([site.name for site in left])
        paired = {name for name in found.tensors if found.same.get(name, name) in tensors}
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
    """Tell where pairs go for TensorRT: before products, and on one input of a sum behind a convolution.

    TensorRT moves pairs itself and fuses what stands between a DequantizeLinear and the next QuantizeLinear into the
    product. Outputs have no pair of their own: the one who reads them says whether they are quantized. Of a sum behind
    a convolution the other input is quantized, which makes it part of that convolution. (NVIDIA TensorRT documentation,
    "Q/DQ Layer-Placement Recommendations".)
    """
    found = dict.fromkeys(site.input for site in sites)
    summed = {site.output for site in sites if site.is_conv}
    for node in model.graph:
        if node.op_type != "Add" or any(value is None or constant(value) is not None for value in node.inputs):
            continue
        first, second = (value for value in node.inputs if value is not None)
        if first is second:
            continue
        if _only(second, summed):
            found[str(first.name)] = None
        elif _only(first, summed):
            found[str(second.name)] = None
    order = [str(value.name) for value in model.graph.inputs]
    order += [str(value.name) for node in model.graph for value in node.outputs]
    return Placement(tuple(name for name in order if name in found), {}, {})


def _only(value: ir.Value, made: set[str]) -> bool:
    """Tell whether a convolution makes it for this sum alone."""
    return value.name in made and len(value.uses()) == 1 and not value.is_graph_output()
