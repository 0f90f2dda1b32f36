"""A graph of an older set is one of a newer, and fuses where the older had no operator."""

from __future__ import annotations

import math

import numpy as np
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.constants import TARGET, Opset
from quantkit.graph.fuse.gelu import Gelu


def test_an_older_graph_is_converted_and_then_fuses() -> None:
    small = Small(opset=13)
    x = small.input("x", 2, 3)
    mean = small.op("ReduceMean", x, axes=[1])
    y = small.op("Sub", x, mean)
    part = small.op("Erf", small.op("Div", y, np.float32(math.sqrt(2))))
    y = small.op("Mul", small.op("Mul", y, small.op("Add", part, np.float32(1))), np.float32(0.5), name="end")
    model = small.model(y)
    places, error = fuse(model, small.feeds(x=(2, 3)), chosen=[Opset(), Gelu()])
    assert places == [Fused("small", "opset", True), Fused("end", "gelu", True)]
    assert operators(model)[-2:] == ["Sub", "Gelu"]
    assert model.opset_imports == {"": TARGET}
    assert model.ir_version >= 10
    assert error < 1e-6


def test_a_newer_graph_stays() -> None:
    small = Small(opset=TARGET)
    model = small.model(small.op("Relu", small.input("x", 2)))
    assert fuse(model, small.feeds(x=(2,)), chosen=[Opset()]) == ([], 0.0)


def test_what_the_converter_does_not_know_says_why() -> None:
    small = Small(opset=13)
    y = small.op("Relu", small.input("x", 2))
    model = small.model(y)
    model.graph[0].op_type = "Rellu"
    (place,) = Opset().run(model)
    assert not place.done
    assert place.reason.startswith("opset 13: ")
    assert operators(model) == ["Rellu"]
