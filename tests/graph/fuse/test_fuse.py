"""What every fusion goes through: the proof, and being undone."""

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graph import Small, operators
from torch import nn

from quantkit.errors import InputError
from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse._rule import LIMIT, difference, limit, outputs
from quantkit.graph.fuse.activation_bounds import behind
from quantkit.graph.fuse.constants import Constants


class Wrong:
    """Takes every Relu away."""

    name = "wrong"

    def run(self, model: ir.Model) -> list[Fused]:
        found = []
        for node in list(model.graph):
            if node.op_type == "Relu":
                node.outputs[0].replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
                node.inputs[0].name, node.outputs[0].name = node.outputs[0].name, None
                model.graph.remove(node, safe=True)
                found.append(Fused(node.name or "", self.name, True))
        return found


def test_a_fusion_that_changes_the_outputs_is_undone_and_listed() -> None:
    small = Small()
    y = small.op("Relu", small.op("Conv", small.input("x", 1, 3, 4, 4), small.normal(2, 3, 1, 1)))
    model = small.model(y)
    places, error = fuse(model, small.feeds(x=(1, 3, 4, 4)), chosen=[Wrong()])
    assert operators(model) == ["Conv", "Relu"]
    assert [(place.node, place.done) for place in places] == [("Relu_1", False)]
    assert places[0].reason.startswith("undone: outputs differ by")
    assert error == 0


class Invalid:
    """Writes an operator that there is none of."""

    name = "invalid"

    def run(self, model: ir.Model) -> list[Fused]:
        model.graph[0].op_type = "Rellu"
        return [Fused("Relu_0", self.name, True)]


def test_a_fusion_that_the_runtime_does_not_take_is_undone_and_listed() -> None:
    small = Small()
    model = small.model(small.op("Relu", small.input("x", 2)))
    places, _ = fuse(model, small.feeds(x=(2,)), chosen=[Invalid()])
    assert operators(model) == ["Relu"]
    assert places[0].reason.startswith("undone: ONNX Runtime does not run it: ")


class Renames:
    """Leaves the outputs as they are, under another name."""

    name = "renames"

    def run(self, model: ir.Model) -> list[Fused]:
        model.graph.outputs[0].name = "other"
        return [Fused("Relu_0", self.name, True)]


def test_a_fusion_that_renames_an_output_is_undone_and_listed() -> None:
    small = Small()
    model = small.model(small.op("Relu", small.input("x", 2)))
    places, _ = fuse(model, small.feeds(x=(2,)), chosen=[Renames()])
    assert [value.name for value in model.graph.outputs] == ["v0"]
    assert places[0].reason == "undone: outputs of the graph have other names"


def with_function() -> tuple[Small, ir.Model]:
    """A model whose one node is a function of its own: Relu(x) + 1."""
    inner, outer = Small(), Small()
    y = inner.op("Add", inner.op("Relu", inner.input("a", 2)), inner.op("Constant", value_float=1.0))
    inner.graph.outputs.append(y)
    function = ir.Function("own", "Plus", "", graph=inner.graph, attributes=[])
    x = outer.input("x", 2)
    node = ir.node("Plus", [x], domain="own", name="call")
    node.outputs[0].name = "y"
    outer.graph.append(node)
    outer.graph.opset_imports["own"] = 1
    model = outer.model(node.outputs[0])
    model.functions[function.identifier()] = function
    return outer, model


def test_functions_are_inlined_and_come_back_with_what_is_undone() -> None:
    small, model = with_function()
    places, error = fuse(model, small.feeds(x=(2,)), chosen=[Constants()])
    assert operators(model) == ["Relu", "Add"]
    assert not model.functions
    assert error == 0

    class Broken(Constants):
        def run(self, model: ir.Model) -> list[Fused]:
            super().run(model)
            return Wrong().run(model)

    small, model = with_function()
    places, _ = fuse(model, small.feeds(x=(2,)), chosen=[Broken()])
    assert operators(model) == ["Plus"]
    assert list(model.functions) == [("own", "Plus", "")]
    assert [place.done for place in places] == [False]


def test_without_feeds_nothing_can_be_proved() -> None:
    small = Small()
    with pytest.raises(InputError, match="fuse-unproved"):
        fuse(small.model(small.op("Relu", small.input("x", 2))), [])


