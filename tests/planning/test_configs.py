"""Sizes read off configs: held against the models that transformers builds of them, and what cannot be read."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import transformers
from zoo import shrink
from zoo.pictures import SEEING

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.sizes.encoder_decoders import PAIRS
from quantkit.model.sizes.encoders import TEXT, VISION
from quantkit.model.sizes.families import FAMILIES
from quantkit.model.structure.traced import find_blocks, is_linear

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
_DELTA = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_hidden_layers": 4},
}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16} | {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_DEEP = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_CLASSES = {"num_labels": 7}
_T5 = {"d_kv": 24, "d_ff": 96, "num_decoder_layers": 3}
_BART = {"decoder_layers": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80} | {
    "max_position_embeddings": 48
}
_NO_WINDOW = {"sliding_window": None}
# model type, class, what it has besides; every switch and every class that is counted by itself once
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", "LlamaModel", {"head_dim": 24}),
    ("mistral", "MistralForCausalLM", {"sliding_window": None}),
    ("ministral", "MinistralForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    ("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", "Qwen3ForCausalLM", {"attention_bias": True}),
    ("qwen2_vl_text", "Qwen2VLTextModel", {}),
    ("qwen2_5_vl_text", "Qwen2_5_VLTextModel", {}),
    ("qwen3_vl_text", "Qwen3VLTextModel", {}),
    ("ministral3", "Ministral3ForCausalLM", {"head_dim": 16}),
    ("gemma", "GemmaForCausalLM", {}),
    ("gemma2", "Gemma2ForCausalLM", {"attention_bias": True}),
    ("gemma3_text", "Gemma3ForCausalLM", {"num_hidden_layers": 7, "tie_word_embeddings": False}),
    ("granite", "GraniteForCausalLM", {"mlp_bias": True}),
    ("olmo", "OlmoForCausalLM", {}),
    ("olmo2", "Olmo2ForCausalLM", {"attention_bias": True}),
    ("olmo3", "Olmo3ForCausalLM", {}),
    ("smollm3", "SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 8}),
    ("cohere", "CohereForCausalLM", {"use_qk_norm": True}),
    ("cohere2", "Cohere2ForCausalLM", {}),
    ("stablelm", "StableLmForCausalLM", {}),
    ("stablelm", "StableLmForCausalLM", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    ("phi3", "Phi3ForCausalLM", {"sliding_window": 8}),
    ("mixtral", "MixtralForCausalLM", {}),
    (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1], "moe_intermediate_size": 48},
    ),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {**_LATENT, **_DEEP, "first_k_dense_replace": 2, "q_lora_rank": 24}),
    (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**_LATENT, **_DEEP, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2},
    ),
    ("deepseek_v2", "DeepseekV2ForCausalLM", {**_LATENT, **_DEEP, "first_k_dense_replace": 1, "q_lora_rank": None}),
    (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]},
    ),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", _DELTA),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", {**_DELTA, "layer_types": ["full_attention", *["linear_attention"] * 3]}),
    (
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**_DELTA, "num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    ("granitemoe", "GraniteMoeForCausalLM", {"num_local_experts": 4, "attention_bias": True}),
    ("gpt_oss", "GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2}),
    (
        "llama4_text",
        "Llama4ForCausalLM",
        {"num_local_experts": 4, "head_dim": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 112},
    ),
    ("bert", "BertModel", {}),
    ("bert", "BertForMaskedLM", {}),
    ("bert", "BertForPreTraining", {"tie_word_embeddings": False}),
    ("bert", "BertForSequenceClassification", _CLASSES),
    ("bert", "BertForTokenClassification", _CLASSES),
    ("bert", "BertForQuestionAnswering", {}),
    ("roberta", "RobertaModel", {}),
    ("roberta", "RobertaForMaskedLM", {}),
    ("roberta", "RobertaForSequenceClassification", _CLASSES),
    ("xlm-roberta", "XLMRobertaForMaskedLM", {}),
    ("electra", "ElectraModel", {"embedding_size": 32}),
    ("electra", "ElectraForMaskedLM", {"embedding_size": 32}),
    ("electra", "ElectraForPreTraining", {"embedding_size": 64}),
    ("electra", "ElectraForSequenceClassification", _CLASSES),
    ("vit", "ViTModel", {"image_size": 32, "patch_size": 8}),
    ("vit", "ViTForImageClassification", {**_CLASSES, "qkv_bias": False}),
    ("deit", "DeiTModel", {"image_size": 30, "patch_size": 8}),
    ("deit", "DeiTForImageClassification", _CLASSES),
    ("deit", "DeiTForImageClassificationWithTeacher", _CLASSES),
    ("t5", "T5ForConditionalGeneration", _T5),
    ("mt5", "MT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    *(
        (name, class_name, {**_BART, "decoder_start_token_id": 1})
        for name, class_name in PAIRS.items()
        if name not in ("t5", "mt5")
    ),
]


def built(config: Any, class_name: str) -> Any:
    """transformers' own, without memory for its weights."""
    import torch
    import transformers

    with torch.device("meta"):
        return getattr(transformers, class_name)(config)


