"""Channels are measured in other units and the outputs stay; ReLU6 is only passed where it never binds."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.equalize import Equalize

X = (2, 4, 6, 6)
SIX = (np.float32(0), np.float32(6))


def uneven(small: Small, *shape: int) -> Any:
    """A weight whose output channels differ by powers of ten."""
    return small.normal(*shape) * np.logspace(-2, 2, shape[0], dtype=np.float32).reshape(-1, *(1,) * (len(shape) - 1))


def separable(small: Small, activation: str, *ends: Any) -> ir.Model:
    """Pointwise, depthwise, pointwise, as in MobileNetV2's blocks."""
    y = small.op("Conv", small.input("x", *X), uneven(small, 8, 4, 1, 1), small.normal(8), name="expand")
    y = small.op(activation, y, *ends, name="first")
    y = small.op("Conv", y, uneven(small, 8, 1, 3, 3), small.normal(8), group=8, pads=[1, 1, 1, 1], name="depthwise")
    y = small.op(activation, y, *ends, name="second")
    return small.model(small.op("Conv", y, small.normal(3, 8, 1, 1), name="project"))


def apart(one: Any, other: Any) -> float:
    """The largest factor between two ranges of a channel."""
    return float(np.exp2(np.abs(np.log2(one / other)).max()))


def weight(model: ir.Model, name: str) -> Any:
    return model.graph.node(name).inputs[1].const_value.numpy()


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_a_depthwise_stack_is_equalized_and_stays_what_it_was(activation: str) -> None:
    small = Small()
    model = separable(small, activation)
    feeds = small.feeds(x=X)
    places, error = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert places == [Fused(name, "equalize", True) for name in ("expand", "depthwise")]
    assert error == 0
    expand, depthwise, project = (np.abs(weight(model, name)) for name in ("expand", "depthwise", "project"))
    assert apart(expand.max(axis=(1, 2, 3)), depthwise.max(axis=(1, 2, 3))) <= 2
    assert apart(depthwise.max(axis=(1, 2, 3)), project.max(axis=(0, 2, 3))) <= 2


def test_groups_and_pooling() -> None:
    small = Small()
    y = small.op("Conv", small.input("x", *X), uneven(small, 6, 2, 3, 3), group=2)
    y = small.op("MaxPool", small.op("PRelu", y, np.full((6, 1, 1), 0.1, np.float32)), kernel_shape=[2, 2])
    y = small.op("Conv", small.op("GlobalAveragePool", y), small.normal(9, 2, 1, 1), group=3, name="second")
    model = small.model(y)
    feeds = small.feeds(x=X)
    places, error = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert [place.done for place in places] == [True]
    assert error == 0
    first, second = np.abs(weight(model, "Conv_0")), np.abs(weight(model, "second")).reshape(3, 3, 2)
    assert apart(first.max(axis=(1, 2, 3)), second.max(axis=1).reshape(-1)) <= 2


def test_a_dead_channel_is_left_alone() -> None:
    small = Small()
    dead = small.normal(4, 4, 1, 1)
    dead[1] = 0
    y = small.op("Relu", small.op("Conv", small.input("x", *X), dead, name="first"))
    model = small.model(small.op("Conv", y, small.normal(2, 4, 1, 1)))
    feeds = small.feeds(x=X)
    _, error = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert error == 0
    assert np.isfinite(weight(model, "first")).all()


def test_relu6_that_binds_on_the_probe_is_refused() -> None:
    small = Small()
    model = separable(small, "Clip", *SIX)
    had, feeds = weight(model, "expand").copy(), small.feeds(x=X)
    places, error = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert [place.done for place in places] == [False, False]
    assert places[0].reason.startswith("first may bind: its bound is 6, its input reaches ")
    assert np.array_equal(weight(model, "expand"), had)
    assert operators(model).count("Clip") == 2
    assert error == 0


def test_relu6_that_is_far_from_binding_becomes_relu() -> None:
    small = Small()
    model = separable(small, "Clip", np.float32(0), np.float32(1e5))
    feeds = small.feeds(x=X)
    places, error = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert all(place.done for place in places)
    assert operators(model) == ["Conv", "Relu", "Conv", "Relu", "Conv"]
    assert error == 0


def test_without_a_probe_a_clip_is_refused() -> None:
    small = Small()
    model = separable(small, "Clip", np.float32(0), np.float32(1e5))
    places, _ = fuse(model, small.feeds(x=X), chosen=[Equalize()])
    assert [place.reason for place in places] == ["first was not probed", "second was not probed"]


def refusals() -> dict[str, tuple[Any, str]]:
    def read_twice(small: Small, y: ir.Value) -> list[ir.Value]:
        return [small.op("Conv", y, small.normal(2, 4, 1, 1)), small.op("Neg", y)]

    def shown(small: Small, y: ir.Value) -> list[ir.Value]:
        return [small.op("Conv", y, small.normal(2, 4, 1, 1)), y]

    def shared(small: Small, y: ir.Value) -> list[ir.Value]:
        weight = small.constant(small.normal(4, 4, 1, 1), "W")
        return [small.op("Conv", y, weight), small.op("Neg", weight)]

    def an_input(small: Small, y: ir.Value) -> list[ir.Value]:
        weight = small.constant(small.normal(4, 4, 1, 1), "W")
        small.graph.inputs.append(weight)
        return [small.op("Conv", y, weight)]

    def other_clip(small: Small, y: ir.Value) -> list[ir.Value]:
        y = small.op("Clip", y, np.float32(-1), np.float32(1))
        return [small.op("Conv", y, small.normal(2, 4, 1, 1))]

    return {
        "read twice": (read_twice, "v1 is read by Conv_2, Neg_3"),
        "an output": (shown, "v1 is an output of the graph"),
        "shared": (shared, "W is shared"),
        "an input": (an_input, "W is an input of the graph"),
        "other clip": (other_clip, "the lower bound of Clip_2 is not 0"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_may_not_be_scaled_says_why(case: str) -> None:
    build, reason = refusals()[case]
    small = Small()
    y = small.op("Relu", small.op("Conv", small.input("x", *X), small.normal(4, 4, 1, 1)))
    model = small.model(*build(small, y))
    feeds = small.feeds(x=X)
    places, _ = fuse(model, feeds, chosen=[Equalize(feeds)])
    assert [(place.done, place.reason) for place in places] == [(False, reason)]


def test_what_is_no_pair_is_not_listed() -> None:
    small = Small()
    y = small.op("Sigmoid", small.op("Conv", small.input("x", *X), small.normal(4, 4, 1, 1)))
    model = small.model(small.op("Conv", y, small.normal(2, 4, 1, 1)))
    feeds = small.feeds(x=X)
    assert fuse(model, feeds, chosen=[Equalize(feeds)]) == ([], 0.0)
