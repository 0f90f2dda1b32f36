"""Networks for TensorRT against transformers' own numbers, and engines that TensorRT-RTX builds without a GPU."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_onnx import LAYERS, Small, export
from thorough import beside

from quantkit import content
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec, load_exporter, reader
from quantkit.exporters.tensorrt import engine as _engine
from quantkit.exporters.tensorrt.dialect import TYPES
from quantkit.exporters.tensorrt.exporter import FIRST_SM, FORMATS, refuse_gpu
from quantkit.exporters.tensorrt.profiles import ProfileShapes, capacity, fitted, inputs_of, shapes
from quantkit.exporters.trace.rewrite import DOMAIN, Traced
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
from quantkit.target import Profile, Target

pytestmark = pytest.mark.usefixtures("one_thread")

EXPORT = load_exporter("tensorrt")
DECODE = Profile(name="decode", batch=(1, 2, 4), length=(1, 1, 1), context=(1, 16, 60))
PREFILL = Profile(name="prefill", batch=(1, 1, 2), length=(1, 16, 48), context=(0, 0, 0))
PROFILES = [DECODE.model_dump(), PREFILL.model_dump()]
SCHEMES: dict[str, WeightScheme | None] = {
    "float": None,
    "int4": WeightScheme(format="int4", granularity="group", group=32, symmetric=True),
    "int4 by channel": WeightScheme(format="int4", granularity="channel", symmetric=True),
    "int8": WeightScheme(format="int8", granularity="channel", scale="float32"),
    "int8 by tensor": WeightScheme(format="int8", granularity="tensor", scale="float32"),
    "fp8": WeightScheme(format="fp8_e4m3", granularity="channel"),
    "fp8 in groups": WeightScheme(format="fp8_e4m3", granularity="group", group=32),
    "mxfp8": WeightScheme(format="mxfp8"),
    "nvfp4": WeightScheme(format="nvfp4"),
    "nf4": WeightScheme(format="nf4", group=32),
}
STATIC = {name: ActivationScheme(format=name, granularity="tensor", dynamic=False) for name in ("int8", "fp8_e4m3")}


def network(folder: Path, name: str = "llama", how: WeightScheme | None = SCHEMES["int4"], **more: Any) -> Small:
    options = {"engine": False, "profiles": PROFILES, "changes": {"n_layer": 2} if name == "gpt2" else LAYERS, **more}
    return export(folder, name, how, exporter=EXPORT, **options)


def model_of(made: Small) -> ir.Model:
    return ir.load(made.folder / "engine" / "network.onnx")


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SCHEMES)
def test_every_format_computes_what_was_decided_on(tmp_path: Path, form: str) -> None:
    made = network(tmp_path, how=SCHEMES[form])
    checks = made.check()
    assert all(check.ok for check in checks.values()), checks
    assert 0 < checks["network.logits"].value < 4e-3  # type: ignore[operator]
    operators = {node.op_type for node in model_of(made).graph}
    assert {node.domain for node in model_of(made).graph} == {""}
    assert ("DequantizeLinear" in operators) == (form != "float")
    assert "QuantizeLinear" not in operators


def test_bfloat16_has_its_own_limits(tmp_path: Path) -> None:
    checks = network(tmp_path, how=SCHEMES["int8"], type="bfloat16").check()
    assert all(check.ok for check in checks.values())
    assert checks["network.logits"].limit == 2.0**-3


def test_what_leaves_float16_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime on a CPU computes it in float32, and finds nothing wrong."""
    made = network(tmp_path, how=SCHEMES["int8"])
    spoil(made, "v_proj.scale", lambda scale: scale * 0 + 6e4)
    with pytest.raises(InputError, match="float16-overflow") as caught:
        made.check()
    assert "v_proj" in str(caught.value.where)


