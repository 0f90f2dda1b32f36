"""Zeros go into the convolution, uneven ones too; everything else stays a Pad."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.pad_conv import MeanPool, PadConv

X = (1, 3, 6, 5)


@pytest.mark.parametrize("own", [None, [1, 0, 0, 1]])
@pytest.mark.parametrize("axes", [False, True])
def test_zeros_become_padding(own: list[int] | None, axes: bool) -> None:
    small = Small()
    x = small.input("x", *X)
    widths = np.array([0, 1, 2, 3] if axes else [0, 0, 0, 1, 0, 0, 2, 3])
    y = small.op("Pad", x, widths, *([np.float32(0), np.array([-2, 3])] if axes else []))
    attributes = {"strides": [2, 2]} | ({"pads": own} if own else {"auto_pad": "VALID"})
    model = small.model(small.op("Conv", y, small.normal(2, 3, 3, 3), **attributes))
    places, error = fuse(model, small.feeds(x=X), chosen=[PadConv()])
    assert operators(model) == ["Conv"]
    assert model.graph[0].attributes.get_ints("pads") == ((1, 1, 2, 4) if own else (0, 1, 2, 3))
    assert [place.node for place in places if place.done] == ["Pad_0"]
    assert error < 1e-6


def test_a_pad_stays_for_who_else_reads_it() -> None:
    small = Small()
    y = small.op("Pad", small.input("x", *X), np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    model = small.model(small.op("Conv", y, small.normal(2, 3, 3, 3)), small.op("Relu", y))
    _, error = fuse(model, small.feeds(x=X), chosen=[PadConv()])
    assert operators(model) == ["Pad", "Conv", "Relu"]
    assert model.graph[1].inputs[0] is model.graph.inputs[0]
    assert error < 1e-6


@pytest.mark.parametrize(
    ("inputs", "attributes", "automatic", "reason"),
    [
        ([[0, 0, 1, 1, 0, 0, 1, 1]], {"mode": "reflect"}, "NOTSET", "its padding is not constant"),
        ([[0, 0, 1, 1, 0, 0, 1, 1], np.float32(1)], {}, "NOTSET", "it does not pad with zeros"),
        ([[0, 1, 0, 0, 0, 0, 0, 0]], {}, "NOTSET", "it pads the batch or the channels, or its padding is negative"),
        ([[0, 0, -1, 0, 0, 0, 0, 0]], {}, "NOTSET", "it pads the batch or the channels, or its padding is negative"),
        ([[0, 0, 1, 1, 0, 0, 1, 1]], {}, "SAME_UPPER", "Conv_1 pads by itself (SAME_UPPER)"),
    ],
)
def test_what_is_left_says_why(inputs: list[Any], attributes: dict[str, Any], automatic: str, reason: str) -> None:
    small = Small()
    y = small.op("Pad", small.input("x", *X), *map(np.asarray, inputs), **attributes)
    channels = 4 if inputs[0][1] else 3
    model = small.model(small.op("Conv", y, small.normal(2, channels, 3, 3), auto_pad=automatic))
    places, _ = fuse(model, small.feeds(x=X), chosen=[PadConv()])
    assert [(place.done, place.reason) for place in places] == [(False, reason)]
    assert operators(model) == ["Pad", "Conv"]


def test_computed_widths_stay() -> None:
    small = Small()
    widths = small.input("widths", 8, dtype=ir.DataType.INT64)
    model = small.model(small.op("Conv", small.op("Pad", small.input("x", *X), widths), small.normal(2, 3, 3, 3)))
    feeds = [{"x": small.normal(*X), "widths": np.zeros(8, np.int64)}]
    assert [place.reason for place in fuse(model, feeds, chosen=[PadConv()])[0]] == ["its widths are not constants"]


IMAGES = (2, 3, 4, 5)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("opset", [12, 17, 21])
def test_a_mean_over_all_positions_is_a_pooling(opset: int, keep: int) -> None:
    small = Small(opset)
    x = small.input("x", "batch", 3, 4, 5)
    axes = [np.array([-1, 2])] if opset >= 18 else []
    y = small.op("ReduceMean", x, *axes, keepdims=keep, **({} if axes else {"axes": [2, 3]}))
    model = small.model(y)
    places, error = fuse(model, small.feeds(x=IMAGES), chosen=[MeanPool()])
    assert places == [Fused("ReduceMean_0", "mean_pool", True)]
    assert operators(model) == ["GlobalAveragePool"] + ["Squeeze"] * (1 - keep)
    assert error < 1e-6


@pytest.mark.parametrize(("shape", "axes"), [(IMAGES, [1]), (IMAGES, [3]), (IMAGES, [1, 2, 3]), ((2, 3, 4), [2])])
def test_a_mean_over_anything_else_stays(shape: tuple[int, ...], axes: list[int]) -> None:
    small = Small()
    model = small.model(small.op("ReduceMean", small.input("x", *shape), np.array(axes)))
    assert fuse(model, small.feeds(x=shape), chosen=[MeanPool()]) == ([], 0.0)
    assert operators(model) == ["ReduceMean"]
