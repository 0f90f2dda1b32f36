"""Convert an ONNX graph to OpenVINO's own form, with the KV cache as a state, and check the written file.

A state is a variable of the model: the plug-in keeps keys and values, and a step gets only the new tokens. `beam_idx`
is the index in the state of the sequence that each row continues; the plug-ins recognise the cache by it
(src/plugins/intel_cpu/src/transformations/cpu_opset/common/pass/stateful_sdpa_fusion.cpp).

`openvino.codes` checks the file as OpenVINO reads it: every quantized weight is a constant of 4 or 8 bits, and its
codes, zero points and scales are those of the bundle.

`reload.openvino` checks max |outputs - expected| / max |expected| <= 1e-4 on the CPU, in float32 without rounding of
inputs (`exporters/check.py` chooses the runs). For that, Q/DQ pairs before quantized inputs are removed; their scales
are compared beside the codes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch

from quantkit.bundle import Check, stopping_when_full
from quantkit.errors import InputError
from quantkit.exporters.check import counted, difference, judged, reloaded
from quantkit.exporters.onnx.exporter import dialect_weights
from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName
from quantkit.exporters.trace.rewrite import CACHES, PlainOperators
from quantkit.exporters.values import Values
from quantkit.formats.base.activation import InputCodes
from quantkit.runtimes.openvino.open import MODEL, first_line, library, read
from quantkit.runtimes.openvino.session import OpenvinoGraph, OpenvinoModel

if TYPE_CHECKING:
    import openvino


PAST, PRESENT = CACHES
CODES, ZERO = ".weight.codes", ".weight.zero"
_MIDDLE, _NIBBLE = 128, 8


def converted(path: Path) -> openvino.Model:
    """Read an ONNX file by OpenVINO's frontend.

    Raises InputError: `openvino-operator` for an operator that OpenVINO does not read; MissingDependency: openvino.
    """
    try:
        return library().Core().read_model(str(path))
    except RuntimeError as problem:
        rule = f"OpenVINO {library().__version__} must support every operator of the graph"
        remedy = "leave `openvino` out of `export`; `onnx` runs as it is"
        raise InputError("openvino-operator", path.name, first_line(problem), rule, remedy) from None


def without_guards(model: openvino.Model) -> None:
    """Remove the frontend's guard after attention (zeros for fully masked rows): masks here are finite."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Select":
            continue
        seen, attention = node.input_value(0).get_node(), node.input_value(2)
        if seen.get_type_name() == "IsNaN" and attention.get_node().get_type_name() == "ScaledDotProductAttention":
            node.output(0).replace(attention)