def test_a_network_that_does_not_run_is_one_line_with_its_node(tmp_path: Path) -> None:
    made = network(tmp_path, how=SCHEMES["int8 by tensor"])
    path = made.folder / "engine" / "network.onnx"
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    node = next(node for node in model.graph if str(node.name).endswith("v_proj/output"))
    node.replace_input_with(0, node.inputs[1])
    ir.save(model, path)
    with pytest.raises(InputError, match="network-unrunnable") as caught:
        made.check()
    assert str(caught.value.where).startswith("MatMul model.layers.0.self_attn.v_proj")
    assert "keep=[model.layers.0.self_attn.v_proj]" in str(caught.value.remedy)
    assert "ONNXRuntimeError" not in caught.value.line()


def test_a_window_in_an_encoder_is_refused() -> None:
    from quantkit.exporters.tensorrt.dialect import TensorrtDialect

    x = ir.Value(name="x", shape=ir.Shape([1, 4, 8, 16]), type=ir.TensorType(ir.DataType.FLOAT16))
    attributes = {"window": 8, "heads": 4, "kv_heads": 4, "scale": 1.0, "softcap": 0.0, "causal": 0}
    node = ir.node("Attention", [x, x, x, x], attributes=attributes, domain=DOMAIN)
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23, DOMAIN: 1})
    traced = Traced(ir.Model(graph, ir_version=10), {}, decoder=False, layers=0)
    with pytest.raises(InputError, match="a window in an encoder"):
        TensorrtDialect(traced, None, quantized=None).apply()  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [20, 500])
def test_a_cache_that_contradicts_model_or_profiles_is_refused(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(InputError, match="profile-impossible"):
        network(tmp_path, capacity=tokens)


def mixed(linear: str) -> WeightScheme | None:
    return SCHEMES["nf4" if "q_proj" in linear else "int8"] if "layers" in linear else None


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("bert", SCHEMES["int4"]),
        ("llama", mixed),
        *(pytest.param(name, SCHEMES["int4"], marks=pytest.mark.thorough) for name in ("gemma2", "qwen3", "gpt2")),
    ],
)
def test_every_architecture_does_and_formats_may_be_mixed(tmp_path: Path, name: str, how: Any) -> None:
    assert all(check.ok for check in network(tmp_path, name, how).check().values())


def test_a_window_hides_what_lies_behind_it(tmp_path: Path) -> None:
    """16 tokens, a window of 8 in every second layer: compared with transformers' own mask, so that none is noticed."""
    made = network(tmp_path, "gemma2", None)
    assert made.check()["network.logits"].ok
    spoil(made, "mask/8/size", lambda size: size * 0 + 100)
    assert not made.check()["network.logits"].ok


@pytest.mark.parametrize("form", STATIC)
def test_quantized_inputs_are_pairs_with_the_calibrated_scale(tmp_path: Path, form: str) -> None:
    weights = SCHEMES["int8" if form == "int8" else "fp8"]
    made = network(tmp_path, how=weights, activations=STATIC[form])
    checks = made.check()
    assert all(check.ok for check in checks.values()), checks
    graph = model_of(made).graph
    pairs = [node for node in graph if node.op_type == "QuantizeLinear"]
    # q, k and v share one, gate and up another
    assert len(pairs) == 4 * 2
    zero = pairs[0].inputs[2]
    assert zero is not None and zero.const_value is not None
    assert zero.const_value.dtype == (ir.DataType.INT8 if form == "int8" else ir.DataType.FLOAT8E4M3FN)


def test_a_pair_with_another_scale_is_found(tmp_path: Path) -> None:
    made = network(tmp_path, how=SCHEMES["int8"], activations=STATIC["int8"])
    spoil(made, "input.scale", lambda scale: scale * np.float16(1.01))
    checks = made.check()
    assert not checks["network.pairs"].ok
    assert checks["network.logits"].ok, "logits are compared without pairs"


@pytest.mark.parametrize("form", STATIC)
def test_a_stored_cache_has_the_calibrated_scales(tmp_path: Path, form: str) -> None:
    made = network(tmp_path, kv_cache=CacheScheme(format=form), cache="grown")
    checks = made.check()
    assert all(check.ok for check in checks.values()), checks
    assert checks["network.pairs"].ok
    spoil(made, "attention.1/value.scale", lambda scale: scale * np.float16(1.01))
    assert made.check()["network.pairs"].where == "attention.1/value"


