"""A product of matrices takes its bias in; others keep it beside them."""

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.constants import Constants
from quantkit.graph.fuse.plain_products import LinearBias


@pytest.mark.parametrize("shape", [(3,), (1, 3), ()])
def test_a_product_and_its_bias_become_a_gemm(shape: tuple[int, ...]) -> None:
    small = Small()
    y = small.op("MatMul", small.input("x", "batch", 6), small.normal(6, 3))
    model = small.model(small.op("Add", small.constant(np.asarray(small.normal(*shape))), y, name="sum"))
    places, error = fuse(model, small.feeds(x=(4, 6)), chosen=[LinearBias()])
    assert places == [Fused("sum", "linear_bias", True)]
    assert operators(model) == ["Gemm"]
    assert model.graph[0].name == "sum"
    assert error < 1e-6


@pytest.mark.parametrize(
    ("shape", "bias", "reason"),
    [
        (("n", 4, 6), (3,), "x has 3 dimensions, not all of them fixed; Gemm takes matrices"),
        ((4, 6), (4, 3), "the bias does not have one number per column"),
        ((4, 6), (4, 1), "the bias does not have one number per column"),
    ],
)
def test_what_is_left_says_why(shape: tuple[int | str, ...], bias: tuple[int, ...], reason: str) -> None:
    small = Small()
    y = small.op("MatMul", small.input("x", *shape), small.normal(6, 3))
    model = small.model(small.op("Add", y, small.normal(*bias)))
    feeds = small.feeds(x=[2 if isinstance(size, str) else size for size in shape])
    places, _ = fuse(model, feeds, chosen=[LinearBias()])
    assert [(place.done, place.reason) for place in places] == [(False, reason)]
    assert operators(model) == ["MatMul", "Add"]


def test_rows_of_more_dimensions_are_counted_where_all_are_fixed() -> None:
    small = Small()
    y = small.op("Add", small.op("MatMul", small.input("x", 2, 4, 6), small.normal(6, 3)), small.normal(3), name="sum")
    model = small.model(small.op("Add", small.op("MatMul", y, small.normal(3, 5)), small.normal(5)))
    places, error = fuse(model, small.feeds(x=(2, 4, 6)), chosen=[Constants(), LinearBias()])
    assert [place.done for place in places] == [True, True]
    assert operators(model) == ["Reshape", "Gemm", "Reshape"] * 2
    assert model.graph[1].outputs[0].shape == ir.Shape([8, 3])
    assert model.graph[1].name == "sum"
    assert error < 1e-6


def test_a_product_that_others_read_stays() -> None:
    small = Small()
    y = small.op("MatMul", small.input("x", 4, 6), small.constant(small.normal(6, 3)))
    model = small.model(small.op("Add", y, small.normal(3)), y)
    places, _ = fuse(model, small.feeds(x=(4, 6)), chosen=[LinearBias()])
    assert [place.reason for place in places] == ["v0 is an output of the graph"]


def test_products_and_sums_of_what_is_computed_are_not_listed() -> None:
    small = Small()
    x = small.input("x", 4, 4)
    weight = small.constant(small.normal(4, 4), "W")
    small.graph.inputs.append(weight)
    y = small.op("Add", small.op("MatMul", x, x), small.normal(4))
    z = small.op("Add", small.op("MatMul", x, weight), small.normal(4))
    model = small.model(y, z, dtype=ir.DataType.FLOAT)
    assert fuse(model, small.feeds(x=(4, 4)), chosen=[LinearBias()]) == ([], 0.0)
