"""What does nothing goes; outputs keep their names; what cannot go says why."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import fuse
from quantkit.graph.fuse.no_ops import NoOps

X = (2, 3, 4)
Build = Callable[[Small, ir.Value], ir.Value]
FAR = 2**63 - 1

NOTHING: dict[str, Build] = {
    "Identity": lambda small, x: small.op("Identity", x),
    "Dropout": lambda small, x: small.op("Dropout", x, np.float32(0.5)),
    "Dropout off": lambda small, x: small.op("Dropout", x, np.float32(0.5), np.array(False)),
    "Cast": lambda small, x: small.op("Cast", x, to=1),
    "Reshape": lambda small, x: small.op("Reshape", x, np.array([0, -1, 4])),
    "Expand": lambda small, x: small.op("Expand", x, np.array([1, 4])),
    "Transpose": lambda small, x: small.op("Transpose", x, perm=[0, 1, 2]),
    "Pad": lambda small, x: small.op("Pad", x, np.zeros(6, np.int64)),
    "Slice": lambda small, x: small.op("Slice", x, np.array([0, 0]), np.array([FAR, 4]), np.array([0, 2])),
    "Concat": lambda small, x: small.op("Concat", x, axis=0),
    "Sum": lambda small, x: small.op("Sum", x),
    "0 +": lambda small, x: small.op("Add", np.float32(0), x),
    "- 0": lambda small, x: small.op("Sub", x, np.zeros(1, np.float32)),
    "* 1": lambda small, x: small.op("Mul", x, np.ones((1, 1), np.float32)),
    "/ 1": lambda small, x: small.op("Div", x, np.float32(1)),
    "two transposes": lambda small, x: small.op("Transpose", small.op("Transpose", x, perm=[1, 2, 0]), perm=[2, 0, 1]),
    "squeezed": lambda small, x: small.op("Squeeze", small.op("Unsqueeze", x, np.array([1])), np.array([1])),
    "there and back": lambda small, x: small.op("Cast", small.op("Cast", x, to=11), to=1),
}

SOMETHING: dict[str, Build] = {
    "Dropout in training": lambda small, x: small.op("Dropout", x, np.float32(0), np.array(True)),
    "Reshape": lambda small, x: small.op("Reshape", x, np.array([0, 4, 3])),
    "Reshape of unknown": lambda small, x: small.op("Reshape", x, small.op("Shape", x)),
    "Expand": lambda small, x: small.op("Expand", x, np.array([1, 2, 3, 4])),
    "Transpose": lambda small, x: small.op("Transpose", x, perm=[0, 2, 1]),
    "Pad": lambda small, x: small.op("Pad", x, np.array([0, 0, 0, 0, 0, 1])),
    "Slice": lambda small, x: small.op("Slice", x, np.array([0]), np.array([3]), np.array([2])),
    "Slice by two": lambda small, x: small.op("Slice", x, np.array([0]), np.array([FAR]), np.array([2]), np.array([2])),
    "1 - x": lambda small, x: small.op("Sub", np.float32(0), x),
    "1 / x": lambda small, x: small.op("Div", np.float32(1), x),
    "broadcast": lambda small, x: small.op("Mul", x, np.ones((1, 1, 1, 1), np.float32)),
    "rounded": lambda small, x: small.op("Cast", small.op("Cast", x, to=10), to=1),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_does_nothing_goes(case: str) -> None:
    small = Small()
    x = small.op("Relu", small.input("x", *X))
    x.shape, x.dtype = ir.Shape(X), ir.DataType.FLOAT
    model = small.model(small.op("Neg", NOTHING[case](small, x)))
    places, error = fuse(model, small.feeds(x=X), chosen=[NoOps()])
    assert operators(model) == ["Relu", "Neg"]
    assert all(place.done for place in places) and places
    assert error == 0


@pytest.mark.parametrize("case", SOMETHING)
def test_what_does_something_stays(case: str) -> None:
    small = Small()
    x = small.op("Relu", small.input("x", *X))
    x.shape, x.dtype = ir.Shape(X), ir.DataType.FLOAT
    model = small.model(small.op("Neg", SOMETHING[case](small, x)))
    had = operators(model)
    places, _ = fuse(model, small.feeds(x=X), chosen=[NoOps()])
    assert places == []
    assert operators(model) == had


def test_an_output_keeps_its_name() -> None:
    small = Small()
    y = small.op("Identity", small.op("Relu", small.input("x", *X)))
    y.name = "logits"
    model = small.model(y)
    fuse(model, small.feeds(x=X), chosen=[NoOps()])
    assert operators(model) == ["Relu"]
    assert [value.name for value in model.graph.outputs] == ["logits"]


def test_chains_are_shortened() -> None:
    small = Small()
    x = small.input("x", *X)
    y = small.op("Reshape", small.op("Reshape", x, np.array([6, 4])), np.array([4, -1]))
    y = small.op("Transpose", small.op("Transpose", y, perm=[1, 0]), perm=[1, 0])
    z = small.op("Transpose", small.op("Transpose", x, perm=[1, 2, 0]), perm=[1, 0, 2])
    model = small.model(small.op("Neg", y), z)
    places, error = fuse(model, small.feeds(x=X), chosen=[NoOps()])
    assert operators(model) == ["Reshape", "Transpose", "Neg"]
    assert model.graph[1].attributes.get_ints("perm") == (2, 1, 0)
    assert all(place.done for place in places)
    assert error == 0


def test_what_may_not_go_says_why() -> None:
    small = Small()
    x = small.input("x", *X)
    shown = small.op("Relu", x)
    model = small.model(small.op("Identity", x, name="a"), shown, small.op("Identity", shown, name="b"))
    places, _ = fuse(model, small.feeds(x=X), chosen=[NoOps()])
    assert {place.node: place.reason for place in places} == {
        "a": "it makes x an output of the graph",
        "b": "v0 and v2 are both outputs of the graph".replace("v0", shown.name or ""),
    }
    assert operators(model) == ["Relu", "Identity", "Identity"]
