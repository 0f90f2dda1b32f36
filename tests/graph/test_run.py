"""A graph run piece by piece gives what it gives in one go, and holds no more than is still to be read."""

from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from quantkit.graph.open import open_graph
from quantkit.graph.run import Runner, Stepwise, told
from quantkit.graph.sites import patches, sites


def test_every_value_is_that_of_the_whole_graph(tmp_path: Path) -> None:
    model = open_graph(networks.write(tmp_path / "tiny.onnx")).model
    inputs = [site.input for site in sites(model)]
    assert len(inputs) > 3
    feeds = [{"images": networks.images(4, seed)} for seed in range(2)]
    steps = Stepwise(feeds)
    for place, name in enumerate(inputs):
        found = steps.value(model, name, inputs[place + 1 :])
        for feed, value in zip(feeds, found, strict=True):
            expected = feed[name] if name in feed else Runner(model, [name])(feed)[name]
            assert np.allclose(value, expected, atol=1e-5), name
    # behind the last, nothing is waited for but itself
    assert set(steps._held[0]) == {inputs[-1]}


def test_a_value_can_be_asked_for_twice(tmp_path: Path) -> None:
    model = open_graph(networks.write(tmp_path / "tiny.onnx")).model
    name = sites(model)[2].input
    steps = Stepwise([{"images": networks.images(2)}])
    first = steps.value(model, name, [name])
    assert steps.value(model, name, [])[0] is first[0]


def test_fewer_patches_are_rows_of_all_of_them(tmp_path: Path) -> None:
    for site in sites(open_graph(networks.write(tmp_path / "tiny.onnx")).model):
        if not site.is_conv:
            continue
        x = np.random.default_rng(0).standard_normal((2, site.weight.shape[1] * site.group, 12, 12), np.float32)
        every, few = patches(site, x), patches(site, x, most=8)
        assert 4 <= few.shape[1] < every.shape[1]
        rows = {row.tobytes() for row in every[0]}
        assert all(row.tobytes() in rows for row in few[0])


@pytest.mark.parametrize("most", [1000, None])
def test_where_there_are_few_all_are_taken(tmp_path: Path, most: int | None) -> None:
    site = sites(open_graph(networks.write(tmp_path / "tiny.onnx")).model)[0]
    x = networks.images(2)
    assert np.array_equal(patches(site, x, most=most), patches(site, x))


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
