"""Families of decoders: what a block of each `model_type` has, as a table that restates transformers' own modules.

The tests build those and count; `decoders.py` makes sizes of a row and a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """What a block of a family has.

    Args:
        norms: vectors as long as a token in each block.
        last: the same after all blocks.
        norm_bias: whether each has a bias as long beside it.
        qkv_bias, out_bias, mlp_bias: whether those linears have biases, or the key that says so.
        query_norm: norms of queries and keys: one as long as a `head` for all heads, or as long as `all` of them.
        query_norm_key: the switch for them.
        joined: q, k, v are one tensor, and so are gate and up.
        tied: whether the head is the embedding where the config does not say.
        windows: which layers see a window: `all` if there is one; `switched`: all, if `use_sliding_window`; `late`: the
            same from `max_window_layers` on; `unrotated`: the same for layers without positions; a number n: all but
            every nth.
        head_dim: whether a config's `head_dim` counts; else it is hidden / heads.
        experts: how they are called and counted, where there are any.
        corrected: something is added to what a router says, to balance the experts.
        latent: keys and values come from one small vector.
        defaults: what transformers takes for absent keys, where it is not what everybody takes.
    """

    norms: int = 2
    last: int = 1
    norm_bias: bool = False
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    query_norm: Literal["", "head", "all"] = ""
    query_norm_key: str = ""
    joined: bool = False
    tied: bool = False
    windows: int | Literal["", "all", "switched", "late", "unrotated"] = ""
    head_dim: bool = True
    experts: Literal["", "mixtral", "qwen", "deepseek"] = ""
    corrected: bool = False
    latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PLAIN: dict[str, Any] = {"qkv_bias": False, "out_bias": False}
_GEMMA = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "mistral": Family(**_PLAIN, windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(**_PLAIN, windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, out_bias=False, windows="late", defaults={"sliding_window": 4096}),
    "qwen3": Family(query_norm="head", windows="late", defaults={"head_dim": 128, "sliding_window": 4096}),
    "gemma": Family(tied=True, defaults={"head_dim": 256}),
    "gemma2": Family(norms=4, tied=True, windows=2, defaults={**_GEMMA, "sliding_window": 4096}),
    "gemma3_text": Family(
        norms=4,
        query_norm="head",
        tied=True,
        windows=6,
        defaults={**_GEMMA, "sliding_window": 4096, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    "granite": Family(mlp_bias="mlp_bias"),
    "olmo": Family(norms=0, last=0),
    "olmo2": Family(query_norm="all"),
    "olmo3": Family(query_norm="all", windows=4, defaults={"sliding_window": 4096}),
    "smollm3": Family(mlp_bias="mlp_bias", tied=True, windows="unrotated", defaults={"num_key_value_heads": 4}),
    "cohere": Family(norms=1, query_norm="all", query_norm_key="use_qk_norm", tied=True),
    "cohere2": Family(norms=1, tied=True, windows=4, head_dim=False, defaults={"sliding_window": 4096}),
    "stablelm": Family(
        norm_bias=True,
        qkv_bias="use_qkv_bias",
        out_bias=False,
        query_norm="all",
        query_norm_key="qk_layernorm",
        head_dim=False,
    ),
    "phi3": Family(**_PLAIN, joined=True, windows="all"),
    "mixtral": Family(
        **_PLAIN, windows="all", experts="mixtral", defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2}
    ),
    "qwen3_moe": Family(
        query_norm="head",
        windows="switched",
        experts="qwen",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        out_bias=False,
        windows="late",
        experts="qwen",
        defaults={"sliding_window": 4096, "qkv_bias": True},
    ),
    "deepseek_v2": Family(experts="deepseek", latent=True, defaults={"q_lora_rank": 1536, "n_shared_experts": 2}),
    "deepseek_v3": Family(
        experts="deepseek", corrected=True, latent=True, defaults={"q_lora_rank": 1536, "n_shared_experts": 1}
    ),
}
# keys that a plain block has nothing to do with: a model of an unknown type that has one of them is no Llama
_FOREIGN = (
    "expert",
    "moe_",
    "lora_rank",
    "ssm",
    "state_size",
    "conv_kernel",
    "linear_",
    "vision_config",
    "is_encoder_",
)
_LLAMA = ("num_key_value_heads", "intermediate_size", "rms_norm_eps", "vocab_size")


def assumed_family(config: Mapping[str, Any]) -> Family | None:
    """A Llama's, for a type that is not known but has the keys of one and none of another kind; else None."""
    foreign = any(value and mark in key for key, value in config.items() for mark in _FOREIGN)
    return FAMILIES["llama"] if all(key in config for key in _LLAMA) and not foreign else None
