"""Write products of 8-bit weights and 8-bit inputs for ONNX Runtime's integer kernels.

    fixed scale     QuantizeLinear, MatMulIntegerToFloat with the bias
      moved         Sub and Mul by channel before it; the weight and the bias hold the inverse (`passes/center.py`)
    by tensor       DynamicQuantizeLinear, MatMulInteger, Cast, Mul         fused to DynamicQuantizeMatMul
    by token        s = max|x| / 127.5; QuantizeLinear, MatMulIntegerToFloat with a scale of 1, Mul by s
      with a zero   s = (max - min) / 255, z = -min / s; the same, less (z - 128) Σ_k W_nk before the Mul

Weights have one scale a channel. An input of several products is quantized once. **Codes of inputs** are unsigned, as
DynamicQuantizeLinear makes them; a symmetric scale has the zero point 128. **Codes of weights** are unsigned with the
zero point 128 (`uint8`), or signed (`int8`). An x86 processor without VNNI multiplies u8 by s8 with sums of two
products in 16 bits, which saturate (an error of 4 % instead of 1 % at K = 256). u8 by u8 is exact on every processor,
but slower. Codes of `int7` never saturate, and are always signed.
Operators: https://onnx.ai/onnx/operators and ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporters.onnx.nbits import WeightsByName
from quantkit.formats import load_format
from quantkit.formats.base.activation import InputCodes
from quantkit.graph.values import initializer
from quantkit.runtimes.onnxruntime.float_products import LATER
from quantkit.scheme import ActivationScheme

Array = NDArray[Any]
Codes = Literal["uint8", "int8"]
# metadata of a product's node: its stacked linears
LINEARS = "quantkit.linears"
MICROSOFT = "com.microsoft"
_HALF = 128
# with 7-bit weights, no sum of two products exceeds 16 bits
_SMALL = "int7"
# half of the 255 steps between the smallest and the largest code, for a symmetric scale
_REACH, _STEPS = 127.5, 255
_TINY = np.finfo(np.float32).tiny
# function that adds a node, from its kind, inputs, names of outputs and attributes
_Add = Callable[..., list[ir.Value]]


@dataclass(frozen=True)
class ProductInput:
    """Quantized input of products: `codes` with float scale and zero point.

    `shift` is the difference of tokens' own zero points from `zero`, [..., 1].
    """

    codes: ir.Value
    scale: ir.Value
    zero: ir.Value
    shift: ir.Value | None = None


@dataclass(frozen=True)
class Integers:
    """Writer of one graph's integer products."""

    # functions of the dialect: add a node before another one; an initializer whose values are read later; a constant
    node: Callable[..., list[ir.Value]]
    new: Callable[[str, Sequence[int], Any, Callable[[], Array]], ir.Value]
    constant: Callable[[str, Any, Any], ir.Value]
    weights: WeightsByName  # their weights
    codes: Codes  # storage of weights
    _inputs: dict[tuple[ir.Value, InputCodes], ProductInput] = field(default_factory=dict)

    def product(
        self, before: ir.Node, source: ir.Value, names: Sequence[str], name: str, bias: ir.Value | None = None
    ) -> ir.Value:
        """Multiply `source` [..., K] with the weights of stacked linears: [..., N].

        Args:
            bias: [N], added to it; of inputs with a fixed scale.
        """
        first = self.weights.linears[names[0]]
        how = first.input
        assert how is not None
        codes, scales, zeros = self._weight(names, name)
        x = self.input(source, how, first.columns)

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

    def _shape(self, names: Sequence[str]) -> tuple[int, int]:
        """Return [K, N] of stacked linears."""
        linears = [self.weights.linears[name] for name in names]
        return linears[0].columns, sum(linear.rows for linear in linears)

    def _weight(self, names: Sequence[str], name: str) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Add codes [K, N], scales [N], and zero points [N] or None if all are zero."""
        columns, rows = self._shape(names)
        scheme = self.weights.linears[names[0]].scheme
        assert scheme is not None
        unsigned = self.codes == "uint8" and scheme.format != _SMALL
        dtype, shift = (np.uint8, _HALF) if unsigned else (np.int8, 0)

        def shifted(values: Array) -> Array:
            return np.asarray((values.astype(np.int16) + shift).astype(dtype))

        def of_channels(part: int, default: Array | None = None) -> Array:
            """Concatenate a value of every linear, [N, 1] or [1, 1], to [N]."""
            grids = [(self.weights.grid(linear)[part], self.weights.linears[linear].rows) for linear in names]
            parts = [(default if values is None else values, rows) for values, rows in grids]
            return np.concatenate([np.broadcast_to(values[:, 0], (rows,)) for values, rows in parts])  # type: ignore[index]

        def codes() -> Array:
            return shifted(np.concatenate([self.weights.codes(linear)[:, :columns] for linear in names]).T)

        stored = self.new(f"{name}.codes", (columns, rows), dtype, codes)
        steps = self.new(f"{name}.scales", (rows,), np.float32, lambda: of_channels(0))
        if scheme.symmetric and shift == 0:
            return stored, steps, None
        none = np.zeros((1, 1), np.int8)
        return stored, steps, self.new(f"{name}.zeros", (rows,), dtype, lambda: shifted(of_channels(1, none)))

    def _totals(self, names: Sequence[str], name: str) -> ir.Value:
        """Add Σ_k of the codes' values, [N]."""

        def totals() -> Array:
            parts = []
            for linear in names:
                scale, zero = self.weights.grid(linear)
                wide = self.weights.codes(linear)[:, : self.weights.linears[linear].columns].astype(np.int64)
                points = 0 if zero is None else zero.astype(np.int64)
                parts.append(((wide - points).sum(axis=1) * scale[:, 0]).astype(np.float32))
            return np.concatenate(parts)

        return self.new(f"{name}.totals", self._shape(names)[1:], np.float32, totals)

    # --- inputs -------------------------------------------------------------------------------------------------------

    def input(self, source: ir.Value, how: InputCodes, columns: int) -> ProductInput:
        """Quantize an input [..., columns] once for all its products, right after its producer."""
        if (source, how) in self._inputs:
            return self._inputs[source, how]
        nodes: list[ir.Node] = []

        def add(kind: str, inputs: list[ir.Value | None], outputs: Sequence[str], **attributes: Any) -> list[ir.Value]:
            values = [ir.Value(name=f"{source.name}/{name}") for name in outputs]
            converted = ir.convenience.convert_attributes(attributes)
            nodes.append(ir.Node("", kind, inputs, converted, outputs=values))
            return values

        if how.scale is not None:
            quantized = self._fixed(source, how, add)
        elif how.scheme.granularity == "token":
            quantized = self._by_token(source, columns, how.scheme.symmetric, add)
        elif how.scheme.symmetric:
            scale, zero = self._step(source, (), add), self._half
            quantized = ProductInput(add("QuantizeLinear", [source, scale, zero], ["codes"])[0], scale, zero)
        else:
            quantized = ProductInput(*add("DynamicQuantizeLinear", [source], ["codes", "scale", "zero"]))
        producer = source.producer()
        if producer is not None and producer.graph is not None:
            producer.graph.insert_after(producer, nodes)
        else:
            assert source.graph is not None
            source.graph.insert_before(next(iter(source.graph)), nodes)
        self._inputs[source, how] = quantized
        return quantized

    def _fixed(self, source: ir.Value, how: InputCodes, add: _Add) -> ProductInput:
        if how.moved:
            shift, reach = (np.asarray(part, np.float32) for part in how.moved)
            (source,) = add("Sub", [source, self.constant(f"{source.name}.shift", shift, np.float32)], ["shifted"])
            (source,) = add("Mul", [source, self.constant(f"{source.name}.channels", 1 / reach, np.float32)], ["even"])
        scale = self.constant(f"{source.name}.scale", how.scale, np.float32)
        zero = self.constant(f"{source.name}.zero", how.zero + _HALF, np.uint8)
        (codes,) = add("QuantizeLinear", [source, scale, zero], ["codes"])
        return ProductInput(codes, scale, zero)

    @property
    def _half(self) -> ir.Value:
        return self.constant(f"half.{_HALF}", _HALF, np.uint8)

    def _step(self, source: ir.Value, axes: Sequence[ir.Value], add: _Add) -> ir.Value:
        """Add max|x| / 127.5 over axes, or over all."""
        (sizes,) = add("Abs", [source], ["abs"])
        (largest,) = add("ReduceMax", [sizes, *axes], ["absmax"], keepdims=int(bool(axes)))
        return self._scale(largest, self.constant("reach", _REACH, np.float32), add)

    def _scale(self, extent: ir.Value, steps: ir.Value, add: _Add) -> ir.Value:
        """Add the step of an extent; zeros get an arbitrary one."""
        (step,) = add("Div", [extent, steps], ["step"])
        return add("Max", [step, self.constant("tiny", _TINY, np.float32)], ["scale"])[0]

    def _by_token(self, source: ir.Value, columns: int, symmetric: bool, add: _Add) -> ProductInput:
        """Quantize by token: QuantizeLinear takes scales and zero points along its first axis."""
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
            scale = self._scale(reach, self.constant("steps", _STEPS, np.float32), add)
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


