"""Constants of a graph: read, replaced, and the ways in which one may not be touched."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
_MOVED = ("Transpose", "Reshape", "Identity")


def name_of(node: ir.Node) -> str:
    """Return a node's name; that of its first output where it has none."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type


def constant(value: ir.Value | None) -> Array | None:
    """Return what a value always is; None where it is computed, or an input that merely has a default."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def fixed(value: ir.Value | None) -> Array | None:
    """As `constant`, also of what is moved on its way, as a weight is transposed for one of two that share it."""
    found, node = constant(value), None if value is None else value.producer()
    if found is not None or node is None or node.op_type not in _MOVED or (x := fixed(node.inputs[0])) is None:
        return found
    if node.op_type == "Transpose":
        return np.transpose(x, node.attributes.get_ints("perm"))
    if node.op_type == "Identity":
        return x
    shape = constant(node.inputs[1])
    return None if shape is None or (shape == 0).any() else x.reshape([int(size) for size in shape])


def scalar(value: ir.Value | None) -> float | None:
    """Return the one element of a constant, of whatever rank."""
    found = constant(value)
    return None if found is None or found.size != 1 or found.dtype.kind not in "fiu" else float(found.reshape(-1)[0])


def why_not_constant(value: ir.Value | None) -> str:
    """Return a reason, for a value that `constant` does not give."""
    if value is None:
        return "an input is missing"
    if value.is_graph_input():
        return f"{value.name} is an input of the graph"
    return f"{value.name} is not a constant"


def other_readers(value: ir.Value, among: Collection[ir.Node]) -> str:
    """Why a value inside of a pattern has to stay: it is an output, or a node that is not `among` them reads it."""
    if value.is_graph_output():
        return f"{value.name} is an output of the graph"
    for reader, _ in value.uses():
        if reader not in among:
            return f"{name_of(reader)} reads {value.name} too"
    return ""


def set_input(node: ir.Node, index: int, values: Array, *, name: str) -> None:
    """Give a node a constant of its own as an input; one that nothing else reads keeps its name."""
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    value = node.inputs[index]
    own = value is not None and value.is_initializer() and len(value.uses()) == 1
    if value is not None and own and not (value.is_graph_input() or value.is_graph_output()):
        value.const_value = ir.tensor(values, name=value.name)
        value.shape = ir.Shape(values.shape)
        return
    assert node.graph is not None
    node.replace_input_with(index, initializer(node.graph, values, name=name))


def initializer(graph: ir.Graph, values: Array, *, name: str, taken: Collection[str | None] | None = None) -> ir.Value:
    """Return a new constant of a graph; the name gets a tail where it is `taken`, by default by any of its values."""
    unique = free(name, {value.name for value in values_of(graph)} if taken is None else taken)
    tensor = ir.tensor(values, name=unique)
    value = ir.Value(name=unique, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def values_of(graph: ir.Graph) -> dict[ir.Value, None]:
    """Return all values of a graph and of those inside of it, whose names would hide its own, in order."""
    every = [graph, *graph.subgraphs()]
    parts = [(each.inputs, each.initializers.values(), *(node.outputs for node in each)) for each in every]
    return {value: None for part in parts for values in part for value in values}


def free(name: str, taken: Collection[str | None]) -> str:
    """Return the name, with a tail where it is taken."""
    while name in taken:
        name += "_"
    return name


def parts_of(graph: ir.Graph) -> frozenset[ir.Value | ir.Node]:
    """Return all that has a name in a graph and in those inside of it."""
    return frozenset((*values_of(graph), *graph.all_nodes()))


def name_apart(graph: ir.Graph, known: Collection[ir.Value | ir.Node]) -> None:
    """Give what was put into a graph names that nothing else of its kind in it has; `known`: its parts from before.

    Nodes know values, not names, so that those have to differ only when the graph is written.
    """
    kept = {*known, *graph.inputs, *graph.outputs}
    for every in (values_of(graph), list(graph.all_nodes())):
        taken = {part.name for part in every if part in kept}
        for part in every:
            if part not in kept and part.name:
                part.name = free(part.name, taken)
                taken.add(part.name)


def drop_unread(graph: ir.Graph) -> None:
    """Remove the constants that nothing reads any more, and what merely moves them."""
    for node in reversed(graph):
        if node.op_type in _MOVED and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def bypass(value: ir.Value, source: ir.Value) -> str:
    """Let all readers of `value` read `source`; its node can go. Returns why not, where that is so."""
    if value.is_graph_output():
        if source.is_graph_input() or source.is_initializer():
            return f"it makes {source.name} an output of the graph"
        if source.is_graph_output():
            return f"{source.name} and {value.name} are both outputs of the graph"
        if value.graph is not source.graph:
            return f"{source.name} comes from outside of the subgraph"
    name, output = value.name, value.is_graph_output()
    if source.shape is None:
        source.shape = value.shape
    if source.type is None:
        source.type = value.type
    value.replace_all_uses_with(source, replace_graph_outputs=True)
    if output:
        value.name, source.name = None, name
    return ""


def per_channel(values: Array, rank: int, channels: int) -> Array | None:
    """A constant that broadcasts over [N, C, ...] as one number a channel: [C]; None if it does anything else."""
    shape = (1,) * (rank - values.ndim) + values.shape
    if len(shape) != rank or shape[1] not in (1, channels) or any(size != 1 for size in (shape[0], *shape[2:])):
        return None
    return np.broadcast_to(values.reshape(-1), (channels,))