def nibbles_around_zero(model: openvino.Model) -> None:
    """Convert 4-bit codes around 8 to `i4` codes around 0, so that no zero point is subtracted.

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
        # the frontend adds one zero point for all codes if a file has none
        if point.get_type_name() != "Constant" or int(np.prod(point.get_output_shape(0))) != 1:
            continue
        if int(point.data.reshape(-1)[0]) & 15 != _NIBBLE:
            continue
        # copied to OpenVINO's own memory: a constant would only refer to NumPy's
        around = ov.Tensor(ov.Type.i4, codes.get_output_shape(0))
        around.data.reshape(-1).view(np.uint8)[:] = nibbles_signed(codes.data.reshape(-1))
        stored = ov.op.Constant(around)
        stored.set_friendly_name(codes.get_friendly_name())
        wide.input(0).replace_source_output(stored.output(0))
        node.output(0).replace(wide.output(0))


def nibbles_signed(packed: Any) -> Any:
    """Convert two 4-bit codes a byte, around 8, to codes around 0."""
    return np.ascontiguousarray(packed) ^ np.uint8(_NIBBLE << 4 | _NIBBLE)


def with_state(model: openvino.Model) -> openvino.Model:
    """Make the inputs and outputs of keys and values variables; `beam_idx` [B] int32 is a new input."""
    ov = library()
    from openvino import opset13 as ops

    parameters = {node.get_friendly_name(): node for node in model.get_parameters()}
    results = {result.input_value(0).get_any_name(): result for result in model.get_results()}

    def whole(*numbers: int) -> Any:
        return ops.constant(np.array(numbers, np.int64))

    beams = ops.parameter([-1], ov.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    rows = ops.constant(np.int64(0))
    batch = ops.gather(ops.shape_of(parameters["input_ids"], "i64"), whole(0), rows)
    sinks = []
    for name in [name for name in parameters if name.startswith(PAST)]:
        past, present = parameters.pop(name), results.pop(name.replace(PAST, PRESENT))
        shape = past.get_partial_shape()
        sizes = ops.concat([batch, whole(shape[1].get_length(), 0, shape[3].get_length())], 0)
        kept = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), sizes), name, ov.Type.f32, shape)
        past.output(0).replace(ops.gather(kept, beams, rows).output(0))
        sinks.append(ops.assign(present.input_value(0).get_node(), name))
    return ov.Model(list(results.values()), sinks, [*parameters.values(), beams], "model")


def signed(graph: Path, folder: Path) -> Path:
    """Write a graph with its byte weights around 128 converted to codes around 0.

    OpenVINO 2026.4 multiplies signed weights in integers, and dequantizes others to floats. Without VNNI it adds two
    products in 16 bits: weights bounded by `unsaturated` never saturate; others may, which the check of the outputs
    finds (seen on AVX2).

    Raises:
        InputError: `openvino-operator` for products with dynamic scales, whose codes OpenVINO dequantizes to floats.
    """
    import onnx

    model = onnx.load(str(graph))
    if any(node.op_type == "MatMulIntegerToFloat" for node in model.graph.node):
        rule = "OpenVINO multiplies integers by fixed scales, and expands these codes to floats"
        remedy = "--recipe int8-network; this graph runs in ONNX Runtime as it is"
        raise InputError("openvino-operator", graph.name, "MatMulIntegerToFloat", rule, remedy)
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
    onnx.save(model, str(folder / graph.name))
    return folder / graph.name


def around_zero(codes: Any) -> Any:
    """Turn bytes around 128 into int8 around 0; others stay as they are."""
    return (codes.astype(np.int16) - _MIDDLE).astype(np.int8) if codes.dtype == np.uint8 else codes


def fixed(model: openvino.Model, shape: tuple[int, ...]) -> None:
    """Fix the shape of every input: sequences and tokens, or samples."""
    model.reshape({value.any_name: [*shape, *list(value.partial_shape)[len(shape) :]] for value in model.inputs})


def without_pairs(model: openvino.Model) -> None:
    """Remove the rounding of inputs (FakeQuantize), so that products multiply floats."""
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
        # OpenVINO's default names count all nodes of the process, so files would differ from run to run
        if re.fullmatch(rf"{node.get_type_name()}_\d+", node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
    with stopping_when_full(path.parent):
        library().save_model(model, path, compress_to_fp16=False)


def constants(model: openvino.Model) -> Iterator[tuple[str, str, Any]]:
    """List (name, element type, the bytes as they are stored) of every constant."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Constant":
            yield node.get_friendly_name(), node.get_element_type().get_type_name(), node.data


# --- the dialect ------------------------------------------------------------------------------------------------------
# ONNX operators that OpenVINO's frontend converts to products with packed weights and to fused attention.
#
#     Linear      MatMulNBits. The frontend converts it to Constant (u4, u8), Convert, Subtract, Multiply, MatMul; the
#                 plug-ins keep the weight of this pattern packed. 4-bit codes without zero points become i4
#                 afterwards, without the Subtract. With quantized inputs: a Q/DQ pair before MatMul, and an int8
#                 weight with DequantizeLinear
#     Attention   Attention-23, which becomes ScaledDotProductAttention; basic operators for soft-capped scores. Keys
#                 that several queries share are repeated, the form that the plug-ins recognise
#     RMSNorm     RMSNormalization
#
# The cache grows; it becomes a state of the model afterwards.

MICROSOFT = "com.microsoft"


@dataclass
class OpenvinoDialect(PlainOperators):
    """Rewrites one graph for OpenVINO."""

    opsets: ClassVar = {"": 23, MICROSOFT: 1}
    ir_version: ClassVar = 10

    def __post_init__(self) -> None:
        self.cache = "grown"

    def _attended(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], scale: float) -> ir.Value:
        query, key, value, bias = inputs
        key, value = self._repeated(node, f"{name}/keys", key), self._repeated(node, f"{name}/values", value)
        return super()._attended(node, name, [query, key, value, bias], scale)

    def _product(self, node: ir.Node, source: ir.Value, name: str, linear: LinearSpec) -> ir.Value:
        if linear.scheme is None or linear.input is not None:
            return super()._product(node, source, name, linear)
        packed = self.weights.packed(name)
        inputs = [source, *self._packed_tensors(packed, name)]
        how = {"K": packed.columns, "N": packed.rows, "bits": packed.bits, "block_size": packed.block}
        return self._node(node, "MatMulNBits", inputs, [f"{name}/output"], MICROSOFT, **how)[0]

    def _weight(self, before: ir.Node, name: str, linear: LinearSpec) -> ir.Value:
        """Add codes in bytes with a scale a channel, dequantized; floats stay floats."""
        if linear.scheme is None:
            return super()._weight(before, name, linear)
        weights, shape = self.weights, (linear.columns, linear.rows)
        codes = self._new(f"{name}.codes", shape, np.int8, lambda: weights.codes(name).astype(np.int8).T)
        scale = self._new(f"{name}.scales", shape[1:], np.float32, lambda: channel_scales(weights, name))
        return self._node(before, "DequantizeLinear", [codes, scale], [f"{name}.values"], axis=1)[0]

    def _zero(self, how: InputCodes) -> ir.Value:
        return self._constant(f"zero/{how.zero}", how.zero, np.int8)


