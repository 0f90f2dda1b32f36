"""Products whose weights and inputs are both in 8 bits, as ONNX Runtime multiplies them in integers.

    fixed scale     QuantizeLinear, MatMulIntegerToFloat with the bias
      moved         Sub, Mul by channel before that; the rest is in the weight and the bias (`passes/center.py`)
    by tensor       DynamicQuantizeLinear, MatMulInteger, Cast, Mul         fused to DynamicQuantizeMatMul
    by token        s = max|x| / 127.5; QuantizeLinear, MatMulIntegerToFloat with a scale of 1, Mul by s
      with a zero   s = (max - min) / 255, z = -min / s; the same, less (z - 128) Σ_k W_nk before the Mul

Weights have one scale a channel. Inputs of several products are quantized once. Codes of inputs are unsigned, since
DynamicQuantizeLinear has no others: a symmetric scale is one with the zero point 128. **Codes of weights** are unsigned
with the zero point 128 (`uint8`), or signed (`int8`). Without VNNI an x86 processor multiplies u8 by s8 with sums of
two products in 16 bits, which saturate (4 % of error for 1 % at K = 256); u8 by u8 is exact on every processor, and
slower. Codes of `int7` never saturate, and are always signed.
Operators: https://onnx.ai/onnx/operators and ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporters.onnx.nbits import InputCodes, WeightsByName
from quantkit.formats import load_format
from quantkit.runtimes.onnxruntime.float_products import LATER
from quantkit.scheme import ActivationScheme

Array = NDArray[Any]
Codes = Literal["uint8", "int8"]
# on the node that multiplies: the linears whose weights it has below each other
LINEARS = "quantkit.linears"
MICROSOFT = "com.microsoft"
_HALF = 128
# of weights of 7 bits no sum of two products leaves 16 bits
_SMALL = "int7"
# of a symmetric scale: half of the 255 steps between the smallest code and the largest
_REACH, _STEPS = 127.5, 255
# `Rewriting._node`: a new node before another one, of a kind, with inputs and names of outputs; its outputs
Node = Callable[..., list[ir.Value]]


@dataclass(frozen=True)
class ProductInput:
    """An input as products take it: `codes` of float scale and zero point.

    `shift` is what tokens' own zero points are beyond `zero`, [..., 1].
    """

    codes: ir.Value
    scale: ir.Value
    zero: ir.Value
    shift: ir.Value | None = None


@dataclass(frozen=True)
class Integers:
    """What writes the products of one graph.

    Args:
        node, new, constant: of the dialect: a node, an initializer that is read when it is written, a constant.
        weights: what goes into them.
        codes: how weights are stored.
    """

    node: Node
    new: Callable[[str, Sequence[int], Any, Callable[[], Array]], ir.Value]
    constant: Callable[[str, Any, Any], ir.Value]
    weights: WeightsByName
    codes: Codes
    _inputs: dict[tuple[ir.Value, InputCodes], ProductInput] = field(default_factory=dict)

    def product(
        self, before: ir.Node, source: ir.Value, names: Sequence[str], name: str, bias: ir.Value | None = None
    ) -> ir.Value:
        """The product of `source` [..., K] with the weights of linears below each other: [..., N].

        Args:
            bias: [N], added to it; of inputs with a fixed scale.
        """
        how = self.weights.linears[names[0]].input
        assert how is not None
        codes, scales, zeros = self._weight(names, name)
        x = self.input(source, how, self.weights.linears[names[0]].columns)

        def at(kind: str, inputs: list[ir.Value | None], output: str, domain: str = "", **attributes: Any) -> ir.Value:
            return self.node(before, kind, inputs, [f"{name}/{output}"], domain, **attributes)[0]

        if how.scale is not None:
            inputs = [x.codes, codes, x.scale, scales, x.zero, zeros, *([bias] if bias is not None else [])]
            return _named(at("MatMulIntegerToFloat", inputs, "output", MICROSOFT), names)
        if how.scheme.granularity == "token":
            inputs = [x.codes, codes, self.constant(LATER, 1.0, np.float32), scales, x.zero, zeros]
            sums = _named(at("MatMulIntegerToFloat", inputs, "sums", MICROSOFT), names)
            if x.shift is not None:
                sums = at("Sub", [sums, at("Mul", [x.shift, self._totals(names, name)], "shift")], "centred")
            return at("Mul", [sums, x.scale], "output")
        sums = _named(at("MatMulInteger", [x.codes, codes, x.zero, zeros], "sums"), names)
        floats = at("Cast", [sums], "floats", to=int(ir.DataType.FLOAT))
        return at("Mul", [floats, at("Mul", [x.scale, scales], "scale")], "output")

    # --- weights ------------------------------------------------------------------------------------------------------

    def _weight(self, names: Sequence[str], name: str) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes [K, N], scales [N], zero points [N] or None where all are zero."""
        linears = [self.weights.linears[each] for each in names]
        rows, columns = sum(linear.rows for linear in linears), linears[0].columns
        scheme = linears[0].scheme
        assert scheme is not None
        unsigned = self.codes == "uint8" and scheme.format != _SMALL
        dtype, shift = (np.uint8, _HALF) if unsigned else (np.int8, 0)

        def codes() -> Array:
            found = [self.weights.codes(each)[:, :columns] for each in names]
            shifted: Array = (np.concatenate(found).T.astype(np.int16) + shift).astype(dtype)
            return shifted

        def scales() -> Array:
            parts = [self.weights.grid(each)[0] for each in names]
            return np.concatenate([_spread(part, each.rows) for part, each in zip(parts, linears, strict=True)])

        def zeros() -> Array:
            found = [self.weights.grid(each)[1] for each in names]
            parts = [np.zeros((1, 1), np.int8) if part is None else part for part in found]
            points = np.concatenate([_spread(part, each.rows) for part, each in zip(parts, linears, strict=True)])
            shifted: Array = (points.astype(np.int16) + shift).astype(dtype)
            return shifted

        stored = self.new(f"{name}.codes", (columns, rows), dtype, codes)
        steps = self.new(f"{name}.scales", (rows,), np.float32, scales)
        plain = scheme.symmetric and shift == 0
        return stored, steps, None if plain else self.new(f"{name}.zeros", (rows,), dtype, zeros)

    def _totals(self, names: Sequence[str], name: str) -> ir.Value:
        """Σ_k of what the codes stand for, [N]."""

        def totals() -> Array:
            found = []
            for each in names:
                scale, zero = self.weights.grid(each)
                wide = self.weights.codes(each)[:, : self.weights.linears[each].columns].astype(np.int64)
                points = 0 if zero is None else zero.astype(np.int64)
                found.append(((wide - points).sum(axis=1) * scale[:, 0]).astype(np.float32))
            return np.concatenate(found)

        return self.new(f"{name}.totals", (sum(self.weights.linears[each].rows for each in names),), np.float32, totals)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def input(self, source: ir.Value, how: InputCodes, columns: int) -> ProductInput:
        """An input [..., columns] quantized once for all that multiply it, right after what makes it."""
        if (source, how) in self._inputs:
            return self._inputs[source, how]
        nodes: list[ir.Node] = []

        def add(kind: str, inputs: list[ir.Value | None], outputs: Sequence[str], **attributes: Any) -> list[ir.Value]:
            values = [ir.Value(name=f"{source.name}/{name}") for name in outputs]
            given = ir.convenience.convert_attributes(attributes)
            nodes.append(ir.Node("", kind, inputs, given, outputs=values))
            return values

        if how.scale is not None:
            found = self._fixed(source, how, add)
        elif how.scheme.granularity == "token":
            found = self._by_token(source, columns, symmetric=how.scheme.symmetric, add=add)
        elif how.scheme.symmetric:
            scale, zero = self._step(source, (), add), self._half
            found = ProductInput(add("QuantizeLinear", [source, scale, zero], ["codes"])[0], scale, zero)
        else:
            codes, scale, zero = add("DynamicQuantizeLinear", [source], ["codes", "scale", "zero"])
            found = ProductInput(codes, scale, zero)
        producer = source.producer()
        if producer is not None and producer.graph is not None:
            producer.graph.insert_after(producer, nodes)
        else:
            graph = source.graph
            assert graph is not None
            graph.insert_before(next(iter(graph)), nodes)
        self._inputs[source, how] = found
        return found

    def _fixed(self, source: ir.Value, how: InputCodes, add: Callable[..., list[ir.Value]]) -> ProductInput:
        if how.moved:
            shift, reach = (np.asarray(each, np.float32) for each in how.moved)
            (source,) = add("Sub", [source, self.constant(f"{source.name}.shift", shift, np.float32)], ["shifted"])
            (source,) = add("Mul", [source, self.constant(f"{source.name}.channels", 1 / reach, np.float32)], ["even"])
        scale = self.constant(f"{source.name}.scale", how.scale, np.float32)
        zero = self.constant(f"{source.name}.zero", how.zero + _HALF, np.uint8)
        (codes,) = add("QuantizeLinear", [source, scale, zero], ["codes"])
        return ProductInput(codes, scale, zero)

    @property
    def _half(self) -> ir.Value:
        return self.constant(f"half.{_HALF}", _HALF, np.uint8)

    def _step(self, source: ir.Value, axes: Sequence[ir.Value], add: Callable[..., list[ir.Value]]) -> ir.Value:
        """max|x| / 127.5 over axes, or over all."""
        (sizes,) = add("Abs", [source], ["abs"])
        (largest,) = add("ReduceMax", [sizes, *axes], ["absmax"], keepdims=int(bool(axes)))
        (step,) = add("Div", [largest, self.constant("reach", _REACH, np.float32)], ["step"])
        return self._positive(step, add)

    def _positive(self, step: ir.Value, add: Callable[..., list[ir.Value]]) -> ir.Value:
        """Of zeros alone any step is right."""
        (scale,) = add("Max", [step, self.constant("tiny", np.finfo(np.float32).tiny, np.float32)], ["scale"])
        return scale

    def _by_token(
        self, source: ir.Value, columns: int, *, symmetric: bool, add: Callable[..., list[ir.Value]]
    ) -> ProductInput:
        """QuantizeLinear takes the tokens' scales, and their zero points, along its first axis."""
        last, flat = self.constant("last", [-1], np.int64), self.constant("all", [-1], np.int64)
        shift = None
        if symmetric:
            scale = self._step(source, [last], add)
        else:
            nothing = self.constant("zero.0", 0.0, np.float32)
            (least,) = add("ReduceMin", [source, last], ["least"], keepdims=1)
            (largest,) = add("ReduceMax", [source, last], ["largest"], keepdims=1)
            (low,) = add("Min", [least, nothing], ["low"])
            (high,) = add("Max", [largest, nothing], ["high"])
            (reach,) = add("Sub", [high, low], ["reach"])
            (step,) = add("Div", [reach, self.constant("steps", _STEPS, np.float32)], ["step"])
            scale = self._positive(step, add)
            (below,) = add("Div", [low, scale], ["below"])
            (whole,) = add("Round", [below], ["whole"])
            (point,) = add("Neg", [whole], ["point"])
            (shift,) = add("Sub", [point, self.constant("half.float", _HALF, np.float32)], ["shift"])
        (rows,) = add("Reshape", [source, self.constant(f"rows.{columns}", [-1, columns], np.int64)], ["rows"])
        (scales,) = add("Reshape", [scale, flat], ["scales"])
        if symmetric:
            (count,) = add("Shape", [scales], ["count"])
            (zeros,) = add("Expand", [self._half, count], ["zeros"])
        else:
            (points,) = add("Reshape", [point, flat], ["points"])
            (zeros,) = add("Cast", [points], ["zeros"], to=int(ir.DataType.UINT8))
        (codes,) = add("QuantizeLinear", [rows, scales, zeros], ["codes.rows"], axis=0)
        (shape,) = add("Shape", [source], ["shape"])
        (turned,) = add("Reshape", [codes, shape], ["codes"])
        return ProductInput(turned, scale, self._half, shift=shift)


def _spread(values: Array, rows: int) -> Array:
    """[N, 1] or [1, 1] as [N]."""
    return np.broadcast_to(values[:, 0], (rows,))


def _named(value: ir.Value, linears: Sequence[str]) -> ir.Value:
    """With the linears noted on the node that makes it."""
    node = value.producer()
    assert node is not None
    node.metadata_props[LINEARS] = " ".join(linears)
    return value


# --- many rows --------------------------------------------------------------------------------------------------------
# Two ways to multiply in one graph: codes of 4 bits for few rows, the same weights in 8 bits a channel for many.
# MatMulNBits expands its codes for every block of rows, which a prompt pays for again and again: on processors that
# multiply bytes fast (VNNI, AMX, Arm's i8mm) a product of integers takes a third of the time from some 16 rows on. Both
# ways stand in one graph, behind an If on the number of rows; head, embedding and norms are there once. The bytes are
# stored: a session that folds them out of the codes keeps what every operator gives until it is made (ONNX Runtime
# 1.31).
#
#     W = (codes - zero) · scale        s_n = max_k |W_nk| / 127,   W' = round(W / s)      inputs: by token

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
