"""Products of a graph whose inputs are quantized as it runs, in ONNX Runtime, against plain arithmetic."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from quantkit.exporters.onnx.dynamic import activations_of, insert
from quantkit.graph import integer
from quantkit.graph.pairs.qdq import Codes
from quantkit.graph.run import Runner
from quantkit.graph.sites import sites
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.scheme import ActivationScheme, WeightScheme

RNG = np.random.default_rng(0)
WEIGHTS = WeightScheme(format="int8", granularity="channel", scale="float32")


def model(body: str, x: str, w: tuple[int, ...], more: str = "") -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{x}] x{more}) => (float y) {{ {body} }}'
    made = ir.from_onnx_text(text)
    values = {value.name: value for node in made.graph for value in node.inputs if value is not None}
    bias = w[1] if "MatMul" in body else w[0]
    for name, shape in (("w", w), ("b", (bias,))):
        if name in values:
            array = RNG.standard_normal(shape).astype(np.float32)
            values[name].const_value, values[name].shape = ir.tensor(array, name=name), ir.Shape(shape)
            values[name].type = ir.TensorType(ir.DataType.FLOAT)
            made.graph.register_initializer(values[name])
    return made


def rounded(x: np.ndarray, how: ActivationScheme) -> np.ndarray:
    """x as its codes stand for it."""
    axis = -1 if how.granularity == "token" else None
    if how.symmetric:
        step = np.abs(x).max(axis=axis, keepdims=True) / 127.5
        return np.clip(np.rint(x / step), -128, 127) * step
    low, high = np.minimum(x.min(axis=axis, keepdims=True), 0), np.maximum(x.max(axis=axis, keepdims=True), 0)
    step = (high - low) / 255
    zero = np.rint(-low / step)
    return (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step


def quantized(made: ir.Model, how: ActivationScheme, kind: Any, tmp_path: Path) -> tuple[Runner, Codes, Any]:
    (site,) = sites(made)
    matrix = site.matrix()
    most = 127 if kind == "uint8" else 63
    scale = np.abs(matrix).max(axis=1) / most
    bias = RNG.standard_normal(len(matrix)).astype(np.float32)
    codes = Codes(np.rint(matrix / scale[:, None]).astype(np.int8), scale.astype(np.float32), bias)
    scheme = WEIGHTS if kind == "uint8" else WEIGHTS.model_copy(update={"format": "int7"})
    own = insert(made, {site.name: codes}, {site.name: site}, scheme, how, weight_type=kind)
    ir.save(own, tmp_path / "own.onnx")
    write_optimized(tmp_path / "own.onnx", tmp_path / "optimised.onnx")
    wanted = [integer.QuantizedSite(site.name, f"{site.stem}.codes", 1.0, site.output)]
    found = integer.found(ir.load(tmp_path / "optimised.onnx"), wanted)
    assert found.share == 1.0, found
    return Runner(tmp_path / "own.onnx"), codes, site


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("x", "w", "attributes", "extra"),
    [
        ("N,4,9,9", (8, 4, 3, 3), "pads = [1, 1, 1, 1]", {"padding": 1}),
        ("N,4,9,9", (4, 1, 3, 3), "group = 4, strides = [2, 2]", {"groups": 4, "stride": 2}),
        ("N,4,9", (6, 4, 3), "pads = [2, 2]", {"padding": 2}),
    ],
)
def test_a_convolution_in_integers(
    kind: Any, x: str, w: tuple[int, ...], attributes: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    how = ActivationScheme(format="int8", granularity="token")
    made = model(f"y = Conv <{attributes}> (x, w, b)", x, w)
    own, codes, site = quantized(made, how, kind, tmp_path)
    values = (RNG.standard_normal((3, *map(int, x.split(",")[1:]))) + 0.7).astype(np.float32)
    assert activations_of(site, how).granularity == "tensor"
    inputs = rounded(values, ActivationScheme(format="int8", granularity="tensor", symmetric=False))
    product = torch.conv1d if len(w) == 3 else torch.conv2d
    weight = torch.from_numpy(site.shaped(codes.values()).astype(np.float64))
    expected = product(
        torch.from_numpy(inputs.astype(np.float64)), weight, torch.from_numpy(codes.bias).double(), **extra
    )
    np.testing.assert_allclose(own({"x": values})["y"], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize(
    ("body", "x", "w"),
    [("y = MatMul (x, w)", "N,5,16", (16, 6)), ("y = Gemm <transB = 1> (x, w, b)", "N,16", (6, 16))],
)
def test_a_linear_in_integers(
    body: str, x: str, w: tuple[int, ...], granularity: Any, symmetric: bool, kind: Any, tmp_path: Path
) -> None:
    how = ActivationScheme(format="int8", granularity=granularity, symmetric=symmetric)
    own, codes, _ = quantized(model(body, x, w), how, kind, tmp_path)
    values = (RNG.standard_normal((3, *map(int, x.split(",")[1:]))) + 0.7).astype(np.float32)
    expected = rounded(values, how) @ codes.values().T + codes.bias
    np.testing.assert_allclose(own({"x": values})["y"], expected, atol=1e-4)


def test_several_products_of_one_input_share_its_codes_and_the_rest_stays_float(tmp_path: Path) -> None:
    body = "a = MatMul (x, w) b2 = MatMul (x, v) c = Add (a, b2) y = MatMul (c, u)"
    weights = ", ".join(f"float[8,8] {name} = {{{', '.join(map(str, RNG.standard_normal(64)))}}}" for name in "wvu")
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[N,8] x) => (float[N,8] y) <{weights}> {{ {body} }}'
    made = ir.from_onnx_text(text)
    found = {site.name: site for site in sites(made)}
    codes = {
        name: Codes(np.rint(site.matrix() * 20).astype(np.int8), np.full(8, 0.05, np.float32))
        for name, site in list(found.items())[:2]
    }
    how = ActivationScheme(format="int8", granularity="token")
    own = insert(made, codes, found, WEIGHTS, how)
    operators = [node.op_type for node in own.graph]
    assert operators.count("QuantizeLinear") == 1
    assert operators.count("MatMul") == 1
    assert {"u"} <= set(own.graph.initializers)
    assert not {"w", "v"} & set(own.graph.initializers)
    x = RNG.standard_normal((4, 8)).astype(np.float32)
    expected, given = (Runner(each)({"x": x})["y"] for each in (made, own))
    assert 0 < np.linalg.norm(given - expected) / np.linalg.norm(expected) < 0.05
    assert "w" in made.graph.initializers, "the float graph is as it was"
