"""What constants alone decide is computed once; weights do not blow up."""

import math

import numpy as np
import onnx_ir as ir
import pytest
from small_graph import Small, operators

from quantkit.graph.fuse import Fused, fuse
from quantkit.graph.fuse.constants import LIMIT, TARGET, Constants, Opset
from quantkit.graph.fuse.gelu import Gelu


def test_constants_and_fixed_shapes_fold() -> None:
    small = Small()
    x = small.input("x", 2, 12)
    shape = small.op("Concat", small.op("Gather", small.op("Shape", x), np.array([0])), np.array([3, 4]), axis=0)
    y = small.op("Reshape", x, shape)
    y = small.op("Add", y, small.op("Mul", small.normal(3, 4), np.float32(2)))
    model = small.model(y)
    places, error = fuse(model, small.feeds(x=(2, 12)), chosen=[Constants()])
    assert operators(model) == ["Reshape", "Add"]
    assert places == [Fused(name, "constants", True) for name in ("Shape_0", "Gather_1", "Concat_2", "Mul_4")]
    assert error == 0


@pytest.mark.parametrize("opset", [13, 21])
def test_a_reshape_of_which_one_size_is_free_needs_no_shape(opset: int) -> None:
    small = Small(opset)
    x = small.input("x", "batch", 3, 4)
    rows = small.op("Slice", small.op("Shape", x), np.array([0]), np.array([1]))
    y = small.op("Reshape", x, small.op("Concat", rows, np.array([-1]), axis=0))
    y.shape, y.dtype = ir.Shape(["batch", 12]), ir.DataType.FLOAT
    model = small.model(small.op("Relu", y))
    _, error = fuse(model, small.feeds(x=(2, 3, 4)), chosen=[Constants()])
    assert operators(model) == ["Reshape", "Relu"]
    assert model.graph[0].inputs[1].const_value.numpy().tolist() == [-1, 12]
    assert error == 0


def test_constant_nodes_become_initializers() -> None:
    small = Small()
    x = small.input("x", 2, 3)
    half = small.op("Constant", value_float=0.5)
    model = small.model(small.op("Mul", x, half))
    fuse(model, small.feeds(x=(2, 3)), chosen=[Constants()])
    assert operators(model) == ["Mul"]
    assert [value.const_value.numpy().item() for value in model.graph.initializers.values()] == [0.5]


def test_a_weight_that_would_grow_is_left_and_one_that_only_turns_is_not() -> None:
    rows = LIMIT // 64
    small = Small()
    x = small.input("x", 4, 64)
    turned = small.op("Transpose", small.normal(2 * rows, 64), perm=[1, 0], name="turned")
    grown = small.op("Expand", small.normal(1, 64), np.array([2 * rows, 64]), name="grown")
    model = small.model(small.op("MatMul", small.op("MatMul", x, turned), grown))
    places, error = fuse(model, small.feeds(x=(4, 64)), chosen=[Constants()])
    assert [(place.node, place.done) for place in places] == [("turned", True), ("grown", False)]
    assert places[1].reason == f"more than {LIMIT} elements, and more than the constants that would go"
    assert operators(model) == ["Expand", "MatMul", "MatMul"]
    assert error == 0


def test_a_weight_that_others_read_too_is_not_stored_twice() -> None:
    small = Small()
    weight = small.constant(small.normal(256, 128))
    x = small.op("MatMul", small.input("x", 4, 256), weight)
    model = small.model(small.op("MatMul", x, small.op("Transpose", weight, perm=[1, 0])))
    places, _ = fuse(model, small.feeds(x=(4, 256)), chosen=[Constants()])
    assert [place.done for place in places] == [False]


def test_the_default_of_an_input_is_no_constant() -> None:
    small = Small()
    x, scale = small.input("x", 2), small.constant(np.array([2.0, 3.0], np.float32), "scale")
    small.graph.inputs.append(scale)
    model = small.model(small.op("Mul", x, small.op("Neg", scale)))
    places, _ = fuse(model, small.feeds(x=(2,)), chosen=[Constants()])
    assert places == []
    assert operators(model) == ["Neg", "Mul"]
    assert [value.name for value in model.graph.inputs] == ["x", "scale"]


def test_a_branch_that_is_never_taken_goes() -> None:
    outer = Small()
    x = outer.input("x", 3)
    branches = {}
    for name, kind in (("then_branch", "Relu"), ("else_branch", "Neg")):
        part = Small()
        end = part.op(kind, x)
        end.name = f"{name}.end"
        branches[name] = part.model(end).graph
    model = outer.model(outer.op("If", np.array(False), **branches))
    places, error = fuse(model, outer.feeds(x=(3,)), chosen=[Constants()])
    assert operators(model) == ["Neg"]
    assert [place.node for place in places if place.done] == ["If_0", "Relu_0", "Neg_0"]
    assert error == 0


def test_quantizers_stay() -> None:
    small = Small()
    codes, scale = np.array([1, 2], np.int8), np.float32(0.5)
    weight = small.op("DequantizeLinear", codes, scale)
    model = small.model(small.op("Mul", small.input("x", 2), weight), dtype=ir.DataType.FLOAT)
    places, _ = fuse(model, small.feeds(x=(2,)), chosen=[Constants()])
    assert places == []
    assert operators(model) == ["DequantizeLinear", "Mul"]


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
