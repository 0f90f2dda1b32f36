"""A product and its bias as one node.

    Add(MatMul(x, W), b) = Gemm(x, W, b)                                    x [M, K]
                         = Reshape(Gemm(Reshape(x, [M, K]), W, b), shape)   x [..., K] of a fixed shape, M rows in all

Gemm takes matrices. ONNX Runtime writes the second form itself when it loads a graph whose shapes are all fixed, and a
bias that is float there keeps the product out of the integer kernel; written here, the bias can be quantized with it.
Where a size is free, it leaves MatMul and Add as they are (MatMulIntegerToFloat and Add), and so does this.
Guard: W [K, N] and b (one number a column) are constants, the shape of x is known, nothing else reads the product.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused
from quantkit.graph.values import constant, per_channel


class _Gemm(_rule.Rule):
    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Add(op.MatMul(x, weight), bias, _outputs=["y"])

    def refuses(self, context: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> str | None:
        W, b = constant(weight), constant(bias)
        if W is None or b is None or W.ndim != 2:
            return None
        if x.shape is None:
            return f"the shape of {x.name} is not known"
        if len(x.shape) != 2 and not x.shape.is_static():
            return f"{x.name} has {len(x.shape)} dimensions, not all of them fixed; Gemm takes matrices"
        return (
            "" if b.ndim <= 2 and per_channel(b, 2, W.shape[1]) is not None else "the bias is not one number a column"
        )

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> Any:
        name = _rule.keep_name(y)
        if x.shape is None or len(x.shape) == 2:
            return op.Gemm(x, weight, bias, _name=name)
        *leading, K = x.shape.numpy()
        W = constant(weight)
        assert W is not None
        M, N = math.prod(leading), W.shape[1]
        flat = op.Reshape(x, op.initializer(ir.tensor(np.array([M, K])), name=f"{y.name}.rows"))
        product = op.Gemm(flat, weight, bias, _name=name)
        for value, shape in ((flat, (M, K)), (product, (M, N))):
            value.shape, value.type = ir.Shape(shape), x.type
        return op.Reshape(product, op.initializer(ir.tensor(np.array([*leading, N])), name=f"{y.name}.shape"))


class LinearBias:
    """See the module."""

    name = "linear_bias"

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite in place."""
        return _rule.apply(model, [_Gemm(self.name)])
