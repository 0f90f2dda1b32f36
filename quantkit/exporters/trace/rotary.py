"""Rotary embedding in a traced graph: what it turns, and by which angles.

Operators: https://onnx.ai/onnx/operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.exporters.trace.rewrite import DOMAIN


@dataclass(frozen=True)
class Angles:
    """Tables [positions, half a head] of cosines and sines, in the graph."""

    cos: ir.Value
    sin: ir.Value


@dataclass
class RotaryTables:
    """Rotary embedding outside attention, recognised; its angles for every position, computed by the graph itself.

    Args:
        graph: that is being rewritten.
        positions: for how many.
        constant: puts a table into the graph: name, values, dtype.
    """

    graph: ir.Graph
    positions: int
    constant: Callable[[str, Any, Any], ir.Value]
    found: dict[tuple[ir.Value, ir.Value], Angles | None] = field(default_factory=dict)

    def strip(self, value: ir.Value) -> tuple[ir.Value, Angles] | None:
        """What x·cos + half(x)·sin is made of: x and the tables; None for anything else."""
        node = value.producer()
        if node is None or node.op_type != "Add":
            return None
        products = [x.producer() if x is not None else None for x in node.inputs]
        if any(product is None or product.op_type != "Mul" for product in products):
            return None
        plain, turned = products
        assert plain is not None and turned is not None
        x, cos = plain.inputs
        half, sin = turned.inputs
        if x is None or cos is None or sin is None or half is None or _halved(half) is not x:
            return None
        angles = self._angles(cos, sin)
        return None if angles is None else (x, angles)

    def _angles(self, cos: ir.Value, sin: ir.Value) -> Angles | None:
        if (cos, sin) not in self.found:
            self.found[cos, sin] = self._table(cos, sin)
        return self.found[cos, sin]

    def _table(self, cos: ir.Value, sin: ir.Value) -> Angles | None:
        """Run the part of the graph that makes the angles on positions 0, 1, 2, ..."""
        import onnxruntime

        graph, length = self.graph, self.positions
        given = [value for value in graph.inputs if value.name in ("input_ids", "attention_mask")]
        try:
            part = ir.convenience.extract(graph, given, [cos, sin])
        except ValueError:  # they depend on something else: the cache, the embeddings
            return None
        part.opset_imports.update(graph.opset_imports)
        part.opset_imports.pop(DOMAIN, None)
        model = ir.Model(part, ir_version=10)
        for value in part.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        proto = ir.to_proto(model)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        ones = np.ones((1, length), np.int64)
        feeds = {value.name: ones for value in session.get_inputs()}
        tables = [np.asarray(found)[0] for found in session.run(None, feeds)]
        tables = [table.reshape(length, -1) for table in tables]
        short = session.run(None, {name: values[:, :2] for name, values in feeds.items()})
        if any(not np.allclose(np.asarray(x)[0], y[:2], atol=1e-5) for x, y in zip(short, tables, strict=True)):
            # they change with the length of the text (longrope): there is no one table
            return None
        half = tables[0].shape[1] // 2
        if any(not np.array_equal(table[:, :half], table[:, half:]) for table in tables):
            return None
        number = sum(angles is not None for angles in self.found.values())
        return Angles(
            self.constant(f"rotary.{number}.cos", tables[0][:, :half], np.float32),
            self.constant(f"rotary.{number}.sin", tables[1][:, :half], np.float32),
        )


def _halved(value: ir.Value) -> ir.Value | None:
    """x of concat(-x[half:], x[:half]) along the last axis."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    left, right = (x.producer() if x is not None else None for x in node.inputs)
    if left is None or right is None or left.op_type != "Neg" or right.op_type != "Slice":
        return None
    back = left.inputs[0].producer() if left.inputs[0] is not None else None
    if back is None or back.op_type != "Slice" or back.inputs[0] is not right.inputs[0]:
        return None
    x = right.inputs[0]
    size = x.shape[-1] if x is not None and x.shape is not None else None
    if not isinstance(size, int):
        return None
    ends = [[_number(slice_.inputs[place]) for place in (1, 2)] for slice_ in (right, back)]
    (start, middle), (second, end) = ends
    exact = (start, middle, second) == (0, size // 2, size // 2) and end is not None and end >= size
    return x if exact else None


def _number(value: ir.Value | None) -> int | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else int(tensor.numpy().reshape(-1)[0])
