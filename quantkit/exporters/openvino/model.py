"""From an ONNX graph of ours to OpenVINO's own form: read by its frontend, its cache made a state, written, read back.

A state is a variable of the model: keys and values stay where the plug-in keeps them, and a step is given new tokens
alone. `beam_idx` says which sequence of the state each row goes on with; the plug-ins recognise the cache by it
(src/plugins/intel_cpu/src/transformations/cpu_opset/common/pass/stateful_sdpa_fusion.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from quantkit.bundle import stopping_when_full
from quantkit.errors import InputError
from quantkit.exporters.onnx.nbits import InputCodes, LinearSpec, PackedWeights, block_size
from quantkit.exporters.trace.rewrite import PlainOperators
from quantkit.formats import load_format
from quantkit.runtimes.openvino.library import first_line, library

if TYPE_CHECKING:
    import openvino

PAST, PRESENT = "past_key_values.", "present."
CODES, ZERO = ".weight.codes", ".weight.zero"
_MIDDLE, _NIBBLE = 128, 8


def converted(path: Path) -> openvino.Model:
    """What OpenVINO reads of an ONNX file.

    Raises:
        InputError: `openvino-operator`, it has an operator that OpenVINO does not read.
        MissingDependency: openvino.
    """
    core = library().Core()
    try:
        return core.read_model(str(path))
    except RuntimeError as problem:
        raise InputError(
            "openvino-operator",
            where=path.name,
            value=first_line(problem),
            rule=f"OpenVINO {library().__version__} reads every operator of the graph",
            remedy="leave `openvino` out of `export`; `onnx` runs as it is",
        ) from None


def without_guards(model: openvino.Model) -> None:
    """Take out what the frontend puts behind attention, zeros for rows that see nothing: masks here are finite."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Select":
            continue
        seen = node.input_value(0).get_node()
        attention = node.input_value(2)
        if seen.get_type_name() == "IsNaN" and attention.get_node().get_type_name() == "ScaledDotProductAttention":
            node.output(0).replace(attention)


def nibbles_around_zero(model: openvino.Model) -> None:
    """Make codes of 4 bits from 0, around 8, the same codes around 0, `i4`: nothing is subtracted from them any more.

    A nibble c becomes the nibble of c - 8 in two's complement, c ^ 8. Those with zero points of their own stay `u4`.
    """
    ov = library()
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Subtract":
            continue
        wide, zero = (node.input_value(place).get_node() for place in (0, 1))
        codes = wide.input_value(0).get_node() if wide.get_type_name() == "Convert" else None
        if codes is None or codes.get_type_name() != "Constant" or codes.get_element_type() != ov.Type.u4:
            continue
        point = zero.input_value(0).get_node() if zero.get_type_name() == "Convert" else zero
        # one for all, as the reader puts it where a file has none
        if point.get_type_name() != "Constant" or int(np.prod(point.get_output_shape(0))) != 1:
            continue
        if int(point.data.reshape(-1)[0]) & 15 != _NIBBLE:
            continue
        # memory of its own: what it is given from outside it would only borrow
        around = ov.Tensor(ov.Type.i4, codes.get_output_shape(0))
        around.data.reshape(-1).view(np.uint8)[:] = nibbles_signed(codes.data.reshape(-1))
        stored = ov.op.Constant(around)
        stored.set_friendly_name(codes.get_friendly_name())
        wide.input(0).replace_source_output(stored.output(0))
        node.output(0).replace(wide.output(0))


def nibbles_signed(packed: Any) -> Any:
    """Two codes of 4 bits a byte, around 8, as two around 0."""
    return np.ascontiguousarray(packed) ^ np.uint8(_NIBBLE << 4 | _NIBBLE)


