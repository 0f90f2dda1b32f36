"""Rewrite a traced graph for TensorRT: plain ONNX operators, strongly typed in 16 bits, quantization only by Q/DQ.

    Linear      MatMul with a weight [K, N] after DequantizeLinear, and a Q/DQ pair for a quantized input
                (after Sub and Mul by channel for inputs that `passes/center.py` moved)
    RMSNorm     RMSNormalization, computed in float32
    Attention   Attention-24 (TensorRT's IAttention) with an additive mask, and a cache of keys and values; basic
                operators for soft-capped scores, or for too few heads for the kernels

The cache `in_place` (`trace/rewrite.py`) is TensorRT's IKVCacheUpdateLayer: input and output are one buffer, so a CUDA
graph of a step can be replayed. A quantized cache (int8 or fp8_e4m3) has a Q/DQ pair around it.

TensorRT reads quantized weights only as codes [K, N] before DequantizeLinear:

    int8, int4            scale of the tensor, a channel, or blocks of 16 to 128 along K; never a zero point
    fp8_e4m3, mxfp8       the same; a square block's scale is repeated for each of its channels
    nvfp4                 blocks of 16, their scales E4M3 under one float32: two DequantizeLinear
    nf4                   int4 codes as indices into a codebook: a Gather, times the scale

The output of DequantizeLinear has the type of its scale, so scales are stored in the graph's 16 bits. Scales that would
lose more than 16-bit rounding (below 6e-5 they are subnormal) stay float32, and the dequantized weight is rounded.
(NVIDIA TensorRT documentation, "Working with Quantized Types"; what 1.7.1 of TensorRT-RTX builds is in docs/design.md.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporters.onnx.nbits import LinearSpec
from quantkit.exporters.trace.rewrite import CACHES, PlainOperators
from quantkit.formats.base.activation import InputCodes

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor


Floats = Literal["float16", "bfloat16"]
FLOATS: Mapping[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# TensorRT-RTX 1.7.1 has no kernel for one token of one sequence with fewer heads
_FEWEST = 3


@dataclass(frozen=True)
class CacheScales:
    """Type of a quantized cache, and the scales of keys and values of every layer."""

    format: str
    scales: Mapping[int, tuple[float, float]]


@dataclass
class TensorrtDialect(PlainOperators):
    """Rewrites one graph for TensorRT."""

    opsets: ClassVar = {"": 24}
    ir_version: ClassVar = 11

    quantized: Callable[..., QuantTensor]  # linear -> its codes; with `codes=False` all else of it
    type: Floats = "float16"  # type of the computation
    stored_cache: CacheScales | None = None  # storage of keys and values; None for the graph's type

    @property
    def floats(self) -> np.dtype[Any]:
        """NumPy type of the computation."""
        return FLOATS[self.type]

    def apply(self) -> ir.Model:
        """Rewrite everything; no placeholder is left."""
        model = super().apply()
        for node in self.graph:
            # the names by which an engine speaks of its layers
            node.name = node.outputs[0].name
        return model

    # --- attention ----------------------------------------------------------------------------------------------------

    def _cached(self) -> None:
        if self.stored_cache is not None:
            kind = ir.DataType.from_numpy(TYPES[self.stored_cache.format])
            for value in (*self.graph.inputs, *self.graph.outputs):
                if value.name is not None and value.name.startswith(CACHES):
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

    def _zero(self, how: InputCodes) -> ir.Value:
        kind = how.scheme.format
        return self._constant(f"zero/{kind}", 0, TYPES[kind])

    def _weight(self, before: ir.Node, name: str, linear: LinearSpec) -> ir.Value:
        """Return [K, N] for multiplication."""
        if linear.scheme is None:
            return super()._weight(before, name, linear)
        parts = stored(self.quantized(name, codes=False), self.floats)
        places = self._new(f"{name}.codes", parts.shape, parts.type, lambda: codes(self.quantized(name)))
        scale = self._constant(f"{name}.scale", parts.scale, parts.scale.dtype)
        if parts.whole is not None:
            whole = self._constant(f"{name}.whole", parts.whole.astype(self.floats), self.floats)
            (scale,) = self._node(before, "DequantizeLinear", [scale, whole], [f"{name}.scales"])
        if parts.codebook is not None:
            values = self._looked_up(before, name, places, parts, scale)
        else:
            (values,) = self._node(before, "DequantizeLinear", [places, scale], [f"{name}.values"], **parts.options)
        if parts.whole is None and parts.scale.dtype != self.floats:
            short = int(ir.DataType.from_numpy(self.floats))
            (values,) = self._node(before, "Cast", [values], [f"{name}.rounded"], to=short)
        return values

    def _looked_up(
        self, before: ir.Node, name: str, codes: ir.Value, parts: StoredTensors, scale: ir.Value
    ) -> ir.Value:
        """Compute codebook[code + 8] · scale, [K, N]."""

        def at(kind: str, inputs: list[ir.Value], output: str, **attributes: Any) -> ir.Value:
            return self._node(before, kind, inputs, [f"{name}.{output}"], **attributes)[0]

        assert parts.block is not None and parts.codebook is not None
        columns, rows = parts.shape
        groups = columns // parts.block
        numbers = at("DequantizeLinear", [codes, self._constant("codebook/unit", 1.0, self.floats)], "numbers")
        places = at("Cast", [numbers], "places", to=int(ir.DataType.INT32))
        places = at("Add", [places, self._constant("codebook/offset", 8, np.int32)], "index")
        book = self._constant("codebook", parts.codebook, self.floats)
        values = at("Gather", [book, places], "looked_up", axis=0)
        apart = self._constant(f"apart/{groups}x{parts.block}x{rows}", [groups, parts.block, rows], np.int64)
        values = at("Reshape", [values, apart], "apart")
        middle = at("Unsqueeze", [scale, self._constant("middle", [1], np.int64)], "spread")
        values = at("Mul", [values, middle], "scaled")
        together = self._constant(f"together/{columns}x{rows}", [columns, rows], np.int64)
        return at("Reshape", [values, together], "values")


Array = NDArray[Any]
# storage types of codes
TYPES = {
    "int8": np.dtype(np.int8),
    "int7": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "nvfp4": np.dtype(ml_dtypes.float4_e2m1fn),
    "nf4": np.dtype(ml_dtypes.int4),
}
# half a unit in the last place of float16, and of bfloat16
_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class StoredTensors:
    """Tensors of one weight, without its codes."""

    shape: tuple[int, int]  # [K, N]
    type: np.dtype[Any]  # of the codes
    scale: Array  # [] of the tensor, [N] of channels, [K / block, N] of blocks
    axis: int | None  # axis of DequantizeLinear; None for a tensor's scale
    block: int | None  # values along K under one scale; None without blocks
    whole: Array | None = None  # float32 factor of E4M3 scales; None for other scales
    codebook: Array | None = None  # values by code + 8; None if codes are numbers

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of DequantizeLinear."""
        attributes = {"axis": self.axis, "block_size": self.block}
        return {name: value for name, value in attributes.items() if value is not None}


