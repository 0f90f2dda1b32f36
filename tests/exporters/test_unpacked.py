"""What a checkpoint's config says of the matrices that stay in floats, held against other programs' own rules.

The rules of compressed-tensors and transformers are called; those of vLLM stand in `reference/plain_vllm.py`.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from reference import plain_vllm
from safetensors import safe_open
from zoo import _MIXTURE, MIXTURES

from quantkit.exporters import LayerSpec
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.exporters.checkpoint.writer import Writer
from quantkit.exporters.checkpoint.writer import unpacked_names as names
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme
from quantkit.target import Target

LAYER = "model.layers.1"
# model -> its linears in vLLM that stay in floats, and those that are packed, both by vLLM's names, in its layer 1
THERE: dict[str, tuple[list[str], list[str]]] = {
    "mixtral": (["block_sparse_moe.gate"], ["block_sparse_moe.experts.0.w1", "self_attn.qkv_proj"]),
    "qwen3": (["mlp.gate"], ["mlp.experts.0.down_proj", "self_attn.qkv_proj", "self_attn.o_proj"]),
    "qwen2": (["mlp.gate", "mlp.shared_expert_gate"], ["mlp.experts.0.up_proj", "mlp.shared_expert.gate_up_proj"]),
    "deepseek": (["mlp.gate"], ["self_attn.fused_qkv_a_proj", "mlp.shared_experts.gate_up_proj", "self_attn.o_proj"]),
    "granite": (["block_sparse_moe.gate", "block_sparse_moe.experts.0.w1"], ["self_attn.qkv_proj"]),
    "gpt-oss": (["mlp.router", "mlp.experts.0.gate_up_proj", "mlp.experts.3.down_proj"], ["self_attn.qkv_proj"]),
    "phi": (["block_sparse_moe.gate"], ["block_sparse_moe.experts.0.w1", "self_attn.qkv_proj"]),
}
MODELS = {
    **MIXTURES,
    "granite": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**_MIXTURE, "num_local_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**_MIXTURE, "num_local_experts": 4, "head_dim": 16}),
    "phi": ("PhimoeForCausalLM", "PhimoeConfig", {**_MIXTURE, "num_local_experts": 4}),
}
INT4 = {"format": "int4", "granularity": "group", "group": 32}
FORMS: dict[str, dict[str, Any]] = {
    "pack-quantized": INT4,
    "nvfp4-pack-quantized": {"format": "nvfp4"},
    "float-quantized": {"format": "fp8_e4m3", "granularity": "channel"},
    "gptq": INT4,
    "bitsandbytes": {"format": "nf4"},
}


class Decided(Finished):
    """Schemes alone, without codes."""

    def __init__(self, schemes: dict[str, WeightScheme]) -> None:
        super().__init__([], {})
        self.schemes = schemes


def written(model: str, folder: Path, layout: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The `quantization_config` of a model, and (matrices in floats, packed linears) by their names in the files."""
    name, config, settings = MODELS[model]
    torch.manual_seed(0)
    getattr(transformers, name)(getattr(transformers, config)(**settings)).to(dtype).save_pretrained(folder)
    source = open_model(str(folder))
    stream = StreamedModel(source)
    plain = {"schema": 1, "name": "x", "summary": "x", "passes": ["rtn"], "export": ["checkpoint"], "keep": ["lm_head"]}
    if model in ("granite", "gpt-oss"):  # transformers has these experts in one tensor, and packs none of them
        plain["keep"] = ["lm_head", "*.experts"]
    recipe = Recipe.model_validate({**plain, "scheme": {"weights": FORMS[layout]}, **changes})
    layers = lay_out(recipe, stream.skeleton, stream.block_names, source.dtype, head=stream.head)
    values: Any = SimpleNamespace(original=stream, finished=Decided(dict(layers.schemes)))
    config = Writer.of(values, EXPORT.Options(layout=layout).found).quantization
    packed = {stream.files[f"{linear}.weight"].removesuffix(".weight") for linear in layers.schemes}
    table = stream.files["model.embed_tokens.weight"]
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        shapes = {key: stored.get_slice(key).get_shape() for key in stored.keys()}  # noqa: SIM118 (not a dict)
    matrices = {key.removesuffix(".weight") for key, shape in shapes.items() if len(shape) > 1 and key != table}
    return config, matrices - packed, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", THERE)
