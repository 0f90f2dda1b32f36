"""8-bit weights with 8-bit inputs: each product against plain arithmetic, and what ONNX Runtime makes of it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import zoo
from exported import write_as
from small_onnx import EXPORT, Small, expected, export, kept, relative
from test_check_onnx import spoil  # type: ignore[import-not-found]
from test_dialect_ort import Graph, dense, run, weights  # type: ignore[import-not-found]

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec
from quantkit.exporters.onnx import check as check_w8a8
from quantkit.exporters.onnx.dialect import OrtDialect
from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName
from quantkit.exporters.onnx.single_op import EXACT_SUMS
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.formats.base.activation import InputCodes
from quantkit.graph import integer
from quantkit.runtimes.onnxruntime.open import write_optimized
from quantkit.scheme import ActivationScheme, WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = WeightScheme(format="int8", granularity="channel", scale="float32")
HOW = {
    "fixed": {"granularity": "tensor", "dynamic": False, "symmetric": False},
    "fixed, symmetric": {"granularity": "tensor", "dynamic": False},
    "by token": {"granularity": "token"},
    "by token, asymmetric": {"granularity": "token", "symmetric": False},
    "by tensor": {"granularity": "tensor", "symmetric": False},
    "by tensor, symmetric": {"granularity": "tensor"},
}
KERNEL = {
    "fixed": "MatMulIntegerToFloat",
    "by token": "MatMulIntegerToFloat",
    "by token, asymmetric": "MatMulIntegerToFloat",
    "by tensor": "DynamicQuantizeMatMul",
}
QUANTIZES = {"QuantizeLinear", "DynamicQuantizeLinear"}
SOUND = ["onnx.valid", "onnx.operators", "onnx.contained", "reload.onnxruntime", "reload.integers", "integer.macs"]


def inputs(name: str) -> ActivationScheme:
    return ActivationScheme.model_validate({"format": "int8", **HOW[name]})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[tuple[str, str, str], Small] = {}

    def of(name: str, how: str, form: str = "int8") -> Small:
        key = name, how, form
        if key not in found:
            folder, weights = tmp_path_factory.mktemp("w8a8"), WEIGHTS.model_copy(update={"format": form})
            found[key] = export(folder, name, weights, activations=inputs(how))
        return found[key]

    return of


def rounded(x: torch.Tensor, how: str) -> torch.Tensor:
    """By the definition, in float32, where the largest value of a token lies between two codes."""
    axes, zero = (-1,) if how == "by token" else tuple(range(x.dim())), 0
    if how.startswith("fixed"):
        scale, zero = torch.tensor(0.05), -3 if how == "fixed" else 0
    elif how in ("by tensor", "by token, asymmetric"):
        pair = (x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)) if "token" in how else (x.min(), x.max())
        low, high = pair[0].clamp(max=0), pair[1].clamp(min=0)
        scale = ((high - low) / 255).clamp(min=1e-30)
        zero = (-128 - low / scale).round()
    else:
        scale = (x.abs().amax(axes, keepdim=True) / 127.5).clamp(min=1e-30)
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


def exact(model: Any, x: Any) -> Any:
    """In ONNX Runtime, with sums that do not saturate."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in EXACT_SUMS.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": x})[0]


def plain(model: Any, ids: torch.Tensor, how: str, linears: list[str]) -> Any:
    """transformers' own forward with every input rounded."""
    handles = [
        model.get_submodule(linear).register_forward_pre_hook(lambda _, args: (rounded(args[0], how),))
        for linear in linears
    ]
    try:
        return expected(model, ids)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("how", HOW)
def test_an_encoder_computes_what_its_scheme_says(made: Any, how: str) -> None:
    small, ids = made("bert", how), zoo.ids(3, 20)
    linears = list(small.results.schemes)
    assert len(linears) == 18
    found = small.load(accuracy_level=None).encode(ids.numpy())
    # a code that falls between two is now and then rounded to the other side, and moves all that follows
    assert relative(found, plain(small.model, ids, how, linears)) < 2e-2
    # with inputs left alone it is the model of the stored weights, and the rounding above was no small thing
    exact = small.load().encode(ids.numpy())
    assert relative(exact, expected(small.model, ids)) < 5e-6
    assert relative(found, exact) > 1e-3


EACH = [("bert", how, form) for how in KERNEL for form in ("int8", "int7")]


@pytest.mark.parametrize(("name", "how", "form"), [*EACH, ("llama", "fixed", "int8"), ("gpt2", "by token", "int8")])
def test_every_product_is_checked_and_runs_in_integers(made: Any, name: str, how: str, form: str) -> None:
    small = made(name, how, form)
    checks = small.check()
    assert list(checks) == SOUND
    assert all(check.ok for check in checks.values()), checks
    assert checks["integer.macs"].value == 1
    assert 0 < checks["reload.integers"].value < 1e-5


