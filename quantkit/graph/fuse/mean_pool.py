"""A mean over all positions of an image is a global pooling.

    ReduceMean(x [N, C, H, W], axes [2, 3]) = GlobalAveragePool(x), then a Squeeze of H and W where they are not kept

ONNX Runtime makes an integer kernel of a quantized pooling and none of a quantized mean.
Guard: the axes are constants and all dimensions after the channels, of which there are two or more: of three dimensions
the last one may as well be the channels.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import constant, initializer, name_of

# the axes of a Squeeze are an input since
_OPSET = 13


class MeanPool:
    """See the module."""

    name = "mean_pool"

    def run(self, model: ir.Model) -> list[Fused]:
        """Replace in place; a mean over anything else is not listed."""
        found = []
        for node in nodes(model, "ReduceMean"):
            x = node.inputs[0]
            rank = len(x.shape) if x is not None and x.shape is not None else 0
            given = constant(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get_ints("axes")
            if given is None or rank < 4 or sorted(int(axis) % rank for axis in given) != list(range(2, rank)):
                continue
            _replace(node, rank, _rule.opset(model))
            found.append(Fused(name_of(node), self.name, True))
        return found


def _replace(node: ir.Node, rank: int, opset: int) -> None:
    graph, old = node.graph, node.outputs[0]
    assert graph is not None
    pool = ir.node("GlobalAveragePool", node.inputs[:1], name=node.name)
    made = [pool]
    if not node.attributes.get_int("keepdims", 1):
        pool.outputs[0].name = f"{old.name}.kept"
        pool.outputs[0].type = old.type
        axes = np.arange(2, rank)
        if opset < _OPSET:
            made.append(ir.node("Squeeze", [pool.outputs[0]], attributes={"axes": axes.tolist()}))
        else:
            where = initializer(graph, axes, name=f"{old.name}.axes")
            made.append(ir.node("Squeeze", [pool.outputs[0], where]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, [old], [made[-1].outputs[0]])
