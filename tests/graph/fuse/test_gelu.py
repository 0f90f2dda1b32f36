"""Every way to write a GELU becomes one node; what is almost one stays."""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.gelu import Gelu

X = (2, 5)
HALF, ONE = np.float32(0.5), np.float32(1)
Build = Callable[[Small, ir.Value], ir.Value]


def _erf(small: Small, x: ir.Value) -> ir.Value:
    return small.op("Erf", small.op("Div", x, np.float32(math.sqrt(2))))


def _tanh(small: Small, x: ir.Value) -> ir.Value:
    cube = small.op("Mul", np.float32(0.044715), small.op("Pow", x, np.float32(3)))
    return small.op("Tanh", small.op("Mul", small.op("Add", x, cube), np.float32(math.sqrt(2 / math.pi))))


def _tanh_of_products(small: Small, x: ir.Value) -> ir.Value:
    cube = small.op("Mul", x, small.op("Mul", small.op("Mul", x, np.float32(0.044715)), x))
    return small.op("Tanh", small.op("Mul", np.float32(math.sqrt(2 / math.pi)), small.op("Add", cube, x)))


def _half_last(small: Small, x: ir.Value, part: ir.Value) -> ir.Value:
    return small.op("Mul", small.op("Mul", x, small.op("Add", part, ONE)), HALF)


def _half_inside(small: Small, x: ir.Value, part: ir.Value) -> ir.Value:
    return small.op("Mul", small.op("Mul", HALF, small.op("Add", ONE, part)), x)


def _half_of_x(small: Small, x: ir.Value, part: ir.Value) -> ir.Value:
    return small.op("Mul", small.op("Mul", x, HALF), small.op("Add", part, np.ones(1, np.float32)))


def _halved(small: Small, x: ir.Value, part: ir.Value) -> ir.Value:
    return small.op("Div", small.op("Mul", x, small.op("Add", part, ONE)), np.float32(2))


@pytest.mark.parametrize("whole", [_half_last, _half_inside, _half_of_x, _halved])
@pytest.mark.parametrize("part", [_erf, _tanh, _tanh_of_products])
def test_every_form_becomes_one_node(part: Build, whole: Callable[..., ir.Value]) -> None:
    small = Small()
    # x is a product itself: nothing of it may be taken for a factor
    x = small.op("Mul", small.input("x", *X), small.constant(small.normal(5)))
    model = small.model(whole(small, x, part(small, x)))
    root = model.graph[-1].name
    places, error = fuse(model, small.feeds(x=X), chosen=[Gelu()])
    assert places == [Fused(root or "", "gelu", True)]
    assert operators(model) == ["Mul", "Gelu"]
    assert model.graph[1].attributes.get_string("approximate") == ("none" if part is _erf else "tanh")
    assert error < 1e-6


def test_an_older_opset_has_no_gelu() -> None:
    small = Small(opset=17)
    x = small.input("x", *X)
    model = small.model(_half_last(small, x, _erf(small, x)))
    places, _ = fuse(model, small.feeds(x=X), chosen=[Gelu()])
    assert [(place.done, place.reason) for place in places] == [(False, "opset 17 has no Gelu, 20 has")]
    assert "Erf" in operators(model)


def test_a_value_that_is_read_elsewhere_stays() -> None:
    small = Small()
    x = small.input("x", *X)
    part = _erf(small, x)
    model = small.model(_half_last(small, x, part), small.op("Neg", part))
    places, _ = fuse(model, small.feeds(x=X), chosen=[Gelu()])
    assert [(place.done, place.reason) for place in places] == [(False, "Neg_5 reads v1 too")]
    assert operators(model).count("Erf") == 1


def _wrong_root(small: Small, x: ir.Value) -> ir.Value:
    return _half_last(small, x, small.op("Erf", small.op("Div", x, np.float32(1.5))))


def _other_x(small: Small, x: ir.Value) -> ir.Value:
    return _half_last(small, small.op("Neg", x), _erf(small, x))


def _not_halved(small: Small, x: ir.Value) -> ir.Value:
    return small.op("Mul", x, small.op("Add", _erf(small, x), ONE))


@pytest.mark.parametrize("build", [_wrong_root, _other_x, _not_halved, lambda small, x: small.op("Tanh", x)])
def test_what_is_no_gelu_is_not_listed(build: Build) -> None:
    small = Small()
    model = small.model(build(small, small.input("x", *X)))
    had = operators(model)
    assert fuse(model, small.feeds(x=X), chosen=[Gelu()]) == ([], 0.0)
    assert operators(model) == had
