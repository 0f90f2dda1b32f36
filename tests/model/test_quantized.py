"""Quantized sources: every opened weight is what transformers makes of the same files, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from exported import export, llama, scheme
from reference import plain_awq, plain_gptq
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.model import run_time
from quantkit.model.sizes import configs
from quantkit.model.sizes.quantized import grid_of
from quantkit.model.source.open import Source, open_model, open_written
from quantkit.model.streaming.own_forward import demand_equal, on_disk
from quantkit.model.streaming.stream import StreamedModel
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.runtimes.torch.reloaded import expanded
from quantkit.scheme import WeightScheme

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
LINEAR = "model.layers.1.mlp.down_proj"


def edited(
    folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]], stated: dict[str, Any] | None = None
) -> Path:
    """Change the tensors of a folder, and its `quantization_config` (None leaves it)."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {name: value.contiguous() for name, value in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if stated is not None:
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": stated}))
    return folder


def plain(folder: Path) -> dict[str, torch.Tensor]:
    """All parameters as plain transformers has them, in the dtype of the config."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)
    return {name: value.detach() for name, value in model.named_parameters()}


def held_against(source: Source, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert source.quantization is not None and source.quantization.opened
    assert source.dtype == str(dtype).removeprefix("torch.")
    weights = source.quantization.floats  # before merged experts are cut
    for name in weights.entries:
        value = weights.read(name)
        if name in source.quantization.opened:
            assert value.dtype == dtype
        assert tuple(value.shape) == weights.entries[name].shape
        assert torch.equal(value, expected[name].to(value.dtype)), name
        assert torch.equal(weights.beginning(name, 3), value[:3])


# --- fp8 -------------------------------------------------------------------------------------------------------------


def in_blocks(tensors: dict[str, torch.Tensor], block: int = 128) -> dict[str, torch.Tensor]:
    """Every linear of the blocks in float8, with a scale for each block."""
    stored = dict(tensors)
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = value.shape
        wide = torch.nn.functional.pad(value.float(), (0, -columns % block, 0, -rows % block))
        parts = wide.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = parts.abs().amax(dim=(1, 3)) / 448
        codes = (parts / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
        stored |= {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return stored


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_in_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = edited(llama(tmp_path / "fp8", dtype, **_WIDE), in_blocks, FP8)
    source = open_model(str(folder))
    held_against(source, plain(folder), dtype)
    assert source.was == "fp8_e4m3 block 128x128"
    (note,) = source.notes
    assert "adds to its loss" in note and "inputs in fp8_e4m3 by group of 128" in note
    assert source.bytes < source.weights.total_bytes()
    assert "quantization_config" not in source.config


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_do_not_divide_are_cut_off(tmp_path: Path, dtype: torch.dtype) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128, which `Fp8Dequantize` of transformers refuses; its kernels cut."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    folder = edited(llama(tmp_path / "fp8", dtype, hidden_size=192, intermediate_size=320), in_blocks, FP8)
    tensors, source = load_file(folder / "model.safetensors"), open_model(str(folder))
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        arguments = tensors[name], tensors[f"{name}_scale_inv"], [128, 128], torch.float32
        assert torch.equal(source.weights.read(name), _dequantize_fp8_weight(*arguments).to(dtype))


def test_exponents_and_one_scale(tmp_path: Path) -> None:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = in_blocks(tensors)
        for name in [name for name in stored if name.endswith("_scale_inv")]:
            stored[name] = (stored[name].log2().round() + 127).to(torch.uint8)
        return stored

    folder = edited(llama(tmp_path / "ue8m0", torch.bfloat16, **_WIDE), changed, {**FP8, "scale_fmt": "ue8m0"})
    held_against(open_model(str(folder)), plain(folder), torch.bfloat16)

    def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = in_blocks(tensors, 384)
        scales = {name: value.reshape(()) for name, value in stored.items() if name.endswith("_scale_inv")}
        inputs = {name.replace("weight_scale_inv", "activation_scale"): torch.tensor(0.01) for name in scales}
        return stored | scales | inputs

    stated = {**FP8, "activation_scheme": "static", "weight_block_size": None}
    folder = edited(llama(tmp_path / "one", torch.bfloat16, **_WIDE), whole, stated)
    source = open_model(str(folder))
    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{LINEAR}.weight"].float() * tensors[f"{LINEAR}.weight_scale_inv"]
    assert torch.equal(source.weights.read(f"{LINEAR}.weight"), weight.bfloat16())
    stream = StreamedModel(source)
    assert source.quantization is not None
    how = source.quantization.run_time(stream.linears(), stream.files)
    assert float(how.scales[LINEAR].scale) == pytest.approx(0.01) and len(how.activations) == 14


def test_experts_in_fp8(tmp_path: Path) -> None:
    """Experts lie in the files one by one, and transformers merges them after their scales."""
    model_class, config_class, settings = zoo.MIXTURES["deepseek"]
    folder = tmp_path / "deepseek"
    config = getattr(transformers, config_class)(**settings)
    zoo.filled(getattr(transformers, model_class), config).save_pretrained(folder)  # type: ignore[operator]
    edited(folder, lambda tensors: in_blocks(tensors, 8), {**FP8, "weight_block_size": [8, 8]})
    source, ids = open_model(str(folder)), zoo.ids(2, 16)
    assert source.quantization is not None
    assert any(".experts.3.up_proj" in name for name in source.quantization.opened)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert torch.allclose(StreamedModel(source).answers(ids).all(), expected, atol=1e-4)


# --- mxfp4 -----------------------------------------------------------------------------------------------------------


def gpt_oss(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    config = transformers.GptOssConfig(
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).to(dtype).save_pretrained(folder)

    def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = {}
        for name, value in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = value
                continue
            experts, columns, rows = value.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        return stored

    return edited(folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_of_gpt_oss(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = gpt_oss(tmp_path / "oss", dtype)
    source = open_model(str(folder))
    held_against(source, plain(folder), dtype)
    assert source.was == "mxfp4 group 32"


def test_mxfp4_quantized_to_mxfp4_is_itself(tmp_path: Path) -> None:
    source = open_model(str(gpt_oss(tmp_path / "oss")))
    how = WeightScheme(format="mxfp4")
    experts = [name for name in source.weights.entries if ".experts." in name and name.endswith("_proj.weight")]
    assert len(experts) == 2 * 4 * 2
    for name in experts:
        weight = source.weights.read(name).float()
        again = load_format("mxfp4").quantize(weight, how)
        assert torch.equal(load_format("mxfp4").dequantize(again), weight)


def test_the_stream_of_opened_experts_is_the_model(tmp_path: Path) -> None:
    stream = StreamedModel(open_model(str(gpt_oss(tmp_path / "oss"))))
    assert demand_equal(stream, zoo.ids(4, 32), 2).ok and demand_equal(stream, zoo.ids(4, 32), 1).ok


# --- layouts that quantkit writes ------------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"form": "int4", "granularity": "group", "group": 32, "symmetric": False}),
    "int4-symmetric": ("pack-quantized", {"form": "int4", "granularity": "group", "group": 32}),
    "int3": ("pack-quantized", {"form": "int3", "granularity": "group", "group": 32, "symmetric": False}),
    "int8": ("int-quantized", {"form": "int8", "granularity": "channel"}),
    "fp8": ("float-quantized", {"form": "fp8_e4m3", "granularity": "channel"}),
    "fp8-block": ("float-quantized", {"form": "fp8_e4m3", "granularity": "block", "group": 128}),
    "nvfp4": ("nvfp4-pack-quantized", {"form": "nvfp4", "granularity": "group"}),
    "mxfp4": ("mxfp4-pack-quantized", {"form": "mxfp4", "granularity": "group"}),
    "nf4": ("bitsandbytes", {"form": "nf4", "granularity": "group"}),
}
WIDENED = ("int4", "int8", "fp8", "nvfp4", "mxfp4")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_quantkit_writes_is_a_source(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    layout, fields = WRITTEN[name]
    plain_name = str(dtype).removeprefix("torch.")
    if fields["form"] in ("int4", "int3", "int8", "fp8_e4m3"):
        fields = {"scale": plain_name, **fields}
    model = llama(tmp_path / "model", dtype, hidden_size=128, intermediate_size=256)
    written = export(model, tmp_path / "bundle", scheme(**fields), layout=layout).model
    source = open_model(str(written))
    if name == "nf4":  # bitsandbytes keeps its codes in transformers
        for linear in source.quantization.opened:  # type: ignore[union-attr]
            assert source.weights.read(linear).dtype == dtype
    else:
        held_against(source, plain(written), dtype)
    assert source.notes and source.was


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("layout", "form"), [("pack-quantized", "int8"), *((WRITTEN[one][0], one) for one in WIDENED)])
def test_a_model_in_float32_has_the_stream_s_weights(
    tmp_path: Path, layout: str, form: str, dtype: torch.dtype
) -> None:
    """Asked for float32, transformers would widen the scales: inputs that are rounded then get other codes."""
    scale = {} if "fp4" in form else {"scale": str(dtype).removeprefix("torch.")}
    fields = {**scale, **WRITTEN[form][1]}
    folder = export(llama(tmp_path / "floats", dtype), tmp_path / "bundle", scheme(**fields), layout=layout).model
    written = open_written(folder)
    streamed, parameters = expanded(written).weights, dict(written.load().named_parameters())
    names = [name for name in parameters if name.endswith("_proj.weight")]
    assert names and all(torch.equal(parameters[name], streamed.read(name).float()) for name in names)
    again = dict(TORCH.network(folder).named_parameters())
    assert all(torch.equal(parameters[name], again[name]) for name in names)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_with_an_order_of_inputs(tmp_path: Path, version: int) -> None:
    model = llama(tmp_path / "model", torch.float16, hidden_size=128, intermediate_size=256)
    layout, symmetric = {1: ("gptq", True), 2: ("gptq-v2", False)}[version]
    how = scheme(form="int4", granularity="group", group=32, symmetric=symmetric)
    written = export(model, tmp_path / "bundle", how, layout=layout).model
    torch.manual_seed(0)

    def disordered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        orders = {name: value[torch.randperm(len(value))] for name, value in tensors.items() if name.endswith(".g_idx")}
        return tensors | orders

    source = open_model(str(edited(written, disordered)))
    stored = load_file(written / "model.safetensors")
    assert source.quantization is not None and len(source.quantization.opened) == 14
    for name in source.quantization.opened:
        prefix = name.removesuffix(".weight")
        parts = (stored[f"{prefix}.{part}"].numpy() for part in ("qweight", "qzeros", "scales", "g_idx"))
        expected = torch.from_numpy(plain_gptq.weight(*parts, bits=4, version=version)).T
        assert torch.equal(source.weights.read(name), expected)
    assert source.was == f"{layout.replace('-', '_')} int4 group 32"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awq(tmp_path: Path, dtype: torch.dtype) -> None:
    expected: dict[str, torch.Tensor] = {}

    def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored: dict[str, torch.Tensor] = {}
        torch.manual_seed(0)
        for name, value in tensors.items():
            if not name.endswith("_proj.weight"):
                stored[name] = value
                continue
            (rows, columns), prefix = value.shape, name.removesuffix(".weight")
            codes, zeros = (torch.randint(0, 16, (size, rows)) for size in (columns, columns // 32))
            scales = (torch.rand(columns // 32, rows) / 50).half()
            stored |= {f"{prefix}.qweight": plain_awq.packed(codes), f"{prefix}.qzeros": plain_awq.packed(zeros)}
            stored[f"{prefix}.scales"] = scales
            assert torch.equal(plain_awq.unpacked(stored[f"{prefix}.qweight"]), codes)
            expected[name] = plain_awq.weight(stored[f"{prefix}.qweight"], stored[f"{prefix}.qzeros"], scales, 32).T
        return stored

    stated = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    source = open_model(str(edited(llama(tmp_path / "awq", dtype), packed, stated)))
    assert source.quantization is not None and source.quantization.opened.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(source.weights.read(name), value.to(dtype))


# --- foreign configurations of compressed-tensors --------------------------------------------------------------------


def written(tmp_path: Path, dtype: torch.dtype = torch.float32) -> Path:
    model = llama(tmp_path / "model", dtype, hidden_size=128, intermediate_size=256)
    how = scheme(form="int8", granularity="channel", scale=str(dtype).removeprefix("torch."))
    return export(model, tmp_path / "bundle", how, layout="int-quantized").model


def restated(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def groups_of(folder: Path) -> dict[str, Any]:
    groups: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    return groups


def test_targets_may_be_patterns(tmp_path: Path) -> None:
    folder = written(tmp_path, torch.bfloat16)
    (group,) = groups_of(folder).values()
    inputs = {**group, "targets": ["re:.*self_attn.*"], "input_activations": INT8_INPUTS}
    groups = {"group_0": {**group, "targets": ["re:.*mlp.*"]}, "group_1": inputs}
    source = open_model(str(restated(folder, config_groups=groups, ignore=["re:.*lm_head"])))
    held_against(source, plain(folder), torch.bfloat16)
    stream = StreamedModel(source)
    assert source.quantization is not None
    how = source.quantization.run_time(stream.linears(), stream.files)
    first = "model.layers.0.self_attn"
    assert {name for name in how.activations if name.startswith("model.layers.0")} == {
        *(f"{first}.{part}_proj" for part in "qkvo")
    }
    ignored = {**source.quantization.config, "ignore": ["re:.*1.self_attn.q_proj"]}
    how = run_time.read(ignored, stream.linears(), source.weights.entries, source.weights.read)
    assert {"model.layers.1.self_attn.q_proj", LINEAR}.isdisjoint(how.activations) and len(how.activations) == 7


def test_the_original_of_a_score_rounds_its_inputs(tmp_path: Path) -> None:
    folder = written(tmp_path)
    groups = {"group_0": {**groups_of(folder)["group_0"], "input_activations": INT8_INPUTS}}
    source = open_model(str(restated(folder, config_groups=groups)))
    ids = zoo.ids(2, 16)
    stream = StreamedModel(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    runs, floats = stream.as_it_runs().answers(ids).all(), stream.answers(ids).all()
    near = float((runs - expected).norm() / expected.norm())
    assert near < 2e-3 < float((floats - expected).norm() / expected.norm())
    assert "inputs in int8 by token" in source.notes[0]
    assert stream.transforms == []


def test_inputs_that_cannot_be_rounded_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    groups = {"group_0": {**groups_of(folder)["group_0"], "input_activations": {**inputs, "symmetric": True}}}
    source = open_model(str(restated(folder, config_groups=groups)))
    assert "inputs left in floats (its kernels round them to 4-bit floats by tensor_group)" in source.notes[0]
    stream = StreamedModel(source)
    assert stream.as_it_runs() is stream


# --- the model as it is loaded ---------------------------------------------------------------------------------------


def test_the_stream_is_the_opened_model(tmp_path: Path) -> None:
    folder = edited(llama(tmp_path / "fp8", torch.bfloat16, **_WIDE), in_blocks, FP8)
    stream, ids = StreamedModel(open_model(str(folder))), zoo.ids(4, 32)
    assert demand_equal(stream, ids, 2).ok
    assert demand_equal(stream, ids, 1).ok
    loaded = stream.source.load()
    assert torch.equal(loaded.get_parameter(f"{LINEAR}.weight"), stream.tensor(f"{LINEAR}.weight"))
    with on_disk(stream.skeleton, stream.paths) as placed:
        assert not (folder / "opened").exists()
        offloaded = stream.source.load(None, placed)
        with torch.no_grad():
            assert torch.allclose(offloaded(input_ids=ids).logits, loaded(input_ids=ids).logits, atol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "quark"}, "'quark'"),
        ({"quant_method": "torchao"}, "'torchao'"),
        ({}, ""),
        ({"bits": 4}, "has no quant_method"),
        ("gptq", "has no quant_method"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq"}, "not understood"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8 of bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "not understood"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": 1}}, "understood"),
    ],
)
def test_another_method_is_refused_by_its_config(stated: Any, value: str, tmp_path: Path) -> None:
    config = {"quantization_config": stated}
    if not stated:
        assert grid_of(config, "x") is None
        return
    with pytest.raises(InputError, match="already-quantized") as caught:
        grid_of(config, "x")
    assert value in caught.value.value and caught.value.remedy


@pytest.mark.parametrize(
    ("gone", "part"),
    [("weight_scale_inv", "in F8_E4M3"), ("weight", "in no file")],
)
def test_codes_without_their_parts(gone: str, part: str, tmp_path: Path) -> None:
    def lacking(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in in_blocks(tensors).items() if name != f"{LINEAR}.{gone}"}

    folder = edited(llama(tmp_path / "fp8", torch.bfloat16, **_WIDE), lacking, FP8)
    with pytest.raises(InputError, match="already-quantized") as caught:
        open_model(str(folder))
    assert LINEAR in str(caught.value) and part in str(caught.value)


def test_a_damaged_scale_is_found_before_the_work(tmp_path: Path) -> None:
    def damaged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = in_blocks(tensors)
        stored[f"{LINEAR}.weight_scale_inv"][0, 0] = float("nan")
        return stored

    source = open_model(str(edited(llama(tmp_path / "fp8", torch.bfloat16, **_WIDE), damaged, FP8)))
    with pytest.raises(InputError, match="weights-nonfinite"):
        source.weights.largest(source.weights.entries)


# --- from the config alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_bytes_from_the_config(tmp_path: Path, name: str) -> None:
    if name == "fp8":
        folder = edited(llama(tmp_path / "fp8", torch.bfloat16, tied=False, **_WIDE), in_blocks, FP8)
    else:
        model = llama(tmp_path / "model", torch.bfloat16, hidden_size=128, intermediate_size=256)
        folder = export(model, tmp_path / "bundle", scheme(scale="bfloat16", **WRITTEN["int4"][1])).model
    config = json.loads((folder / "config.json").read_text())
    architecture, grid = configs.from_config(config, "x"), grid_of(config, "x")
    assert grid is not None
    expected = open_model(str(folder)).bytes
    assert configs.stored_bytes(architecture, grid) == pytest.approx(expected, rel=0.01)
    assert any(f"the source has {grid.words}, about" in text for text in architecture.assumed)


@pytest.mark.parametrize(
    ("stated", "words"), [({"quant_method": "hqq"}, "'hqq'"), ({"bits": 4}, "has no quant_method")]
)
def test_a_plan_refuses_what_a_compile_refuses(stated: dict[str, object], words: str) -> None:
    config = {"model_type": "llama", "quantization_config": stated, "hidden_size": 64, "num_hidden_layers": 1}
    with pytest.raises(InputError, match=f"already-quantized.*{words}"):
        configs.from_config({**config, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}, "x")