@pytest.mark.parametrize(("left", "expected"), [(1.0, LIMIT), (1e-3, 4 * 2**-23 / 1e-3), (1e-5, 1e-3)])
def test_where_little_is_left_of_the_inputs_their_last_bit_is_the_limit(left: float, expected: float) -> None:
    small = Small()
    model = small.model(small.op("Sub", small.input("x", 4), np.float32(1 - left)))
    feeds = [{"x": np.ones(4, np.float32)}]
    assert limit(model, feeds, outputs(model, feeds)) == pytest.approx(expected, rel=1e-3)


def test_the_difference_is_relative_to_each_outputs_largest_magnitude() -> None:
    one, ten = np.array([1.0, -2.0]), np.array([10.0, 5.0])
    assert difference([[one, ten]], [[one, ten + 0.5]]) == pytest.approx(0.05)
    assert difference([[one], [10 * one]], [[one + 0.1], [10 * one]]) == pytest.approx(0.005)
    assert difference([[np.array([np.nan, 1.0])]], [[np.array([np.nan, 1.0])]]) == 0
    assert difference([[np.array([np.nan, 1.0])]], [[np.array([0.0, 1.0])]]) == np.inf
    assert difference([[np.array([1.0])]], [[np.array([np.inf])]]) == np.inf
    assert difference([[np.array([3, 4])]], [[np.array([3, 5])]]) == np.inf
    assert difference([[[np.array([3]), "a"]]], [[[np.array([3]), "a"]]]) == 0


class InvertedResidual(nn.Module):
    """As in MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 2 * into
        self.skips = into == out and stride == 1
        self.layers = nn.Sequential(
            *(nn.Conv2d(into, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return x + y if self.skips else y


def exported(module: nn.Module, x: torch.Tensor, opset: int, free: bool = True) -> ir.Model:
    shapes: Any = ({0: torch.export.Dim("batch")},) if free else None
    program = torch.onnx.export(
        module.eval(), (x,), dynamo=True, optimize=False, opset_version=opset, dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    return program.model


@pytest.fixture(scope="module")
def cnn() -> ir.Model:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 5)),
    )
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    return exported(model, torch.randn(2, 3, 16, 16), 20)


def test_an_inverted_residual_network(cnn: ir.Model) -> None:
    model, random = cnn.clone(), np.random.default_rng(0)
    feeds = [{"input": random.standard_normal((rows, 3, 16, 16)).astype(np.float32)} for rows in (1, 4)]
    name = model.graph.inputs[0].name or ""
    feeds = [{name: feed["input"]} for feed in feeds]
    before = outputs(model, feeds)
    places, error = fuse(model, feeds)
    block = ["Conv", "Clip", "Conv", "Clip", "Conv"]
    found = [kind.replace("Relu", "Clip") for kind in operators(model)]
    assert found == ["Conv", "Clip", *block, "Add", *block, "GlobalAveragePool", "Reshape", "Gemm"]
    assert Counter(place.fusion for place in places if place.done)["conv_batch_norm"] == 7
    assert error < 5e-6
    # the same on a batch that the proof has not seen
    other = [{name: random.standard_normal((3, 3, 16, 16)).astype(np.float32)}]
    assert len(before) == 2
    assert difference(outputs(cnn, other), outputs(model, other)) < 5e-6


def test_the_tensors_to_quantize_of_that_network(cnn: ir.Model) -> None:
    model = cnn.clone()
    name = model.graph.inputs[0].name or ""
    fuse(model, [{name: np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)}])
    convs = [node for node in model.graph if node.op_type == "Conv"]
    kinds = [behind(node.outputs[0]).producer().op_type for node in convs]  # type: ignore[union-attr]
    assert [kind == "Conv" for kind in kinds] == [False, False, False, True, False, False, True]


@pytest.mark.parametrize("opset", [18, 20])
def test_a_bert_layer(opset: int) -> None:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=32, attn_implementation="eager")
    model = exported(BertLayer(config), torch.randn(2, 5, 16), opset, free=False)
    name = model.graph.inputs[0].name or ""
    feeds = [{name: np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)}]
    places, error = fuse(model, feeds)
    kinds = Counter(operators(model))
    assert kinds["LayerNormalization"] == 2
    assert kinds["Identity"] == kinds["Constant"] == kinds["Concat"] == 0
    # all six linears take their biases in; products of activations stay products
    assert kinds["Gemm"] == 6 and kinds["MatMul"] == 2
    assert kinds["Gelu"] == 1 and kinds["Erf"] == 0
    assert [place.done for place in places if place.fusion == "opset"] == [True]
    assert error < 1e-5