def stored(model: Any) -> int:
    """Elements of parameters and of buffers that are saved, each once."""
    saved = model.state_dict()
    buffers = sum(value.numel() for name, value in model.named_buffers() if name in saved)
    return int(sum(value.numel() for value in model.parameters()) + buffers)


def linears(model: Any) -> dict[str, tuple[int, int]]:
    """Those in blocks, whose paths have a number."""
    import torch

    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {
        name: (each.weight.shape[0], each.weight.shape[1])
        for name, each in found.items()
        if any(part.isdigit() for part in name.split(".")) and not name.endswith(("shared_expert_gate", "router"))
    }


@pytest.mark.parametrize(("model_type", "class_name", "more"), CASES)
def test_sizes_are_those_of_the_model_that_transformers_builds(
    model_type: str, class_name: str, more: dict[str, Any]
) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**BASE, **more})
    model = built(config, class_name)
    found = configs.from_config({**json.loads(config.to_json_string()), "architectures": [class_name]}, "x")
    assert found.parameters == stored(model)
    ours = {each.name: (each.N, each.K) for each in found.inside() if not each.router and each.count == 1}
    assert ours == linears(model)
    kinds = getattr(config, "layer_types", None)
    if kinds and class_name.endswith("ForCausalLM"):
        sliding = [layer.attention is not None and layer.attention.kind == "sliding" for layer in found.layers]
        assert sliding == [kind == "sliding_attention" for kind in kinds]
    if found.head is not None and not found.tied:
        head = model.get_submodule(found.head.name)
        assert tuple(head.weight.shape) == (found.head.N, found.head.K)


