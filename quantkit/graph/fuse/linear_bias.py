"""A product and its bias as one node: Add(MatMul(x, W), b) = Gemm(x, W, b), for matrices x.

Guard: W [K, N] and b (one number a column) are constants, x has two dimensions. With more, Gemm has no form for it and
both nodes stay: a quantized MatMul followed by an Add is what ONNX Runtime fuses there (MatMulIntegerToFloat's bias).
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._fused import Fused
from quantkit.graph.fuse._values import constant, per_channel


class _Gemm(_rule.Rule):
    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Add(op.MatMul(x, weight), bias, _outputs=["y"])

    def refuses(self, context: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> str | None:
        W, b = constant(weight), constant(bias)
        if W is None or b is None or W.ndim != 2:
            return None
        if x.shape is None:
            return f"the shape of {x.name} is not known"
        if len(x.shape) != 2:
            return f"{x.name} has {len(x.shape)} dimensions, Gemm takes matrices"
        return (
            "" if b.ndim <= 2 and per_channel(b, 2, W.shape[1]) is not None else "the bias is not one number a column"
        )

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> Any:
        return op.Gemm(x, weight, bias, _name=_rule.keep_name(y))


class LinearBias:
    """See the module."""

    name = "linear_bias"

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite in place."""
        return _rule.apply(model, [_Gemm(self.name)])