@pytest.mark.parametrize("form", ["int4", "nvfp4", "nf4"])
def test_one_wrong_code_is_found(tmp_path: Path, form: str) -> None:
    made = network(tmp_path, how=SCHEMES[form])

    def off_by_one(codes: Any) -> Any:
        flat = codes.reshape(-1).astype(np.float32)
        flat[5] += 1 if flat[5] < 1 else -1
        return flat.reshape(codes.shape).astype(codes.dtype)

    spoil(made, "v_proj.codes", off_by_one)
    assert not made.check()["network.weights"].ok


def spoil(made: Small, end: str, change: Any) -> None:
    """Change the first constant whose name ends so, in the file."""
    path = made.folder / "engine" / "network.onnx"
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    value = next(value for name, value in model.graph.initializers.items() if name.endswith(end))
    assert value.const_value is not None
    value.const_value = ir.tensor(change(value.const_value.numpy()), name=value.name, dtype=value.const_value.dtype)
    ir.save(model, path)


def test_small_scales_stay_exact(tmp_path: Path) -> None:
    """float16 has no normal numbers below 6e-5."""
    from quantkit.exporters.tensorrt.dialect import fitting

    tiny, usual = np.array([3e-6, 1e-2], np.float32), np.array([3e-3, 1e-2], np.float32)
    assert fitting(tiny, np.dtype(np.float16)).dtype == np.float32
    assert fitting(usual, np.dtype(np.float16)).dtype == np.float16


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_cache_in_place_has_room_for_every_profile(tmp_path: Path) -> None:
    graph = model_of(network(tmp_path)).graph
    past = next(value for value in graph.inputs if value.name == "past_key_values.0.key")
    assert past.shape is not None and past.shape[2] == 61
    assert [node.op_type for node in graph].count("TensorScatter") == 2 * 2
    assert {"write_indices", "position_ids", "logits_to_keep"} <= {value.name for value in graph.inputs}


def test_a_growing_cache_gives_the_same(tmp_path: Path) -> None:
    made = network(tmp_path, cache="grown")
    assert all(check.ok for check in made.check().values())
    assert "write_indices" not in {value.name for value in model_of(made).graph.inputs}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "word", "remedy"),
    [
        ({"format": "int4", "granularity": "group", "group": 64, "symmetric": False}, "zero points", "symmetric=true"),
        ({"format": "int4", "granularity": "group", "group": 256, "symmetric": True}, "groups of 256", "group=64"),
        ({"format": "int4", "granularity": "group", "group": 128, "symmetric": True}, "K 96", "group=32"),
        ({"format": "int3", "granularity": "group", "group": 32, "symmetric": True}, "int3", "format=int4"),
        ({"format": "mxfp4"}, "mxfp4", "format=nvfp4"),
    ],
)
def test_weights_that_tensorrt_cannot_hold_are_refused(fields: dict[str, Any], word: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        asked = LayerSpec({"a.down": WeightScheme(**fields)}, shapes={"a.down": (64, 96)})
        EXPORT.accepts(EXPORT.Options(sm="8.9"), asked)
    assert caught.value.code == "layout-unsupported"
    assert word in str(caught.value.value)
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("form", "sm", "ok"),
    [
        ("int4", "7.5", False),
        ("int4", "8.0", True),
        ("fp8", "8.6", False),
        ("nvfp4", "8.9", False),
        ("int8", "7.5", True),
    ],
)
def test_a_format_that_a_gpu_does_not_hold_is_refused_before_any_work(form: str, sm: str, ok: bool) -> None:
    pytest.importorskip("tensorrt_rtx")
    refusal = nullcontext() if ok else pytest.raises(InputError, match=f"for SM {sm}.*scheme.weights.format=int")
    with refusal:
        EXPORT.accepts(EXPORT.Options(sm=sm), LayerSpec({"a": SCHEMES[form]}, shapes={"a": (64, 64)}))