def test_every_family_is_held_against_transformers() -> None:
    assert {model_type for model_type, _, _ in CASES} == {*FAMILIES, *PAIRS, *TEXT, *VISION}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_taken_for_absent_keys_is_what_transformers_takes(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, config_class = FAMILIES[name], CONFIG_MAPPING[name]
    theirs = {each.name: each.default for each in dataclasses.fields(config_class)}
    assert {key: theirs[key] for key in family.defaults} == dict(family.defaults)
    assert bool(theirs.get("tie_word_embeddings")) == family.tied


@pytest.mark.parametrize("name", configs.shipped_names())
def test_shipped_configs_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = configs.shipped(name).config
    config = CONFIG_MAPPING[given["model_type"]](**{k: v for k, v in given.items() if k != "architectures"})
    assert configs.read(name).parameters == stored(built(config, given["architectures"][0]))


@pytest.mark.parametrize("name", configs.shipped_names())
def test_shipped_configs_add_up_to_what_is_published(name: str) -> None:
    published = configs.shipped(name).published
    found = configs.read(name).parameters
    if published.digits is None:
        assert found == published.parameters
    else:
        assert float(f"{found:.{published.digits - 1}e}") == published.parameters
    assert published.source
    assert not configs.read(name).assumed


def test_active_parameters_of_mixtures_of_experts() -> None:
    # DeepSeek's own count of a token's: 36.6B, with the head and without the table of tokens (README_WEIGHTS.md)
    deepseek = configs.read("deepseek-v3")
    assert (deepseek.active_parameters - deepseek.embeddings) / 1e9 == pytest.approx(36.6, abs=0.05)
    assert configs.read("qwen3-235b-a22b").active_parameters / 1e9 == pytest.approx(22, abs=0.5)
    assert configs.read("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    assert configs.read("llama-3-8b").active_parameters == configs.read("llama-3-8b").parameters


def test_experts_are_called_as_a_compile_calls_them() -> None:
    names = [each.name for each in configs.read("deepseek-v3").layers[3].matrices]
    assert "model.layers.3.mlp.experts.*.gate_proj" in names
    assert "model.layers.3.mlp.shared_experts.down_proj" in names
    assert "model.layers.0.mlp.experts.*.w1" in [each.name for each in configs.read("mixtral-8x7b").layers[0].matrices]


def test_the_text_part_of_several_modalities() -> None:
    text = {k: v for k, v in configs.shipped("gemma-3-27b").config.items() if k not in ("dtype", "tie_word_embeddings")}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    found = configs.from_config({**whole, "text_config": text, "vision_config": {"hidden_size": 1152}}, "x")
    assert found.parameters == configs.read("gemma-3-27b").parameters
    assert found.dtype == "bfloat16"
    assert "without vision_config" in " ".join(found.assumed)
    # google's own configs leave out what is default
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        text.pop(key)
    small = configs.from_config({**whole, "text_config": {**text, "hidden_size": 2560}}, "x")
    assert small.vocabulary == 262208
    assert "num_attention_heads 8, the default of transformers" in " ".join(small.assumed)


def test_an_unknown_type_with_the_keys_of_a_llama_is_taken_for_one() -> None:
    unknown = {**LLAMA, "model_type": "my-model", "architectures": ["MyModelForCausalLM"], "rms_norm_eps": 1e-5}
    found = configs.from_config(unknown, "x")
    assert found.parameters == configs.from_config(LLAMA, "x").parameters
    assert found.assumed == ("blocks like Llama's: my-model is unknown",)
    for foreign in ({"num_experts": 8}, {"kv_lora_rank": 16}, {"mamba_d_ssm": 4}, {"rms_norm_eps": None}):
        config = {k: v for k, v in {**unknown, **foreign}.items() if v is not None}
        with pytest.raises(InputError, match="config-unknown"):
            configs.from_config(config, "x")


@pytest.mark.parametrize("name", SEEING)
def test_a_vision_language_model_s_config_gives_its_linears_its_tower_and_an_image_s_tokens(name: str) -> None:
    config = shrink.config_of(shrink.named(name))
    stated = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name], "dtype": "float32"}
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    found, notes = configs.from_config(stated, "x"), " ".join(configs.from_config(stated, "x").assumed)
    blocks = model.get_submodule(find_blocks(model))
    linears = [value for block in blocks for each in block.modules() if is_linear(each) for value in each.parameters()]
    # routers are no linears of transformers, and convolutions have three dimensions too
    named = [(name.rpartition(".")[0], value) for name, value in blocks.named_parameters()]
    experts = [value for name, value in named if value.dim() == 3 and not name.endswith("conv1d")]
    experts += [value for name, value in named if name.endswith("mlp.gate")]
    assert sum(matrix.parameters for matrix in found.inside()) == sum(value.numel() for value in [*linears, *experts])
    # of a tiny tower, norms and positions are a large part
    assert 0.4 < found.parameters / sum(value.numel() for value in model.parameters()) < 1.6
    assert found.sees and (found.image_tokens is None) == ("a token of the context for each" in notes)
    assert "tower of images" in notes and re.search(r"an image .*takes", notes)
    assert re.search(r"\b(4|16|576|256)\b tokens|16 x 16 pixels", notes), notes


def test_an_old_config_of_a_vision_language_model_has_its_text_part_at_the_top() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    flat = {**text, "num_key_value_heads": 2, "vocab_size": 100, "model_type": "qwen2_vl", "dtype": "bfloat16"}
    flat |= {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "patch_size": 14}}
    found = configs.from_config({**flat, "architectures": ["Qwen2VLForConditionalGeneration"]}, "x")
    nested = {**flat, "model_type": "qwen2_vl_text"}
    both = {"model_type": "qwen2_vl", "text_config": nested, "vision_config": flat["vision_config"]}
    assert found.layers == configs.from_config(both, "x").layers and found.kind == "decoder"


