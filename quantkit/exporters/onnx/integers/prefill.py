"""Two ways to multiply in one graph: codes of 4 bits for few rows, the same weights in 8 bits a channel for many.

MatMulNBits expands its codes for every block of rows, which a prompt pays for again and again: on processors that
multiply bytes fast (VNNI, AMX, Arm's i8mm) a product of integers takes a third of the time from some 16 rows on. Both
ways stand in one graph, behind an If on the number of rows; head, embedding and norms are there once. The bytes are
stored: a session that folds them out of the codes keeps what every operator gives until it is made (ONNX Runtime 1.31).

    W = (codes - zero) · scale        s_n = max_k |W_nk| / 127,   W' = round(W / s)      inputs: by token, `products.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quantkit.exporters.onnx.integers.products import Integers
from quantkit.exporters.onnx.nbits import Array, InputCodes, WeightsByName
from quantkit.formats import load_format
from quantkit.scheme import ActivationScheme

# from so many rows on, tokens of all sequences together
ROWS = 16
# how initializers end that hold such weights
BYTES = ".bytes"
_LARGEST = 127
_BY_TOKEN = InputCodes(ActivationScheme(format="int8", granularity="token"))


def many_rows(weights: WeightsByName, head: str) -> WeightsByName:
    """The same, with inputs in 8 bits for every product of codes that takes more rows in a prompt than in a step."""
    linears = {
        name: replace(linear, input=_BY_TOKEN)
        if linear.scheme is not None and linear.input is None and name != head and expandable(linear.scheme.format)
        else linear
        for name, linear in weights.linears.items()
    }
    return replace(weights, linears=linears)


def expandable(form: str) -> bool:
    """Whether weights of a format are rounded again to 8 bits for many rows."""
    return form.startswith("int") and load_format(form).bits in (4, 8)


class Bytes(Integers):
    """Products in integers of weights that have fewer bits, rounded again to 8 bits a channel."""

    def _weight(self, names: Sequence[str], name: str) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes [K, N] int8 and scales [N]."""
        linears = [self.weights.linears[each] for each in names]
        rows, columns = sum(linear.rows for linear in linears), linears[0].columns

        def codes() -> Array:
            parts = []
            for each in names:
                dense = self.weights.dense(each)
                parts.append(np.rint(dense / _step(dense)[:, None]).astype(np.int8))
            return np.concatenate(parts).T

        def steps() -> Array:
            return np.concatenate([_step(self.weights.dense(each)) for each in names])

        stored = self.new(f"{name}{BYTES}", (columns, rows), np.int8, codes)
        return stored, self.new(f"{name}{BYTES}.scales", (rows,), np.float32, steps), None


def _step(dense: Array) -> Array:
    """Of each row, [N] float32; of zeros alone any step is right."""
    found: Array = np.maximum(np.abs(dense).max(axis=1) / _LARGEST, np.finfo(np.float32).tiny).astype(np.float32)
    return found


def both(few: ir.Model, many: ir.Model, rows: int = ROWS) -> ir.Model:
    """`few` with its nodes in one branch of an If, and those of `many`, for `rows` rows and more, in the other.

    Args:
        few, many: of one model: inputs and outputs are alike, and initializers of one name the same.
    """
    graph, other = few.graph, many.graph
    for value in [*other.inputs, *other.initializers.values()]:
        own = next((each for each in graph.inputs if each.name == value.name), None)
        own = own or graph.initializers.get(value.name or "")
        if own is not None:
            ir.convenience.replace_all_uses_with(value, own)
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    outputs = [ir.Value(name=each.name, shape=each.shape, type=each.type) for each in graph.outputs]
    branches = [_branch(graph, "few"), _branch(other, "many")]
    for name, value in list(other.initializers.items()):
        if name not in graph.initializers and value.uses():
            other.initializers.pop(name)
            graph.register_initializer(value)
    limit = ir.Value(name="rows/limit")
    limit.const_value = ir.tensor(np.asarray(rows, np.int64), name=limit.name)
    limit.shape, limit.type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
    graph.register_initializer(limit)
    count, small = ir.Value(name="rows/count"), ir.Value(name="rows/few")
    graph.append(ir.Node("", "Size", [ids], outputs=[count]))
    graph.append(ir.Node("", "Less", [count, limit], outputs=[small]))
    given = ir.convenience.convert_attributes(dict(zip(("then_branch", "else_branch"), branches, strict=True)))
    graph.append(ir.Node("", "If", [small], given, outputs=outputs))
    graph.outputs.extend(outputs)
    return few


def _branch(graph: ir.Graph, name: str) -> ir.Graph:
    """The nodes of a graph as the body of a branch; the graph then has neither these nor outputs."""
    nodes, outputs = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    for node in nodes:
        for value in node.outputs:
            value.name = f"{name}/{value.name}" if value.name else value.name
    return ir.Graph([], outputs, nodes=nodes, name=name)
