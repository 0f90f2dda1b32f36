"""What TensorRT-RTX's parser says of networks that it does not take, and what is made of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.exporters.tensorrt.parser import Refused, of_parser, refusal, unknown
from quantkit.runtimes.tensorrt.library import Said, load

pytest.importorskip("tensorrt_rtx")
LIBRARY = load("tensorrt_rtx")


def refused(nodes: Sequence[onnx.NodeProto], **constants: Any) -> list[Refused]:
    """What the parser says of nodes from `x` to `y`, both [2, 8]."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy"]
    given = {"w": np.ones((8, 8), np.float32), **constants}
    made = [numpy_helper.from_array(value, name) for name, value in given.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=made)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    said = Said(LIBRARY.api)
    builder = LIBRARY.api.Builder(said.logger)
    network = LIBRARY.network(builder)
    parser = LIBRARY.api.OnnxParser(network, said.logger)
    assert not parser.parse(model.SerializeToString())
    return of_parser(parser)


def node(kind: str, inputs: str, output: str, name: str, domain: str = "") -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name, domain=domain)


def test_every_node_that_it_does_not_take_is_named_once_by_operator() -> None:
    found = refused(
        [
            node("Det", "w", "a", "one"),
            node("Mul", "x a", "b", "m"),
            node("Det", "w", "c", "two"),
            node("Add", "b c", "y", "s"),
        ]
    )
    assert [(each.operator, each.node) for each in found] == [("Det", "one"), ("Det", "two")]
    error = refusal("network.onnx", "tensorrt_rtx 1.7", found)
    assert (error.code, error.where) == ("network-unsupported", "network.onnx: Det one")
    assert "does not take Det (one, two)" in error.value
    assert "false" not in error.line()
    assert "--recipe int8-network" in error.remedy
    assert "\n" not in error.line()


def test_a_zero_point_is_answered_with_the_settings_that_leave_it_out() -> None:
    pair = [node("QuantizeLinear", "x s z", "q", "q"), node("DequantizeLinear", "q s z", "d", "d")]
    found = refused([*pair, node("MatMul", "d w", "y", "m")], s=np.float32(0.1), z=np.int8(3))
    error = refusal("n.onnx", "t", found)
    assert "Non-zero zero point" in error.rule
    assert error.remedy == "--set scheme.weights.symmetric=true --set scheme.activations.symmetric=true"


@pytest.mark.parametrize(
    ("first", "remedy"),
    [
        (Refused("MatMulNBits", "m", domain="com.microsoft"), "without a runtime's own optimizations"),
        (
            Refused("FusedMatMul", "m", 'creator && "Plugin not found, are the plugin name"'),
            "a runtime's own optimizations",
        ),
        (Refused("DynamicQuantizeLinear", "d", "false"), "--set scheme.activations.dynamic=false"),
        (Refused("QLinearConv", "c", "false"), "give the float graph"),
        (Refused("TensorScatter", "t", "false"), "--set tensorrt.cache=grown"),
        (Refused("DequantizeLinear", "conv1/weight", "block size"), "--set keep=[conv1]"),
        (Refused("NonZero", "n", "false"), "--recipe int8-network"),
        (Refused("Attention", "n"), "opset below 23"),
    ],
)
def test_what_would_remove_a_node(first: Refused, remedy: str) -> None:
    assert remedy in refusal("n.onnx", "t", [first]).remedy


def test_a_long_list_is_cut() -> None:
    many = [Refused("Det", f"n{place}") for place in range(9)] + [Refused(f"K{place}") for place in range(6)]
    value = refusal("n.onnx", "t", many).value
    assert "Det (n0, n1, n2, n3 and 5 more); K0; K1; K2; and 3 more kinds" in value
    assert refusal("n.onnx", "t", []).where == "n.onnx: a node"


def test_operators_are_asked_for_without_a_network_and_without_a_gpu() -> None:
    assert unknown(LIBRARY, ["MatMul", "Conv", "Softmax", "Det", "BitShift", "NoSuchThing", "NonMaxSuppression"]) == {
        "NonMaxSuppression",
        "Det",
        "BitShift",
        "NoSuchThing",
    }
