"""A graph that multiplies in two ways, by the number of rows (`exporters/onnx/integers.py`): each by itself.

Fewer rows than a limit go the way of `steps`, others that of `prompts`; head, embedding and norms are there once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import onnx

Way = Literal["steps", "prompts"]
WAYS: tuple[Way, ...] = ("prompts", "steps")
_BRANCHES: dict[Way, str] = {"steps": "then_branch", "prompts": "else_branch"}
# in a graph's metadata: from so many rows on; bytes of weights that the way of steps, and that of prompts, reads
ROWS, STEP_BYTES, PROMPT_BYTES = "quantkit.prompt_rows", "quantkit.step_bytes", "quantkit.prompt_bytes"


def one_way(model: onnx.ModelProto, way: Way) -> None:
    """Leave one way in place, without the condition; nothing changes where there are not two."""
    graph, node = model.graph, _by_rows(model)
    if node is None:
        return
    left = next(attribute.g for attribute in node.attribute if attribute.name == _BRANCHES[way])
    names = {inner.name: outer for inner, outer in zip(left.output, node.output, strict=True)}
    for each in left.node:
        for place, name in enumerate(each.input):
            each.input[place] = names.get(name, name)
        for place, name in enumerate(each.output):
            each.output[place] = names.get(name, name)
    del graph.node[:]
    graph.node.extend(left.node)


def nodes_of(model: onnx.ModelProto, way: Way) -> list[onnx.NodeProto]:
    """The nodes of one way; none of a graph that has not two."""
    node = _by_rows(model)
    branches = node.attribute if node is not None else ()
    return [inner for attribute in branches if attribute.name == _BRANCHES[way] for inner in attribute.g.node]


def every_node(graph: onnx.GraphProto) -> Iterator[Any]:
    """The nodes of a graph, and of the graphs inside them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g)


def _by_rows(model: onnx.ModelProto) -> onnx.NodeProto | None:
    """The If between both ways."""
    return next((each for each in model.graph.node if each.op_type == "If" and list(each.input) == ["rows/few"]), None)