@pytest.mark.parametrize("how", KERNEL)
def test_inputs_are_quantized_once_and_fused(made: Any, tmp_path: Path, how: str) -> None:
    """Of a block of bert: q, k, v in one product, three more."""
    small = made("bert", how)
    count = Counter(node.op_type for node in small.proto().graph.node)
    assert sum(count[kind] for kind in QUANTIZES) == 12
    write_optimized(small.onnx / "model.onnx", tmp_path / "model.onnx")
    fused = ir.load(tmp_path / "model.onnx")
    kinds = Counter(node.op_type for node in fused.graph)
    assert kinds[KERNEL[how]] == 12
    assert not {"MatMul", "Gemm", "FusedMatMul", "DequantizeLinear"} & set(kinds)
    sites = [
        integer.QuantizedSite(each.name, each.weight, 1.0, each.output) for each in check_w8a8.products(small.onnx)
    ]
    assert integer.found(fused, sites).kernels == {KERNEL[how]: 12}


def test_biases_are_added_by_products_and_no_norm_adds(made: Any, tmp_path: Path) -> None:
    """Both cost ONNX Runtime more elsewhere: BiasGelu and SkipLayerNormalization take longer than what they join."""
    small = made("bert", "fixed")
    assert all(each.biased for each in check_w8a8.products(small.onnx))
    write_optimized(small.onnx / "model.onnx", tmp_path / "model.onnx")
    kinds = Counter(node.op_type for node in ir.load(tmp_path / "model.onnx").graph)
    assert (kinds["LayerNormalization"], kinds["Sum"], kinds["Gelu"]) == (7, 6, 3)
    assert not {"SkipLayerNormalization", "BiasGelu"} & set(kinds)


