"""The outputs stay what they are, in ONNX Runtime; what may not be folded is left, with a reason."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.conv_batch_norm import ConvBatchNorm

X = (2, 6, 7, 5)


def folded(model: ir.Model, feeds: Any) -> list[Fused]:
    """Fuse and hold the proof to float32's rounding."""
    places, error = fuse(model, feeds, chosen=[ConvBatchNorm()])
    assert error < 2e-6
    return places


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape", "attributes"),
    [
        ("Conv", (4, 6, 3, 3), {"pads": [1, 1, 1, 1]}),
        ("Conv", (6, 1, 3, 3), {"group": 6, "strides": [2, 2]}),
        ("Conv", (4, 3, 1, 1), {"group": 2}),
        ("ConvTranspose", (6, 4, 3, 3), {}),
        ("ConvTranspose", (6, 2, 2, 2), {"group": 3}),
    ],
)
def test_a_batch_norm_folds_into_a_convolution(
    kind: str, shape: tuple[int, ...], attributes: dict[str, Any], bias: bool
) -> None:
    small = Small()
    x = small.input("x", *X)
    channels = shape[0] if kind == "Conv" else shape[1] * attributes.get("group", 1)
    y = small.op(kind, x, small.normal(*shape), *([small.normal(channels)] if bias else []), **attributes)
    model = small.model(small.batch_norm(y, channels, epsilon=1e-3))
    places = folded(model, small.feeds(x=X))
    assert places == [Fused("BatchNormalization_1", "conv_batch_norm", True)]
    assert operators(model) == [kind]
    assert model.graph[0].name == f"{kind}_0"
    assert [value.name for value in model.graph.outputs] == ["v1"]


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_batch_norm_folds_into_a_gemm_with_its_beta(transposed: int) -> None:
    small = Small()
    weight = small.normal(*((3, 6) if transposed else (6, 3)))
    y = small.op("Gemm", small.input("x", 4, 6), weight, small.normal(1, 3), transB=transposed, alpha=0.5, beta=2.0)
    model = small.model(small.batch_norm(y, 3))
    assert folded(model, small.feeds(x=(4, 6)))[0].done
    assert operators(model) == ["Gemm"]


def test_constants_of_one_number_a_channel_fold_whole_chains() -> None:
    small = Small()
    y = small.op("Conv", small.input("x", *X), small.normal(4, 6, 3, 3))
    y = small.op("Mul", small.normal(4, 1, 1), y)
    y = small.op("Sub", small.op("Add", y, small.normal(1, 4, 1, 1)), np.float32(0.3))
    model = small.model(small.op("Relu", small.op("Div", y, np.float32(3))))
    assert all(place.done for place in folded(model, small.feeds(x=X)))
    assert operators(model) == ["Conv", "Relu"]


def test_a_shared_weight_stays_for_the_other_convolution() -> None:
    small = Small()
    x, weight = small.input("x", *X), small.constant(small.normal(4, 6, 3, 3), "W")
    plain, other = small.op("Conv", x, weight), small.op("Conv", x, weight)
    model = small.model(plain, small.batch_norm(other, 4))
    kept = weight.const_value.numpy().copy()
    assert folded(model, small.feeds(x=X))[0].done
    assert operators(model) == ["Conv", "Conv"]
    assert np.array_equal(model.graph.initializers["W"].const_value.numpy(), kept)
    assert model.graph[1].inputs[1].name != "W"


def test_a_norm_inside_a_branch_is_fused_there() -> None:
    outer, inner = Small(), Small(seed=1)
    x = outer.input("x", *X)
    y = inner.batch_norm(inner.op("Conv", x, outer.constant(outer.normal(4, 6, 3, 3), "W")), 4)
    branches = {}
    for name, value in (("then_branch", y), ("else_branch", None)):
        part = inner if value is not None else Small()
        end = value if value is not None else part.op("Conv", x, outer.graph.initializers["W"])
        end.name = f"{name}.end"
        branches[name] = part.model(end).graph
    truth = outer.input("c", dtype=ir.DataType.BOOL)
    model = outer.model(outer.op("If", truth, **branches))
    feeds = [{"x": outer.normal(*X), "c": np.array(way)} for way in (True, False)]
    places = folded(model, feeds)
    assert [place.done for place in places] == [True]
    assert operators(model) == ["If", "Conv", "Conv"]


def refusals() -> dict[str, tuple[Any, str]]:
    def read_twice(small: Small) -> list[ir.Value]:
        y = small.op("Conv", small.input("x", *X), small.normal(4, 6, 1, 1))
        return [small.batch_norm(y, 4), small.op("Relu", y)]

    def shown(small: Small) -> list[ir.Value]:
        y = small.op("Conv", small.input("x", *X), small.normal(4, 6, 1, 1))
        return [small.batch_norm(y, 4), y]

    def weight_is_an_input(small: Small) -> list[ir.Value]:
        weight = small.constant(small.normal(4, 6, 1, 1), "W")
        y = small.op("Conv", small.input("x", *X), weight)
        small.graph.inputs.append(weight)
        return [small.batch_norm(y, 4)]

    def weight_is_computed(small: Small) -> list[ir.Value]:
        x = small.input("x", *X)
        weight = small.op("Abs", small.normal(4, 6, 1, 1))
        return [small.batch_norm(small.op("Conv", x, weight), 4)]

    def before(small: Small) -> list[ir.Value]:
        return [small.op("Conv", small.batch_norm(small.input("x", *X), 6), small.normal(4, 6, 1, 1))]

    def training(small: Small) -> list[ir.Value]:
        y = small.op("Conv", small.input("x", *X), small.normal(4, 6, 1, 1))
        return [small.batch_norm(y, 4, training_mode=1, outputs=3)]

    def over_space(small: Small) -> list[ir.Value]:
        y = small.op("Conv", small.input("x", *X), small.normal(4, 6, 1, 1))
        return [small.op("Add", y, small.normal(7, 5))]

    return {
        "read twice": (read_twice, "Relu_2 reads v0 too"),
        "an output": (shown, "v0 is an output of the graph"),
        "an input": (weight_is_an_input, "W is an input of the graph"),
        "computed": (weight_is_computed, "v0 is not a constant"),
        "before": (before, "no convolution computes its input"),
        "training": (training, "in training mode"),
        "over space": (over_space, "its constant does not have one number per channel"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_may_not_be_folded_is_left_with_a_reason(case: str) -> None:
    build, reason = refusals()[case]
    small = Small()
    model = small.model(*build(small))
    had = operators(model)
    places, error = fuse(model, small.feeds(x=X), chosen=[ConvBatchNorm()])
    assert [(place.done, place.reason) for place in places] == [(False, reason)]
    assert operators(model) == had
    assert error == 0
