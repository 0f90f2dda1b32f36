"""Products as matrices, where pairs go, and a graph with pairs against its float self, in ONNX Runtime."""

from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graph import Small

from quantkit.errors import InputError
from quantkit.graph import integer
from quantkit.graph.codes import solve
from quantkit.graph.fuse import fuse
from quantkit.graph.open import open_graph
from quantkit.graph.pairs import placement, qdq
from quantkit.graph.pairs.placement import MOVING, THROUGH
from quantkit.graph.pairs.qdq import Codes, Range
from quantkit.graph.run import Runner
from quantkit.graph.sites import Site, patches, sites
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.scheme import ActivationScheme, WeightScheme

ACTIVATIONS = ActivationScheme(format="int8", granularity="tensor", dynamic=False, symmetric=False)
WEIGHTS = WeightScheme(format="int8", granularity="channel", scale="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    graph = open_graph(networks.write(tmp_path_factory.mktemp("graph") / "tiny.onnx"))
    fuse(graph.model, [{"images": networks.images(2)}])
    return graph.model


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (2, 1, 2)])
def test_a_convolution_is_a_product_of_its_patches(groups: int, stride: int, padding: int, dilation: int) -> None:
    conv = torch.nn.Conv2d(4, 8, 3, stride, padding, dilation, groups, bias=False)
    x = torch.randn(2, 4, 9, 9)
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,4,9,9] x, float[8,{4 // groups},3,3] w) => (float y) {{
        y = Conv <group = {groups}, strides = [{stride}, {stride}], pads = [{padding}, {padding}, {padding}, {padding}],
                  dilations = [{dilation}, {dilation}]> (x, w) }}"""
    node = next(iter(ir.from_onnx_text(text).graph))
    site = Site("c", node, conv.weight.detach().numpy(), 0, groups)
    rows, matrix = patches(site, x.numpy()), site.matrix()
    found = [rows[g] @ matrix[g * 8 // groups : (g + 1) * 8 // groups].T for g in range(groups)]
    with torch.no_grad():
        expected = conv(x).permute(0, 2, 3, 1).reshape(-1, 8).numpy()
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)
    np.testing.assert_array_equal(site.shaped(matrix), site.weight)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_linears_weight_is_a_matrix_of_its_outputs(transposed: int) -> None:
    shape = (3, 4) if transposed else (4, 3)
    weight = np.arange(12, dtype=np.float32).reshape(shape)
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => (float[N,3] y) <float[{shape[0]},{shape[1]}] w'
    )
    text += " = {" + ",".join(str(float(v)) for v in weight.reshape(-1)) + "}>"
    text += f" {{ y = Gemm <transB = {transposed}> (x, w) }}"
    (site,) = sites(ir.from_onnx_text(text))
    assert site.matrix().shape == (3, 4)
    np.testing.assert_array_equal(site.matrix(), weight if transposed else weight.T)
    np.testing.assert_array_equal(site.shaped(site.matrix()), weight)
    assert site.macs((5, 3), 5) == 12


def test_pairs_go_where_integer_kernels_need_them(model: ir.Model) -> None:
    found = sites(model)
    assert [site.node.op_type for site in found] == ["Conv", "Conv", "Conv", "Gemm"]
    assert [site.depthwise for site in found] == [False, True, False, False]
    place = placement.place(model, found, [site.name for site in found])
    ends = {name: node.op_type for node in model.graph for name in [node.outputs[0].name] if name in place.tensors}
    # the clips take the place of what they clip; the sum and the mean stay in integers; the logits are float
    able = {*THROUGH, *MOVING, "Clip", "Relu", "Conv"}
    assert {"Add", "Clip", "Conv", "GlobalAveragePool"} <= set(ends.values()) <= able
    assert len(place.bounds) == 2
    assert "images" in place.tensors
    assert "logits" not in place.tensors
    # of what is kept, nothing has a pair on its account
    fewer = placement.place(model, found, [found[-1].name])
    assert len(fewer.tensors) < len(place.tensors)


def quantized(
    model: ir.Model, *, symmetric: bool = False, signed: bool = False, weights: WeightScheme = WEIGHTS, **more: Any
) -> tuple[ir.Model, dict[str, Codes], Any]:
    found = sites(model)
    place = placement.place(model, found, [site.name for site in found], absorbing=not symmetric)
    feeds = [{"images": each} for each in np.split(networks.images(32), 4)]
    activations = ACTIVATIONS.model_copy(update={"symmetric": symmetric})
    ranges = solve.ranges(model, place, feeds, activations, signed=signed)
    named = {site.name: site for site in found}

    def made(codes: Any) -> ir.Model:
        return qdq.insert(model, place, ranges, codes, named, **more)

    codes = solve.solved(model, made, found, feeds, weights, ranges, place)
    return made(codes), codes, found


def in_integers(made: ir.Model, found: Any, folder: Path) -> float:
    """The share of products that ONNX Runtime runs in integers."""
    ir.save(made, folder / "q.onnx")
    wanted = [integer.QuantizedSite(s.name, f"{s.stem}.codes", 1.0, s.output) for s in found]
    write_optimized(folder / "q.onnx", folder / "o.onnx")
    return integer.found(ir.load(folder / "o.onnx"), wanted).share


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_all_of_it_runs_in_integers_and_is_right(model: ir.Model, tmp_path: Path, kind: Any) -> None:
    made, _, found = quantized(model, weight_type=kind)
    x = networks.images(64, seed=1)
    expected, own = Runner(model)({"images": x})["logits"], Runner(made)({"images": x})["logits"]
    error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.03
    assert not [node for node in made.graph if node.op_type in ("Clip", "Relu")], "the codes saturate instead"
    stored = [v.const_value for v in made.graph.initializers.values() if v.const_value is not None]
    assert not [t for t in stored if t.dtype == ir.DataType.FLOAT and len(t.shape) > 1], "no float weight is left"
    assert in_integers(made, found, tmp_path) == 1.0
    # what integers make of it is what its pairs say, but for codes that lie between two
    plain = Runner(made, optimised=False)({"images": x})["logits"]
    assert np.linalg.norm(plain - own) / np.linalg.norm(plain) < 0.02


def codes_of_zero(made: ir.Model) -> set[tuple[str, int]]:
    """Type and zero point of every pair of an activation."""
    points = {node.inputs[2].name for node in made.graph if node.op_type == "QuantizeLinear"}  # type: ignore[union-attr]
    tensors = [value.const_value for name, value in made.graph.initializers.items() if name in points]
    return {(tensor.dtype.name, int(tensor.numpy())) for tensor in tensors if tensor is not None}


def test_without_zero_points_it_runs_in_integers_too(model: ir.Model, tmp_path: Path) -> None:
    made, _, found = quantized(model, symmetric=True)
    assert codes_of_zero(made) == {("UINT8", 128)}
    assert in_integers(made, found, tmp_path) == 1.0
    x = networks.images(64, seed=1)
    expected, own = Runner(model)({"images": x})["logits"], Runner(made)({"images": x})["logits"]
    assert np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.05
    # an activation reads and makes codes of one scale: its own pair changes nothing
    clips = [node for node in made.graph if node.op_type in ("Clip", "Relu")]
    assert len(clips) == 2
    for clip in clips:
        before, behind = clip.inputs[0].producer(), next(iter(clip.outputs[0].uses()))[0]  # type: ignore[union-attr]
        scales = [node.inputs[1].const_value.numpy() for node in (before, behind)]  # type: ignore[union-attr]
        assert scales[0] == scales[1]


def test_signed_codes_are_the_same_numbers(model: ir.Model) -> None:
    x = {"images": networks.images(16, seed=1)}
    made = [quantized(model, symmetric=True, signed=signed)[0] for signed in (False, True)]
    assert codes_of_zero(made[1]) == {("INT8", 0)}
    unsigned, signed = (Runner(each, optimised=False)(x)["logits"] for each in made)
    np.testing.assert_array_equal(unsigned, signed)


def test_one_scale_a_weight_runs_in_integers(model: ir.Model, tmp_path: Path) -> None:
    weights = WeightScheme(format="int8", granularity="tensor", scale="float32")
    made, codes, found = quantized(model, weights=weights)
    assert {each.scale.shape for each in codes.values()} == {(1,)}
    assert in_integers(made, found, tmp_path) == 1.0
    x = networks.images(64, seed=1)
    expected, own = Runner(model)({"images": x})["logits"], Runner(made)({"images": x})["logits"]
    assert np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.05


@pytest.mark.parametrize(("value", "code"), [(0.5, "activations-constant"), (np.nan, "activations-nonfinite")])
def test_what_has_no_range_is_named(model: ir.Model, value: float, code: str) -> None:
    found = sites(model)
    place = placement.place(model, found, [site.name for site in found])
    feeds = [{"images": np.full_like(networks.images(4), value)}]
    with pytest.raises(InputError, match=rf"\[{code}\] images"):
        solve.ranges(model, place, feeds, ACTIVATIONS)


def test_each_products_mean_is_kept(model: ir.Model) -> None:
    made, codes, found = quantized(model)
    feed = {"images": networks.images(32)}
    last = found[-1]
    expected, own = (Runner(each)(feed)["logits"].mean(axis=0) for each in (model, made))
    assert np.abs(expected - own).max() < 2e-3
    before = qdq.bias_of(last)
    assert not np.array_equal(codes[last.name].bias, before), "it was moved for that"  # type: ignore[arg-type]


def test_a_bias_fits_its_sums() -> None:
    own = Range(scale=1e-3, zero=0)
    scale, bias = np.array([1e-9, 1e-2], np.float32), np.array([5.0, 5.0], np.float32)
    raised = qdq.fits(scale, bias, own)
    assert raised[1] == scale[1]
    assert 5.0 / (own.scale * raised[0]) < 2**31
    assert qdq.fits(scale, None, own) is scale


def test_ranges_hold_zero_and_what_was_seen(model: ir.Model) -> None:
    found = sites(model)
    place = placement.place(model, found, [site.name for site in found])
    ranges = solve.ranges(model, place, [{"images": networks.images(8)}], ACTIVATIONS)
    x = networks.images(8)
    own = ranges["images"]
    low, high = (own.scale * (end - own.zero) for end in (0, 255))
    assert low <= x.min() + own.scale and high >= x.max() - own.scale
    for end, clipped in place.bounds.items():
        assert ranges[end].zero == 0, f"{clipped} is clipped at 0"
    rounded = solve.rounded(x, ranges["images"])
    assert np.abs(rounded - x).max() <= 0.51 * ranges["images"].scale + 1e-6


def graph(body: str, outputs: str = "float[N,4,6,6] y", weights: int = 3) -> ir.Model:
    """A chain over x [N, 4, 6, 6] with convolution weights w0, w1, ... of 4 by 4 channels, 3 x 3."""
    rng = np.random.default_rng(0)
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[N,4,6,6] x) => ({outputs}) {{ {body} }}'
    model = ir.from_onnx_text(text)
    values = {value.name: value for node in model.graph for value in node.inputs if value is not None}
    for number in range(weights):
        value = values[f"w{number}"]
        tensor = ir.tensor((rng.standard_normal((4, 4, 3, 3)) / 6).astype(np.float32), name=f"w{number}")
        value.const_value, value.shape = tensor, ir.Shape((4, 4, 3, 3))
        model.graph.register_initializer(value)
    return model


def conv(y: str, x: str, w: str) -> str:
    return f"{y} = Conv <pads = [1, 1, 1, 1]> ({x}, {w}) "


def made_of(model: ir.Model, keep: tuple[str, ...] = ()) -> tuple[ir.Model, float]:
    """(the graph with pairs, its relative error)."""
    found = [site for site in sites(model) if site.name not in keep]
    place = placement.place(model, found, [site.name for site in found])
    x = np.random.default_rng(1).standard_normal((16, 4, 6, 6)).astype(np.float32)
    ranges = solve.ranges(model, place, [{"x": x}], ACTIVATIONS)
    named = {site.name: site for site in found}
    codes = solve.solved(
        model, lambda c: qdq.insert(model, place, ranges, c, named), found, [{"x": x}], WEIGHTS, ranges, place
    )
    made = qdq.insert(model, place, ranges, codes, named)
    expected, own = Runner(model)({"x": x}), Runner(made)({"x": x})
    assert expected.keys() == own.keys()
    return made, max(float(np.linalg.norm(own[k] - v) / np.linalg.norm(v)) for k, v in expected.items())


def operators(made: ir.Model, tmp_path: Path) -> list[str]:
    ir.save(made, tmp_path / "made.onnx")
    write_optimized(tmp_path / "made.onnx", tmp_path / "optimised.onnx")
    return [node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph]


def test_a_bias_that_is_computed_leaves_its_product_float() -> None:
    body = (
        "b = ReduceMean <keepdims = 0> (x, axes) " + "a = Conv <pads = [1, 1, 1, 1]> (x, w0, b) " + conv("y", "a", "w1")
    )
    model = graph("axes = Constant <value_ints = [0, 2, 3]> () " + body, weights=2)
    assert [site.output for site in sites(model)] == ["y"]
    _, error = made_of(model)
    assert error < 0.03


@pytest.mark.parametrize("kept", ["a", "b"])
def test_a_kept_product_between_quantized_ones_stays_float(tmp_path: Path, kept: str) -> None:
    model = graph(conv("a", "x", "w0") + conv("b", "a", "w1") + conv("y", "b", "w2"))
    made, error = made_of(model, keep=(kept,))
    assert error < 0.03
    found = operators(made, tmp_path)
    assert (found.count("QLinearConv"), found.count("Conv")) == (2, 1), found


def test_a_convolution_may_be_an_output_itself(tmp_path: Path) -> None:
    model = graph(conv("a", "x", "w0") + conv("y", "a", "w1"), "float[N,4,6,6] a, float[N,4,6,6] y", 2)
    made, error = made_of(model)
    assert error < 0.03
    assert operators(made, tmp_path).count("QLinearConv") == 2


def test_what_only_moves_values_has_the_scale_of_what_it_moves() -> None:
    pool = "p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a) "
    model = graph(conv("a", "x", "w0") + pool + conv("y", "p", "w1"), weights=2)
    found = sites(model)
    assert placement.place(model, found, [site.name for site in found]).same == {"p": "a"}
    assert made_of(model)[1] < 0.03
    # what it moves may have no pair
    assert made_of(model, keep=("a",))[1] < 0.03


def test_a_later_output_of_a_node_is_an_input_too() -> None:
    body = conv("a", "x", "w0") + "h, k = Split <axis = 1, num_outputs = 2> (a) c = Concat <axis = 1> (k, h) "
    assert made_of(graph(body + conv("y", "c", "w1"), weights=2))[1] < 0.03


def test_a_bound_that_was_meant_to_be_none_is_none() -> None:
    low = "l = Constant <value_float = -3.4028234663852886e38> () h = Constant <value_float = 0.5> () "
    body = low + conv("a", "x", "w0") + "c = Clip (a, l, h) " + conv("y", "c", "w1")
    assert made_of(graph(body, weights=2))[1] < 0.03


def test_products_and_skip_connections() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    skip = small.op("Relu", x)
    conv = small.op("Conv", skip, small.normal(4, 4, 1, 1))
    summed = small.op("Add", conv, skip)
    pooled = small.op("Flatten", small.op("GlobalAveragePool", summed))
    model = small.model(small.op("Gemm", pooled, small.normal(4, 3)))
    placed = placement.before(model, sites(model))
    # the sum's other input is read by the convolution already; what is pooled has none, what Gemm reads has
    assert placed.tensors == (skip.name, pooled.name)
    assert (placed.same, placed.bounds) == ({}, {})


def test_one_of_two_convolutions_that_are_summed() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    left, right = (small.op("Conv", x, small.normal(4, 4, 1, 1)) for _ in range(2))
    model = small.model(small.op("Add", left, right))
    assert placement.before(model, sites(model)).tensors == ("x", left.name)


def test_sums_of_what_is_kept_and_of_constants_have_none() -> None:
    small = Small()
    x = small.input("x", "n", 4, 6, 6)
    kept = small.op("Conv", x, small.normal(4, 4, 1, 1))
    summed = small.op("Add", kept, small.op("Relu", x))
    last = small.op("Conv", small.op("Add", summed, small.normal(1, 4, 1, 1)), small.normal(2, 4, 1, 1))
    model = small.model(last)
    found = sites(model)
    chosen = [site for site in found if site.output == last.name]
    assert placement.before(model, chosen).tensors == (chosen[0].input,)