def test_linears_of_one_input_are_quantized_once_without_merging(tmp_path: Path) -> None:
    small = export(tmp_path, "bert", WEIGHTS, activations=inputs("by token"), merge=False)
    count = Counter(node.op_type for node in small.proto().graph.node)
    assert (count["QuantizeLinear"], count["MatMulIntegerToFloat"]) == (12, 18)
    assert all(check.ok for check in small.check().values())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("codes", ["uint8", "int8"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_one_product_is_plain_integer_arithmetic(how: str, codes: Any, symmetric: bool) -> None:
    """With a token of zeros, as padding can be, and inputs beyond a fixed scale."""
    rows, columns = 8, 48
    stored = weights({"a": (rows, columns, WEIGHTS.model_copy(update={"symmetric": symmetric}))})
    fixed = {"scale": 0.05, "zero": -3 if how == "fixed" else 0} if how.startswith("fixed") else {}
    stored.linears["a"] = replace(stored.linears["a"], input=InputCodes(inputs(how), **fixed))  # type: ignore[index]
    graph = Graph(columns)
    model = OrtDialect(graph.traced(graph.linear("a", graph.x, rows)), stored, codes=codes).apply()
    x = 4 * np.random.default_rng(0).standard_normal((2, 3, columns)).astype(np.float32)
    x[1, 2] = 0
    found = exact(model, x)
    wanted = rounded(torch.from_numpy(x), how).double().numpy() @ dense(stored, "a").T
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert how == "by tensor" or not found[1, 2].any()


WRONG = {
    "a code": ("codes", lambda values: values.__setitem__((5, 3), values[5, 3] ^ 0x80)),
    "a scale": ("scales", lambda values: values.__setitem__(5, values[5] * 1.1)),
    "a zero point": ("zeros", lambda values: values.__setitem__(5, 120)),
    "a bias": ("bias", lambda values: values.__setitem__(5, values[5] + 1)),
}


@pytest.mark.parametrize(("part", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_number_of_a_weight_is_found(made: Any, tmp_path: Path, part: str, change: Any) -> None:
    small = kept(made("bert", "fixed"), tmp_path / "b")
    spoil(small, f"encoder.layer.1.output.dense.{part}", change)
    assert not small.check()["reload.onnxruntime"].ok


def test_a_wrong_scale_of_an_input_is_found_and_named(made: Any, tmp_path: Path) -> None:
    """In float32 it does not show."""
    small = kept(made("bert", "fixed"), tmp_path / "b")
    product = next(each for each in check_w8a8.products(small.onnx) if "layer.1.output" in each.name)
    spoil(small, f"{product.source}.scale", lambda values: values.__setitem__((), 0.06))
    checks = small.check()
    assert checks["reload.onnxruntime"].ok
    assert not checks["reload.integers"].ok
    assert checks["reload.integers"].where.startswith("encoder.layer.1.output.dense: ")


def test_a_product_that_stays_in_float_is_named(made: Any, tmp_path: Path) -> None:
    """A weight that goes through another operator on its way is not fused, and gives the same numbers."""
    small = kept(made("bert", "fixed"), tmp_path / "b")
    model, name = small.proto(), "encoder.layer.1.output.dense"
    (node,) = (each for each in model.graph.node if each.output[0] == f"{name}/output")
    codes, weight, step, steps, zero, *_, bias = node.input
    floats = [
        onnx.helper.make_node("DequantizeLinear", [codes, step, zero], ["plain/x"]),
        onnx.helper.make_node("DequantizeLinear", [weight, steps, node.input[5]], ["plain/w"], axis=1),
        onnx.helper.make_node("Neg", ["plain/w"], ["plain/minus"]),
        onnx.helper.make_node("Neg", ["plain/minus"], ["plain/weight"]),
        onnx.helper.make_node("MatMul", ["plain/x", "plain/weight"], ["plain/product"]),
        onnx.helper.make_node("Add", ["plain/product", bias], [f"{name}/output"]),
    ]
    floats[-2].metadata_props.extend(node.metadata_props)
    place = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    for more, each in enumerate(floats):
        model.graph.node.insert(place + more, each)
    (small.onnx / "model.onnx").write_bytes(model.SerializeToString())
    checks = small.check()
    assert checks["reload.onnxruntime"].ok
    found = checks["integer.macs"]
    assert not found.ok
    assert found.value == pytest.approx(1 - 1 / 15, abs=0.08)
    assert found.where == "encoder.layer.1.output.dense runs as MatMul"


REFUSED = [
    ({"format": "fp8_e4m3"}, WEIGHTS, "activations in fp8_e4m3.*fuses.*only for 8-bit integers"),
    ({"format": "int8", "granularity": "group", "group": 32}, WEIGHTS, "in groups.*one scale"),
    ({"format": "int8"}, WeightScheme(format="int4", granularity="group", group=32), "weights in int4 by group"),
    ({"format": "int8"}, WeightScheme(format="int8", granularity="group", group=32), "weights in int8 by group"),
]


@pytest.mark.parametrize(("how", "weights", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_has_no_integer_kernel_is_refused(how: dict[str, Any], weights: WeightScheme, message: str) -> None:
    activations = {"a.linear": ActivationScheme.model_validate(how)}
    with pytest.raises(InputError, match=rf"a\.linear.*{message}") as caught:
        EXPORT.accepts(EXPORT.Options(), LayerSpec({"a.linear": weights}, activations=activations))
    assert caught.value.code == "layout-unsupported"


def test_of_an_input_that_is_not_quantized_nothing_changes(tmp_path: Path) -> None:
    """An override may leave some inputs alone: those weights stay in MatMulNBits."""
    small = export(tmp_path, "bert", WEIGHTS, activations=inputs("fixed"))
    small.results.activations = {n: each for n, each in small.results.activations.items() if "layer.0" not in n}
    write_as(EXPORT, small.folder, small.source, small.stream, small.results, {})
    kinds = Counter(node.op_type for node in small.proto().graph.node)
    assert (kinds["MatMulNBits"], kinds["MatMulIntegerToFloat"]) == (4, 8)
    assert all(check.ok for check in small.check().values())
    assert np.isfinite(small.load(accuracy_level=None).encode(zoo.ids().numpy())).all()


@pytest.mark.parametrize(("form", "codes"), [("int8", "uint8"), ("int7", "uint8"), ("int8", "int8")])
def test_sums_that_saturate_are_found(tmp_path: Path, form: str, codes: str) -> None:
    """Where the processor has sums of 16 bits; with VNNI or on Arm there is nothing to find."""
    changes = {"num_hidden_layers": 1, "hidden_size": 256}
    how = WEIGHTS.model_copy(update={"format": form})
    small = export(tmp_path, "bert", how, activations=inputs("fixed"), changes=changes, weight_codes=codes)
    found = small.check()["reload.integers"]
    if codes == "uint8":
        assert found.ok
        (tensor,) = (each for each in small.proto().graph.initializer if each.name.endswith("0.output.dense.codes"))
        assert tensor.data_type == (onnx.TensorProto.UINT8 if form == "int8" else onnx.TensorProto.INT8)
    elif machine.isa() == "avx2":
        assert not found.ok


@pytest.mark.parametrize("sign", [1, -1])
def test_no_two_products_of_7_bits_leave_16_bits(sign: int) -> None:
    """The largest there are, in ONNX Runtime without any option."""
    form = load_format("int7")
    code = form.high if sign > 0 else form.low
    assert 2 * 255 * abs(code) < 2**15
    how = WEIGHTS.model_copy(update={"format": "int7"})
    stored = WeightsByName(
        {"a": LinearSpec(1, 64, how, None, InputCodes(inputs("fixed"), 1.0, -128))},
        {"a.weight": (1, 64)},
        lambda _: np.zeros((1, 64), np.float32),
        lambda _: np.full((1, 64), code, np.int8),
        lambda _: (np.ones((1, 1), np.float32), None),
    )
    graph = Graph(64)
    model = OrtDialect(graph.traced(graph.linear("a", graph.x, 1)), stored).apply()
    (found,) = run(model, np.full((1, 3, 64), 255, np.float32))
    assert (found == 255 * 64 * code).all()


def test_what_is_decided_can_run_in_torch_too(made: Any) -> None:
    """With its inputs quantized, for whoever looks where the harm comes from."""
    small, ids = made("bert", "fixed"), zoo.ids(2, 12)
    values = Values.of_results(small.source, small.stream, small.results)
    found = values.running().run(ids).numpy()
    assert relative(found, plain(small.model, ids, "fixed", list(small.results.schemes))) < 2e-2
    assert relative(values.stream.run(ids).numpy(), expected(small.model, ids)) < 5e-6
    assert relative(found, values.stream.run(ids).numpy()) > 1e-3
