"""Check on a CPU that TensorRT's network computes the expected values.

    max |outputs - expected| / max |expected| <= 2^-6        (16-bit arithmetic; 2^-3 in bfloat16)

The outputs are logits (`exporters/check.py`), or those of the float graph with dequantized weights. The network runs in
ONNX Runtime with products in floats, or in onnx's reference evaluator for types that ONNX Runtime does not have (FP4,
bfloat16). Codes that are off by one could hide below this limit. So every weight is also read back and compared with
the bundle's (`network.weights`): up to the rounding of its scale for a transformer; exactly for a graph, whose scales
are 16-bit numbers.

A quantized input or cache may round a value at the edge between two codes either way, and one step of int8 is far more
than 2^-6. So outputs are compared without Q/DQ pairs, and the pairs by their scales and types (`network.pairs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.exporters.check import counted, difference, judged, largest, worst
from quantkit.exporters.onnx.check import sound
from quantkit.exporters.tensorrt.dialect import TYPES
from quantkit.exporters.trace.rewrite import CACHES, is_producer
from quantkit.exporters.values import Values
from quantkit.graph.outputs import steady
from quantkit.graph.run import Feed, Runner, told
from quantkit.graph.values import initializer, name_apart, parts_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.exporters.tensorrt.graph import NetworkProduct

Array = NDArray[Any]
LIMITS = {"float16": 2.0**-6, "bfloat16": 2.0**-3}
# allowed relative error of scales in 16 bits
_SCALES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def check(network: Path, values: Values) -> list[Check]:
    """Check a transformer's network, in `engine/` of a bundle.

    Raises InputError: `network-unrunnable`, `float16-overflow`.
    """
    import onnx_ir as ir

    checks = sound(network.parent, network.name)
    if not all(check.ok for check in checks):
        return checks
    model = ir.load(network)
    kind = str(model.metadata_props.get("quantkit.type", "float16"))
    checks.append(_weights(model, values, _SCALES[kind]))
    if values.inputs or values.run_time.cache is not None:
        checks.append(_pairs(model, values, _SCALES[kind]))
    error, where = worst(RunningNetwork(in_floats(model), network.parent), values)
    return [*checks, judged("network.logits", error, LIMITS[kind], where)]


def check_graph(
    network: Path,
    model: ir.Model,
    products: Mapping[str, NetworkProduct],
    pairs: Mapping[str, float],
    kind: str,
    feed: Feed,
) -> list[Check]:
    """Check a graph's network.

    Args:
        network: file of the network.
        model: float graph that the network was made from.
        products, pairs, kind: arguments of `graph.network`.
        feed: a few real inputs.

    Raises InputError: `onnx-unrunnable`, `float16-overflow`.
    """
    import onnx_ir as ir

    checks = sound(network.parent, network.name)
    if not all(check.ok for check in checks):
        return checks
    stored = ir.load(network)
    wrong = []
    for name, product in products.items():
        weight = read_back(stored, product.site.stem, product.weight.scheme.format)
        if weight is None or not np.array_equal(weight, product.dense()):
            wrong.append(name)
    checks.append(counted("network.weights", wrong))
    checks.append(_graph_pairs(stored, products, pairs, kind))
    error, where = _outputs(stored, model, products, feed)
    return [*checks, judged("network.outputs", error, LIMITS["float16"], where)]


# --- weights ----------------------------------------------------------------------------------------------------------


def _weights(model: ir.Model, values: Values, limit: float) -> Check:
    """Check the largest difference of a weight in the file from the expected one, relative to its largest values."""
    most, where = 0.0, ""
    for name in values.schemes:
        tensor = values.quantized(name)
        dense = tensor.dense().float().numpy()
        weight = read_back(model, name, tensor.scheme.format)
        if weight is None or weight.shape != dense.shape:
            return judged("network.weights", None, limit, name)
        apart = float((np.abs(weight - dense) / (np.abs(dense).max(axis=1, keepdims=True) + 1e-30)).max(initial=0))
        if not apart <= most:
            most, where = apart, name
    return judged("network.weights", most, limit, where)


def read_back(model: ir.Model, name: str, form: str) -> Array | None:
    """Read a weight of the file, [N, K] float32, as ONNX's DequantizeLinear defines it; None if it is missing.

    Args:
        model: network.
        name: name of the weight; its parts are `NAME.codes`, `NAME.scale` and, for a quantized scale, `NAME.whole`.
        form: format; NF4's codes are indices into the `codebook`.
    """
    codes, scale, whole = (_constant(model, f"{name}.{part}") for part in ("codes", "scale", "whole"))
    book = _constant(model, "codebook") if form == "nf4" else None
    if codes is None or scale is None:
        return None
    if book is not None:
        codes = book[codes.astype(np.int64) + 8]
    if whole is not None:
        scale = scale * whole
    if codes.ndim > 2:  # of a convolution: [O, I/g, ...]
        return np.asarray(codes * scale.reshape(-1, *[1] * (codes.ndim - 1))).reshape(codes.shape[0], -1)
    if scale.ndim == 2:
        scale = np.repeat(scale, -(-codes.shape[0] // scale.shape[0]), axis=0)[: codes.shape[0]]
    return np.asarray(codes * scale).T


def _constant(model: ir.Model, name: str) -> Array | None:
    """Return a stored value in float32; None if there is none of this name."""
    value = model.graph.initializers.get(name)
    return None if value is None or value.const_value is None else value.const_value.numpy().astype(np.float32)


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(model: ir.Model, values: Values, limit: float) -> Check:
    """Count the products, keys and values with a wrong pair, or without one.

    A right pair has the bundle's scale, up to a relative error of `limit`, no zero point, and the type of its format.
    """
    producers = {str(node.outputs[0].name): node for node in model.graph}
    wrong = []
    for name, how in values.inputs.items():
        product = producers.get(f"{name}/output") or next(
            node for node in model.graph if node.op_type == "MatMul" and _reads(node, f"{name}.codes")
        )
        read = product.inputs[0].producer() if product.inputs[0] is not None else None
        quantize = read.inputs[0].producer() if read is not None and read.inputs[0] is not None else None
        if how.scale is None or not _is_pair(quantize, read, how.scale, how.scheme.format, limit):
            wrong.append(name)
    cache = values.run_time.cache
    for layer, scales in values.run_time.cache_scales.items() if cache is not None else ():
        for word, own in zip(("key", "value"), scales, strict=True):
            name, scale = f"attention.{layer}/{word}", float(own.scale.float().reshape(-1)[0])
            quantize, read = producers.get(f"{name}/quantized"), producers.get(f"{name}/read")
            if cache is None or not _is_pair(quantize, read, scale, cache.format, limit):
                wrong.append(name)
    return counted("network.pairs", wrong)


def _is_pair(quantize: ir.Node | None, dequantize: ir.Node | None, scale: float, form: str, limit: float) -> bool:
    sides = ((quantize, "QuantizeLinear"), (dequantize, "DequantizeLinear"))
    return all(node is not None and node.op_type == kind and _on(node, scale, form, limit) for node, kind in sides)


def _on(node: ir.Node, scale: float, form: str, limit: float) -> bool:
    """Tell whether a node has this scale, to `limit` of it, and a zero point of 0 in the type of a format."""
    held, zero = (None if value is None else value.const_value for value in node.inputs[1:])
    if held is None or zero is None or not abs(float(held.numpy().astype(np.float32)) - scale) <= limit * scale:
        return False
    return bool(zero.numpy().dtype == TYPES[form] and not zero.numpy().any())


def _reads(node: ir.Node, name: str) -> bool:
    weight = node.inputs[1]
    while weight is not None and (maker := weight.producer()) is not None:
        weight = maker.inputs[0]
        if weight is not None and weight.name == name:
            return True
    return False


def _graph_pairs(
    stored: ir.Model, products: Mapping[str, NetworkProduct], pairs: Mapping[str, float], kind: str
) -> Check:
    """Count the pairs with a wrong scale or type, and the products without one."""
    quantizers = {
        name: node for node in stored.graph if node.op_type == "QuantizeLinear" for name in _sources(node.inputs[0])
    }
    wrong = [
        name
        for name, scale in pairs.items()
        if (node := quantizers.get(name)) is None or not _on(node, scale, kind, limit=0.0)
    ]
    for name, product in products.items() if pairs else ():
        read = {value.producer() for value in _readers(stored, f"{product.site.stem}.values")}
        pair = quantizers.get(product.site.input)
        if pair is None or not read & {reader for reader, _ in pair.outputs[0].uses()}:
            wrong.append(name)
    return counted("network.pairs", wrong)


def _sources(value: ir.Value | None) -> list[str]:
    """Return a value's names in the float graph: inputs, outputs and float32 values are cast in this one."""
    if value is None:
        return []
    cast = is_producer(value, "Cast")
    before = cast.inputs[0] if cast is not None else None
    ends = [before] if before is not None and f"{value.name}".startswith(f"{before.name}.half") else []
    behind = [node.outputs[0] for node, _ in value.uses() if node.op_type == "Cast"]
    ends += [output for output in behind if output.is_graph_output()]
    return [str(end.name) for end in (value, *ends)]


