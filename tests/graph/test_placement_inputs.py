"""Pairs for TensorRT: before products, and on the other input of a sum behind a convolution."""

from __future__ import annotations

from small_graph import Small

from quantkit.graph.pairs.placement import before
from quantkit.graph.sites import sites


def test_products_and_skip_connections() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    skip = small.op("Relu", x)
    conv = small.op("Conv", skip, small.normal(4, 4, 1, 1))
    summed = small.op("Add", conv, skip)
    pooled = small.op("Flatten", small.op("GlobalAveragePool", summed))
    model = small.model(small.op("Gemm", pooled, small.normal(4, 3)))
    placed = before(model, sites(model))
    # the sum's other input is read by the convolution already; what is pooled has none, what Gemm reads has
    assert placed.tensors == (skip.name, pooled.name)
    assert (placed.same, placed.bounds) == ({}, {})


def test_one_of_two_convolutions_that_are_summed() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    left, right = (small.op("Conv", x, small.normal(4, 4, 1, 1)) for _ in range(2))
    model = small.model(small.op("Add", left, right))
    assert before(model, sites(model)).tensors == ("x", left.name)


def test_sums_of_what_is_kept_and_of_constants_have_none() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    kept = small.op("Conv", x, small.normal(4, 4, 1, 1))
    summed = small.op("Add", kept, small.op("Relu", x))
    last = small.op("Conv", small.op("Add", summed, small.normal(1, 4, 1, 1)), small.normal(2, 4, 1, 1))
    model = small.model(last)
    found = sites(model)
    chosen = [site for site in found if site.output == last.name]
    assert before(model, chosen).tensors == (chosen[0].input,)
