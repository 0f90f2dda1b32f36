"""Recipes with quantized activations or a quantized cache, from a model to a bundle that plain transformers loads."""

import json
import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import zoo
from conftest import recipe  # type: ignore[import-not-found]
from zoo import shrink

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.exporters.values import Values
from quantkit.model.source.open import in_float32
from quantkit.model.streaming.answers import Head
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.compile import Compiled
from quantkit.runtimes.torch.reloaded import reloaded

INT8 = {"format": "int8", "granularity": "channel", "scale": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama.tiny"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=258, num_hidden_layers=2, max_position_embeddings=640)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, few_scored: None) -> None:
    monkeypatch.setattr("quantkit.measurement.accuracy.score.SAMPLES", 2)


def compiled(model: Path, out: Path, layout: str, scheme: dict[str, Any], **changes: Any) -> Compiled:
    made = recipe(scheme=scheme, export=[{"checkpoint": {"layout": layout}}], **changes)
    return compile_model(Request.of(str(model), recipe=made, out=out, speed=False))


def of_transformers(folder: Path, ids: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    loaded = in_float32(loaded) if wide else loaded
    with torch.no_grad():
        return loaded(input_ids=ids).logits  # type: ignore[no-any-return]


def streamed(folder: Path, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    stream = reloaded(folder, **settings)
    hidden = stream.run(ids, chunk=2)
    return Head(stream.rest(), stream.paths, stream.flow)(hidden, ids)


STATIC = {"granularity": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("assigner", "form", "weights", "activations"),
    [
        ("gptq", "int8", {}, {}),
        ("gptq", "int8", {}, {**STATIC, "symmetric": False, "range": "entropy"}),
        ("gptq", "fp8_e4m3", {}, {}),
        pytest.param(
            *("rtn", "fp8_e4m3", {"granularity": "block", "group": 128}, {"granularity": "group", "group": 32}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_w8a8_is_what_transformers_computes(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    assigner: str,
    form: str,
    weights: dict[str, Any],
    activations: dict[str, Any],
) -> None:
    layout = "int-quantized" if form == "int8" else "float-quantized"
    scheme = {"weights": {**INT8, "format": form, **weights}, "activations": {"format": form, **activations}}
    result = compiled(model, tmp_path / "out", layout, scheme, passes=[assigner])
    assert "it/s" not in capsys.readouterr().err, "a library drew a bar"
    manifest = result.bundle.manifest
    checks = {check.name: check for check in manifest.checks}
    assert checks["reload.transformers"].ok and checks["reload.compressed_tensors"].ok
    config = json.loads((result.bundle.model_folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == layout and group["targets"] == ["Linear"]
    assert group["input_activations"]["dynamic"] is activations.get("dynamic", True)
    fixed = not activations.get("dynamic", True)
    for layer in manifest.layers:
        assert layer.activations is not None and layer.activations["format"] == form
        assert (layer.input_scale is not None) == fixed
    scales = {layer.name: layer.input_scale for layer in manifest.layers}
    first = "model.layers.0.self_attn."
    assert scales[first + "q_proj"] == scales[first + "k_proj"] == scales[first + "v_proj"]
    ids = zoo.ids(2, 16)
    theirs, ours = of_transformers(result.bundle.model_folder, ids), streamed(result.bundle.model_folder, ids)
    assert torch.allclose(ours, theirs, atol=2e-3 * float(theirs.abs().max()))
    # a finished bundle is checked by its own files alone
    assert all(check.ok for check in EXPORT.check(result.bundle.path))
    assert not any(decision.code == "saturated" for decision in result.decisions if activations.get("range") is None)


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("OPTForCausalLM", "int8", torch.float32),
        ("Llama4ForCausalLM", "int8", torch.bfloat16),
        ("DeepseekV3ForCausalLM", "int8", torch.bfloat16),
        pytest.param("OPTForCausalLM", "fp8_e4m3", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("Llama4ForCausalLM", "fp8_e4m3", torch.float32, marks=pytest.mark.thorough),
    ],
)
def test_a_scale_that_plain_transformers_shares_is_told(
    name: str, form: str, dtype: torch.dtype, tmp_path: Path, byte_tokenizer: Any
) -> None:
    """Their classes pass [tokens, K] or [batch, 1, tokens, K]: compressed-tensors computes one scale, we many."""
    changes = {"first_k_dense_replace": 2, "num_hidden_layers": 2} if name.startswith("Deepseek") else {}
    shrink.tiny(name, tmp_path / "m", dtype=dtype, vocab_size=258, max_position_embeddings=640, **changes)
    byte_tokenizer.save_pretrained(tmp_path / "m")
    scheme = {"weights": {**INT8, "format": form}, "activations": {"format": form}}
    layout = "int-quantized" if form == "int8" else "float-quantized"
    result = compiled(tmp_path / "m", tmp_path / "out", layout, scheme, passes=["rtn"])
    folder, ids = result.bundle.model_folder, zoo.ids(2, 16)
    told = [decision for decision in result.decisions if decision.code == "one-scale"]
    assert len(told) == len(
        {layer.name.split(".layers.")[1].partition(".")[0] for layer in result.bundle.manifest.layers}
    )
    assert all(re.search("fc1|feed_forward|kv_b_proj", decision.where) for decision in told)
    checks = {check.name: check.ok for check in EXPORT.check(result.bundle.path)}
    assert checks["reload.transformers"] and "score.kl" in {check.name for check in result.bundle.manifest.checks}
    theirs = of_transformers(folder, ids, wide=True)
    size = float(theirs.abs().max())
    assert torch.allclose(streamed(folder, ids, library=True), theirs, atol=1e-4 * size)
    assert not torch.allclose(streamed(folder, ids), theirs, atol=1e-3 * size)
    batch = torch.cat([streamed(folder, row[None]) for row in ids])
    assert torch.allclose(streamed(folder, ids), batch, atol=2e-3 * size), "a token's scale is its own"


def test_an_override_leaves_some_inputs_alone(model: Path, tmp_path: Path) -> None:
    overrides = [{"match": "*.down_proj", "activations": None}]
    scheme = {"weights": INT8, "activations": {"format": "int8"}}
    result = compiled(model, tmp_path / "out", "int-quantized", scheme, overrides=overrides)
    kept = {layer.name.rpartition(".")[2] for layer in result.bundle.manifest.layers if layer.activations is None}
    assert kept == {"down_proj"}
    config = json.loads((result.bundle.model_folder / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 2
    assert result.bundle.manifest.recipe["overrides"] == overrides


def test_a_cache_is_measured_at_a_long_context(model: Path, tmp_path: Path) -> None:
    granularity = "head"
    scheme = {"weights": INT8, "kv_cache": {"format": "int8", "granularity": granularity}}
    result = compiled(model, tmp_path / "out", "int-quantized", scheme)
    rows = [row for row in result.rows if row.shape and "context" in row.shape]
    assert [(row.settings["kv_cache"], row.shape["context"]) for row in rows if row.shape] == [
        (f"int8, {granularity}", 512),
        (f"int8, {granularity}", 640),
        ("float", 512),
        ("float", 640),
    ]
    assert [row.n for row in rows[:2]] == [2 * 511, 2 * 639]
    assert rows[0].value != rows[2].value
    folder, ids = result.bundle.model_folder, zoo.ids(2, 16)
    theirs = of_transformers(folder, ids)
    assert torch.allclose(streamed(folder, ids), theirs, atol=2e-3 * float(theirs.abs().max()))
    assert not torch.allclose(streamed(folder, ids, cache=False), theirs, atol=1e-5)
    assert all(check.ok for check in EXPORT.check(result.bundle.path))


def test_a_cache_alone_leaves_the_weights_dense(model: Path, tmp_path: Path) -> None:
    scheme = {"kv_cache": {"format": "int8"}}
    result = compiled(model, tmp_path / "out", "dense", scheme, passes=[])
    folder, ids = result.bundle.model_folder, zoo.ids(2, 16)
    assert not result.bundle.manifest.layers
    # what is exported of the bundle later knows it
    values = Values.of_bundle(result.bundle.path)
    assert values.run_time.cache is not None and values.run_time.cache.format == "int8"
    assert set(values.run_time.cache_scales) == {0, 1} and values.stream.transforms == []
    plain = of_transformers(model, ids)
    theirs = of_transformers(folder, ids)
    assert not torch.allclose(plain, theirs, atol=1e-5)
    assert torch.allclose(streamed(folder, ids), theirs, atol=2e-3 * float(theirs.abs().max()))
    assert all(check.ok for check in EXPORT.check(result.bundle.path))


@pytest.mark.parametrize(
    ("layout", "scheme", "said"),
    [
        (
            "dense",
            {"weights": INT8, "activations": {"format": "int8"}},
            "--set 'export=[{checkpoint: {layout: int-quantized}}]'",
        ),
        ("pack-quantized", {"weights": {**INT8, "symmetric": False}, "activations": {"format": "int8"}}, "zero points"),
        (
            "int-quantized",
            {"weights": INT8, "kv_cache": {"format": "int8", "granularity": "channel"}},
            "scale by channel",
        ),
        ("int-quantized", {"weights": INT8, "kv_cache": {"format": "int8", "symmetric": False}}, "symmetric"),
        ("int-quantized", {"weights": {"format": "int4", "granularity": "channel"}}, "holds int8"),
    ],
)
def test_what_a_checkpoint_cannot_say_is_refused(
    model: Path, tmp_path: Path, layout: str, scheme: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        compiled(model, tmp_path / "out", layout, scheme)
    assert caught.value.code == "layout-unsupported" and said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_divide_are_refused(model: Path, tmp_path: Path) -> None:
    scheme = {"weights": INT8, "activations": {"format": "int8", "granularity": "group", "group": 128}}
    with pytest.raises(InputError) as caught:
        compiled(model, tmp_path / "out", "int-quantized", scheme)
    assert caught.value.code == "group-indivisible" and "K 64" in caught.value.value


def test_an_interrupted_compile_keeps_the_scales(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = {
        "weights": INT8,
        "activations": {"format": "int8", "granularity": "tensor", "dynamic": False},
        "kv_cache": {"format": "int8"},
    }
    whole = compiled(model, tmp_path / "whole", "int-quantized", scheme)
    made = recipe(scheme=scheme, export=[{"checkpoint": {"layout": "int-quantized"}}])
    with monkeypatch.context() as patch:
        patch.setattr(
            "quantkit.pipeline.blocks.subject.TransformerSubject.export",
            lambda self: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(Exception):  # noqa: B017 (whatever stops it)
            compile_model(Request.of(str(model), recipe=made, out=tmp_path / "again", speed=False))
    again = compile_model(Request.of(str(model), recipe=made, out=tmp_path / "again", speed=False, resume=True))
    assert Bundle.load(again.bundle.path).manifest.content_sha256 == whole.bundle.manifest.content_sha256


def test_an_encoder_s_recipe_ends_in_integer_kernels(tmp_path: Path, byte_tokenizer: Any) -> None:
    """The shipped recipe, from a model to a verdict's rows; what it cannot hold is refused before any work."""
    folder, changes = tmp_path / "bert", {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 64}
    zoo.save(folder, byte_tokenizer, "bert", **changes)
    few = ["calibration.samples=2", "calibration.tokens=32", "gates={}"]
    request = Request.of(str(folder), recipe="int8-encoder", out=tmp_path / "out", changes=few, speed=False)
    result = compile_model(request)
    checks = {check.name: check for check in result.bundle.manifest.checks}
    assert checks["integer.macs"].value == 1
    assert all(check.ok for check in checks.values())
    (cosine,) = (row for row in result.rows if row.name == "accuracy.cosine")
    assert cosine.value is not None
    assert cosine.value > 0.99
    fp8 = ["scheme.activations={format: fp8_e4m3}", "scheme.weights.format=fp8_e4m3", *few]
    with pytest.raises(InputError, match="fp8_e4m3 inputs do not run in onnxruntime"):
        compile_model(Request.of(str(folder), recipe="int8-encoder", out=tmp_path / "no", changes=fp8, speed=False))
    both = ["export=[{onnx: {}}, {checkpoint: {layout: int-quantized}}]", "scheme.weights.format=int8", *few]
    with pytest.raises(InputError, match="channels that center moves"):
        compile_model(Request.of(str(folder), recipe="int8-encoder", out=tmp_path / "no", changes=both, speed=False))
    assert not (tmp_path / "no").exists()


def test_an_encoder_s_network_for_tensorrt_holds_moved_channels(tmp_path: Path, byte_tokenizer: Any) -> None:
    """Sub and Mul stand before each pair, and the network is what the moved model computes."""
    folder, changes = tmp_path / "bert", {"vocab_size": 258, "num_hidden_layers": 2, "max_position_embeddings": 64}
    zoo.save(folder, byte_tokenizer, "bert", **changes)
    few = ["calibration.samples=2", "calibration.tokens=32", "gates={}", "export=[{tensorrt: {engine: false}}]"]
    asked = {"recipe": "int8-tensorrt", "target": "rtx-4090", "changes": few, "speed": False}
    result = compile_model(Request.of(str(folder), out=tmp_path / "out", **asked))
    checks = {check.name: check for check in result.bundle.manifest.checks}
    assert all(check.ok for check in checks.values()), checks
    assert checks["network.logits"].value > 0  # type: ignore[operator]
    nodes = {str(node.name): node for node in ir.load(result.bundle.path / "engine" / "network.onnx").graph}
    codes = [node for name, node in nodes.items() if name.endswith("/input.codes")]
    assert len(codes) == 2 * 4  # q, k and v read one
    for node in codes:
        even = nodes[str(node.inputs[0].name)]  # type: ignore[union-attr]
        assert (even.op_type, nodes[str(even.inputs[0].name)].op_type) == ("Mul", "Sub")  # type: ignore[union-attr]
    (cosine,) = (row for row in result.rows if row.name == "accuracy.cosine")
    assert cosine.value > 0.99  # type: ignore[operator]