def _readers(stored: ir.Model, weight: str) -> list[ir.Value]:
    """Return the inputs of a weight's products."""
    for node in stored.graph:
        if any(value is not None and value.name == weight for value in node.inputs):
            return [value for value in node.inputs if value is not None]
    return []


# --- numbers ----------------------------------------------------------------------------------------------------------


def computed(model: ir.Model) -> list[str]:
    """Name all values computed in float16, except weights and values computed from weights alone."""
    import onnx_ir as ir

    fixed = set(model.graph.initializers.values())
    names = []
    for node in model.graph:
        if all(value is None or value in fixed for value in node.inputs) and node.op_type != "Shape":
            fixed |= set(node.outputs)
        else:
            names += [str(value.name) for value in node.outputs if value.dtype == ir.DataType.FLOAT16]
    return names


def demand_finite(values: Mapping[str, Array], names: Iterable[str]) -> None:
    """Refuse values beyond float16's range. ONNX Runtime on a CPU computes in float32, and would not show them.

    Raises InputError: `float16-overflow`, naming the first value.
    """
    for name in names:
        if not np.isfinite(values[name]).all():
            remedy = "--set tensorrt.type=bfloat16 (for language models and encoders only)"
            raise InputError("float16-overflow", name, "not finite in 16 bits", "float16 ends at 65,504", remedy)


