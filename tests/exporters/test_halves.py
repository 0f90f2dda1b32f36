"""Float graphs in 16 bits: the types that ONNX asks for, the same ends, and numbers that stay close."""

import numpy as np
import onnx
import onnx_ir as ir
from small_graph import Small

from quantkit.exporters.tensorrt.graph import HALF, WIDE, halved
from quantkit.graph.run import Runner


def checked(model: ir.Model) -> ir.Model:
    """Every operator has types that ONNX lets it have."""
    onnx.shape_inference.infer_shapes(ir.to_proto(model), check_type=True, strict_mode=True)
    return model


def test_ends_stay_and_all_between_is_halved() -> None:
    small = Small()
    x = small.input("x", "n", 8)
    y = small.op("Softmax", small.op("Gemm", x, small.normal(8, 4), small.normal(4)))
    feed = {"x": small.normal(3, 8)}
    expected = Runner(small.model(y))(feed)["v1"]
    model = checked(halved(ir.Model(small.graph, ir_version=10)))
    assert [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)] == [WIDE, WIDE]
    assert {value.dtype for value in model.graph.initializers.values()} == {HALF}
    inner = [value.dtype for node in model.graph for value in node.outputs if not value.is_graph_output()]
    assert WIDE not in inner
    found = Runner(model)(feed)["v1"]
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() < 2e-3


def test_sizes_of_a_resize_stay_wide() -> None:
    small = Small()
    x = small.input("x", "n", 2, 3, 3)
    scales = np.array([1, 1, 2, 2], np.float32)
    model = small.model(small.op("Resize", x, None, scales, mode="nearest"))
    checked(halved(model))
    assert [value.dtype for value in model.graph.initializers.values()] == [WIDE]
    assert Runner(model)({"x": small.normal(1, 2, 3, 3)})["v0"].shape == (1, 2, 6, 6)


def test_masks_beyond_the_largest_half_stay_finite() -> None:
    small = Small()
    x = small.input("x", "n", 4)
    mask = np.array([0, np.finfo(np.float32).min, 0, 0], np.float32)
    model = halved(small.model(small.op("Softmax", small.op("Add", x, mask))))
    found = Runner(model)({"x": small.normal(2, 4)})["v1"]
    assert np.isfinite(found).all()
    assert found[:, 1].max() == 0


def test_casts_and_made_constants() -> None:
    small = Small()
    ids = small.input("ids", "n", 3, dtype=ir.DataType.INT64)
    floats = small.op("Cast", ids, to=int(WIDE))
    zeros = small.op("ConstantOfShape", small.op("Shape", ids))
    model = halved(small.model(small.op("Add", floats, zeros)))
    checked(model)
    assert next(node for node in model.graph if node.op_type == "Cast").attributes["to"].as_int() == int(HALF)
    assert Runner(model)({"ids": np.ones((2, 3), np.int64)})["v3"].tolist() == [[1.0] * 3] * 2
