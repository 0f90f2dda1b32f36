"""Fusion of layer normalization from its parts (Ba et al. 2016, arXiv 1607.06450).

    d = x − mean(x),   y = w ⊙ d / √(mean(d²) + ε) + b    =    LayerNormalization(x, w, b)

over the last axes, those of w. d² may be a Pow or a product, the quotient a Div or a product with a Reciprocal. Guard:
the operator exists (opset 17), ε is a constant, both means are over the same last axes, w and b have their shape, no
other node reads a value in between. ONNX has no operator for a skip connection in front of the norm: ONNX Runtime fuses
both nodes when it loads the graph (SkipLayerNormalization).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused
from quantkit.graph.values import constant, scalar

_OPSET = 17


class _Norm(_rule.Rule):
    """w ⊙ d / √(mean(d²) + ε) in one of its four forms."""

    def __init__(self, fusion: str, power: bool, quotient: bool) -> None:
        super().__init__(fusion)
        self._power, self._quotient = power, quotient

    def pattern(self, op: Any, x: Any, weight: Any, epsilon: Any, exponent: Any) -> Any:
        mean = op.ReduceMean(x, _allow_other_inputs=True, _outputs=["mean"])
        d = op.Sub(x, mean)
        squared = op.Pow(d, exponent) if self._power else op.Mul(d, d)
        variance = op.ReduceMean(squared, _allow_other_inputs=True, _outputs=["variance"])
        deviation = op.Sqrt(op.Add(variance, epsilon))
        normal = op.Div(d, deviation) if self._quotient else op.Mul(d, op.Reciprocal(deviation))
        return op.Mul(normal, weight, _outputs=["y"])

    def refuses(
        self,
        context: Any,
        x: ir.Value,
        weight: ir.Value,
        epsilon: ir.Value,
        exponent: ir.Value | None,
        mean: ir.Value,
        variance: ir.Value,
        y: ir.Value,
    ) -> str | None:
        if self._power and scalar(exponent) != 2:
            return None
        rank = len(x.shape) if x.shape is not None else None
        axes = _axes(mean, rank)
        if axes is None or axes != _axes(variance, rank):
            return "its means are not over the same known axes"
        if axes != list(range(-len(axes), 0)):
            return "it does not normalize the last axes"
        if _rule.opset(context.model) < _OPSET:
            return f"opset {_rule.opset(context.model)} has no LayerNormalization, {_OPSET} has"
        if scalar(epsilon) is None:
            return "its epsilon is not a constant"
        return "" if _fits(weight, x, len(axes)) else "its weight does not have the shape of the last axes"

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Value, **bound: ir.Value) -> Any:
        axes = _axes(bound["mean"], len(x.shape) if x.shape is not None else None)
        name = _rule.keep_name(bound["y"])
        return op.LayerNormalization(x, weight, axis=-len(axes or []), epsilon=scalar(epsilon), _name=name)


class _Bias(_rule.Rule):
    """LayerNormalization(x, w) + b."""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Add(op.LayerNormalization(x, weight, _outputs=["normal"]), bias, _outputs=["y"])

    def refuses(self, context: Any, bias: ir.Value, weight: ir.Value, **bound: ir.Value) -> str | None:
        b, w = constant(bias), constant(weight)
        return "" if b is not None and w is not None and b.shape == w.shape else None

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, normal: ir.Value, y: ir.Value) -> Any:
        node = normal.producer()
        assert node is not None
        return op.LayerNormalization(x, weight, bias, **node.attributes, _name=_rule.keep_name(y))


class LayerNorm:
    """Fuses layer normalization, as described in the module."""

    name = "layer_norm"

    def run(self, model: ir.Model) -> list[Fused]:
        """Rewrite in place: first the norms, then their biases."""
        forms = itertools.product((True, False), repeat=2)
        listed = _rule.apply(model, [_Norm(self.name, power, quotient) for power, quotient in forms])
        return listed + _rule.apply(model, [_Bias(self.name)])


def _axes(mean: ir.Value, rank: int | None) -> list[int] | None:
    """Return the axes of a ReduceMean counted from the end; an attribute before opset 18, an input since."""
    node = mean.producer()
    if node is None or not node.attributes.get_int("keepdims", 1):
        return None
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get_ints("axes")
    if axes is None or (rank is None and any(axis >= 0 for axis in axes)):
        return None
    return sorted(int(axis) if axis < 0 else int(axis) - (rank or 0) for axis in axes)


def _fits(weight: ir.Value, x: ir.Value, axes: int) -> bool:
    """Tell whether a weight is a constant with the shape of the normalized axes."""
    w = constant(weight)
    if w is None or w.ndim != axes:
        return False
    tail: Any = list(x.shape)[-axes:] if x.shape is not None else w.shape
    return all(not isinstance(size, int | np.integer) or size == had for size, had in zip(tail, w.shape, strict=True))
