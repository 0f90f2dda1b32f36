"""Tiny random models of many architectures, from transformers' own config classes. For plumbing, never for quality."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 96
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES["max_position_embeddings"] = 64
_LLAMA = {
    **{**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_WINDOWS = {**_LLAMA, "head_dim": 16, "sliding_window": 8}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}

# name -> (model class, config class, its settings)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _WINDOWS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _WINDOWS),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0}),
    "bert": ("BertModel", "BertConfig", {**_SIZES, "intermediate_size": 96}),
}
# what a few tests need besides; not every test runs over these
OTHERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 16}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _LLAMA),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    ),
}


def tiny(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A random model whose norms are not all ones, so that folds have something to fold."""
    model_class, config_class, settings = {**ARCHITECTURES, **OTHERS}[name]
    config = getattr(transformers, config_class)(**{**settings, **changes})
    return filled(getattr(transformers, model_class), config, seed)


def save(folder: Path, tokenizer: Any, name: str, **changes: object) -> Path:
    """Write a tiny model and its tokenizer into a folder, and return the folder."""
    tiny(name, **changes).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def filled(model_class: Any, config: Any, seed: int = 0) -> nn.Module:
    """A random model of any class, with norms and biases of many values and weights that are not too small."""
    torch.manual_seed(seed)
    model: nn.Module = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            else:
                parameter.mul_(3.0)
    return model


def spiky(name: str, gain: float, shift: float) -> nn.Module:
    """A model with a few inputs that are much larger than the others, as real ones have.

    Args:
        name: of the architecture.
        gain, shift: what every 16th weight of a norm is multiplied by, and then gets added.
    """
    model = tiny(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("norm" in key or "ln_" in key) and "weight" in key:
                parameter[::16] = parameter[::16] * gain + shift
    return model


@torch.no_grad()
def outputs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits, or the last hidden states, of ids [samples, tokens]."""
    found: torch.Tensor = model(input_ids=tokens)[0]
    return found


def ids(samples: int = 4, tokens: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids [samples, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, tokens), generator=generator)


_MIXTURE = {**_LLAMA, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_QWEN = {**_MIXTURE, "num_experts": 4, "moe_intermediate_size": 32}
_DEEPSEEK = {
    **{**_MIXTURE, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}
_QWEN3 = {**_QWEN, "head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": True}
# mixtures of experts, apart from the others: what these are for is the experts
MIXTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_MIXTURE, "num_local_experts": 4}),
    "qwen3": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _QWEN3),
    # a shared expert behind a gate that is a linear
    "qwen2": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**_QWEN, "shared_expert_intermediate_size": 32}),
    # a dense first layer, a shared expert, groups of experts, a bias on the choice
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
}


def mixture(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A mixture of experts with random weights, large enough that experts differ and routing is decided."""
    model_class, config_class, settings = MIXTURES[name]
    config = getattr(transformers, config_class)(**{**settings, **changes})
    model: nn.Module = getattr(transformers, model_class)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model
