"""The dialect of TensorRT: plain ONNX operators, strongly typed in 16 bits, quantization by Q/DQ alone.

    Linear      MatMul with a weight [K, N] under DequantizeLinear (`weights.py`); a pair before quantized inputs
                (and before that Sub and Mul by channel, where `passes/center.py` moved them)
    RMSNorm     RMSNormalization, computed in float32
    Attention   Attention-24 (TensorRT's IAttention) with an additive mask; spelled out where scores are capped, or
                heads too few for its kernels. Keys and values go into a cache

The cache (`trace/rewrite.py`) `in_place` is TensorRT's IKVCacheUpdateLayer: input and output are one buffer, and a CUDA
graph of a step can be replayed. It holds int8 or fp8_e4m3 where the recipe quantizes it: a pair around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quantkit.exporters.onnx.nbits import InputCodes
from quantkit.exporters.tensorrt.network.weights import TYPES, StoredTensors, stored
from quantkit.exporters.tensorrt.network.weights import codes as codes_of
from quantkit.exporters.trace.rewrite import PlainOperators

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor

OPSET = 24
Floats = Literal["float16", "bfloat16"]
FLOATS: Mapping[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# TensorRT-RTX 1.7.1 has no kernel for one token of one sequence with fewer heads
_FEWEST = 3


@dataclass(frozen=True)
class CacheScales:
    """Of a quantized cache: its type, and for each layer the scale of keys and of values."""

    format: str
    scales: Mapping[int, tuple[float, float]]


@dataclass
class TensorrtDialect(PlainOperators):
    """The rewriting of one graph.

    Args:
        quantized: linear -> its codes; with `codes=False` all else of it.
        type: what is computed in.
        stored_cache: how keys and values are stored; None in the graph's type.
    """

    quantized: Callable[..., QuantTensor]
    type: Floats = "float16"
    stored_cache: CacheScales | None = None

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

    # --- attention ----------------------------------------------------------------------------------------------------

    def _cached(self) -> None:
        if self.stored_cache is not None:
            kind = ir.DataType.from_numpy(TYPES[self.stored_cache.format])
            for value in (*self.graph.inputs, *self.graph.outputs):
                if value.name is not None and value.name.startswith(("past_key_values.", "present.")):
                    value.type = ir.TensorType(kind)
        super()._cached()

    def _attended(self, node: ir.Node, name: str, inputs: Sequence[ir.Value | None], scale: float) -> ir.Value:
        if node.attributes["heads"].as_int() < _FEWEST:
            return self._spelled_out(node, name, inputs, 0.0)
        return super()._attended(node, name, inputs, scale)

    def _remember(
        self, node: ir.Node, layer: int, which: int, new: ir.Value | None, past: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        if self.stored_cache is None:
            return super()._remember(node, layer, which, new, past)
        name, kind = f"attention.{layer}/{'value' if which else 'key'}", self.stored_cache.format
        scale = self._constant(f"{name}.scale", self.stored_cache.scales[layer][which], self.floats)
        zero = self._constant(f"cache.zero/{kind}", 0, TYPES[kind])
        (new,) = self._node(node, "QuantizeLinear", [new, scale, zero], [f"{name}/quantized"])
        kept, _ = super()._remember(node, layer, which, new, past)
        (read,) = self._node(node, "DequantizeLinear", [kept, scale, zero], [f"{name}/read"])
        return read, kept

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
