"""Kinds of a graph's outputs, read from the graph: classes, selections, values.

An output holds scores of **classes** if a softmax makes it, or an argmax, a softmax or a classifier of `ai.onnx.ml`
reads it; if it, or the weight of its product, has such a name (`logits`, `classifier.weight`); or if the file's
metadata
names each of its columns. An output is a **selection** if its rows are chosen by NonMaxSuppression or a similar
operator. The last bit of a score then decides the number of rows and their order, so selections are compared as sets,
and to compare a graph with itself, the inputs of the choice are used instead.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

import onnx_ir as ir

_CLASSES = {
    *("logit", "logits", "prob", "probs", "probability", "probabilities", "score", "scores", "softmax"),
    *("class", "classes", "classifier", "classification", "category", "categories"),
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_CHANCES = ("Softmax", "LogSoftmax")
_READ_CLASSES = (*_CHANCES, "ArgMax", "LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
# operators that keep rows of numbers
_SAME_ROWS = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
# operator -> index of its first output that depends on a choice; all but TopK also choose the number of rows
_CHOOSING = {"NonMaxSuppression": 0, "NonZero": 0, "Compress": 0, "Unique": 0, "TopK": 1}
# operators from floats to the booleans of a choice
_TRUTHS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Not", "Cast")
# operators that return the position of an extreme value
_PLACES = ("ArgMax", "ArgMin")
# operators that compute new rows from chosen ones
_PRODUCTS = (
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "ScatterND", "ScatterElements"),
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
)
# keys of a file's metadata with a name for each class, and the longest value that is read
_NAMES = ("names", "classes", "class_names", "labels", "label_names", "id2label", "categories")
_LONGEST = 1 << 20


@dataclass(frozen=True)
class OutputKinds:
    """Kinds of a graph's outputs.

    Args:
        classes: names of the outputs with scores of classes.
        widths: numbers of classes that the metadata has names for.
        selected: names of the outputs whose rows were chosen.
    """

    classes: frozenset[str] = frozenset()
    widths: frozenset[int] = frozenset()
    selected: frozenset[str] = frozenset()


def kinds(model: ir.Model) -> OutputKinds:
    """Read the kinds of outputs from a graph."""
    outputs = [value for value in model.graph.outputs if value.name]
    chosen = _downstream(model, _chosen(model, _CHOOSING), _PRODUCTS)
    return OutputKinds(
        frozenset(str(value.name) for value in outputs if _tells_classes(value)),
        frozenset(_named(model)),
        frozenset(str(value.name) for value in outputs if value in chosen),
    )


def steady(model: ir.Model) -> list[str]:
    """Return the names of the values by which a graph is compared with itself.

    These are its outputs. An output with chosen rows is replaced by the floats that the choice depends on. If no float
    is
    among them, the inputs of ArgMax and ArgMin are added.
    """
    varying = _downstream(model, _chosen(model, [name for name in _CHOOSING if name != "TopK"]), ())
    varying |= _downstream(model, _chosen(model, ["TopK"]), _PRODUCTS)
    compared = [value for value in model.graph.outputs if value not in varying]
    if len(compared) < len(model.graph.outputs):
        by = [value for node in model.graph if _chooses(node, _CHOOSING) for value in _reads(node)]
        for value in by:
            maker = value.producer()
            if maker is not None and maker.op_type in _TRUTHS:
                by += [operand for operand in maker.inputs if operand is not None]
            elif maker is not None and maker.graph is model.graph and maker.op_type != "Constant":
                compared += [] if value in varying else [value]
    if all(value.dtype is not None and not value.dtype.is_floating_point() for value in compared):
        compared += [
            value for node in model.graph if node.op_type in _PLACES for value in node.inputs if value is not None
        ]
    return list(dict.fromkeys(str(value.name) for value in compared))


def _tells_classes(value: ir.Value) -> bool:
    maker = value.producer()
    while maker is not None and maker.op_type in _SAME_ROWS and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    called = [value.name or ""]
    if maker is not None:
        called += [str(operand.name) for operand in maker.inputs if operand is not None and operand.is_initializer()]
    if any(word.lower() in _CLASSES for name in called for word in _WORD.findall(name)):
        return True
    return (maker is not None and maker.op_type in _CHANCES) or _read_as_classes(value)


def _read_as_classes(value: ir.Value) -> bool:
    return any(
        node.op_type in _READ_CLASSES or (node.op_type in _SAME_ROWS and _read_as_classes(node.outputs[0]))
        for node, _ in value.uses()
    )


def _named(model: ir.Model) -> Iterator[int]:
    """Yield the number of names in each list, or mapping by number, of the metadata."""
    for text in (text for key, text in model.metadata_props.items() if key.lower() in _NAMES and len(text) < _LONGEST):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                names = read(text)
                names = list(names.values()) if isinstance(names, dict) else names
                if isinstance(names, list) and len(names) > 1 and all(isinstance(name, str) for name in names):
                    yield len(names)
                break


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    """Yield a node and the nodes of its subgraphs."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _inside(inner)


def _reads(node: ir.Node) -> list[ir.Value]:
    return [value for inner in _inside(node) for value in inner.inputs if value is not None]


def _chooses(node: ir.Node, operators: Collection[str]) -> bool:
    return any(inner.op_type in operators for inner in _inside(node))


def _chosen(model: ir.Model, operators: Collection[str]) -> set[ir.Value]:
    """Return outputs of these operators that depend on values of inputs, not only on their sizes."""
    known = _downstream(model, set(model.graph.inputs), ("Shape", "Size"))
    nodes = [node for node in model.graph if _chooses(node, operators) and known.intersection(_reads(node))]
    return {value for node in nodes for value in node.outputs[_CHOOSING.get(node.op_type, 0) :]}


def _downstream(model: ir.Model, start: set[ir.Value], ends: Collection[str]) -> set[ir.Value]:
    """Return all values computed from these; operators in `ends` stop the search."""
    reached = set(start)
    for node in model.graph:
        if node.op_type not in ends and reached.intersection(_reads(node)):
            reached.update(node.outputs)
    return reached
