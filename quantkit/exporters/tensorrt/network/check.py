"""Does the network that TensorRT will build compute what was decided on? Found out on a CPU.

    max |logits - expected| / max |expected| <= 2^-6        (16-bit arithmetic; 2^-3 in bfloat16)

in ONNX Runtime, products in floats, or where that does not have a type (FP4, bfloat16) in onnx's reference evaluator.
What is compared: `exporters/check.py`. Codes that are off by one would hide below such a limit: so every weight is read
back from the file as well and held against what was decided (`network.weights`, to the rounding of its scale).

Where inputs are quantized, or the cache, a value on the edge of a code goes either way, and one step of int8 is far
more than 2^-6: logits are compared without the pairs, and the pairs by their scales and types (`network.pairs`).
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
from quantkit.exporters.check import counted, judged, worst
from quantkit.exporters.onnx.check import sound
from quantkit.exporters.tensorrt.network.weights import TYPES
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.graph.run import told

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]
LIMITS = {"float16": 2.0**-6, "bfloat16": 2.0**-3}
# what scales in 16 bits may be off by
_SCALES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
# of past keys: the cache that is quantized itself; its values depend on rounding as inputs do
_CACHE = "past_key_values."


def check(network: Path, values: Values) -> list[Check]:
    """All checks of a network, in `engine/` of a bundle.

    Raises:
        InputError: `network-unrunnable`, `float16-overflow`.
    """
    import onnx_ir as ir

    found = sound(network.parent, network.name)
    if not all(each.ok for each in found):
        return found
    model = ir.load(network)
    kind = str(model.metadata_props.get("quantkit.type", "float16"))
    found.append(_weights(model, values, _SCALES[kind]))
    if values.inputs or values.run_time.cache is not None:
        found.append(_pairs(model, values, _SCALES[kind]))
    error, where = worst(RunningNetwork(in_floats(model), network.parent), values)
    return [*found, judged("network.logits", error, LIMITS[kind], where)]


# --- weights ----------------------------------------------------------------------------------------------------------


def _weights(model: ir.Model, values: Values, limit: float) -> Check:
    """The largest difference of a weight in the file from the one that was decided on, in its largest values."""
    most, where = 0.0, ""
    for name in values.schemes:
        tensor = values.quantized(name)
        dense = load_format(tensor.scheme.format).dequantize(tensor).float().numpy()
        found = read_back(model, name, tensor.scheme.format)
        if found is None or found.shape != dense.shape:
            return judged("network.weights", None, limit, name)
        apart = float((np.abs(found - dense) / (np.abs(dense).max(axis=1, keepdims=True) + 1e-30)).max(initial=0))
        if not apart <= most:
            most, where = apart, name
    return judged("network.weights", most, limit, where)


def read_back(model: ir.Model, name: str, form: str) -> Array | None:
    """A weight as the file has it, [N, K] float32, by the words of ONNX's DequantizeLinear; None where it is not there.

    Args:
        name: of the weight; its parts are `NAME.codes`, `NAME.scale` and `NAME.whole`, of a scale that is quantized.
        form: format; of NF4 the codes are places in the `codebook`.
    """
    codes, scale, whole = (constant(model, f"{name}.{part}") for part in ("codes", "scale", "whole"))
    book = constant(model, "codebook") if form == "nf4" else None
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


def constant(model: ir.Model, name: str) -> Array | None:
    """A stored value in float32; None where there is none of that name."""
    value = model.graph.initializers.get(name)
    return None if value is None or value.const_value is None else value.const_value.numpy().astype(np.float32)


def _pairs(model: ir.Model, values: Values, limit: float) -> Check:
    """How many products, keys and values that are to be quantized have another pair, or none.

    A pair has the scale that was decided on, to `limit` of it, no zero point, and the type of its format.
    """
    producers = {str(node.outputs[0].name): node for node in model.graph}
    wrong = []
    for name, given in values.inputs.items():
        product = producers.get(f"{name}/output") or next(
            node for node in model.graph if node.op_type == "MatMul" and _reads(node, f"{name}.codes", producers)
        )
        read = product.inputs[0].producer() if product.inputs[0] is not None else None
        made = read.inputs[0].producer() if read is not None and read.inputs[0] is not None else None
        if given.scale is None or not _is_pair(made, read, given.scale, given.scheme.format, limit):
            wrong.append(name)
    cache = values.run_time.cache
    for layer, found in values.run_time.cache_scales.items() if cache is not None else ():
        for word, own in zip(("key", "value"), found, strict=True):
            name, scale = f"attention.{layer}/{word}", float(own.scale.float().reshape(-1)[0])
            made, read = producers.get(f"{name}/quantized"), producers.get(f"{name}/read")
            if cache is None or not _is_pair(made, read, scale, cache.format, limit):
                wrong.append(name)
    return counted("network.pairs", wrong)


def _is_pair(quantize: ir.Node | None, dequantize: ir.Node | None, scale: float, form: str, limit: float) -> bool:
    for node, operator in ((quantize, "QuantizeLinear"), (dequantize, "DequantizeLinear")):
        if node is None or node.op_type != operator:
            return False
        held, zero = (
            None if each is None or each.const_value is None else each.const_value for each in node.inputs[1:]
        )
        if held is None or zero is None or not abs(float(held.numpy()) - scale) <= limit * scale:
            return False
        if zero.numpy().dtype != TYPES[form] or zero.numpy().any():
            return False
    return True


def _reads(node: ir.Node, name: str, producers: Mapping[str, ir.Node]) -> bool:
    weight = node.inputs[1]
    while weight is not None and (made := weight.producer()) is not None:
        if made.inputs[0] is not None and made.inputs[0].name == name:
            return True
        weight = made.inputs[0]
    return False


# --- numbers ----------------------------------------------------------------------------------------------------------


def computed(model: ir.Model) -> list[str]:
    """Names of all that is computed in float16; weights, and what is made of them alone, are left out."""
    import onnx_ir as ir

    fixed = set(model.graph.initializers.values())
    found = []
    for node in model.graph:
        if all(value is None or value in fixed for value in node.inputs) and node.op_type != "Shape":
            fixed |= set(node.outputs)
        else:
            found += [str(value.name) for value in node.outputs if value.dtype == ir.DataType.FLOAT16]
    return found


def demand_finite(found: Mapping[str, Array], names: Iterable[str]) -> None:
    """Refuse a network that leaves float16's range. ONNX Runtime on a CPU computes in float32, and would not show it.

    Raises:
        InputError: `float16-overflow`, naming the first value.
    """
    for name in names:
        if not np.isfinite(found[name]).all():
            raise InputError(
                "float16-overflow",
                where=name,
                value="not finite in 16 bits",
                rule="float16 ends at 65,504",
                remedy="--set tensorrt.type=bfloat16, which language models and encoders have; a graph has none",
            )


def in_floats(model: ir.Model) -> ir.Model:
    """A copy whose inputs and cache are not quantized; its weights are, and stay where they are."""
    import onnx_ir as ir

    made = model.clone()
    floats = ir.DataType.BFLOAT16 if model.metadata_props.get("quantkit.type") == "bfloat16" else ir.DataType.FLOAT16
    for node in list(made.graph):
        source = node.inputs[0] if node.inputs else None
        if source is None or source.is_initializer():
            continue
        behind_weight = (producer := source.producer()) is not None and producer.op_type == "DequantizeLinear"
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and not behind_weight):
            ir.convenience.replace_all_uses_with(node.outputs[0], source, replace_graph_outputs=True)
            made.graph.remove(node, safe=True)
    for value in (*made.graph.inputs, *made.graph.outputs):
        if str(value.name).startswith((_CACHE, "present.")):
            value.type = ir.TensorType(floats)
    return made


@dataclass
class NetworkState:
    """A cache, and the mask [B, tokens so far] of what is in it."""

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
        self.decoder = any(name.startswith(_CACHE) for name in self.inputs)
        self._run = _session(model, folder)

    def state(self, batch: int, capacity: int) -> NetworkState:
        """An empty cache; one that is written in place has the network's capacity."""
        caches = {}
        for name, value in self.inputs.items():
            if name.startswith(_CACHE):
                assert value.shape is not None and value.dtype is not None
                sizes = [batch, *(each if isinstance(each, int) else 0 for each in list(value.shape)[1:])]
                caches[name] = np.zeros(sizes, value.dtype.numpy())
        return NetworkState(caches, np.zeros((batch, 0), np.int64))

    def run(self, state: NetworkState, ids: Array, mask: Array | None = None) -> Array:
        """Logits of new tokens [B, S], float32; `mask` has zeros where they are padding."""
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
        found = self(feed)
        state.caches = {name: found[name.replace("past_key_values", "present")] for name in state.caches}
        return found["logits"].astype(np.float32)

    def logits(self, ids: Array, mask: Array | None = None) -> Array:
        """See `RunningExport`: an engine has no head of an encoder's class."""
        return self.encode(ids, mask)

    def encode(self, ids: Array, mask: Array | None = None) -> Array:
        """An encoder's last hidden states for ids [B, S], float32."""
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
        if "token_type_ids" in self.inputs:
            feed["token_type_ids"] = np.zeros_like(ids)
        return self(feed)["last_hidden_state"].astype(np.float32)

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Output -> values. Raises InputError `float16-overflow`, `network-unrunnable`."""
        try:
            given = self._run(dict(feed))
        except Exception as problem:
            raise _unrunnable(problem) from None
        found = dict(zip([*self.outputs, *self.inner], given, strict=True))
        demand_finite(found, self.inner)
        return {name: found[name] for name in self.outputs}


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
        evaluator = ReferenceEvaluator(proto)
        return lambda feed: evaluator.run(None, feed)
    return lambda feed: session.run(None, feed)


def _unrunnable(problem: Exception) -> InputError:
    node, reason = told(problem)
    product = re.search(r" (.+?)(?:/output|\.values|/input\.\w+)$", node)
    return InputError(
        "network-unrunnable",
        where=node or "the network",
        value=reason,
        rule="a network runs on the CPU before TensorRT gets it",
        remedy=f"--set 'keep=[{product[1]}]' leaves it in floats" if product else "please report it, with the recipe",
    )
