"""Does the network that TensorRT will build from a graph compute what was decided on? Found out on a CPU.

    max |outputs - expected| / max |expected| <= 2^-6        (16-bit arithmetic)

in ONNX Runtime, nothing quantized but weights: a value on the edge of a code goes either way, and one step of int8 is
more than that. What is expected is the float graph with the values that the codes stand for, in float32. Weights are
read back from the file (`network.weights`, exactly: their scales are 16-bit numbers), pairs by their scales and types
(`network.pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.bundle import Check
from quantkit.exporters.check import counted, judged
from quantkit.exporters.onnx.check import sound
from quantkit.exporters.tensorrt.network.check import LIMITS, computed, constant, demand_finite, in_floats, read_back
from quantkit.exporters.tensorrt.network.weights import TYPES
from quantkit.formats import load_format
from quantkit.graph.outputs import steady
from quantkit.graph.run import Feed, Runner
from quantkit.graph.values import free, name_apart, parts_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.exporters.tensorrt.network.graph import NetworkProduct

Array = NDArray[Any]


def check(
    network: Path,
    model: ir.Model,
    products: Mapping[str, NetworkProduct],
    pairs: Mapping[str, float],
    kind: str,
    feed: Feed,
) -> list[Check]:
    """All checks of a network.

    Args:
        model: the float graph that it was made from.
        products, pairs, kind: what was decided on; see `graph.network`.
        feed: a few real inputs.

    Raises:
        InputError: `onnx-unrunnable`, `float16-overflow`.
    """
    import onnx_ir as ir

    found = sound(network.parent, network.name)
    if not all(each.ok for each in found):
        return found
    stored = ir.load(network)
    found.append(_weights(stored, products))
    found.append(_pairs(stored, products, pairs, kind))
    error, where = _numbers(network, stored, model, products, feed)
    return [*found, judged("network.outputs", error, LIMITS["float16"], where)]


def dense(product: NetworkProduct) -> Array:
    """What the codes of a product stand for, [N, K] float32."""
    tensor = product.weight
    values: Array = load_format(tensor.scheme.format).dequantize(tensor).float().numpy()
    return values


def _weights(stored: ir.Model, products: Mapping[str, NetworkProduct]) -> Check:
    """How many weights of the file are not those that were decided on."""
    wrong = []
    for name, product in products.items():
        found = read_back(stored, product.site.stem, product.weight.scheme.format)
        if found is None or not np.array_equal(found, dense(product)):
            wrong.append(name)
    return counted("network.weights", wrong)


def _pairs(stored: ir.Model, products: Mapping[str, NetworkProduct], pairs: Mapping[str, float], kind: str) -> Check:
    """How many pairs have another scale or type than was decided on, and how many products read none."""
    made = {
        name: node for node in stored.graph if node.op_type == "QuantizeLinear" for name in _sources(node.inputs[0])
    }
    wrong = []
    for name, scale in pairs.items():
        node = made.get(name)
        found = None if node is None else constant(stored, str(node.inputs[1].name))  # type: ignore[union-attr]
        zero = None if node is None else node.inputs[2]
        right = found is not None and float(found) == scale and zero is not None and zero.const_value is not None
        if not right or zero.const_value.numpy().dtype != TYPES[kind] or zero.const_value.numpy().any():  # type: ignore[union-attr]
            wrong.append(name)
    for name, product in products.items() if pairs else ():
        read = {value.producer() for value in _readers(stored, f"{product.site.stem}.values")}
        pair = made.get(product.site.input)
        if pair is None or not read & {reader for reader, _ in pair.outputs[0].uses()}:
            wrong.append(name)
    return counted("network.pairs", wrong)


def _sources(value: ir.Value | None) -> list[str]:
    """Return a value's name in the float graph: inputs, outputs and what has 32 bits alone are cast in this one."""
    if value is None:
        return []
    casts = [node.outputs[0] for node, _ in value.uses() if node.op_type == "Cast"]
    made = value.producer()
    before = made.inputs[0] if made is not None and made.op_type == "Cast" else None
    ends = [before] if before is not None and f"{value.name}".startswith(f"{before.name}.half") else []
    ends += [given for given in casts if given.is_graph_output()]
    return [str(each.name) for each in (value, *ends)]


def _readers(stored: ir.Model, weight: str) -> list[ir.Value]:
    """What the product of a weight reads."""
    for node in stored.graph:
        if any(value is not None and value.name == weight for value in node.inputs):
            return [value for value in node.inputs if value is not None]
    return []


def _numbers(
    network: Path, stored: ir.Model, model: ir.Model, products: Mapping[str, NetworkProduct], feed: Feed
) -> tuple[float | None, str]:
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    ir.external_data.load_to_model(stored)
    plain = in_floats(stored)
    ShapeInferencePass()(plain)  # for the types of what is computed
    inner = computed(plain)
    given, own = Runner(plain, inner, literal=True)(feed), decided(model, products)
    # a row more that is chosen is no fault: what it is chosen by is compared, where the network has it
    by = [name for name in steady(own) if name in given] or list(given)
    expected = {name: value for name, value in Runner(own, steady(own))(feed).items() if name in by}
    demand_finite(given, inner)
    worst, where = 0.0, ""
    for name, wanted in expected.items():
        if wanted.dtype.kind != "f":
            continue
        apart = np.abs(given[name].astype(np.float64) - wanted).max(initial=0) / (np.abs(wanted).max(initial=0) or 1.0)
        if not apart <= worst:  # NaN is worse than anything
            worst, where = float(apart), name
    return (worst, where) if np.isfinite(worst) else (None, f"{where} is not finite in 16 bits")


def decided(model: ir.Model, products: Mapping[str, NetworkProduct]) -> ir.Model:
    """A copy of the float graph with the weights and biases that were decided on."""
    import onnx_ir as ir

    made = model.clone()
    known = parts_of(made.graph)
    nodes = {str(node.outputs[0].name): node for node in made.graph if node.outputs}
    for product in products.values():
        node, site = nodes[product.site.output], product.site
        parts = {1: site.shaped(dense(product))}
        if product.bias is not None:
            parts[2] = product.bias.astype(np.float32)
        for place, values in parts.items():
            name = free(f"{site.output}.decided{place}", made.graph.initializers)
            value = ir.Value(name=name, const_value=ir.tensor(values, name=name))
            value.shape, value.type = ir.Shape(values.shape), ir.TensorType(ir.DataType.FLOAT)
            made.graph.register_initializer(value)
            if len(node.inputs) <= place:
                node.resize_inputs(place + 1)
            node.replace_input_with(place, value)
        if product.bias is not None and node.op_type == "Gemm":
            node.attributes.pop("beta", None)
    name_apart(made.graph, known)
    return made