def in_floats(model: ir.Model) -> ir.Model:
    """Copy a network without pairs around inputs and cache; weights stay quantized, and where they are."""
    import onnx_ir as ir

    plain = model.clone()
    floats = ir.DataType.BFLOAT16 if model.metadata_props.get("quantkit.type") == "bfloat16" else ir.DataType.FLOAT16
    for node in list(plain.graph):
        source = node.inputs[0] if node.inputs else None
        if source is None or source.is_initializer():
            continue
        behind_weight = is_producer(source, "DequantizeLinear") is not None
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and not behind_weight):
            ir.convenience.replace_all_uses_with(node.outputs[0], source, replace_graph_outputs=True)
            plain.graph.remove(node, safe=True)
    for value in (*plain.graph.inputs, *plain.graph.outputs):
        if str(value.name).startswith(CACHES):
            value.type = ir.TensorType(floats)
    return plain


@dataclass
class NetworkState:
    """A cache, and the mask [B, tokens so far] of its content."""

    caches: dict[str, Array]
    mask: Array


class RunningNetwork:
    """A network in ONNX Runtime, or in onnx's reference evaluator where that has no kernel."""

    headed = False

    def __init__(self, model: ir.Model, folder: Path) -> None:
        self.outputs = [str(value.name) for value in model.graph.outputs]
        self.inner = [name for name in computed(model) if name not in self.outputs]
        values = {str(value.name): value for node in model.graph for value in node.outputs}
        model.graph.outputs.extend(values[name] for name in self.inner)
        self.inputs = {str(value.name): value for value in model.graph.inputs}
        self.decoder = any(name.startswith(CACHES) for name in self.inputs)
        self._run = _session(model, folder)

    def state(self, batch: int, capacity: int) -> NetworkState:
        """Make an empty cache; one that is written in place has the network's capacity."""
        caches = {}
        for name, value in self.inputs.items():
            if name.startswith(CACHES):
                assert value.shape is not None and value.dtype is not None
                sizes = [batch, *(size if isinstance(size, int) else 0 for size in list(value.shape)[1:])]
                caches[name] = np.zeros(sizes, value.dtype.numpy())
        return NetworkState(caches, np.zeros((batch, 0), np.int64))

    def run(self, state: NetworkState, ids: Array, mask: Array | None = None) -> Array:
        """Return logits of new tokens [B, S], float32; `mask` has zeros where they are padding."""
        (rows, new), start = ids.shape, state.mask.shape[1]
        state.mask = seen = np.concatenate([state.mask, np.ones_like(ids) if mask is None else mask], axis=1)
        positions = np.maximum(seen.cumsum(axis=1) - 1, 0)[:, start : start + new]
        feed = {**state.caches, "input_ids": ids, "position_ids": positions, "attention_mask": seen}
        if "logits_to_keep" in self.inputs:
            feed["logits_to_keep"] = np.zeros(1, np.int64)
        if "write_indices" in self.inputs:
            shape = self.inputs["attention_mask"].shape
            assert shape is not None
            feed["attention_mask"] = np.pad(seen, ((0, 0), (0, int(shape[1]) - seen.shape[1])))  # type: ignore[arg-type]
            feed["write_indices"] = np.full(rows, start, np.int64)
        outputs = self(feed)
        past, present = CACHES
        state.caches = {name: outputs[name.replace(past, present)] for name in state.caches}
        return outputs["logits"].astype(np.float32)

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """Raise as `RunningExport.logits`: an engine has no head of an encoder's class."""
        return self.encode(ids, mask)

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """Return an encoder's last hidden states for ids [B, S], float32."""
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        if "token_type_ids" in self.inputs:
            feed["token_type_ids"] = np.zeros_like(ids)
        return self(feed)["last_hidden_state"].astype(np.float32)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run: output -> values. Raises InputError `float16-overflow`, `network-unrunnable`."""
        try:
            values = self._run(dict(feed))
        except Exception as problem:
            raise _unrunnable(problem) from None
        named = dict(zip([*self.outputs, *self.inner], values, strict=True))
        demand_finite(named, self.inner)
        return {name: named[name] for name in self.outputs}


def _session(model: ir.Model, folder: Path) -> Any:
    import onnx_ir as ir
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    proto = ir.to_proto(model)
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as problem:  # ONNX Runtime raises types of its own for each status
        if "NOT_IMPLEMENTED" not in str(problem):
            raise _unrunnable(problem) from None
        from onnx.external_data_helper import load_external_data_for_model
        from onnx.reference import ReferenceEvaluator

        load_external_data_for_model(proto, str(folder))
        session = ReferenceEvaluator(proto)
    return lambda feed: session.run(None, feed)


def _unrunnable(problem: Exception) -> InputError:
    node, reason = told(problem)
    product = re.search(r" (.+?)(?:/output|\.values|/input\.\w+)$", node)
    return InputError(
        "network-unrunnable",
        where=node or "the network",
        value=reason,
        rule="the network must run on the CPU before TensorRT builds it",
        remedy=f"--set 'keep=[{product[1]}]' leaves it in floats" if product else "please report it, with the recipe",
    )


def _outputs(
    stored: ir.Model, model: ir.Model, products: Mapping[str, NetworkProduct], feed: Feed
) -> tuple[float | None, str]:
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    ir.external_data.load_to_model(stored)
    plain = in_floats(stored)
    ShapeInferencePass()(plain)  # for the types of what is computed
    inner = computed(plain)
    values, own = Runner(plain, inner, literal=True)(feed), decided_graph(model, products)
    # choosing one more row is no fault: the values that decide are compared, if the network has them
    by = [name for name in steady(own) if name in values] or list(values)
    expected = {name: value for name, value in Runner(own, steady(own))(feed).items() if name in by}
    demand_finite(values, inner)
    errors = {
        name: difference(values[name].astype(np.float64), wanted)
        for name, wanted in expected.items()
        if wanted.dtype.kind == "f"
    }
    error, where = largest(errors) if errors else (0.0, "")
    return error, where if error is not None else f"{where} in 16 bits"


def decided_graph(model: ir.Model, products: Mapping[str, NetworkProduct]) -> ir.Model:
    """Copy the float graph with the expected weights and biases."""
    copied = model.clone()
    known = parts_of(copied.graph)
    nodes = {str(node.outputs[0].name): node for node in copied.graph if node.outputs}
    for product in products.values():
        node, site = nodes[product.site.output], product.site
        parts = {1: site.shaped(product.dense())}
        if product.bias is not None:
            parts[2] = product.bias.astype(np.float32)
        for place, values in parts.items():
            if len(node.inputs) <= place:
                node.resize_inputs(place + 1)
            name = f"{site.output}.decided{place}"
            node.replace_input_with(place, initializer(copied.graph, values, name=name))
        if product.bias is not None and node.op_type == "Gemm":
            node.attributes.pop("beta", None)
    name_apart(copied.graph, known)
    return copied
