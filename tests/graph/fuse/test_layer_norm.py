"""Every way to write a layer norm becomes one node, and ONNX Runtime then takes the skip connection in."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.layer_norm import LayerNorm

X = (2, 3, 8)


def _mean(small: Small, x: ir.Value, axes: list[int]) -> ir.Value:
    if small.graph.opset_imports[""] < 18:
        return small.op("ReduceMean", x, axes=axes)
    return small.op("ReduceMean", x, np.array(axes))


def normalized(
    small: Small,
    x: ir.Value,
    axes: list[int],
    shape: tuple[int, ...] = (8,),
    *,
    power: bool = True,
    quotient: bool = True,
    bias: bool = True,
    epsilon: float = 1e-3,
) -> ir.Value:
    d = small.op("Sub", x, _mean(small, x, axes), name="difference")
    squared = small.op("Pow", d, np.full(1, 2, np.float32)) if power else small.op("Mul", d, d)
    deviation = small.op("Sqrt", small.op("Add", np.float32(epsilon), _mean(small, squared, axes)))
    y = small.op("Div", d, deviation) if quotient else small.op("Mul", small.op("Reciprocal", deviation), d)
    y = small.op("Mul", small.normal(*shape), y)
    return small.op("Add", y, small.normal(*shape)) if bias else y


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize("quotient", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_becomes_one_node(opset: int, power: bool, quotient: bool, bias: bool) -> None:
    small = Small(opset=opset)
    x = small.input("x", "batch", 3, 8)
    model = small.model(normalized(small, x, [-1], power=power, quotient=quotient, bias=bias))
    root = model.graph[-1].name
    places, error = fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert all(place.done for place in places)
    assert operators(model) == ["LayerNormalization"]
    assert model.graph[0].name == root
    assert len(model.graph[0].inputs) == 2 + bias
    assert error < 2e-6


def test_over_several_last_axes() -> None:
    small = Small()
    model = small.model(normalized(small, small.input("x", 2, 3, 8), [1, 2], (3, 8)))
    fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert operators(model) == ["LayerNormalization"]
    assert model.graph[0].attributes.get_int("axis") == -2


@pytest.mark.parametrize(
    ("opset", "axes", "shape", "reason"),
    [
        (16, [-1], (8,), "opset 16 has no LayerNormalization, 17 has"),
        (21, [1], (1, 8), "it does not normalize the last axes"),
        (21, [-1], (1,), "its weight does not have the shape of the last axes"),
        (21, [-1], (3, 8), "its weight does not have the shape of the last axes"),
    ],
)
def test_what_is_left_says_why(opset: int, axes: list[int], shape: tuple[int, ...], reason: str) -> None:
    small = Small(opset=opset)
    model = small.model(normalized(small, small.input("x", *X), axes, shape))
    had = operators(model)
    places, _ = fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert [(place.done, place.reason) for place in places] == [(False, reason)]
    assert operators(model) == had


def test_a_value_that_is_read_elsewhere_stays() -> None:
    small = Small()
    y = normalized(small, small.input("x", *X), [-1])
    model = small.model(y, small.op("Neg", small.graph.node("difference").outputs[0]))
    places, _ = fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert [(place.done, place.reason) for place in places] == [(False, "Neg_9 reads v1 too")]


def test_a_second_bias_that_is_computed_stays() -> None:
    small = Small()
    x = small.input("x", *X)
    model = small.model(small.op("Add", normalized(small, x, [-1], bias=False), x))
    places, _ = fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert places == [Fused("Mul_7", "layer_norm", True)]
    assert operators(model) == ["LayerNormalization", "Add"]


def test_onnx_runtime_takes_the_skip_connection_into_what_was_fused(tmp_path: Path) -> None:
    import onnxruntime

    def after_loading(model: ir.Model, name: str) -> list[Any]:
        ir.save(model, tmp_path / name)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(tmp_path / f"{name}.loaded")
        onnxruntime.InferenceSession(str(tmp_path / name), options, providers=["CPUExecutionProvider"])
        return operators(ir.load(tmp_path / f"{name}.loaded"))

    small = Small()
    x = small.input("x", *X)
    skipped = small.op("Add", small.op("Relu", x), x)
    model = small.model(normalized(small, skipped, [-1]))
    fuse(model, small.feeds(x=X), chosen=[LayerNorm()])
    assert operators(model) == ["Relu", "Add", "LayerNormalization"]
    assert after_loading(model, "skip.onnx") == ["Relu", "SkipLayerNormalization"]