def with_state(model: openvino.Model) -> openvino.Model:
    """Keys and values that came in and went out become variables; `beam_idx` [B] int32 is a new input."""
    ov = library()
    from openvino import opset13 as ops

    given = {node.get_friendly_name(): node for node in model.get_parameters()}
    results = {result.input_value(0).get_any_name(): result for result in model.get_results()}

    def whole(*numbers: int) -> Any:
        return ops.constant(np.array(numbers, np.int64))

    beams = ops.parameter([-1], ov.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    rows = ops.constant(np.int64(0))
    batch = ops.gather(ops.shape_of(given["input_ids"], "i64"), whole(0), rows)
    sinks = []
    for name in [name for name in given if name.startswith(PAST)]:
        past, present = given.pop(name), results.pop(name.replace(PAST, PRESENT))
        shape = past.get_partial_shape()
        empty = ops.broadcast(
            ops.constant(np.float32(0)), ops.concat([batch, whole(shape[1].get_length(), 0, shape[3].get_length())], 0)
        )
        kept = ops.read_value(empty, name, ov.Type.f32, shape)
        past.output(0).replace(ops.gather(kept, beams, rows).output(0))
        sinks.append(ops.assign(present.input_value(0).get_node(), name))
    return ov.Model(list(results.values()), sinks, [*given.values(), beams], "model")


def signed(graph: Path, folder: Path) -> Path:
    """A graph whose weights in bytes from 0, around 128, are the same codes around 0.

    OpenVINO 2026.4 multiplies signed weights in integers, and expands others to floats. On processors without VNNI it
    adds two products up in 16 bits: weights that `unsaturated` has bounded fit, others may not, which the check of the
    outputs finds (seen on AVX2).

    Raises:
        InputError: `openvino-operator`, products by scales taken as the model runs: it expands their codes to floats.
    """
    import onnx

    model = onnx.load(str(graph))
    if any(node.op_type == "MatMulIntegerToFloat" for node in model.graph.node):
        raise InputError(
            "openvino-operator",
            where=graph.name,
            value="MatMulIntegerToFloat",
            rule="OpenVINO multiplies integers by fixed scales, and expands these codes to floats",
            remedy="--recipe int8-network; this graph runs in ONNX Runtime as it is",
        )
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, tensor in stored.items():
        codes = onnx.numpy_helper.to_array(tensor)
        zero = stored.get(f"{name.removesuffix(CODES)}{ZERO}")
        if not name.endswith(CODES) or codes.dtype != np.uint8 or zero is None:
            continue
        points = onnx.numpy_helper.to_array(zero)
        if (points == _MIDDLE).all():
            tensor.CopyFrom(onnx.numpy_helper.from_array(around_zero(codes), name))
            zero.CopyFrom(onnx.numpy_helper.from_array(around_zero(points), zero.name))
    found = folder / graph.name
    onnx.save(model, str(found))
    return found


def around_zero(codes: Any) -> Any:
    """Bytes around 128 as int8 around 0; others as they are."""
    return (codes.astype(np.int16) - _MIDDLE).astype(np.int8) if codes.dtype == np.uint8 else codes


def fixed(model: openvino.Model, shape: tuple[int, ...]) -> None:
    """Make every input one of so many sequences and tokens, or of so many samples."""
    model.reshape({value.any_name: [*shape, *list(value.partial_shape)[len(shape) :]] for value in model.inputs})


def without_pairs(model: openvino.Model) -> None:
    """Take out what rounds inputs of products, so that they multiply floats: FakeQuantize, to codes and back."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "FakeQuantize" or node.input_value(0).get_node().get_type_name() == "Constant":
            continue
        last = node
        while last.get_type_name() != "Multiply":
            (reader,) = last.output(0).get_target_inputs()
            last = reader.get_node()
        last.output(0).replace(node.input_value(0))


def write(model: openvino.Model, path: Path, notes: Mapping[str, Any]) -> None:
    """Write a model and its weights beside it, numbers as they are. Raises Stopped: `disk-full`."""
    for key, value in notes.items():
        model.set_rt_info(str(value), ["quantkit", key.removeprefix("quantkit.")])
    for number, node in enumerate(model.get_ordered_ops()):
        # by itself it counts all nodes that the process has made so far: a file would never be the same again
        if re.fullmatch(rf"{node.get_type_name()}_\d+", node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
    with stopping_when_full(path.parent):
        library().save_model(model, path, compress_to_fp16=False)


def constants(model: openvino.Model) -> Iterator[tuple[str, str, Any]]:
    """(name, element type, the bytes as they are stored) of every constant."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant":
            yield node.get_friendly_name(), node.get_element_type().get_type_name(), node.data


# --- the dialect ------------------------------------------------------------------------------------------------------
# What OpenVINO's reader of ONNX makes compressed products and fused attention of.
#
#     Linear      MatMulNBits, which the reader takes apart into Constant (u4, u8), Convert, Subtract, Multiply, MatMul:
#                 the pattern whose weight its plug-ins keep packed; codes of 4 bits without zero points become i4
#                 afterwards, without the Subtract. With quantized inputs a pair before MatMul, and a weight of int8
#                 under DequantizeLinear
#     Attention   Attention-23, which becomes ScaledDotProductAttention; spelled out where scores are capped. Keys that
#                 several queries share are repeated: the form in which its plug-ins know them
#     RMSNorm     RMSNormalization
#
# The cache grows, and becomes a state of the model afterwards.

MICROSOFT = "com.microsoft"
OPSET = 23


@dataclass
class OpenvinoDialect(PlainOperators):
    """The rewriting of one graph."""

    def __post_init__(self) -> None:
        self.cache = "grown"

    def apply(self) -> ir.Model:
        """Rewrite everything; no placeholder is left."""
        self._parameters()
        self._attention()
        self._norms()
        self._products()
        model = self._finish()
        self.graph.opset_imports.update({"": OPSET, MICROSOFT: 1})
        model.ir_version = 10
        return model

    def _attended(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], scale: float) -> ir.Value:
        query, key, value, bias = inputs
        key, value = self._repeated(node, f"{name}/keys", key), self._repeated(node, f"{name}/values", value)
        return super()._attended(node, name, [query, key, value, bias], scale)

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> None:
        pairs: dict[tuple[ir.Value, InputCodes], ir.Value] = {}
        for node in self._placeholders("Linear"):
            name, source = node.attributes["name"].as_string(), node.inputs[0]
            linear = self.weights.linears[name]
            assert source is not None
            if linear.scheme is None:
                made = self._float(node, source, name, linear)
            elif linear.input is None:
                made = self._compressed(node, source, name)
            else:
                key = (source, linear.input)
                if key not in pairs:
                    pairs[key] = self._pair(node, source, f"{name}/input", linear.input)
                made = self._node(node, "MatMul", [pairs[key], self._bytes(node, name)], [f"{name}/output"])
            self._replace(node, made)

    def _float(self, node: ir.Node, source: ir.Value, name: str, linear: LinearSpec) -> list[ir.Value]:
        if linear.shared is None:
            return self._node(node, "MatMul", [source, self._turned(name, [name])], [f"{name}/output"])
        (turned,) = self._node(node, "Transpose", [self._tied(linear)], [f"{name}.turned"], perm=[1, 0])
        return self._node(node, "MatMul", [source, turned], [f"{name}/output"])

    def _compressed(self, node: ir.Node, source: ir.Value, name: str) -> list[ir.Value]:
        packed = packed_weights(self.weights, name)
        rows, count = self.weights.linears[name].rows, -(-packed.columns // packed.block)
        values = [
            self._new(f"{name}.codes", (rows, count, packed.block * packed.bits // 8), np.uint8, packed.codes),
            self._new(f"{name}.scales", (rows, count), np.float32, packed.scales),
        ]
        scheme = self.weights.linears[name].scheme
        if scheme is not None and not scheme.symmetric:
            shape = (rows, -(-count * packed.bits // 8))
            values.append(self._new(f"{name}.zeros", shape, np.uint8, packed.zeros))
        how: dict[str, Any] = {"K": packed.columns, "N": rows, "bits": packed.bits, "block_size": packed.block}
        return self._node(node, "MatMulNBits", [source, *values], [f"{name}/output"], MICROSOFT, **how)

    def _bytes(self, node: ir.Node, name: str) -> ir.Value:
        """int8 codes [K, N] and a scale a channel, dequantized."""
        linear = self.weights.linears[name]
        codes = self._new(
            f"{name}.codes", (linear.columns, linear.rows), np.int8, lambda: self.weights.codes(name).astype(np.int8).T
        )
        scale = self._new(f"{name}.scales", (linear.rows,), np.float32, lambda: channel_scales(self.weights, name))
        return self._node(node, "DequantizeLinear", [codes, scale], [f"{name}.values"], axis=1)[0]

    def _pair(self, before: ir.Node, source: ir.Value, name: str, how: InputCodes) -> ir.Value:
        assert how.scale is not None
        if how.moved:
            shift, reach = (np.asarray(each, np.float32) for each in how.moved)
            if shift.any():
                by = self._constant(f"{name}.shift", shift, self.floats)
                (source,) = self._node(before, "Sub", [source, by], [f"{name}.shifted"])
            even = self._constant(f"{name}.channels", 1 / reach, self.floats)
            (source,) = self._node(before, "Mul", [source, even], [f"{name}.even"])
        grid = [
            self._constant(f"{name}.scale", how.scale, self.floats),
            self._constant(f"zero/{how.zero}", how.zero, np.int8),
        ]
        (codes,) = self._node(before, "QuantizeLinear", [source, *grid], [f"{name}.codes"])
        return self._node(before, "DequantizeLinear", [codes, *grid], [f"{name}.values"])[0]


def packed_weights(weights: Any, name: str) -> PackedWeights:
    """The codes of one linear as they are stored: a group is a block, a whole row is one where there are none."""
    linear = weights.linears[name]
    return PackedWeights(
        weights,
        (name,),
        load_format(linear.scheme.format).bits,
        block_size(linear.columns, linear.scheme, name),
        linear.columns,
    )


def channel_scales(weights: Any, name: str) -> Any:
    """A scale for each of a linear's outputs, float32 [N]."""
    scale, _ = weights.grid(name)
    return np.broadcast_to(scale.reshape(-1), (weights.linears[name].rows,))
