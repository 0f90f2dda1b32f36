"""Sizes of decoders by family: the linears of a block, and the reach of its attention.

A decoder block is attention and a gated multilayer perceptron,

    q, k, v = x Wqᵀ, x Wkᵀ, x Wvᵀ        y = Wdown (act(Wgate x) · Wup x)

with `num_key_value_heads` heads of keys and values (grouped queries, arXiv:2305.13245). Families differ in biases,
norms,
windows, experts and fused tensors; DeepSeek's in making keys and values from one small vector (multi-head latent
attention, arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quantkit.model.sizes.architecture import MOST_LAYERS, Architecture, Attention, BlockShapes, Figures, Matrix


@dataclass(frozen=True)
class Family:
    """Properties of a family's blocks.

    Args:
        norms: number of norms in a block, each as long as a token.
        last: number of norms after all blocks.
        norm_bias: True if norms have a bias too.
        qkv_bias, out_bias, mlp_bias: True if those linears have biases, or the key that decides it.
        query_norm: norms of queries and keys: one as long as a `head` for all heads, or as long as `all` of them.
        query_norm_key: key of the switch for them.
        joined: True if q, k, v are one tensor, and gate and up too.
        tied: default of the tied head.
        windows: layers with a window: `all` if there is one; `switched`: all, if `use_sliding_window`; `late`: the same
            from `max_window_layers` on; `unrotated`: the same for layers without positions; a number n: all except
            every nth.
        head_dim: True if a config's `head_dim` counts; else it is hidden / heads.
        experts: naming scheme of the experts, if any.
        corrected: True if a correction is added to the router's output, to balance the experts.
        latent: True if keys and values come from one small vector.
        delta: True if most layers are Gated DeltaNets (arXiv:2412.06464), and the queries of the others have a gate.
        defaults: defaults of transformers for this family.
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
    experts: Literal["", "mixtral", "qwen", "deepseek", "granite", "gpt_oss", "llama4"] = ""
    corrected: bool = False
    latent: bool = False
    delta: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PLAIN: dict[str, Any] = {"qkv_bias": False, "out_bias": False}
