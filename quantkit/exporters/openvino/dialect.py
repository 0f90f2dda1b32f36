"""The dialect of OpenVINO: what its reader of ONNX makes compressed products and fused attention of.

    Linear      MatMulNBits, which the reader takes apart into Constant (u4, u8), Convert, Subtract, Multiply, MatMul:
                the pattern whose weight its plug-ins keep packed; codes of 4 bits without zero points become i4
                afterwards, without the Subtract (`model.py`). With quantized inputs a pair before MatMul, and a
                weight of int8 under DequantizeLinear
    Attention   Attention-23, which becomes ScaledDotProductAttention; spelled out where scores are capped. Keys that
                several queries share are repeated: the form in which its plug-ins know them
    RMSNorm     RMSNormalization

The cache grows (`trace/plain.py`), and becomes a state of the model afterwards (`model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.exporters.onnx.nbits import InputCodes, LinearSpec, PackedWeights, block_size
from quantkit.exporters.trace.plain import PlainOperators
from quantkit.formats import load_format

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