def _named(value: ir.Value, linears: Sequence[str]) -> ir.Value:
    """Record the linears on the node of a value."""
    node = value.producer()
    assert node is not None
    node.metadata_props[LINEARS] = " ".join(linears)
    return value


# --- many rows --------------------------------------------------------------------------------------------------------
# One graph with two ways to multiply: 4-bit codes for few rows, the same weights in 8 bits a channel for many.
# MatMulNBits dequantizes its codes for every block of rows, again and again for a prompt. On processors that multiply
# bytes fast (VNNI, AMX, Arm's i8mm) an integer product takes a third of the time from about 16 rows on. An If on the
# number of rows chooses the way; head, embedding and norms are shared. The file stores both sets of weights: a session
# that computed the bytes from the codes would keep all intermediate results until it is created (ONNX Runtime 1.31).
#
#     W = (codes - zero) · scale        s_n = max_k |W_nk| / 127,   W' = round(W / s)      inputs: by token

# number of rows (tokens of all sequences) from which integers are used
ROWS = 16
# suffix of initializers with such weights
BYTES = ".bytes"
_LARGEST = 127
_BY_TOKEN = InputCodes(ActivationScheme(format="int8", granularity="token"))


def many_rows(weights: WeightsByName, head: str) -> WeightsByName:
    """Set inputs to 8 bits for every product of codes with more rows in a prompt than in a step."""
    linears = {
        name: replace(linear, input=_BY_TOKEN)
        if linear.scheme is not None and linear.input is None and name != head and expandable(linear.scheme.format)
        else linear
        for name, linear in weights.linears.items()
    }
    return replace(weights, linears=linears)


