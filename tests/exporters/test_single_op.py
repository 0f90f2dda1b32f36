"""Single products in ONNX Runtime: right before they are timed, each against our own reading of the stored weight."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from quantkit.errors import InputError
from quantkit.exporters.onnx import single_op as single
from quantkit.exporters.onnx.single_op import SingleProduct, activations

K, N, M = 256, 96, 3
COPIES = (0, 1, 5)


def weight(n: int = N, k: int = K, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def session(product: SingleProduct, copies: Any = COPIES) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    for key, value in single.EXACT_SUMS.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(product.model(copies), options, providers=["CPUExecutionProvider"])


def runs(of: onnxruntime.InferenceSession) -> Any:
    return lambda x: of.run(None, {"x0": x})


@pytest.mark.parametrize("name", single.names())
def test_each_gives_what_its_weight_stands_for(name: str) -> None:
    variant = single.variant(name)
    product = single.product(variant, weight())
    ran = runs(session(product))
    assert product.error(ran, COPIES) < variant.limit
    assert [x.shape for x, _ in product.known] == [(1, K), (17, K)]
    # not for any weight at all: the same outputs against another one are far off
    other = single.product(variant, weight(seed=1))
    assert other.error(ran, COPIES) > 10 * variant.limit
    # the package onnx reads what was written without it, and finds nothing wrong in it
    model = onnx.load_from_string(product.model(COPIES))
    onnx.checker.check_model(model)
    assert [value.name for value in model.graph.output] == ["y0", "y1", "y2"]


@pytest.mark.parametrize("name", [*single.names(), "quantize.static", "quantize.dynamic"])
def test_a_product_in_a_file_is_the_same_product(name: str, tmp_path: Path) -> None:
    product = single.product(single.variant(name), weight())
    for file in ("a.npz", "b.npz"):
        product.save(tmp_path / file)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    read = SingleProduct.read(tmp_path / "a.npz", product.variant)
    assert read.model(COPIES) == product.model(COPIES)
    assert read.model(COPIES, apart=True) == product.model(COPIES, apart=True)
    assert read.weight_bytes == SingleProduct.bytes_in(tmp_path / "a.npz") == product.weight_bytes
    for own, other in zip(product.known, read.known, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(own, other, strict=True))


def test_an_output_that_is_no_number_is_wrong() -> None:
    product = single.product(single.variant("float32"), weight())
    assert np.isnan(product.error(lambda x: [np.full((len(x), N), np.nan)] * 3, COPIES))


def test_a_wrong_zero_point_or_a_swapped_nibble_is_found() -> None:
    variant = single.variant("int4.g32.level4")
    product = single.product(variant, weight())
    for name in ("zero", "w"):
        stored = dict(product.stored)
        raw = stored[name].raw
        stored[name] = replace(stored[name], raw=(raw >> 4) | (raw << 4))
        wrong = replace(product, stored=stored)
        assert wrong.error(runs(session(wrong)), COPIES) > 2 * variant.limit


@pytest.mark.parametrize("name", ["quantize.static", "quantize.dynamic"])
def test_quantizers_alone_give_codes_of_the_input(name: str) -> None:
    product = single.product(single.variant(name), weight())
    x = activations(M, K, "float32")
    first, second = session(product, (0, 1)).run(None, {"x0": x, "x1": x})
    assert first.dtype == np.uint8
    assert first.shape == (M, K)
    assert np.array_equal(first, second)
    centred = (first.astype(np.float32) - first.mean()) / first.std()
    assert np.corrcoef(centred.ravel(), x.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("name", ["float32", "float16", "int4.g32.level0", "int8.dynamic"])
def test_floats_can_be_handed_over_apart_from_the_file(name: str) -> None:
    product = single.product(single.variant(name), weight())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    floats = product.floats(COPIES)
    options.add_external_initializers(
        list(floats), [onnxruntime.OrtValue.ortvalue_from_numpy(each) for each in floats.values()]
    )
    model = product.model(COPIES, apart=True)
    assert len(model) < len(product.model(COPIES))
    apart = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    assert product.error(runs(apart), COPIES) < 4 * product.variant.limit


def test_bytes_are_those_of_codes_scales_and_zero_points() -> None:
    def of(name: str) -> int:
        return single.product(single.variant(name), weight()).weight_bytes

    weights = K * N
    assert of("float32") == 4 * weights
    assert of("float16") == 2 * weights
    assert of("int8.dynamic") == weights + 4 * N
    assert of("int4.g32.level4") == weights // 2 + 4 * N * 8 + N * 4
    assert of("int8.g64.level0") == weights + 4 * N * 4
    assert of("nf4.g64") == weights // 2 + 4 * N * 4
    assert of("fp8_e4m3") == weights + 4 * N
    assert of("quantize.static") == 0


def test_formats_that_quantkit_exports() -> None:
    assert single.usual("int4", block=128, level=4) == "int4.g128.level4"
    assert single.usual("nf4", block=128, level=4) == "nf4.g64"
    assert single.usual("fp8_e4m3", block=128, level=4) == "fp8_e4m3"
    assert single.variant("int4.g128.level4").level == 4
    assert single.variant("int8.dynamic").quantizer == "quantize.dynamic"
    assert single.variant("int8.g32.level4").quantizer == ""
    assert single.variant("int4.qdq").format == "int4"
    assert single.variant("float16").format == "float16"
    assert max(Counter(single.names()).values()) == 1


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(InputError, match=r"group-indivisible.*group must divide K; use int4 in groups of 32"):
        single.check_shape(single.variant("int4.g128.level4"), 96, 64)
    with pytest.raises(InputError, match="shape-invalid"):
        single.check_shape(single.variant("int8.dynamic"), 97, 64)
    with pytest.raises(InputError, match=r"did you mean 'int4\.g32\.level4'"):
        single.variant("int4.g32.lvl4")
