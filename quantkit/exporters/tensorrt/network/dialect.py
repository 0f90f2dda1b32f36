"""The dialect of TensorRT: plain ONNX operators, strongly typed in 16 bits, quantization by Q/DQ alone.

    Linear      MatMul with a weight [K, N] under DequantizeLinear (`weights.py`); a pair before quantized inputs
                (and before that Sub and Mul by channel, where `passes/center.py` moved them)
    RMSNorm     RMSNormalization, computed in float32
    Attention   Attention-24 (TensorRT's IAttention) with an additive mask; spelled out where scores are capped, or
                heads too few for its kernels. Keys and values go into a cache

The cache is one of

    in_place    [batch, heads, capacity, size]; TensorScatter writes new tokens at `write_indices` [batch] (TensorRT's
                IKVCacheUpdateLayer): input and output are one buffer, and a CUDA graph of a step can be replayed
    grown       [batch, heads, tokens so far, size]; Concat: what other runtimes expect

and holds int8 or fp8_e4m3 where the recipe quantizes it: a pair around it. Positions are an input, so rows may be
padded on the left; the mask [batch, columns of the cache] has ones where tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporters.onnx.nbits import InputCodes
from quantkit.exporters.tensorrt.network.weights import TYPES, StoredTensors, stored
from quantkit.exporters.tensorrt.network.weights import codes as codes_of
from quantkit.exporters.trace.rewrite import Rewriting

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor

OPSET = 24
Cache = Literal["in_place", "grown"]
Floats = Literal["float16", "bfloat16"]
FLOATS: Mapping[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# TensorRT-RTX 1.7.1 has no kernel for one token of one sequence with fewer heads
_FEWEST = 3
# added to the scores of what is not to be seen; finite, since a row of padding sees nothing at all
_HIDDEN = {"float16": -60000.0, "bfloat16": -1e9}


@dataclass(frozen=True)
class CacheScales:
    """Of a quantized cache: its type, and for each layer the scale of keys and of values."""

    format: str
    scales: Mapping[int, tuple[float, float]]


@dataclass
class TensorrtDialect(Rewriting):
    """The rewriting of one graph.

    Args:
        quantized: linear -> its codes; with `codes=False` all else of it.
        type: what is computed in.
        cache: see the module.
        capacity: tokens that a cache `in_place` holds.
        stored_cache: how keys and values are stored; None in the graph's type.
    """

    quantized: Callable[..., QuantTensor]
    type: Floats = "float16"
    cache: Cache = "in_place"
    capacity: int = 2048
    stored_cache: CacheScales | None = None
    _masks: dict[int, ir.Value] = field(default_factory=dict, init=False)

    @property
    def floats(self) -> np.dtype[Any]:
        """numpy's type of what is computed in."""
        found: np.dtype[Any] = FLOATS[self.type]
        return found

    def apply(self) -> ir.Model:
        """Rewrite everything; no placeholder is left."""
        self._parameters()
        self._attention()
        self._norms()
        self._products()
        model = self._finish()
        self.graph.opset_imports[""] = OPSET
        model.ir_version = 11
        for node in self.graph:
            # the names by which an engine speaks of its layers
            node.name = node.outputs[0].name
        return model

    # --- norms --------------------------------------------------------------------------------------------------------

    def _norms(self) -> None:
        for node in self._placeholders("RMSNorm"):
            inputs, output = [node.inputs[0], self._gamma(node)], f"{node.attributes['name'].as_string()}/output"
            how: dict[str, Any] = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
            self._replace(node, self._node(node, "RMSNormalization", inputs, [output], **how))

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> None:
        nodes = self._placeholders("Attention")
        if not nodes:
            return
        first = next(iter(self.graph))
        if self.traced.decoder:
            self._cached()
        for index, node in enumerate(nodes):
            self._attend(first, index, node)

    def _cached(self) -> None:
        """The interface of a cache that is written in place."""
        graph = self.graph
        kind = None if self.stored_cache is None else ir.DataType.from_numpy(TYPES[self.stored_cache.format])
        for value in (*graph.inputs, *graph.outputs):
            if value.name is None or not value.name.startswith(("past_key_values.", "present.")):
                continue
            assert value.shape is not None
            if kind is not None:
                value.type = ir.TensorType(kind)
            if self.cache == "in_place":
                value.shape = ir.Shape([value.shape[0], value.shape[1], self.capacity, value.shape[3]])
        if self.cache == "in_place":
            mask = self._input("attention_mask")
            assert mask.shape is not None
            mask.shape = ir.Shape([mask.shape[0], self.capacity])
            ids = self._input("input_ids")
            assert ids.shape is not None
            where = ir.Value(
                name="write_indices", shape=ir.Shape([ids.shape[0]]), type=ir.TensorType(ir.DataType.INT64)
            )
            graph.inputs.insert([each.name for each in graph.inputs].index("position_ids") + 1, where)

    def _input(self, name: str) -> ir.Value:
        return next(value for value in self.graph.inputs if value.name == name)

    def _attend(self, first: ir.Node, index: int, node: ir.Node) -> None:
        name = f"attention.{index}"
        query, key, value, mask, *past = node.inputs
        window = node.attributes["window"].as_int()
        if window > 0 and not self.traced.decoder:
            raise InputError(
                "attention-unsupported",
                where=name,
                value="a window in an encoder",
                rule="every token of an encoder sees every other",
                remedy="export a checkpoint",
            )
        bias = self._mask(first, mask, window)
        present: list[ir.Value] = []
        if past:
            key, kept = self._remember(node, index, 0, key, past[0])
            value, also = self._remember(node, index, 1, value, past[1])
            present = [kept, also]
        scale, softcap = node.attributes["scale"].as_float(), node.attributes["softcap"].as_float()
        if softcap > 0 or node.attributes["heads"].as_int() < _FEWEST:
            heads = self._spelled_out(node, name, [query, key, value, bias], softcap)
        else:
            (heads,) = self._node(node, "Attention", [query, key, value, bias], [f"{name}/heads"], scale=scale)
        (turned,) = self._node(node, "Transpose", [heads], [f"{name}/turned"], perm=[0, 2, 1, 3])
        flat = self._constant("flat", [0, 0, -1], np.int64)
        (output,) = self._node(node, "Reshape", [turned, flat], [f"{name}/output"])
        self._replace(node, [output, *present])

    def _spelled_out(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], softcap: float) -> ir.Value:
        """softmax(cap(q kᵀ · scale) + bias) v in operators of their own, [B, H, S, D]; scores in float32."""
        query, key, value, bias = inputs
        heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
        # [B, G, H / G, S, D] by [B, G, 1, D, T]: queries of a group read one key
        size = self._size(query)
        split = self._constant(
            f"attention/split/{heads}/{kv_heads}/{size}", [0, kv_heads, heads // kv_heads, -1, size], np.int64
        )
        (query,) = self._node(node, "Reshape", [query, split], [f"{name}/query"])
        second = self._constant("attention/second", [2], np.int64)
        (key,) = self._node(node, "Unsqueeze", [key, second], [f"{name}/keys"])
        (value,) = self._node(node, "Unsqueeze", [value, second], [f"{name}/values"])
        (turned,) = self._node(node, "Transpose", [key], [f"{name}/keys/turned"], perm=[0, 1, 2, 4, 3])
        factor = self._constant(f"{name}.scale", node.attributes["scale"].as_float(), self.floats)
        (query,) = self._node(node, "Mul", [query, factor], [f"{name}/query/scaled"])
        (scores,) = self._node(node, "MatMul", [query, turned], [f"{name}/products"])
        (scores,) = self._node(node, "Cast", [scores], [f"{name}/scores"], to=int(ir.DataType.FLOAT))
        if softcap > 0:
            cap = self._constant(f"{name}.softcap", softcap, np.float32)
            (scores,) = self._node(node, "Div", [scores, cap], [f"{name}/scores/share"])
            (scores,) = self._node(node, "Tanh", [scores], [f"{name}/scores/bounded"])
            (scores,) = self._node(node, "Mul", [scores, cap], [f"{name}/scores/capped"])
        first = self._constant("attention/first", [1], np.int64)
        (wide,) = self._node(node, "Unsqueeze", [bias, first], [f"{name}/bias"])
        (wide,) = self._node(node, "Cast", [wide], [f"{name}/bias/wide"], to=int(ir.DataType.FLOAT))
        (scores,) = self._node(node, "Add", [scores, wide], [f"{name}/scores/masked"])
        (shares,) = self._node(node, "Softmax", [scores], [f"{name}/shares"], axis=-1)
        kind = int(ir.DataType.from_numpy(self.floats))
        (shares,) = self._node(node, "Cast", [shares], [f"{name}/shares/rounded"], to=kind)
        (mixed,) = self._node(node, "MatMul", [shares, value], [f"{name}/mixed"])
        together = self._constant(f"attention/together/{heads}/{size}", [0, heads, -1, size], np.int64)
        (found,) = self._node(node, "Reshape", [mixed, together], [f"{name}/heads"])
        return found

    def _size(self, query: ir.Value | None) -> int:
        assert query is not None and query.shape is not None
        size = query.shape[3]
        assert isinstance(size, int)
        return size

    def _remember(
        self, node: ir.Node, layer: int, which: int, new: ir.Value | None, past: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """(keys or values of all tokens as they are multiplied, the cache with the new ones)."""
        name = f"attention.{layer}/{'value' if which else 'key'}"
        scale = zero = None
        assert new is not None
        if self.stored_cache is not None:
            number = self.stored_cache.scales[layer][which]
            scale = self._constant(f"{name}.scale", number, self.floats)
            zero = self._constant(f"cache.zero/{self.stored_cache.format}", 0, TYPES[self.stored_cache.format])
            (new,) = self._node(node, "QuantizeLinear", [new, scale, zero], [f"{name}/quantized"])
        if self.cache == "in_place":
            where = self._input("write_indices")
            (kept,) = self._node(node, "TensorScatter", [past, new, where], [f"{name}/kept"], axis=2)
        else:
            (kept,) = self._node(node, "Concat", [past, new], [f"{name}/kept"], axis=2)
        if scale is None:
            return kept, kept
        (read,) = self._node(node, "DequantizeLinear", [kept, scale, zero], [f"{name}/read"])
        return read, kept

    def _mask(self, first: ir.Node, mask: ir.Value | None, window: int) -> ir.Value:
        """[B, 1, S, T], 0 where a token sees another and a large negative number elsewhere; made once."""
        if window in self._masks:
            return self._masks[window]
        assert mask is not None
        stem = f"mask/{window}"
        wide = self._constant("mask/axes", [1, 2], np.int64)
        (real,) = self._node(first, "Cast", [mask], [f"{stem}/real"], to=int(ir.DataType.BOOL))
        (seen,) = self._node(first, "Unsqueeze", [real, wide], [f"{stem}/tokens"])
        if self.traced.decoder:
            columns, rows = self._columns(first, mask, stem)
            (causal,) = self._node(first, "LessOrEqual", [columns, rows], [f"{stem}/causal"])
            (seen,) = self._node(first, "And", [seen, causal], [f"{stem}/seen"])
            if window > 0:
                (least,) = self._node(
                    first, "Sub", [rows, self._constant(f"{stem}/size", window, np.int64)], [f"{stem}/least"]
                )
                (near,) = self._node(first, "Greater", [columns, least], [f"{stem}/near"])
                (seen,) = self._node(first, "And", [seen, near], [f"{stem}/nearby"])
        zero, low = (
            self._constant(f"mask/{word}", number, self.floats)
            for word, number in (("zero", 0.0), ("low", _HIDDEN[self.type]))
        )
        (bias,) = self._node(first, "Where", [seen, zero, low], [f"{stem}/bias"])
        if not self.traced.decoder:
            # [B, 1, 1, T]: every token sees the same
            (new,) = self._node(first, "Shape", [mask], [f"{stem}/new"], start=1, end=2)
            one = self._constant("one", [1], np.int64)
            (shape,) = self._node(first, "Concat", [one, one, new, one], [f"{stem}/shape"], axis=0)
            (bias,) = self._node(first, "Expand", [bias, shape], [f"{stem}/expanded"])
        self._masks[window] = bias
        return bias

    def _columns(self, first: ir.Node, mask: ir.Value, stem: str) -> tuple[ir.Value, ir.Value]:
        """(place of each column of the cache, [1, 1, 1, T]; that of each new token, [B or 1, 1, S, 1])."""
        zero, one = self._constant("mask/first", 0, np.int64), self._constant("mask/step", 1, np.int64)
        ids = self._input("input_ids")
        (length,) = self._node(first, "Shape", [ids], [f"{stem}/length"], start=1, end=2)
        scalar = self._constant("mask/scalar", [0], np.int64)
        (new,) = self._node(first, "Squeeze", [length, scalar], [f"{stem}/count"])
        (steps,) = self._node(first, "Range", [zero, new, one], [f"{stem}/steps"])
        down = self._constant("mask/down", [0, 1, 3], np.int64)
        (rows,) = self._node(first, "Unsqueeze", [steps, down], [f"{stem}/downwards"])
        if self.cache == "in_place":
            columns = self._constant("mask/columns", np.arange(self.capacity).reshape(1, 1, 1, -1), np.int64)
            behind = self._constant("mask/behind", [1, 2, 3], np.int64)
            (start,) = self._node(first, "Unsqueeze", [self._input("write_indices"), behind], [f"{stem}/start"])
        else:
            (total,) = self._node(first, "Shape", [mask], [f"{stem}/total"], start=1, end=2)
            (last,) = self._node(first, "Squeeze", [total, scalar], [f"{stem}/last"])
            (along,) = self._node(first, "Range", [zero, last, one], [f"{stem}/along"])
            across = self._constant("mask/across", [0, 1, 2], np.int64)
            (columns,) = self._node(first, "Unsqueeze", [along, across], [f"{stem}/columns"])
            (start,) = self._node(first, "Sub", [last, new], [f"{stem}/start"])
        (rows,) = self._node(first, "Add", [rows, start], [f"{stem}/rows"])
        return columns, rows

    # --- products -----------------------------------------------------------------------------------------------------

    def _products(self) -> None:
        pairs: dict[tuple[ir.Value, InputCodes], ir.Value] = {}
        for node in self._placeholders("Linear"):
            name = node.attributes["name"].as_string()
            linear, source = self.weights.linears[name], node.inputs[0]
            assert source is not None
            if linear.input is not None:
                key = (source, linear.input)
                if key not in pairs:
                    pairs[key] = self._pair(node, source, f"{name}/input", linear.input)
                source = pairs[key]
            (output,) = self._node(node, "MatMul", [source, self._weight(node, name)], [f"{name}/output"])
            self._replace(node, [output])

    def _pair(self, before: ir.Node, source: ir.Value, name: str, how: InputCodes) -> ir.Value:
        assert how.scale is not None
        kind = how.scheme.format
        if how.moved:
            shift, reach = (np.asarray(each, np.float32) for each in how.moved)
            if shift.any():
                by = self._constant(f"{name}.shift", shift, self.floats)
                (source,) = self._node(before, "Sub", [source, by], [f"{name}.shifted"])
            even = self._constant(f"{name}.channels", 1 / reach, self.floats)
            (source,) = self._node(before, "Mul", [source, even], [f"{name}.even"])
        parts = [
            self._constant(f"{name}.scale", how.scale, self.floats),
            self._constant(f"zero/{kind}", 0, TYPES[kind]),
        ]
        (codes,) = self._node(before, "QuantizeLinear", [source, *parts], [f"{name}.codes"])
        (values,) = self._node(before, "DequantizeLinear", [codes, *parts], [f"{name}.values"])
        return values

    def _weight(self, before: ir.Node, name: str) -> ir.Value:
        """[K, N], as it is multiplied."""
        linear = self.weights.linears[name]
        if linear.scheme is None:
            if linear.shared is not None:
                (turned,) = self._node(before, "Transpose", [self._tied(linear)], [f"{name}.turned"], perm=[1, 0])
                return turned
            return self._turned(name, [name])
        return self._dequantized(before, name, stored(self.quantized(name, codes=False), self.floats))

    def _dequantized(self, before: ir.Node, name: str, found: StoredTensors) -> ir.Value:
        codes = self._new(f"{name}.codes", found.shape, found.type, lambda: codes_of(self.quantized(name)))
        scale = self._constant(f"{name}.scale", found.scale, found.scale.dtype)
        if found.whole is not None:
            whole = self._constant(f"{name}.whole", found.whole.astype(self.floats), self.floats)
            (scale,) = self._node(before, "DequantizeLinear", [scale, whole], [f"{name}.scales"])
        if found.codebook is not None:
            values = self._looked_up(before, name, codes, found, scale)
        else:
            (values,) = self._node(before, "DequantizeLinear", [codes, scale], [f"{name}.values"], **found.options)
        if found.whole is None and found.scale.dtype != self.floats:
            kind16 = int(ir.DataType.from_numpy(self.floats))
            (values,) = self._node(before, "Cast", [values], [f"{name}.rounded"], to=kind16)
        return values

    def _looked_up(
        self, before: ir.Node, name: str, codes: ir.Value, found: StoredTensors, scale: ir.Value
    ) -> ir.Value:
        """Codebook[code + 8] · scale, [K, N]."""
        assert found.block is not None and found.codebook is not None
        columns, rows = found.shape
        groups = columns // found.block
        unit = self._constant("codebook/unit", 1.0, self.floats)
        (numbers,) = self._node(before, "DequantizeLinear", [codes, unit], [f"{name}.numbers"])
        (places,) = self._node(before, "Cast", [numbers], [f"{name}.places"], to=int(ir.DataType.INT32))
        (places,) = self._node(
            before, "Add", [places, self._constant("codebook/offset", 8, np.int32)], [f"{name}.index"]
        )
        book = self._constant("codebook", found.codebook, self.floats)
        (values,) = self._node(before, "Gather", [book, places], [f"{name}.looked_up"], axis=0)
        apart = self._constant(f"apart/{groups}x{found.block}x{rows}", [groups, found.block, rows], np.int64)
        (values,) = self._node(before, "Reshape", [values, apart], [f"{name}.apart"])
        (middle,) = self._node(
            before, "Unsqueeze", [scale, self._constant("middle", [1], np.int64)], [f"{name}.spread"]
        )
        (values,) = self._node(before, "Mul", [values, middle], [f"{name}.scaled"])
        together = self._constant(f"together/{columns}x{rows}", [columns, rows], np.int64)
        (values,) = self._node(before, "Reshape", [values, together], [f"{name}.values"])
        return values