FLOATS = CacheScheme(format="fp8_e4m3")


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, {"activations": {"a": ActivationScheme(format="int8")}}, "granularity=tensor"),
        ({}, {"cache": CacheScheme(format="fp8_e4m3", granularity="head")}, "one fixed scale a layer"),
        ({}, {"cache": FLOATS}, r"tensorrt\.cache=grown"),
        ({"cache": "grown"}, {"cache": CacheScheme(format="int8", symmetric=False)}, "with zero points"),
        ({"hardware_compatible": True}, {}, r"tensorrt\.hardware_compatible=false"),  # which TensorRT-RTX has not
        ({}, {"merged": {"layers.0.experts"}}, "mixture of experts"),
    ],
)
def test_what_tensorrt_cannot_do_is_refused(options: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EXPORT.accepts(EXPORT.Options(sm="8.9", **options), LayerSpec(**asked))
    EXPORT.accepts(EXPORT.Options(sm="8.9", cache="grown"), LayerSpec(cache=FLOATS))


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_profiles_are_cut_to_what_the_model_has() -> None:
    target = Target.load("rtx-4090")
    found, said = fitted(target.profiles, kind="decoder", context=256)
    assert [profile.name for profile in found] == ["decode", "prefill"]
    assert found[0].context == (1, 255, 255)
    assert found[1].length == (1, 256, 256)
    assert len(said) == 2
    assert capacity(found, 256) == 256
    whole, nothing = fitted(target.profiles, kind="decoder", context=8192)
    assert whole == list(target.profiles)
    assert nothing == []


def test_an_encoder_has_no_tokens_before_the_new_ones() -> None:
    found, _ = fitted(Target.load("rtx-4090").profiles, kind="encoder", context=512)
    assert [profile.name for profile in found] == ["prefill"]


def test_a_profile_beyond_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="profile-impossible"):
        fitted([DECODE.model_copy(update={"context": (90, 90, 90)})], kind="decoder", context=64)


def test_sizes_without_a_name_are_refused() -> None:
    with pytest.raises(InputError, match="profile-unknown-size"):
        shapes({"images": ["batch", 3, "height", 224]}, [DECODE])


# --- engines ----------------------------------------------------------------------------------------------------------


# qwen3 differs by its norms of q and k, which weights alone do not meet: with pairs around it is enough
BUILT = [(name, form) for name in ("llama", "bert") for form in ("float", "int4", "int8", "fp8")] + [("qwen3", "int8")]


