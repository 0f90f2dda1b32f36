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

from quantkit.exporters.onnx.integers.products import Integers
from quantkit.exporters.onnx.nbits import InputCodes, PackedWeights, WeightsByName
from quantkit.formats import load_format
from quantkit.scheme import ActivationScheme

# from so many rows on, tokens of all sequences together
ROWS = 16
_BY_TOKEN = InputCodes(ActivationScheme(format="int8", granularity="token"))
_LARGEST = 127.0


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
        count, bits, half = -(-columns // packed.block), packed.bits, 1 << (packed.bits - 1)

        def at(kind: str, inputs: list[ir.Value | None], output: str, **attributes: Any) -> ir.Value:
            value = ir.Value(name=f"{name}/bytes/{output}")
            given = ir.convenience.convert_attributes(attributes)
            self.nodes.append(ir.Node("", kind, inputs, given, outputs=[value]))
            return value

        def whole(*lengths: int) -> ir.Value:
            return self.constant(f"shape/{'x'.join(map(str, lengths))}", lengths, np.int64)

        def words(stored: ir.Value, shape: ir.Value, what: str) -> ir.Value:
            """Stored words one by one, float32."""
            if bits == 4:
                low = at("BitwiseAnd", [stored, self.constant("nibble", 15, np.uint8)], f"{what}/low")
                high = at("BitShift", [stored, self.constant("four", 4, np.uint8)], f"{what}/high", direction="RIGHT")
                pair = [at("Unsqueeze", [each, whole(-1)], f"{what}/{n}") for n, each in enumerate((low, high))]
                stored = at("Concat", list(pair), f"{what}/pairs", axis=-1)
            flat = at("Reshape", [stored, shape], f"{what}/words")
            return at("Cast", [flat], f"{what}/floats", to=int(ir.DataType.FLOAT))

        found = words(codes, whole(rows, count, packed.block), "codes")
        point = self.constant(f"middle.{half}", float(half), np.float32)
        if zeros:
            filled = words(zeros[0], whole(rows, -1), "zeros")
            ends = [whole(0), whole(count), whole(1)]
            point = at("Unsqueeze", [at("Slice", [filled, *ends], "zeros/cut"), whole(2)], "zeros/each")
        steps = at("Unsqueeze", [scales, whole(2)], "scales/each")
        dense = at("Mul", [at("Sub", [found, point], "centred"), steps], "blocks")
        dense = at("Reshape", [dense, whole(rows, -1)], "rows")
        dense = at("Slice", [dense, whole(0), whole(columns), whole(1)], "dense")
        largest = at("ReduceMax", [at("Abs", [dense], "sizes"), whole(1)], "largest", keepdims=1)
        step = at("Div", [largest, self.constant("bytes/largest", _LARGEST, np.float32)], "step")
        step = at("Max", [step, self.constant("tiny", np.finfo(np.float32).tiny, np.float32)], "step/positive")
        rounded = at("Round", [at("Div", [dense, step], "units")], "rounded")
        signed = at("Cast", [rounded], "signed", to=int(ir.DataType.INT8))
        turned = at("Transpose", [signed], "codes", perm=[1, 0])
        return turned, at("Reshape", [step, whole(-1)], "scales"), None


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
