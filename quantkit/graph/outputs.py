"""Kinds of a graph's outputs, as far as the graph itself says: classes, selections, values.

An output tells **classes** apart where a softmax makes it, or an argmax, a softmax or a classifier of `ai.onnx.ml`
reads it; where it, or the product that makes it, is called so (`logits`, `classifier.weight`); or where the file's
metadata has a name for each of its columns. An output is a **selection** where it is made of the indices that
NonMaxSuppression and its like choose: the last bit of a score decides how many rows it has and in which order, so
they are compared as sets, and a graph is held against itself by what the choice is made of.
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
# what leaves rows of numbers the rows that they are
_SAME_ROWS = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
# operator -> which of its outputs choose; of all but the last, how many rows there are follows from the values
_CHOOSING = {"NonMaxSuppression": 0, "NonZero": 0, "Compress": 0, "Unique": 0, "TopK": 1}
# what floats are turned into truth values by, for something to choose by
_TRUTHS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Not", "Cast")
# where the largest or smallest of floats is
_PLACES = ("ArgMax", "ArgMin")
# what makes new rows of chosen ones
_PRODUCTS = (
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "ScatterND", "ScatterElements"),
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
)
# of a file's metadata, what has a name for each class, and how much of it is read
_NAMES = ("names", "classes", "class_names", "labels", "label_names", "id2label", "categories")
_LONGEST = 1 << 20


@dataclass(frozen=True)
class OutputKinds:
    """Names of the outputs that tell classes apart, for how many classes the metadata has names, and names of those
    whose rows were chosen.
    """

    classes: frozenset[str] = frozenset()
    widths: frozenset[int] = frozenset()
    selected: frozenset[str] = frozenset()


def kinds(model: ir.Model) -> OutputKinds:
    """Read off a graph."""
    outputs = [value for value in model.graph.outputs if value.name]
    chosen = _downstream(model, _chosen(model, _CHOOSING), _PRODUCTS)
    return OutputKinds(
        frozenset(str(value.name) for value in outputs if _tells_classes(value)),
        frozenset(_named(model)),
        frozenset(str(value.name) for value in outputs if value in chosen),
    )


def steady(model: ir.Model) -> list[str]:
    """Names of the values by which a graph is held against itself: its outputs, instead of those whose rows were chosen
    the floats that they were chosen by, and beside places of the largest, where no output has floats, what it is of."""
    varying = _downstream(model, _chosen(model, [name for name in _CHOOSING if name != "TopK"]), ())
    varying |= _downstream(model, _chosen(model, ["TopK"]), _PRODUCTS)
    found = [value for value in model.graph.outputs if value not in varying]
    if len(found) < len(model.graph.outputs):
        by = [value for node in model.graph if _chooses(node, _CHOOSING) for value in _reads(node)]
        for value in by:
            maker = value.producer()
            if maker is not None and maker.op_type in _TRUTHS:
                by += [each for each in maker.inputs if each is not None]
            elif maker is not None and maker.graph is model.graph and maker.op_type != "Constant":
                found += [] if value in varying else [value]
    if all(value.dtype is not None and not value.dtype.is_floating_point() for value in found):
        found += [
            value for node in model.graph if node.op_type in _PLACES for value in node.inputs if value is not None
        ]
    return list(dict.fromkeys(str(value.name) for value in found))


def _tells_classes(value: ir.Value) -> bool:
    maker = value.producer()
    while maker is not None and maker.op_type in _SAME_ROWS and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    called = [value.name or ""]
    if maker is not None:
        called += [str(each.name) for each in maker.inputs if each is not None and each.is_initializer()]
    if any(word.lower() in _CLASSES for name in called for word in _WORD.findall(name)):
        return True
    return (maker is not None and maker.op_type in _CHANCES) or _read_as_classes(value)


def _read_as_classes(value: ir.Value) -> bool:
    return any(
        node.op_type in _READ_CLASSES or (node.op_type in _SAME_ROWS and _read_as_classes(node.outputs[0]))
        for node, _ in value.uses()
    )


def _named(model: ir.Model) -> Iterator[int]:
    """Count how many names there are in each list, or mapping by number, of the metadata."""
    for text in (text for key, text in model.metadata_props.items() if key.lower() in _NAMES and len(text) < _LONGEST):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                names = read(text)
                names = list(names.values()) if isinstance(names, dict) else names
                if isinstance(names, list) and len(names) > 1 and all(isinstance(name, str) for name in names):
                    yield len(names)
                break


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    """Return a node and those of its subgraphs."""
    yield node
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _inside(inner)


def _reads(node: ir.Node) -> list[ir.Value]:
    return [value for each in _inside(node) for value in each.inputs if value is not None]


def _chooses(node: ir.Node, operators: Collection[str]) -> bool:
    return any(each.op_type in operators for each in _inside(node))


def _chosen(model: ir.Model, operators: Collection[str]) -> set[ir.Value]:
    """Return what these operators choose by the values of inputs, not by their sizes alone."""
    known = _downstream(model, set(model.graph.inputs), ("Shape", "Size"))
    nodes = [node for node in model.graph if _chooses(node, operators) and known.intersection(_reads(node))]
    return {value for node in nodes for value in node.outputs[_CHOOSING.get(node.op_type, 0) :]}


def _downstream(model: ir.Model, start: set[ir.Value], ends: Collection[str]) -> set[ir.Value]:
    """Everything that is computed from these values, but what only operators give that end it."""
    found = set(start)
    for node in model.graph:
        if node.op_type not in ends and found.intersection(_reads(node)):
            found.update(node.outputs)
    return found
