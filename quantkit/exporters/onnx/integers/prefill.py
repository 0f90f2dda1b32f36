"""Two ways to multiply in one graph: codes of 4 bits for few rows, the same weights in 8 bits a channel for many.

MatMulNBits expands its codes for every block of rows, which a prompt pays for again and again: on processors that
multiply bytes fast (VNNI, AMX, Arm's i8mm) a product of integers takes a third of the time from some 16 rows on. Both
ways stand in one graph, behind an If on the number of rows, and share what the file holds: a session computes the
bytes from the codes when it is made, by folding constants.

    W = (codes - zero) · scale        s_n = max_k |W_nk| / 127,   W' = round(W / s)      inputs: by token, `products.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.exporters.onnx.integers.products import MICROSOFT, Integers
from quantkit.exporters.onnx.nbits import InputCodes, PackedWeights, WeightsByName
from quantkit.formats import load_format
from quantkit.scheme import ActivationScheme

# from so many rows on, tokens of all sequences together
ROWS = 16
_BY_TOKEN = InputCodes(ActivationScheme(format="int8", granularity="token"))


def many_rows(weights: WeightsByName, head: str) -> WeightsByName:
    """The same, with inputs in 8 bits for every product of codes that takes more rows in a prompt than in a step."""
    linears = {
        name: replace(linear, input=_BY_TOKEN)
        if linear.scheme is not None and linear.input is None and name != head and _expandable(linear.scheme.format)
        else linear
        for name, linear in weights.linears.items()
    }
    return replace(weights, linears=linears)


def _expandable(form: str) -> bool:
    return form.startswith("int") and load_format(form).bits in (4, 8)


@dataclass(frozen=True)
class Expanded(Integers):
    """Products in integers of weights that are stored in fewer bits.

    Args:
        packed: how the weights of linears below each other are packed, and codes, scales and zero points as stored.
        nodes: what makes the bytes, of constants alone.
    """

    packed: Callable[[Sequence[str], str], tuple[PackedWeights, list[ir.Value]]] = field(kw_only=True)
    nodes: list[ir.Node] = field(default_factory=list, kw_only=True)

    def _weight(self, names: Sequence[str], name: str) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes [K, N] and scales [N], both from what is stored."""
        packed, (codes, scales, *zeros) = self.packed(names, name)
        rows, columns = sum(self.weights.linears[each].rows for each in names), packed.columns
        steps = self.new(f"{name}.bytes.scales", (rows,), np.float32, packed.steps)

        def at(kind: str, inputs: list[ir.Value | None], output: str, domain: str = "", **attributes: Any) -> ir.Value:
            value = ir.Value(name=f"{name}/bytes/{output}")
            given = ir.convenience.convert_attributes(attributes)
            self.nodes.append(ir.Node(domain, kind, inputs, given, outputs=[value]))
            return value

        def whole(*lengths: int) -> ir.Value:
            return self.constant(f"shape/{'x'.join(map(str, lengths))}", lengths, np.int64)

        # in units of the channel's step, so that 16 bits are enough; in as few operators as can be, since a session
        # holds what each of them gives until it is made
        units = at("Div", [scales, at("Unsqueeze", [steps, whole(1)], "steps")], "units")
        halves = at("Cast", [units], "halves", to=int(ir.DataType.FLOAT16))
        flat = at("Reshape", [codes, whole(rows, -1)], "rows")
        every = self.constant(f"rows/{rows}", np.arange(rows), np.int64)
        options = {"bits": packed.bits, "block_size": packed.block, "gather_axis": 0, "quantize_axis": 1}
        found = at("GatherBlockQuantized", [flat, every, halves, *zeros], "values", MICROSOFT, **options)
        if columns % packed.block:
            found = at("Slice", [found, whole(0), whole(columns), whole(1)], "values/cut")
        rounded = at("Cast", [at("Round", [found], "rounded")], "signed", to=int(ir.DataType.INT8))
        return at("Transpose", [rounded], "codes", perm=[1, 0]), steps, None


def both(few: ir.Model, many: ir.Model, constants: Sequence[ir.Node], rows: int = ROWS) -> ir.Model:
    """`few` with its nodes in one branch of an If, and those of `many`, for `rows` rows and more, in the other.

    Args:
        few, many: of one model: inputs and outputs are alike, and initializers of one name the same.
        constants: nodes of `many` that depend on constants alone; they stay outside, where sessions fold them.
    """
    graph, other = few.graph, many.graph
    for value in [*other.inputs, *other.initializers.values()]:
        own = next((each for each in graph.inputs if each.name == value.name), None)
        own = own or graph.initializers.get(value.name or "")
        if own is not None:
            ir.convenience.replace_all_uses_with(value, own)
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    outputs = [ir.Value(name=each.name, shape=each.shape, type=each.type) for each in graph.outputs]
    branches = [_branch(graph, [], "few"), _branch(other, constants, "many")]
    for node in constants:
        other.remove(node)
    for name, value in list(other.initializers.items()):
        if name not in graph.initializers and value.uses():
            other.initializers.pop(name)
            graph.register_initializer(value)
    limit = ir.Value(name="rows/limit")
    limit.const_value = ir.tensor(np.asarray(rows, np.int64), name=limit.name)
    limit.shape, limit.type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
    graph.register_initializer(limit)
    count, small = ir.Value(name="rows/count"), ir.Value(name="rows/few")
    graph.extend(constants)
    graph.append(ir.Node("", "Size", [ids], outputs=[count]))
    graph.append(ir.Node("", "Less", [count, limit], outputs=[small]))
    given = ir.convenience.convert_attributes(dict(zip(("then_branch", "else_branch"), branches, strict=True)))
    graph.append(ir.Node("", "If", [small], given, outputs=outputs))
    graph.outputs.extend(outputs)
    return few


def _branch(graph: ir.Graph, left: Sequence[ir.Node], name: str) -> ir.Graph:
    """The nodes of a graph but some as the body of a branch; the graph then has neither these nor outputs."""
    kept = set(left)
    nodes = [node for node in graph if node not in kept]
    outputs = list(graph.outputs)
    graph.outputs.clear()
    for node in reversed(nodes):
        graph.remove(node)
    for node in nodes:
        for value in node.outputs:
            value.name = f"{name}/{value.name}" if value.name else value.name
    return ir.Graph([], outputs, nodes=nodes, name=name)