def channel_scales(weights: WeightsByName, name: str) -> Any:
    """Return the scale of every output of a linear, float32 [N]."""
    scale, _ = weights.grid(name)
    return np.broadcast_to(scale.reshape(-1), (weights.linears[name].rows,))


LIMIT = 1e-4
# of graphs, as `reload.onnxruntime` of them: a value at the edge of two codes may fall to either
ROUNDED = 0.05


def check(folder: Path, values: Values) -> list[Check]:
    """Check everything; the numbers only if every code is right."""
    try:
        codes = counted("openvino.codes", wrong_codes(folder, values))
    except InputError as problem:
        return [counted("openvino.codes", [problem.line()])]
    if not codes.ok:
        return [codes]

    def load() -> OpenvinoModel:
        threads = torch.get_num_threads()
        return OpenvinoModel(folder, threads=threads, accuracy_level=0, device="CPU", change=without_pairs)

    # RuntimeError is what OpenVINO raises when a run fails
    return [codes, reloaded("reload.openvino", LIMIT, values, load, failures=(RuntimeError,))]


def wrong_codes(folder: Path, values: Values) -> list[str]:
    """List the constants with unexpected values. Raises InputError `openvino-unreadable`."""
    weights, wrong = dialect_weights(values), []
    stored = {name: (kind, data) for name, kind, data in constants(read(folder / MODEL))}
    for name, linear in weights.linears.items():
        if linear.scheme is None:
            continue
        wanted: dict[str, Any]
        if linear.input is None:
            packed = weights.packed(name)
            wanted = {part: read_part() for part, (_, _, read_part) in packed.tensors().items()}
            own_kind = f"u{packed.bits}"
            if linear.scheme.symmetric and packed.bits == 4:
                own_kind, wanted["codes"] = "i4", nibbles_signed(wanted["codes"])
        else:
            own_kind = "i8"
            wanted = {"codes": weights.codes(name).T, "scales": channel_scales(weights, name)}
        for part, expected in wanted.items():
            kind, data = stored.get(f"{name}.{part}", ("", None))
            if data is None or (part != "scales" and kind != own_kind) or not _same(data, expected):
                wrong.append(f"{name}.{part}")
        # linears of one input share its scale, which has the first one's name
        shared = f"{name}/input.scale"
        if linear.input is not None and shared in stored:
            wrong += [] if _same(stored[shared][1], np.float32(linear.input.scale)) else [shared]
    return wrong


def check_graph(graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
    """Check a graph's codes, and compare its outputs with ONNX Runtime's, which rounds the same values.

    For a graph that chooses rows (boxes), the values before the choice are compared: the number of rows may differ.
    """
    import onnx_ir as ir

    from quantkit.graph.outputs import steady
    from quantkit.graph.run import Runner, showing

    try:
        model = OpenvinoGraph(folder / MODEL, device="CPU")
        stored = {name: data for name, _, data in constants(read(folder / MODEL))}
    except InputError as problem:
        return [counted("openvino.codes", [problem.line()])]
    whole = ir.external_data.load_to_model(ir.load(graph))
    wanted = {
        name: around_zero(value.const_value.numpy())
        for name, value in whole.graph.initializers.items()
        if name.endswith(CODES) and value.const_value is not None
    }
    wrong = [name for name, values in wanted.items() if name not in stored or not _same(stored[name], values)]
    if wrong:
        return [counted("openvino.codes", wrong)]
    by, own = steady(whole), Runner(graph)
    if not set(by) <= set(own.names):
        with tempfile.TemporaryDirectory() as place:
            shown = Path(place) / graph.name
            ir.save(showing(whole, by), shown)
            own = Runner(shown)
            write(converted(signed(shown, shown.parent)), shown.parent / MODEL, {"kind": "network", "device": "CPU"})
            model = OpenvinoGraph(shown.parent / MODEL, device="CPU")
    expected, outputs = own(feed), model(feed)
    floats = {name: value for name, value in expected.items() if name in by and value.dtype.kind == "f" and value.size}
    errors = {name: difference(outputs[name], value) for name, value in floats.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [counted("openvino.codes", []), judged("reload.openvino", errors[worst], ROUNDED, worst)]


def _same(stored: Any, wanted: Any) -> bool:
    """Compare bit by bit, in any shape."""
    one, other = (np.ascontiguousarray(values).reshape(-1) for values in (stored, wanted))
    return bool(one.view(np.uint8).tobytes() == other.view(np.uint8).tobytes())
