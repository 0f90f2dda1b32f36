"""Constants of a graph: reading, replacing, and reasons not to touch one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
_MOVED = ("Transpose", "Reshape", "Identity")


def name_of(node: ir.Node) -> str:
    """Return a node's name, or that of its first output if it has none."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type


def constant(value: ir.Value | None) -> Array | None:
    """Return the value of a constant; None for computed values and for inputs with a default."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def fixed(value: ir.Value | None) -> Array | None:
    """Return a constant as `constant` does, also through Transpose, Reshape and Identity.

    Exporters write a Transpose in front of a weight that two nodes share.
    """
    direct, node = constant(value), None if value is None else value.producer()
    if direct is not None or node is None or node.op_type not in _MOVED or (x := fixed(node.inputs[0])) is None:
        return direct
    if node.op_type == "Transpose":
        return np.transpose(x, node.attributes.get_ints("perm"))
    if node.op_type == "Identity":
        return x
    shape = constant(node.inputs[1])
    return None if shape is None or (shape == 0).any() else x.reshape([int(size) for size in shape])


def scalar(value: ir.Value | None) -> float | None:
    """Return the single element of a constant of any rank; else None."""
    array = constant(value)
    return None if array is None or array.size != 1 or array.dtype.kind not in "fiu" else float(array.reshape(-1)[0])


def why_not_constant(value: ir.Value | None) -> str:
    """Return the reason why `constant` returns None for a value."""
    if value is None:
        return "an input is missing"
    if value.is_graph_input():
        return f"{value.name} is an input of the graph"
    return f"{value.name} is not a constant"


def other_readers(value: ir.Value, among: Collection[ir.Node]) -> str:
    """Return the reason why an inner value of a pattern must stay: it is an output, or a node outside of `among` reads
    it.
    """
    if value.is_graph_output():
        return f"{value.name} is an output of the graph"
    for reader, _ in value.uses():
        if reader not in among:
            return f"{name_of(reader)} reads {value.name} too"
    return ""


def set_input(node: ir.Node, index: int, values: Array, *, name: str) -> None:
    """Set a node's input to a constant of its own; one that no other node reads keeps its name."""
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
    """Add a constant to a graph, and return it.

    Args:
        graph: the graph.
        values: its values.
        name: its name; a suffix is added if it is taken.
        taken: names in use; by default those of all values of the graph.
    """
    unique = free(name, {value.name for value in values_of(graph)} if taken is None else taken)
    tensor = ir.tensor(values, name=unique)
    value = ir.Value(name=unique, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def values_of(graph: ir.Graph) -> dict[ir.Value, None]:
    """Return all values of a graph and its subgraphs, in order; a subgraph's name would hide the graph's."""
    every = [graph, *graph.subgraphs()]
    parts = [(one.inputs, one.initializers.values(), *(node.outputs for node in one)) for one in every]
    return {value: None for part in parts for values in part for value in values}


def free(name: str, taken: Collection[str | None]) -> str:
    """Return the name, with a suffix if it is taken."""
    while name in taken:
        name += "_"
    return name


def parts_of(graph: ir.Graph) -> frozenset[ir.Value | ir.Node]:
    """Return all named values and nodes of a graph and its subgraphs."""
    return frozenset((*values_of(graph), *graph.all_nodes()))


def name_apart(graph: ir.Graph, known: Collection[ir.Value | ir.Node]) -> None:
    """Give added values and nodes unique names.

    In memory, nodes refer to values, not to names, so names have to be unique only when the graph is written.

    Args:
        graph: the graph.
        known: values and nodes from before, which keep their names.
    """
    kept = {*known, *graph.inputs, *graph.outputs}
    for every in (values_of(graph), list(graph.all_nodes())):
        taken = {part.name for part in every if part in kept}
        for part in every:
            if part not in kept and part.name:
                part.name = free(part.name, taken)
                taken.add(part.name)


def drop_unread(graph: ir.Graph) -> None:
    """Remove constants without readers, and nodes that only move such constants."""
    for node in reversed(graph):
        if node.op_type in _MOVED and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def bypass(value: ir.Value, source: ir.Value) -> str:
    """Let all readers of `value` read `source`, so that its node can go; return the reason if that is refused."""
    if value.is_graph_output():
        if source.is_graph_input() or source.is_initializer():
            return f"it makes {source.name} an output of the graph"
        if source.is_graph_output():
            return f"{source.name} and {value.name} are both outputs of the graph"
        if value.graph is not source.graph:
            return f"{source.name} is a value of the outer graph"
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
    """Return a constant as one number per channel, [C]; None if it does not broadcast over [N, C, ...] so."""
    shape = (1,) * (rank - values.ndim) + values.shape
    if len(shape) != rank or shape[1] not in (1, channels) or any(size != 1 for size in (shape[0], *shape[2:])):
        return None
    return np.broadcast_to(values.reshape(-1), (channels,))
