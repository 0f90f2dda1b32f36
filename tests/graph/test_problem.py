"""What ONNX Runtime really says, read as a node and a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from quantkit.graph.run import told

FREE = {"x": ["a", "b"], "w": ["c", "d"]}


def said(
    operator: str, kinds: dict[str, int], shapes: dict[str, Any], *, feed: Any = None, out: int = 0, **more: Any
) -> Any:
    """Of a graph with one node, `a/node`, whose inputs have these types and shapes, and whose output has a type."""
    inputs = [helper.make_tensor_value_info(name, kind, shapes[name]) for name, kind in kinds.items()]
    output = helper.make_tensor_value_info("y", out or next(iter(kinds.values())), None)
    node = helper.make_node(operator, list(kinds), ["y"], name="a/node", **more)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.other", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, [output]), opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception) as caught:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, feed)
    return told(caught.value)


def test_each_kind_of_problem_names_its_node() -> None:
    float32, float16, bfloat16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
    two = {"x": float32, "w": float32}
    node, reason = said("MatMul", two, {"x": [2, 3], "w": [2, 3]})
    assert node == "MatMul a/node" and reason == "Incompatible dimensions for matrix multiplication"
    ones = {name: np.ones((2, 3), np.float32) for name in FREE}
    node, reason = said("MatMul", two, FREE, feed=ones)
    assert node == "MatMul a/node" and "matmul_helper" not in reason and "dimension mismatch" in reason
    codes = {"x": np.ones((8, 4), np.int8), "w": np.ones((2, 4), np.float32)}
    both = {"x": TensorProto.INT8, "w": float32}
    node, reason = said("DequantizeLinear", both, FREE, feed=codes, out=float32, block_size=3, axis=0)
    assert node == "DequantizeLinear a/node" and reason.startswith("x_scale must be ceil")
    node, reason = said("DequantizeLinear", both, FREE)
    assert node == "a/node" and "does not match expected type" in reason
    node, reason = said("Add", {"x": bfloat16, "w": bfloat16}, FREE)
    assert node == "Add a/node" and reason.startswith("Could not find an implementation")
    node, reason = said("MatMul", {"x": float32, "w": float16}, FREE)
    assert node == "MatMul a/node" and "bound to different types" in reason
    node, reason = said("Strange", {"x": float32}, FREE, domain="com.other")
    assert node == "" and "com.other:Strange" in reason
