"""A mean over all positions becomes a pooling; one over anything else does not."""

from __future__ import annotations

import numpy as np
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.pad_conv import MeanPool

X = (2, 3, 4, 5)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("opset", [12, 17, 21])
def test_over_all_positions(opset: int, keep: int) -> None:
    small = Small(opset)
    x = small.input("x", "batch", 3, 4, 5)
    axes = [np.array([-1, 2])] if opset >= 18 else []
    y = small.op("ReduceMean", x, *axes, keepdims=keep, **({} if axes else {"axes": [2, 3]}))
    model = small.model(y)
    places, error = fuse(model, small.feeds(x=X), chosen=[MeanPool()])
    assert places == [Fused("ReduceMean_0", "mean_pool", True)]
    assert operators(model) == ["GlobalAveragePool"] + ["Squeeze"] * (1 - keep)
    assert error < 1e-6


@pytest.mark.parametrize(("shape", "axes"), [(X, [1]), (X, [3]), (X, [1, 2, 3]), ((2, 3, 4), [2])])
def test_over_anything_else(shape: tuple[int, ...], axes: list[int]) -> None:
    small = Small()
    model = small.model(small.op("ReduceMean", small.input("x", *shape), np.array(axes)))
    assert fuse(model, small.feeds(x=shape), chosen=[MeanPool()]) == ([], 0.0)
    assert operators(model) == ["ReduceMean"]
