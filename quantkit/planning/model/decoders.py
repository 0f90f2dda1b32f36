"""Decoders as sizes: what a block of each family holds, and how its attention reaches back.

A block is attention and a gated product of two linears and a third,

    q, k, v = x Wqᵀ, x Wkᵀ, x Wvᵀ        y = Wdown (act(Wgate x) · Wup x)

with as many keys and values as `num_key_value_heads` says (grouped queries, arXiv:2305.13245). Families differ in
biases, norms, windows, experts and in what is stored as one tensor, DeepSeek's in how keys and values
are made from one small vector (multi-head latent attention, arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantkit.planning.model.architecture import Architecture, Attention, BlockShapes, Matrix
from quantkit.planning.model.figures import MOST_LAYERS, Figures


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


FULL, SLIDING = "full_attention", "sliding_attention"


def decoder(figures: Figures, family: Family, name: str, *, head: bool = True) -> Architecture:
    """A decoder by its config.

    Args:
        head: whether it has a language-model head; without one, its blocks are at `layers`, not at `model.layers`.

    Raises:
        InputError: `config-invalid`.
    """
    hidden, count = figures.size("hidden_size"), figures.size("num_hidden_layers", most=MOST_LAYERS)
    vocabulary = figures.size("vocab_size")
    prefix = "model.layers" if head else "layers"
    build = _latent if family.latent else _grouped
    windows = _windows(figures, family, count)
    layers = []
    attending, attention, others = build(figures, family, hidden)
    forward = _forwards(figures, family, hidden, count)
    norm = hidden * (2 if family.norm_bias else 1)
    norms = 1 if figures.model_type == "stablelm" and figures.flag("use_parallel_residual") else family.norms
    for index, (window, (linears, more)) in enumerate(zip(windows, forward, strict=True)):
        path = f"{prefix}.{index}"
        named = [replace(each, name=f"{path}.{each.name}") for each in (*attending, *linears)]
        seen = attention if window is None else replace(attention, kind="sliding", window=window)
        layers.append(BlockShapes(path, named, seen, others + more + norms * norm))
    tied = figures.flag("tie_word_embeddings", family.tied)
    return Architecture(
        name=name,
        kind="decoder" if head else "encoder",
        model_type=figures.model_type,
        dtype=figures.dtype("bfloat16"),
        hidden=hidden,
        layers=layers,
        embeddings=vocabulary * hidden,
        others=family.last * norm,
        head=Matrix("lm_head", vocabulary, hidden) if head else None,
        tied=tied and head,
        vocabulary=vocabulary,
        max_context=figures.maybe("max_position_embeddings"),
        assumed=tuple(figures.assumed),
    )


def _switch(figures: Figures, value: bool | str) -> bool:
    return figures.flag(value) if isinstance(value, str) else value


def _grouped(figures: Figures, family: Family, hidden: int) -> tuple[Sequence[Matrix], Attention, int]:
    """Grouped queries: the linears of attention, and what its own norms hold."""
    heads = figures.size("num_attention_heads")
    shared = figures.size("num_key_value_heads", default=heads)
    if shared > heads or heads % shared:
        raise figures.wrong("num_key_value_heads", f"{shared} for {heads} heads", "heads are a multiple of it")
    stated = figures.maybe("head_dim")
    if (stated is None or not family.head_dim) and hidden % heads:
        raise figures.wrong("num_attention_heads", f"{heads}, hidden_size {hidden}", "heads divide hidden_size")
    wide = hidden // heads
    if stated is not None and not family.head_dim and stated != wide:
        rule = f"a {figures.model_type} has hidden_size / num_attention_heads, {wide}"
        raise figures.wrong("head_dim", str(stated), rule)
    wide = stated or wide
    q, kv = heads * wide, shared * wide
    bias, out_bias = _switch(figures, family.qkv_bias), _switch(figures, family.out_bias)
    if family.joined:
        inward = [Matrix("self_attn.qkv_proj", q + 2 * kv, hidden, bias=bias)]
    else:
        sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        inward = [Matrix(f"self_attn.{leaf}", n, hidden, bias=bias) for leaf, n in sizes.items()]
    matrices = [*inward, Matrix("self_attn.o_proj", hidden, q, bias=out_bias)]
    normed = not family.query_norm_key or figures.flag(family.query_norm_key)
    norms = {"": 0, "head": 2 * wide, "all": q + kv}[family.query_norm] if normed else 0
    return matrices, Attention("full", heads, shared, wide, wide), norms


def _latent(figures: Figures, family: Family, hidden: int) -> tuple[Sequence[Matrix], Attention, int]:
    """Keys and values as one small vector: `c = W_a x`, then `k, v = W_b norm(c)`, with a shared key for positions."""
    heads, latent = figures.size("num_attention_heads"), figures.size("kv_lora_rank")
    rope = figures.size("qk_rope_head_dim")
    plain, value = figures.size("qk_nope_head_dim"), figures.size("v_head_dim")
    shared = figures.maybe("num_key_value_heads")
    if shared not in (None, heads):
        raise figures.wrong("num_key_value_heads", f"{shared} for {heads} heads", "latent attention has one a head")
    rank = figures.maybe("q_lora_rank")
    bias = _switch(figures, family.qkv_bias)
    q = heads * (plain + rope)
    if rank is None:
        matrices = [Matrix("self_attn.q_proj", q, hidden)]
    else:
        matrices = [Matrix("self_attn.q_a_proj", rank, hidden, bias=bias), Matrix("self_attn.q_b_proj", q, rank)]
    matrices += [
        Matrix("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias=bias),
        Matrix("self_attn.kv_b_proj", heads * (plain + value), latent),
        Matrix("self_attn.o_proj", hidden, heads * value, bias=bias),
    ]
    attention = Attention("latent", heads, heads, plain + rope, value, latent=latent, rope_dim=rope)
    return matrices, attention, latent + (rank or 0)


def _windows(figures: Figures, family: Family, count: int) -> list[int | None]:
    """What each layer sees: a number of tokens, or all."""
    kinds = _kinds(figures, family, count)
    if SLIDING not in kinds:
        return [None] * count
    window = figures.maybe("sliding_window")
    if window is None:
        if figures.config.get("layer_types") is None:
            return [None] * count
        raise figures.wrong("sliding_window", "none", "layer_types has layers that slide")
    return [window if kind == SLIDING else None for kind in kinds]


def _kinds(figures: Figures, family: Family, count: int) -> list[str]:
    stated = figures.config.get("layer_types")
    if stated is not None and family.windows not in ("all", "switched", ""):
        if not isinstance(stated, list) or not all(kind in (FULL, SLIDING) for kind in stated):
            other = [kind for kind in stated if kind not in (FULL, SLIDING)] if isinstance(stated, list) else stated
            raise figures.wrong("layer_types", f"{other!r:.60}", f"a list of {FULL} and {SLIDING}")
        if len(stated) != count:
            raise figures.wrong("layer_types", f"{len(stated)} of them", f"one for each of {count} layers")
        return stated
    windows = family.windows
    if isinstance(windows, int):
        every = figures.maybe("sliding_window_pattern", "_sliding_window_pattern") or windows
        return [FULL if (index + 1) % every == 0 else SLIDING for index in range(count)]
    if windows == "all":
        return [SLIDING] * count
    if not windows or not figures.flag("use_sliding_window"):
        return [FULL] * count
    if windows == "late":
        first = figures.size("max_window_layers", default=28, least=0)
        return [SLIDING if index >= first else FULL for index in range(count)]
    if windows == "unrotated":
        every = figures.size("no_rope_layer_interval", default=4)
        rotated = figures.numbers("no_rope_layers") or [int((index + 1) % every != 0) for index in range(count)]
        if len(rotated) != count:
            raise figures.wrong("no_rope_layers", f"{len(rotated)} of them", f"one for each of {count} layers")
        return [FULL if each else SLIDING for each in rotated]
    return [SLIDING] * count


_Forward = tuple[Sequence[Matrix], int]


def _forwards(figures: Figures, family: Family, hidden: int, count: int) -> list[_Forward]:
    """Of each layer: the linears after attention, and what else they store."""
    if not family.experts:
        return [(_gated("mlp", figures.size("intermediate_size"), hidden, figures, family), 0)] * count
    routed = figures.size(*_EXPERTS[family.experts], least=1)
    chosen = figures.size("num_experts_per_tok")
    if chosen > routed:
        raise figures.wrong("num_experts_per_tok", f"{chosen} of {routed} experts", "a token goes to at most all")
    leaves = ("w1", "w3", "w2") if family.experts == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    wide = figures.size("intermediate_size" if family.experts == "mixtral" else "moe_intermediate_size")
    sparse = [Matrix("mlp.gate", routed, hidden, router=True)]
    first, second, last = (f"mlp.experts.*.{leaf}" for leaf in leaves)
    sparse += [Matrix(each, wide, hidden, routed, chosen) for each in (first, second)]
    sparse.append(Matrix(last, hidden, wide, routed, chosen))
    if family.experts == "deepseek" and (common := figures.size("n_shared_experts", default=0, least=0)):
        sparse += _gated("mlp.shared_experts", common * wide, hidden, figures, family)
    if figures.model_type == "qwen2_moe":
        common = figures.size("shared_expert_intermediate_size")
        sparse += _gated("mlp.shared_expert", common, hidden, figures, family)
        sparse.append(Matrix("mlp.shared_expert_gate", 1, hidden, router=True))
    dense = _dense_layers(figures, family, count)
    plain = _gated("mlp", figures.size("intermediate_size"), hidden, figures, family) if any(dense) else []
    return [(plain, 0) if each else (sparse, routed * family.corrected) for each in dense]


# the figure's names: transformers renames some when it saves
_EXPERTS = {
    "mixtral": ("num_local_experts", "num_experts"),
    "qwen": ("num_experts", "num_local_experts"),
    "deepseek": ("n_routed_experts", "num_local_experts"),
}


def _dense_layers(figures: Figures, family: Family, count: int) -> list[bool]:
    """Which layers have no experts."""
    if family.experts == "mixtral":
        return [False] * count
    if family.experts == "qwen":
        every, without = figures.size("decoder_sparse_step", default=1), set(figures.numbers("mlp_only_layers"))
        return [index in without or (index + 1) % every != 0 for index in range(count)]
    if figures.size("moe_layer_freq", default=1) != 1:
        raise figures.wrong("moe_layer_freq", str(figures.config["moe_layer_freq"]), "transformers knows 1 alone")
    first = figures.size("first_k_dense_replace", least=0)
    return [index < first for index in range(count)]


def _gated(place: str, wide: int, hidden: int, figures: Figures, family: Family) -> list[Matrix]:
    bias = _switch(figures, family.mlp_bias)
    last = Matrix(f"{place}.down_proj", hidden, wide, bias=bias)
    if family.joined:
        return [Matrix(f"{place}.gate_up_proj", 2 * wide, hidden, bias=bias), last]
    return [*(Matrix(f"{place}.{leaf}", wide, hidden, bias=bias) for leaf in ("gate_proj", "up_proj")), last]