def test_what_a_config_leaves_open_is_said() -> None:
    silent = {k: v for k, v in LLAMA.items() if k != "dtype"}
    assert configs.from_config(silent, "x").assumed == ("stored in bfloat16: the config has no dtype",)
    head = configs.from_config({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "x")
    assert head.assumed == ("a language model: LlamaForSequenceClassification is not",)
    quantized = configs.from_config({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "x")
    assert "the source has fp8_e4m3" in quantized.assumed[0]
    bert = {**configs.shipped("bert-base").config, "architectures": ["BertForSomething"]}
    assert configs.from_config(bert, "x").assumed == (
        "BertForSomething counted as BertModel: its parameters after the blocks are unknown",
    )


BAD: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size.*missing", {"hidden_size": None}),
    ("hidden_size.*'64'", {"hidden_size": "64"}),
    ("hidden_size.*64.0", {"hidden_size": 64.0}),
    ("hidden_size.*True", {"hidden_size": True}),
    ("hidden_size.*-64", {"hidden_size": -64}),
    ("hidden_size.*10000000", {"hidden_size": 10**12}),
    ("hidden_size", {"hidden_size": [64]}),
    ("num_hidden_layers.*10000", {"num_hidden_layers": 10**6}),
    ("num_hidden_layers", {"num_hidden_layers": 0}),
    ("num_attention_heads.*divide", {"num_attention_heads": 5, "num_key_value_heads": 5}),
    ("num_key_value_heads.*multiple", {"num_key_value_heads": 8}),
    ("num_key_value_heads.*multiple", {"num_key_value_heads": 3}),
    ("vocab_size.*missing", {"vocab_size": None}),
    ("dtype.*int4", {"dtype": "int4"}),
    ("architectures", {"architectures": "LlamaForCausalLM"}),
    ("architecture-unsupported.*a draft head", {"architectures": ["LlamaForCausalLMEagle3"]}),
    ("model_type", {"model_type": None}),
    ("model_type", {"model_type": ["llama"]}),
    ("config-unknown.*mamba", {"model_type": "mamba"}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("text_config", {"text_config": {"text_config": {}}}),
    ("text_config", {"text_config": 3}),
    ("head_dim.*stablelm", {"model_type": "stablelm", "head_dim": 8}),
    ("layer_types.*one for each", {"model_type": "qwen3", "layer_types": ["full_attention"]}),
    ("layer_types.*chunked", {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 5}),
    ("sliding_window.*slide", {"model_type": "olmo3", "layer_types": ["sliding_attention"] * 5} | _NO_WINDOW),
    ("num_local_experts.*missing", {"model_type": "mixtral"}),
    ("num_experts_per_tok.*at most all", {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}),
    ("num_local_experts.*agree", {"model_type": "mixtral", "num_local_experts": 2, "num_experts": 3}),
    ("patch_size.*at least one", {"model_type": "vit", "image_size": 8, "patch_size": 16}),
    ("num_labels.*agree", {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
     | {"num_labels": 3, "id2label": {"0": "a"}}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "changes"), BAD)
def test_what_makes_no_model_is_refused_in_one_line(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=message) as caught:
        configs.from_config({**LLAMA, **changes}, "x")
    assert "\n" not in caught.value.line()
    assert len(caught.value.line()) < 400


def test_folders_files_bundles_and_what_is_neither(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(InputError, match="config-missing"):
        configs.read(str(folder))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert configs.read(str(folder)).name == configs.read(str(folder / "config.json")).name == "my-model"
    for text in ("{", "[1]", '{"hidden_size": NaN}', "[" * 100_000, '{"a": 1}\x00'):
        (folder / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config-invalid") as caught:
            configs.read(str(folder))
        assert "\n" not in caught.value.line()
    with pytest.raises(InputError, match="file-missing"):
        configs.read("./no-such-folder")
    (folder / "model.onnx").write_bytes(b"\x08\xff")
    with pytest.raises(InputError, match=r"config-missing.*\.onnx"):
        configs.read(str(folder / "model.onnx"))
    with pytest.raises(InputError, match="did you mean 'llama-3-8b'"):
        configs.read("lama-3-8b")
    with pytest.raises(InputError, match=r"unknown-model.*\./gpt"):
        configs.read("gpt")


def test_the_hub_is_read_from_its_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="hub-not-cached"):
        configs.read("hf:org/name")
    with pytest.raises(InputError, match="hub-name"):
        configs.read("hf:a/b/c")
    commit = "a" * 40
    place = tmp_path / "models--org--name"
    (place / "snapshots" / commit).mkdir(parents=True)
    (place / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    assert configs.read("hf:org/name").name == "name"


def test_nothing_heavy_is_imported_to_read_store_and_hold_a_model() -> None:
    code = """
import sys
from quantkit.model.sizes import configs
from quantkit.planning.memory import Footprint, cache_of, taken_by
from quantkit.planning.roofline import RooflineProduct
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe
models = {name: configs.read(name) for name in configs.shipped_names()}
found = storage(models["deepseek-v3"], Recipe.load("awq-int4"))
products = [RooflineProduct(each.matrix, each.bytes, each.format, "fp16") for each in (*found.linears, found.head)]
card = Footprint(models["deepseek-v3"], products, cache_of(None, "bfloat16"), 2, False, taken_by("vllm", "gpu"), 80e9)
assert card.needed(1, 8192) == 8
heavy = {"torch", "transformers", "scipy", "plotly", "huggingface_hub", "onnx", "onnxruntime", "compressed_tensors"}
print(sorted(heavy & set(sys.modules)))
"""
    done = forked.run("-c", code, light=True, check=True)
    assert done.stdout.strip() == "[]"
