"""Graphs as torch writes them, before its own optimizer: everything that should fuse does, and the outputs stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graph import operators
from torch import nn

from quantkit.graph.fuse import fuse
from quantkit.graph.fuse._rule import difference, outputs
from quantkit.graph.fuse.activation_bounds import behind


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
