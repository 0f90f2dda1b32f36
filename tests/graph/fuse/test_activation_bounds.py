"""A clip goes exactly where no code changes by it, for every range; ONNX Runtime agrees."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graph import Small, operators

from quantkit.graph.fuse._rule import outputs
from quantkit.graph.fuse.activation_bounds import Grid, absorbed, behind, bounds, grid_of, remove_absorbed

UINT8, INT8 = (0, 255), (-128, 127)


def clip(low: float | None, high: float | None, opset: int = 21) -> ir.Node:
    """A Clip, with inputs or, before opset 11, attributes."""
    small = Small(opset)
    x = small.input("x", 2)
    if opset < 11:
        given_ends = {key: float(end) for key, end in (("min", low), ("max", high)) if end is not None}
        return small.op("Clip", x, **given_ends).producer()  # type: ignore[return-value]
    ends = [None if end is None else np.float32(end) for end in (low, high)]
    return small.op("Clip", x, *ends).producer()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("grid", "low", "high", "goes"),
    [
        (Grid(6 / 255, 0, *UINT8), 0, 6, True),
        (Grid(5 / 255, 0, *UINT8), 0, 6, True),
        (Grid(8 / 255, 0, *UINT8), 0, 6, False),
        (Grid(8 / 255, 0, *UINT8), 0, None, True),
        (Grid(6 / 255, -128, *INT8), 0, 6, True),
        (Grid(6 / 127, 0, *INT8), 0, None, False),
        (Grid(6 / 255, 10, *UINT8), 0, 6, False),
        (Grid(6 / 255, 10, *UINT8), None, 6, True),
        (Grid(6 / 255, 10, *UINT8), None, None, True),
    ],
)
def test_a_clip_is_absorbed_where_its_bounds_have_the_outermost_codes(
    grid: Grid, low: float | None, high: float | None, goes: bool
) -> None:
    for opset in (10, 21):
        assert (absorbed(clip(low, high, opset), grid) == "") == goes


@given(
    scale=st.floats(1e-3, 1.0),
    zero=st.integers(0, 255),
    low=st.floats(-4, 4),
    width=st.floats(0, 8),
    seed=st.integers(0, 9),
)
def test_no_code_changes_where_it_is_absorbed_and_some_does_where_it_is_not(
    scale: float, zero: int, low: float, width: float, seed: int
) -> None:
    grid, high = Grid(scale, zero, *UINT8), low + width
    inner = np.random.default_rng(seed).uniform(-300, 300, 200) * scale
    # beyond both ends of the range: those are the first to show a clip that is missing
    values = [*inner, -1e4, 1e4]
    same = all(grid.code(value) == grid.code(min(max(value, low), high)) for value in values)
    assert same == (absorbed(clip(low, high), grid) == "")


def quantized(low: float, high: float, scale: float, zero: Any, kind: str = "Clip") -> tuple[Small, ir.Model]:
    small = Small()
    y = small.op("Conv", small.input("x", 1, 2, 4, 4), 4 * small.normal(3, 2, 1, 1), name="conv")
    ends = [np.float32(low), np.float32(high)] if kind == "Clip" else []
    y = small.op(kind, y, *ends, name="clip")
    codes = small.op("QuantizeLinear", y, np.float32(scale), zero, name="quantize")
    return small, small.model(small.op("DequantizeLinear", codes, np.float32(scale), zero), dtype=ir.DataType.FLOAT)


@pytest.mark.parametrize("zero", [np.uint8(0), np.int8(-128)])
@pytest.mark.parametrize("kind", ["Clip", "Relu"])
def test_removed_without_a_change_of_one_code(kind: str, zero: Any) -> None:
    small, model = quantized(0, 6, 6 / 255, zero, kind)
    feeds = small.feeds(x=(1, 2, 4, 4))
    before = outputs(model, feeds)
    assert [(place.node, place.done) for place in remove_absorbed(model)] == [("clip", True)]
    assert operators(model) == ["Conv", "QuantizeLinear", "DequantizeLinear"]
    after = outputs(model, feeds)
    assert all(np.array_equal(one[0], other[0]) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("scale", "zero", "reason"),
    [
        (8 / 255, np.uint8(0), "6 has code 191, the outermost is 255"),
        (6 / 127, np.int8(0), "0 has code 0, the outermost is -128"),
    ],
)
def test_what_a_range_does_not_cover_stays_and_says_why(scale: float, zero: Any, reason: str) -> None:
    _, model = quantized(0, 6, scale, zero)
    had = operators(model)
    assert [(place.done, place.reason) for place in remove_absorbed(model)] == [(False, reason)]
    assert operators(model) == had


def test_a_clip_that_is_read_without_a_quantizer_stays() -> None:
    small, model = quantized(0, 6, 6 / 255, np.uint8(0))
    model.graph.outputs.append(small.op("Neg", model.graph.node("clip").outputs[0]))
    assert [place.reason for place in remove_absorbed(model)] == ["Neg_4 reads it without a quantizer"]


def test_one_scale_a_channel_is_no_grid() -> None:
    _, model = quantized(0, 6, 6 / 255, np.uint8(0))
    quantizer = model.graph.node("quantize")
    assert grid_of(quantizer) == Grid(pytest.approx(6 / 255), 0, *UINT8)
    quantizer.replace_input_with(1, Small().constant(np.ones(3, np.float32)))
    assert grid_of(quantizer) is None


def test_the_tensor_to_quantize_is_behind_the_clip() -> None:
    _, model = quantized(0, 6, 6 / 255, np.uint8(0))
    conv, clipped = model.graph.node("conv").outputs[0], model.graph.node("clip").outputs[0]
    assert behind(conv) is clipped
    assert behind(clipped) is clipped
    model.graph.outputs.append(conv)
    assert behind(conv) is conv


def test_a_maximum_with_a_scalar_is_a_bound_and_one_of_two_tensors_is_not() -> None:
    small = Small()
    x = small.input("x", 2)
    assert bounds(small.op("Max", np.float32(0), x).producer()) == (0, np.inf)
    assert bounds(small.op("Min", x, np.float32(6)).producer()) == (-np.inf, 6)
    assert bounds(small.op("Max", x, x).producer()) is None
    assert bounds(small.op("Neg", x).producer()) is None