_DELTA = {
    **{"head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
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
    "qwen2_vl_text": Family(qkv_bias=True, out_bias=False, windows="late", defaults={"sliding_window": 4096}),
    "qwen2_5_vl_text": Family(qkv_bias=True, out_bias=False, windows="late", defaults={"sliding_window": 4096}),
    "qwen3_vl_text": Family(query_norm="head", defaults={"head_dim": 128}),
    "qwen3_5_text": Family(query_norm="head", delta=True, defaults={**_DELTA, "num_key_value_heads": 4}),
    "qwen3_5_moe_text": Family(
        query_norm="head",
        delta=True,
        experts="qwen",
        defaults={
            **{**_DELTA, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        },
    ),
    "ministral3": Family(**_PLAIN, defaults={"num_key_value_heads": 8}),
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
    "granitemoe": Family(experts="granite", defaults={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        qkv_bias="attention_bias",
        windows=2,
        experts="gpt_oss",
        defaults={
            **{"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
            **{"num_local_experts": 128, "num_experts_per_tok": 4},
        },
    ),
    "llama4_text": Family(
        experts="llama4",
        defaults={
            **{"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 1},
            **{"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1},
        },
    ),
    "deepseek_v2": Family(experts="deepseek", latent=True, defaults={"q_lora_rank": 1536, "n_shared_experts": 2}),
    "deepseek_v3": Family(
        experts="deepseek", corrected=True, latent=True, defaults={"q_lora_rank": 1536, "n_shared_experts": 1}
    ),
}
# keys of other kinds of blocks: an unknown model type with one of them is not treated as a Llama
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
# names of the number of experts: transformers renames some when it saves
_EXPERTS = {
    "mixtral": ("num_local_experts", "num_experts"),
    "qwen": ("num_experts", "num_local_experts"),
    "deepseek": ("n_routed_experts", "num_local_experts"),
    **dict.fromkeys(("granite", "gpt_oss", "llama4"), ("num_local_experts", "num_experts")),
}
_GATED = ("gate_proj", "up_proj", "down_proj")
# naming scheme -> module of the mixture, its router, linears of an expert, key of their width
_MIXTURES: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "mixtral": ("mlp", "gate", ("w1", "w3", "w2"), "intermediate_size"),
    "qwen": ("mlp", "gate", _GATED, "moe_intermediate_size"),
    "deepseek": ("mlp", "gate", _GATED, "moe_intermediate_size"),
    "granite": ("block_sparse_moe", "router", _GATED, "intermediate_size"),
    "gpt_oss": ("mlp", "router", ("gate_up_proj", "down_proj"), "intermediate_size"),
    "llama4": ("feed_forward", "router", _GATED, "intermediate_size"),
}


def assumed_family(config: Mapping[str, Any]) -> Family | None:
    """Return Llama's family for an unknown type with its keys and no foreign ones; else None."""
    foreign = any(value and mark in key for key, value in config.items() for mark in _FOREIGN)
    return FAMILIES["llama"] if all(key in config for key in _LLAMA) and not foreign else None


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def decoder(
    figures: Figures, family: Family, name: str, *, head: bool = True, tower: Mapping[str, Any] | None = None
) -> Architecture:
    """Build a decoder from its config; without a `head`, its blocks are at `layers`. Raises `config-invalid`.

    Args:
        tower: whole config of a vision-language model, of which `figures` are the text part.
    """
    hidden, count = figures.size("hidden_size"), figures.size("num_hidden_layers", most=MOST_LAYERS)
    vocabulary = figures.size("vocab_size")
    prefix = "model.language_model.layers" if tower else "model.layers" if head else "layers"
    beside, image = _tower(tower, hidden, figures) if tower else (0, None)
    windows = _windows(figures, family, count)
    layers = []
    attend = (_latent if family.latent else _grouped)(figures, family, hidden)
    delta = _delta(figures, hidden) if family.delta else attend
    kinds = _delta_kinds(figures, count) if family.delta else [FULL] * count
    forward = _forwards(figures, family, hidden, count)
    norm = hidden * (2 if family.norm_bias else 1)
    norms = 1 if figures.model_type == "stablelm" and figures.flag("use_parallel_residual") else family.norms
    for index, (window, kind, (linears, more)) in enumerate(zip(windows, kinds, forward, strict=True)):
        path, (attending, attention, others) = f"{prefix}.{index}", delta if kind == LINEAR else attend
        named = [replace(matrix, name=f"{path}.{matrix.name}") for matrix in (*attending, *linears)]
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
        others=family.last * norm + beside,
        head=Matrix("lm_head", vocabulary, hidden) if head else None,
        tied=tied and head,
        vocabulary=vocabulary,
        max_context=figures.maybe("max_position_embeddings"),
        assumed=tuple(figures.assumed),
        sees=tower is not None,
        image_tokens=image,
    )


_DEPTHS, _WIDTHS = ("num_hidden_layers", "depth"), ("embed_dim", "hidden_size")
_WIDE = ("intermediate_size", "mlp_dim")
_IMAGE_TOKENS = ("mm_tokens_per_image", "image_seq_length", "image_seq_len")


def _tower(config: Mapping[str, Any], hidden: int, figures: Figures) -> tuple[int, int | None]:
    """Estimate the parameters of a tower of images and its projector, and the tokens of an image; note both.

    A block has four linears of attention and two or three of a perceptron; norms, biases and positions are left out.
    """
    vision = Figures(config["vision_config"], f"{figures.where}: vision_config")
    width, depth = vision.maybe(*_first(vision, _WIDTHS)), vision.maybe(*_first(vision, _DEPTHS), most=MOST_LAYERS)
    if width is None or depth is None:
        figures.assume("the text part alone, without vision_config")
        return 0, None
    wide = vision.maybe(*_first(vision, _WIDE)) or int(width * _ratio(vision.config.get("mlp_ratio"), 4))
    gates = 3 if vision.config.get("hidden_act") == "silu" else 2
    elements = depth * (4 * width**2 + gates * width * wide) + hidden * (width + hidden)
    size = f"{elements / 1e6:.3g}M parameters, {elements / 5e8:.2g} GB in 16 bits"
    figures.assume(f"a tower of images and its projector of about {size}")
    patch, side = _side(vision, "patch_size"), _side(vision, "image_size")
    whole = Figures(config, figures.where)
    merged = _side(vision, "spatial_merge_size") or _side(whole, "spatial_merge_size") or 1
    if (stated := next((value for key in _IMAGE_TOKENS if (value := whole.maybe(key))), None)) is not None:
        figures.assume(f"an image takes {stated} tokens of the context, more where it is cut into pieces")
        return elements, stated
    if patch and side:
        shuffled = _ratio(config.get("scale_factor"), 1) / _ratio(vision.config.get("pixel_shuffle_ratio"), 1)
        count = round((side // patch / merged / shuffled) ** 2)
        figures.assume(f"an image of {side} x {side} pixels takes about {count} tokens of the context")
        return elements, count or None
    if patch:
        pixels = patch * merged
        figures.assume(f"an image takes a token of the context for each {pixels} x {pixels} pixels")
    return elements, None


def _first(figures: Figures, keys: Sequence[str]) -> Sequence[str]:
    """Return the first of several keys that a config has; the first of all if it has none."""
    return [next((key for key in keys if figures.config.get(key) is not None), keys[0])]


def _side(figures: Figures, key: str) -> int:
    """Read a size, or the first of a pair; 0 if absent."""
    value = figures.config.get(key)
    pair = Figures({key: value[0]}, figures.where) if isinstance(value, list) and value else figures
    return pair.maybe(key) or 0


def _ratio(value: Any, default: float) -> float:
    """Return a ratio of sizes; the default for what is none."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and 1e-3 <= value <= 1e3 else default


def _switch(figures: Figures, value: bool | str) -> bool:
    return figures.flag(value) if isinstance(value, str) else value


def _grouped(figures: Figures, family: Family, hidden: int) -> tuple[Sequence[Matrix], Attention, int]:
    """Return attention of grouped queries: its linears, its sizes, and the elements of its norms."""
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
        sizes = {"q_proj": (1 + family.delta) * q, "k_proj": kv, "v_proj": kv}
        inward = [Matrix(f"self_attn.{leaf}", n, hidden, bias=bias) for leaf, n in sizes.items()]
    matrices = [*inward, Matrix("self_attn.o_proj", hidden, q, bias=out_bias)]
    normed = not family.query_norm_key or figures.flag(family.query_norm_key)
    norms = {"": 0, "head": 2 * wide, "all": q + kv}[family.query_norm] if normed else 0
    return matrices, Attention("full", heads, shared, wide, wide), norms


def _delta(figures: Figures, hidden: int) -> tuple[Sequence[Matrix], Attention, int]:
    """Return a Gated DeltaNet: a state [keys, values] for each head of values, and a short convolution before it."""
    heads, keys = figures.size("linear_num_value_heads"), figures.size("linear_num_key_heads")
    wide, long = figures.size("linear_key_head_dim"), figures.size("linear_value_head_dim")
    mixed, values = 2 * keys * wide + heads * long, heads * long
    sizes = {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    matrices = [Matrix(f"linear_attn.{leaf}", n, hidden) for leaf, n in sizes.items()]
    kernel = figures.size("linear_conv_kernel_dim")
    attention = Attention("linear", heads, heads, wide, long, state=heads * wide * long + kernel * mixed)
    return [*matrices, Matrix("linear_attn.out_proj", hidden, values)], attention, kernel * mixed + 2 * heads + long


def _delta_kinds(figures: Figures, count: int) -> list[str]:
    """Return the kind of each layer: all but every fourth are linear, where the config does not list them."""
    stated = figures.config.get("layer_types")
    if stated is None:
        every = figures.size("full_attention_interval", default=4)
        return [LINEAR if (index + 1) % every else FULL for index in range(count)]
    if not isinstance(stated, list) or len(stated) != count or not set(stated) <= {FULL, LINEAR}:
        raise figures.wrong("layer_types", f"{stated!r:.60}", f"{count} of {FULL} and {LINEAR}")
    return stated


def _latent(figures: Figures, family: Family, hidden: int) -> tuple[Sequence[Matrix], Attention, int]:
    """Return latent attention: `c = W_a x`, then `k, v = W_b norm(c)`, with a shared key for positions."""
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
    """Return the window of each layer; None for all tokens."""
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
        return [FULL if turns else SLIDING for turns in rotated]
    return [SLIDING] * count


_Forward = tuple[Sequence[Matrix], int]


def _forwards(figures: Figures, family: Family, hidden: int, count: int) -> list[_Forward]:
    """Return the linears after attention, and their other parameters, for each layer."""
    if not family.experts:
        return [(_gated("mlp", figures.size("intermediate_size"), hidden, figures, family), 0)] * count
    routed = figures.size(*_EXPERTS[family.experts], least=1)
    chosen = figures.size("num_experts_per_tok")
    if chosen > routed:
        raise figures.wrong("num_experts_per_tok", f"{chosen} of {routed} experts", "a token goes to at most all")
    place, router, leaves, key = _MIXTURES[family.experts]
    wide, joined = figures.size(key), 3 - len(leaves)  # gate and up may be one
    *first, last = (f"{place}.experts.*.{leaf}" for leaf in leaves)
    sparse = [Matrix(f"{place}.{router}", routed, hidden, router=True)]
    sparse += [Matrix(name, (1 + joined) * wide, hidden, routed, chosen) for name in first]
    sparse.append(Matrix(last, hidden, wide, routed, chosen))
    others = routed * family.corrected
    if family.experts == "gpt_oss":  # biases of experts and router, and an attention sink for each head
        others = routed * (2 * wide + hidden + 1) + figures.size("num_attention_heads")
    if family.experts == "llama4":
        sparse += _gated(f"{place}.shared_expert", wide, hidden, figures, family)
    if family.experts == "deepseek" and (common := figures.size("n_shared_experts", default=0, least=0)):
        sparse += _gated("mlp.shared_experts", common * wide, hidden, figures, family)
    if figures.model_type in ("qwen2_moe", "qwen3_5_moe_text"):
        common = figures.size("shared_expert_intermediate_size")
        sparse += _gated("mlp.shared_expert", common, hidden, figures, family)
        sparse.append(Matrix("mlp.shared_expert_gate", 1, hidden, router=True))
    dense = _dense_layers(figures, family, count)
    if not any(dense):
        return [(sparse, others)] * count
    own = "intermediate_size_mlp" if family.experts == "llama4" else "intermediate_size"
    plain = _gated(place, figures.size(own), hidden, figures, family)
    return [(plain, 0) if is_dense else (sparse, others) for is_dense in dense]


def _dense_layers(figures: Figures, family: Family, count: int) -> list[bool]:
    """Mark the layers without experts."""
    if family.experts in ("mixtral", "granite", "gpt_oss"):
        return [False] * count
    if family.experts == "llama4":
        every = figures.size("interleave_moe_layer_step", default=1)
        mixed = set(figures.numbers("moe_layers")) or set(range(every - 1, count, every))
        return [index not in mixed for index in range(count)]
    if family.experts == "qwen":
        every, without = figures.size("decoder_sparse_step", default=1), set(figures.numbers("mlp_only_layers"))
        return [index in without or (index + 1) % every != 0 for index in range(count)]
    if figures.size("moe_layer_freq", default=1) != 1:
        raise figures.wrong("moe_layer_freq", str(figures.config["moe_layer_freq"]), "transformers supports only 1")
    first = figures.size("first_k_dense_replace", least=0)
    return [index < first for index in range(count)]


def _gated(place: str, wide: int, hidden: int, figures: Figures, family: Family) -> list[Matrix]:
    bias = _switch(figures, family.mlp_bias)
    last = Matrix(f"{place}.down_proj", hidden, wide, bias=bias)
    if family.joined:
        return [Matrix(f"{place}.gate_up_proj", 2 * wide, hidden, bias=bias), last]
    return [*(Matrix(f"{place}.{leaf}", wide, hidden, bias=bias) for leaf in ("gate_proj", "up_proj")), last]