def test_every_matrix_in_floats_is_named_and_no_packed_one(tmp_path: Path, model: str, dtype: torch.dtype) -> None:
    from compressed_tensors.utils.match import match_name

    config, floats, packed = written(model, tmp_path, "pack-quantized", dtype)
    assert floats
    assert packed
    for name in floats:
        assert any(match_name(name, each) for each in config["ignore"]), name
    for name in packed:
        assert not any(match_name(name, each) for each in config["ignore"]), name
    outside, inside = THERE[model]
    for name in outside:
        assert plain_vllm.ignored(f"{LAYER}.{name}", config["ignore"]), name
        assert plain_vllm.ignored(f"language_model.{LAYER}.{name}", config["ignore"]) or "experts" not in name
    for name in inside:
        assert not plain_vllm.ignored(f"{LAYER}.{name}", config["ignore"]), name


@pytest.mark.parametrize("layout", list(FORMS)[1:])
def test_so_does_every_layout_in_its_own_words(tmp_path: Path, layout: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    config, floats, packed = written("gpt-oss", tmp_path, layout)
    if layout == "bitsandbytes":
        taken = [name for name in (*floats, *packed) if should_convert_module(name, config["llm_int8_skip_modules"])]
        assert set(taken) == packed
    for name, left in [
        *((name, True) for name in THERE["gpt-oss"][0]),
        *((name, False) for name in ["self_attn.o_proj"]),
    ]:
        method, _ = plain_vllm.kernel(config, f"{LAYER}.{name}", (64, 64))
        assert (method == "UnquantizedLinearMethod") is left, name
    if (
        layout == "gptq"
    ):  # of a layer's experts vLLM asks by the name of their module, and its other kernels by a part of it
        assert any(re.match(pattern.removeprefix("-:"), f"{LAYER}.mlp.experts") for pattern in config["dynamic"])
        assert f"{LAYER}.mlp.experts" in config["modules_to_not_convert"]


def test_what_vllm_fuses_is_named_where_all_of_it_stays(tmp_path: Path) -> None:
    config, _, _ = written("qwen2", tmp_path, "pack-quantized", keep=["*q_proj", "*k_proj", "*v_proj", "lm_head"])
    assert f"{LAYER}.self_attn.qkv_proj" in config["ignore"]
    assert plain_vllm.ignored(f"{LAYER}.self_attn.qkv_proj", config["ignore"], fused={})
    assert f"{LAYER}.mlp.shared_expert.gate_up_proj" not in config["ignore"]


@pytest.mark.parametrize("changed", ["q_proj", "v_proj"])
def test_a_fused_linear_of_several_kinds_is_said_before_any_work(changed: str) -> None:
    four, eight = WeightScheme(**INT4), WeightScheme(format="int8")
    linears = [f"{LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    shapes = dict.fromkeys(linears, (64, 64))
    target = Target.load("cpu-x86")

    def said(schemes: dict[str, WeightScheme]) -> str:
        return EXPORT.for_target(EXPORT.Options(), target, LayerSpec(schemes, shapes=shapes))[1]

    assert said(dict.fromkeys(linears, four)) == ""
    assert said({**dict.fromkeys(linears[:3], four), linears[3]: eight}) == ""
    for odd in ({f"{LAYER}.self_attn.{changed}": eight}, {}):
        schemes = {name: four for name in linears if not name.endswith(changed)} | odd
        assert f"{LAYER}.self_attn.qkv_proj" in said(schemes)
        with pytest.raises(plain_vllm.Refused):
            plain_vllm.ignored(f"{LAYER}.self_attn.qkv_proj", [f"{LAYER}.self_attn.{changed}"])


def test_a_pattern_never_covers_what_is_packed_elsewhere() -> None:
    """A tower in floats has blocks and experts of the same numbers and names as the packed ones."""
    packed = {"text.layers.0.mlp.experts.0.up_proj", "text.layers.0.mlp.router", "vision.layers.0.attn.o_proj"}
    found = names({"vision.layers.0.mlp.experts.up": 3}, packed)
    assert plain_vllm.ignored("vision.layers.0.mlp.experts.0.up_proj", found)
    assert not any(plain_vllm.ignored(name, found) for name in packed)
