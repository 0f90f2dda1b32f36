"""Constant folding, and conversion to a newer opset.

    f(c₁, c₂, ...) = c        for every f without randomness whose inputs are constants

Model functions are inlined, Constant nodes become initializers, and known shapes become constants (Shape of a fixed
shape, an If with a fixed condition, a Reshape with one free size). onnxscript's folding evaluates the rest with ONNX's
reference evaluator. Guard: a result of more than `LIMIT` elements must not be larger than the constants that it makes
redundant, so that weights do not grow. Graph inputs with default values are no constants; QuantizeLinear and
DequantizeLinear stay.

`Opset` runs first. It converts with ONNX's own version converter: Gelu exists from opset 20, LayerNormalization from
17.
Guard: the model fits a protobuf, and the converter knows every operator.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes import common

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused, nodes
from quantkit.graph.values import constant, name_of

LIMIT = 16_384
# larger results are not computed at all
_COMPUTABLE = 1 << 28
_KEPT = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_GROWING = ("ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Upsample", "OneHot", "EyeLike")


class Constants:
    """Folds constants, as described in the module."""

    name = "constants"

    def run(self, model: ir.Model) -> list[Fused]:
        """Fold in place; list each removed node, and as refused each one whose inputs are all constants."""
        from onnxscript.optimizer import fold_constants
        from onnxscript.rewriter import RewriteRuleSet
        from onnxscript.rewriter.rules.common import materialize_reshape_shape_rule

        trial = model.clone()
        common.InlinePass()(trial)
        _lift(trial)
        common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(trial)
        had = _computing(trial)
        try:
            fold_constants(trial, onnx_shape_inference=True, should_fold=_should_fold, output_size_limit=LIMIT)
        except Exception as problem:  # the reference evaluator may raise anything
            return [Fused(model.graph.name or "graph", self.name, False, f"folding failed: {problem}".splitlines()[0])]
        RewriteRuleSet([materialize_reshape_shape_rule]).apply_to_model(trial)
        _without_allowzero(trial)
        common.RemoveUnusedNodesPass()(trial)
        _lift(trial)
        have = _computing(trial)
        model.graph = trial.graph
        model.functions.clear()
        done = [Fused(name, self.name, True) for name in had if name not in have]
        reason = f"more than {LIMIT} elements, and more than the constants that would go"
        return done + [
            Fused(name, self.name, False, reason) for name, node in have.items() if name in had and _fixed(node)
        ]


def _lift(model: ir.Model) -> None:
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.NameFixPass()(model)


def _without_allowzero(model: ir.Model) -> None:
    """Remove an attribute without effect from Reshape nodes: opset 13 does not have it."""
    for node in nodes(model, "Reshape"):
        shape = constant(node.inputs[1])
        if shape is not None and (shape != 0).all():
            node.attributes.pop("allowzero", None)


def _computing(model: ir.Model) -> dict[str, ir.Node]:
    """Return every node but constants, by name."""
    every = ir.traversal.RecursiveGraphIterator(model.graph)
    return {name_of(node): node for node in every if node.op_type != "Constant"}


def _fixed(node: ir.Node) -> bool:
    inputs = [value for value in node.inputs if value is not None]
    return bool(inputs) and node.op_type not in _KEPT and all(constant(value) is not None for value in inputs)


def _should_fold(node: ir.Node) -> bool | None:
    """Tell whether to fold; None leaves an unknown result size to onnxscript's own rule."""
    if node.op_type in _KEPT:
        return False
    shape = node.outputs[0].shape
    if shape is None or not shape.is_static():
        return None if node.op_type in _GROWING else True
    return math.prod(shape.numpy()) <= _COMPUTABLE


TARGET = 21
_IR_VERSION = 10
_LARGEST = 1 << 30


class Opset:
    """Converts a graph to opset 21."""

    name = "opset"

    def run(self, model: ir.Model) -> list[Fused]:
        """Convert a graph older than `TARGET` in place; the listed place is the graph."""
        import onnx

        had, name = _rule.opset(model), model.graph.name or "graph"
        if had >= TARGET:
            return []
        stored = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
        if sum(tensor.nbytes for tensor in stored) > _LARGEST:
            return [Fused(name, self.name, False, f"opset {had}: its weights are too large for the converter")]
        try:
            converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), TARGET))
        except Exception as problem:  # the converter has error types of its own
            return [Fused(name, self.name, False, f"opset {had}: {problem}".splitlines()[0])]
        model.graph = converted.graph
        model.ir_version = max(model.ir_version, _IR_VERSION)
        model.functions.clear()
        model.functions.update(converted.functions)
        return [Fused(name, self.name, True)]