def codes(tensor: QuantTensor) -> Array:
    """Return the codes [K, N], in their storage type."""
    import torch

    kind = TYPES[tensor.scheme.format]
    values = tensor.codes.view(torch.uint8) if tensor.codes.dtype == torch.float8_e4m3fn else tensor.codes
    turned = np.ascontiguousarray(values.numpy().T)
    if tensor.scheme.format == "nf4":
        return (turned.astype(np.int8) - 8).astype(kind)
    # the bytes of small floats keep their bits
    return turned.view(np.uint8).view(kind) if kind.kind == "V" and kind != TYPES["int4"] else turned.astype(kind)


def stored(tensor: QuantTensor, floats: np.dtype[Any]) -> StoredTensors:
    """Lay out a quantized linear's weight without reading its codes. `floats` is the graph's type."""
    scheme, (rows, columns) = tensor.scheme, tensor.shape
    scale = tensor.scale.float().numpy()
    whole = None if tensor.global_scale is None else np.asarray(tensor.global_scale.float().numpy()).reshape(())
    book = None if scheme.format != "nf4" else np.asarray(tensor.codebook.float().numpy()).astype(floats)  # type: ignore[union-attr]
    axis, block = 0, scheme.group
    if scheme.granularity == "tensor":
        return StoredTensors((columns, rows), TYPES[scheme.format], fitting(scale.reshape(()), floats), None, None)
    if scheme.granularity == "channel":
        scale, axis = scale.reshape(-1), 1
    else:
        if scheme.granularity == "block":
            scale = np.repeat(scale, scheme.group or 1, axis=0)[:rows]
        scale = np.ascontiguousarray(scale.T)
    kept = fitting(scale, floats) if whole is None else scale.astype(ml_dtypes.float8_e4m3fn)
    return StoredTensors((columns, rows), TYPES[scheme.format], kept, axis, block, whole, book)


def fitting(scale: Array, floats: np.dtype[Any]) -> Array:
    """Return scales in the graph's type, or in float32 if the graph's type would lose more than its rounding."""
    scale = np.asarray(scale, np.float32)
    short = scale.astype(floats)
    fits = np.abs(short.astype(np.float32) - scale) <= _ROUNDING[floats.name] * np.abs(scale)
    return short if bool(fits.all()) else scale