def expandable(form: str) -> bool:
    """Return True for a format whose weights are rounded again to 8 bits for many rows."""
    return form.startswith("int") and load_format(form).bits in (4, 8)


class Bytes(Integers):
    """Writer of integer products for weights in fewer bits, rounded again to 8 bits a channel."""

    def _weight(self, names: Sequence[str], name: str) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Add codes [K, N] int8 and scales [N]."""
        columns, rows = self._shape(names)

        def codes() -> Array:
            parts = []
            for linear in names:
                dense = self.weights.dense(linear)
                parts.append(np.rint(dense / _steps(dense)[:, None]).astype(np.int8))
            return np.concatenate(parts).T

        def steps() -> Array:
            return np.concatenate([_steps(self.weights.dense(linear)) for linear in names])

        stored = self.new(f"{name}{BYTES}", (columns, rows), np.int8, codes)
        return stored, self.new(f"{name}{BYTES}.scales", (rows,), np.float32, steps), None


def _steps(dense: Array) -> Array:
    """Return the step of every row, [N] float32; zeros get an arbitrary one."""
    return np.asarray(np.maximum(np.abs(dense).max(axis=1) / _LARGEST, _TINY).astype(np.float32))


def both(few: ir.Model, many: ir.Model, rows: int = ROWS) -> ir.Model:
    """Put the nodes of `few` in one branch of an If, and those of `many`, for `rows` rows and more, in the other.

    Args:
        few, many: graphs of one model with the same inputs and outputs; initializers with one name must be equal.
        rows: number of rows from which `many` runs.
    """
    graph, other = few.graph, many.graph
    own = {value.name: value for value in (*graph.initializers.values(), *graph.inputs)}
    for value in [*other.inputs, *other.initializers.values()]:
        if value.name in own:
            ir.convenience.replace_all_uses_with(value, own[value.name])
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in graph.outputs]
    branches = {"then_branch": _branch(graph, "few"), "else_branch": _branch(other, "many")}
    for name, value in list(other.initializers.items()):
        if name not in graph.initializers and value.uses():
            other.initializers.pop(name)
            graph.register_initializer(value)
    limit = initializer(graph, np.asarray(rows, np.int64), name="rows/limit")
    count, small = ir.Value(name="rows/count"), ir.Value(name="rows/few")
    graph.append(ir.Node("", "Size", [ids], outputs=[count]))
    graph.append(ir.Node("", "Less", [count, limit], outputs=[small]))
    graph.append(ir.Node("", "If", [small], ir.convenience.convert_attributes(branches), outputs=outputs))
    graph.outputs.extend(outputs)
    return few


def _branch(graph: ir.Graph, name: str) -> ir.Graph:
    """Move the nodes of a graph into the body of a branch; the graph loses its nodes and outputs."""
    nodes, outputs = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    for node in nodes:
        for value in node.outputs:
            value.name = f"{name}/{value.name}" if value.name else value.name
    return ir.Graph([], outputs, nodes=nodes, name=name)