@pytest.mark.parametrize(("name", "form"), beside([("llama", "int4"), ("llama", "fp8"), ("bert", "int8")], BUILT))
def test_it_builds_without_a_gpu(tmp_path: Path, name: str, form: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    activations = STATIC["int8"] if form == "int8" else None
    made = network(tmp_path, name, SCHEMES[form], engine=True, sm="8.9", activations=activations)
    EXPORT.build(made.folder, EXPORT.Options(**made.options))
    folder = made.folder / "engine"
    record = json.loads((folder / "sm89.json").read_text())
    assert record["bytes"] == (folder / "sm89.engine").stat().st_size
    assert record["sm"] == ["8.9"]
    assert [each["name"] for each in record["profiles"]] == (["prefill"] if name == "bert" else ["decode", "prefill"])


@pytest.mark.parametrize("cache", beside(["in_place"], ["in_place", "grown"]))
def test_two_heads_of_one_token_build(tmp_path: Path, cache: str) -> None:
    """TensorRT-RTX has no kernel of its own for so few."""
    pytest.importorskip("tensorrt_rtx")
    few = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    made = network(tmp_path, engine=True, sm="8.9", cache=cache, changes=few)
    assert all(check.ok for check in made.check().values())
    EXPORT.build(made.folder, EXPORT.Options(**made.options))
    assert (made.folder / "engine" / "sm89.engine").is_file()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network."""
    pytest.importorskip("tensorrt_rtx")
    return network(tmp_path_factory.mktemp("ready")).folder / "engine"


def job(folder: Path, engine: Path, **more: Any) -> _engine.EngineJob:
    fields: dict[str, Any] = {
        "network": str(folder / "network.onnx"),
        "engine": str(engine),
        "library": "tensorrt_rtx",
        "sm": ["8.9"],
        "gpu": "",
        "profiles": shapes(inputs_of(folder / "network.onnx"), [DECODE]),
        "workspace": 1e9,
        "optimization_level": 3,
    }
    return _engine.EngineJob(**{**fields, **more})


def test_a_gpu_that_the_library_does_not_list_is_refused(ready: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sm-unsupported") as caught:
        _engine.build(job(ready, tmp_path / "x.engine", sm=["9.0"]))
    assert "8.9" in str(caught.value.value)
    with pytest.raises(InputError, match="sm-unsupported"):
        EXPORT.accepts(EXPORT.Options(sm="9.0"), LayerSpec())


def test_a_build_that_takes_too_long_is_given_up(ready: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="timeout"):
        _engine.build(job(ready, tmp_path / "x.engine", seconds=1e-3))
    assert list(tmp_path.iterdir()) == []


def test_an_operator_that_tensorrt_lacks_is_named(ready: Path, tmp_path: Path) -> None:
    model = ir.load(ready / "network.onnx")
    ir.external_data.load_to_model(model)
    node = next(node for node in model.graph if node.op_type == "MatMul")
    node.domain, node.op_type, node.name = "com.microsoft", "MatMulNBits", "the_one"
    ir.save(model, tmp_path / "network.onnx")
    with pytest.raises(InputError, match="network-unsupported") as caught:
        _engine.build(job(tmp_path, tmp_path / "x.engine", profiles=_profiles(ready)))
    assert "MatMulNBits the_one" in str(caught.value.where)


def test_a_profile_that_contradicts_the_network_says_so(ready: Path, tmp_path: Path) -> None:
    first = _profiles(ready)[0]
    wrong = {**first.inputs, "past_key_values.0.key": ([1, 2, 7, 16], [1, 2, 7, 16], [1, 2, 7, 16])}
    with pytest.raises(InputError, match="build-failed"):
        _engine.build(job(ready, tmp_path / "x.engine", profiles=[first.model_copy(update={"inputs": wrong})]))


def _profiles(folder: Path) -> list[ProfileShapes]:
    return shapes(inputs_of(folder / "network.onnx"), [DECODE])


# compute capabilities that each library builds for; TensorRT-RTX has its list, TensorRT begins with Turing
BUILT = {"tensorrt_rtx": {"7.5", "8.0", "8.6", "8.9", "12.0", "12.1"}, "tensorrt": None}


@pytest.mark.parametrize("name", [name for name in content.names("export") if Target.load(name).kind == "gpu"])
@pytest.mark.parametrize("library", sorted(FIRST_SM))
def test_the_first_gpus_are_those_of_the_cells(name: str, library: str) -> None:
    target = Target.load(name)
    sm, built = target.arch.sm or "", BUILT[library]
    if (built is not None and sm not in built) or float(sm) < 7.5:
        assert all(target.supports(form, library).state == "absent" for form in FORMATS)
        return
    for form in FORMATS:
        state = target.supports(form, library).state
        try:
            refuse_gpu("layer", form, library, sm)
        except InputError:
            assert state == "absent", (form, sm)
        else:
            assert state != "absent", (form, sm)


def test_what_is_let_through_can_be_stored() -> None:
    assert set(FORMATS) == set(TYPES)


def test_the_library_that_was_asked_for_reads_it_else_the_first() -> None:
    assert reader("tensorrt", {"library": "tensorrt"}) == "tensorrt"
    assert reader("tensorrt", {}) == "tensorrt_rtx"
    assert reader("checkpoint", {"library": "tensorrt"}) == "torch"
    assert reader("onnx", {"dialect": "onnxruntime"}) == "onnxruntime"
