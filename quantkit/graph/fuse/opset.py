"""A newer set of operators, by ONNX's own version converter: Gelu is there from 20 on, LayerNormalization from 17.

Operators keep what they compute; where one took an attribute it may take an input now.
Guard: the model fits a protobuf, and the converter knows every operator.
"""

from __future__ import annotations

import onnx_ir as ir

from quantkit.graph.fuse import _rule
from quantkit.graph.fuse._rule import Fused

TARGET = 21
_IR_VERSION = 10
_LARGEST = 1 << 30


class Opset:
    """See the module."""

    name = "opset"

    def run(self, model: ir.Model) -> list[Fused]:
        """Convert in place what is older than `TARGET`; listed is the graph."""
        import onnx

        had, name = _rule.opset(model), model.graph.name or "graph"
        if had >= TARGET:
            return []
        stored = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
        if sum(tensor.nbytes for tensor in stored) > _LARGEST:
            return [Fused(name, self.name, False, f"opset {had}: its weights are too large for the converter")]
        try:
            converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), TARGET))
        except Exception as problem:  # the converter's own, for what it does not know
            return [Fused(name, self.name, False, f"opset {had}: {problem}".splitlines()[0])]
        model.graph = converted.graph
        model.ir_version = max(model.ir_version, _IR_VERSION)
        model.functions.clear()
        model.functions.update(converted.functions)
        return [Fused(name, self.name, True)]
