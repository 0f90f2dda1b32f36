"""Describe a model to llama.cpp: architecture, names of tensors, sizes, rotary embedding.

Names come from the `gguf` package's own table (`get_tensor_name_map`). The other fields are those of llama.cpp's
converter (`conversion/base.py`, `TextModel.set_gguf_parameters`, and the class of every architecture), since llama.cpp
computes by them. Three things differ from transformers:

- rotary embedding of `llama` turns neighbouring rows (2i, 2i + 1) of a head, transformers' turns (i, i + d/2): the rows
  of q and k are reordered, `W.reshape(heads, 2, d/2, K).swapaxes(1, 2)`, d = 4: rows 0 2 1 3;
- Gemma's norms multiply by 1 + w, and a file holds 1 + w;
- tied embeddings and heads are one tensor;
- the experts of a layer are one tensor for gate, up and down each, [E, N, K]: `ffn_gate_exps`.

A config that llama.cpp would compute differently is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.exporters import unheld
from quantkit.lazy import torch

if TYPE_CHECKING:
    import gguf

    from quantkit.scheme import WeightScheme

Config = Mapping[str, Any]
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class LlamaCppClass:
    """An architecture of llama.cpp that equals a class of transformers."""

    name: str  # name in llama.cpp
    activation: str = "silu"  # of its feed-forward layers; llama.cpp derives it from the architecture
    turns_neighbours: bool = False  # whether rotary embedding turns rows (2i, 2i + 1) in the file
    adds_one: bool = False  # whether the file holds 1 + w for every norm
    more: Callable[[gguf.GGUFWriter, Config], None] | None = None  # what is said beyond what all say
    windows: bool = False  # whether layers see a window of the text; `more` writes it
    # linears that may have a bias; llama.cpp does not load a file with a tensor that it does not look for
    biases: frozenset[str] = frozenset()
    ropes: frozenset[str] = frozenset({"default", "linear", "yarn"})  # the kinds of rotary embedding
    head_dim: bool = True  # whether heads may have another size than hidden / heads
    untied: bool = True  # whether the head may be a separate tensor
    larger: int = 0  # number of layers by which llama.cpp recognizes the model that scales attention by hidden / heads


def _llama(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(_head_dim(config))


def _gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    _gemma3(writer, config)


def _gemma3(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _qwen3moe(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_ROPES = frozenset({"default", "linear", "yarn"})
_LLAMA = LlamaCppClass("llama", turns_neighbours=True, more=_llama, biases=_QKV | {"o_proj"}, ropes=_ROPES | {"llama3"})
_GEMMA = {"activation": "gelu_pytorch_tanh", "adds_one": True, "windows": True}
KNOWN = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": LlamaCppClass("qwen2", biases=_QKV, head_dim=False),
    "Qwen3ForCausalLM": LlamaCppClass("qwen3"),
    "Qwen3MoeForCausalLM": LlamaCppClass("qwen3moe", more=_qwen3moe),
    "Gemma2ForCausalLM": LlamaCppClass("gemma2", more=_gemma2, untied=False, larger=46, **_GEMMA),  # type: ignore[arg-type]
    # YaRN's factors would also apply to the layers with a window
    "Gemma3ForCausalLM": LlamaCppClass("gemma3", more=_gemma3, ropes=_ROPES - {"yarn"}, larger=62, **_GEMMA),  # type: ignore[arg-type]
}


def architecture_of(class_name: str, config: Config, where: str = "config.json") -> LlamaCppClass:
    """Return the architecture of a class and config that llama.cpp computes as transformers does.

    Args:
        config: config with transformers' defaults filled in.

    Raises InputError: `layout-unsupported`.
    """
    own = KNOWN.get(class_name)
    if own is None:
        raise _refused(where, class_name, f"a GGUF file is written of {', '.join(KNOWN)}")
    theirs = f"llama.cpp's {own.name}"
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation != own.activation:
        raise _refused(where, f"activation {activation}", f"llama.cpp computes {own.activation} in a {own.name}")
    if config.get("mlp_bias"):
        raise _refused(where, "mlp_bias", "transformers' reader of GGUF, which checks a file, has no such thing")
    if config.get("use_bidirectional_attention"):
        raise _refused(where, "use_bidirectional_attention", f"in {theirs} a token sees those before it")
    if not config.get("tie_word_embeddings", True) and not own.untied:
        raise _refused(where, "a head of its own", f"{theirs} reads its head off the embeddings")
    if own.name == "qwen3moe":
        if not config.get("norm_topk_prob"):
            raise _refused(where, "norm_topk_prob false", f"{theirs} lets the weights of a token's experts add up to 1")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise _refused(where, "layers without experts", f"in {theirs} every layer has experts")
    whole = config["hidden_size"] // config["num_attention_heads"]
    if _head_dim(config) != whole and not own.head_dim:
        rule = f"{theirs} has heads of hidden_size / num_attention_heads, here {whole}"
        raise _refused(where, f"head_dim {config['head_dim']}", rule)
    window, context = config.get("sliding_window"), config["max_position_embeddings"]
    used = config.get("use_sliding_window", True) and window is not None and window < context
    if used and not own.windows:
        value = f"sliding_window {window}, for texts of {context} tokens"
        raise _refused(where, value, f"{theirs} lets all tokens see all before them")
    if own.windows:
        _demand_windows(own, config, where)
    _demand_rope(own, config, where)
    return own


def _demand_rope(own: LlamaCppClass, config: Config, where: str) -> None:
    rope = _rope(config)
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        rule = f"in llama.cpp's {own.name} only layers without a window are scaled"
        raise _refused(where, f"rope_type {kind} of layers with a window", rule)
    if (share := rope.get("partial_rotary_factor", local.get("partial_rotary_factor"))) not in (None, 1):
        raise _refused(where, f"partial_rotary_factor {share}", f"llama.cpp's {own.name} rotates whole heads")
    kind = rope.get("rope_type", "default")
    if kind not in own.ropes:
        raise _refused(where, f"rope_type {kind}", f"for {own.name}: {', '.join(sorted(own.ropes))}")
    if kind != "yarn":
        return
    if rope.get("truncate") is False:
        raise _refused(where, "yarn with truncate false", "llama.cpp rounds the ends of the ramp to whole dimensions")
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise _refused(where, f"yarn with {key} {rope[key]}", "llama.cpp scales so in DeepSeek's models alone")


def _demand_windows(own: LlamaCppClass, config: Config, where: str) -> None:
    """Refuse windows and scales of attention that differ from those of llama.cpp's architecture.

    Gemma 2: every second layer has a window; Gemma 3: five of six. Both scale by the head's size, except Gemma's 27B.
    """
    every = 2 if own.name == "gemma2" else 6
    count = config["num_hidden_layers"]
    wanted = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(count)]
    if list(config.get("layer_types") or wanted) != wanted:
        raise _refused(where, "layer_types", f"in llama.cpp's {own.name} every {every}th layer sees all")
    size = config["hidden_size"] // config["num_attention_heads"] if count == own.larger else _head_dim(config)
    scaled = config.get("query_pre_attn_scalar", size)
    if scaled != size:
        rule = f"llama.cpp scales attention of {own.name} with {count} layers by {size}"
        raise _refused(where, f"query_pre_attn_scalar {scaled}", rule)
    if own.name == "gemma3" and config.get("attn_logit_softcapping"):
        raise _refused(where, "attn_logit_softcapping", "llama.cpp's gemma3 has none")


def _refused(where: str, value: str, rule: str) -> InputError:
    return unheld(where, value, rule, "leave `gguf` out of `export`")


def overflow(where: str, reaches: float, rule: str, remedy: str = "") -> InputError:
    """Make the error `float16-overflow`, for a weight beyond float16 that bfloat16 can hold."""
    remedy += "--set 'export=[{gguf: {floats: bfloat16}}]'"
    return InputError("float16-overflow", where=where, value=f"up to {reaches:.3g}", rule=rule, remedy=remedy)


def add_parameters(writer: gguf.GGUFWriter, architecture: LlamaCppClass, config: Config) -> None:
    """Write llama.cpp's fields for computing the model."""
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    rope = _rope(config)
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if (kind := rope.get("rope_type")) in kinds:
        writer.add_rope_scaling_type(kinds[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        context = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(context)
        if (factor := yarn_factor(rope)) is not None:
            writer.add_rope_scaling_attn_factors(factor)
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture.more is not None:
        architecture.more(writer, config)


def yarn_factor(rope: Config) -> float | None:
    """Return YaRN's factor of attention, divided by llama.cpp's own; None if there is none."""
    factor = rope.get("attention_factor")
    return None if factor is None else float(factor / (1 + 0.1 * math.log(rope["factor"])))


def scaled_rope(config: Config) -> Config:
    """Return the scaling of rotary embedding in layers without a window; empty if there is none."""
    rope = _rope(config)
    return {} if rope.get("rope_type", "default") == "default" else rope


def _rope(config: Config) -> Config:
    """Return the settings of rotary embedding; if layers differ, those of layers without a window."""
    rope: Config = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_factors(config: Config) -> torch.Tensor | None:
    """Return Llama 3's divisors of the frequencies of rotary embedding, [d / 2]; None if there are none.

    Long waves are stretched by `factor`, short ones stay, with a linear transition in the wave's length: `rope_freqs`
    of the file, as in `LlamaModel.generate_extra_tensors` of the converter.
    """
    rope, dim = _rope(config), _head_dim(config)
    if rope.get("rope_type") != "llama3":
        return None
    steps = torch.arange(0, dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (rope["rope_theta"] ** (steps / dim))
    factor, low, high = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    context = rope.get("original_max_position_embeddings", 8192)
    factors = []
    for frequency in frequencies:
        wave = 2 * math.pi / frequency
        smooth = (context / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wave < context / high else factor if wave > context / low else between)
    return torch.tensor(factors, dtype=torch.float32)


_EXPERT = re.compile(r"(.*\.experts)\.\d+\.([^.]+\.weight)")


def grouped(parameters: Iterable[str]) -> dict[str, list[str]]:
    """Map names -> parameters: those of a layer's experts together, in order, under one name without a number."""
    groups: dict[str, list[str]] = {}
    for name in parameters:
        one = _EXPERT.fullmatch(name)
        groups.setdefault(f"{one[1]}.{one[2]}" if one else name, []).append(name)
    return groups


def names_of(
    parameters: Iterable[str], architecture: LlamaCppClass, config: Config, where: str = "config.json"
) -> dict[str, str]:
    """Map every parameter, of experts every group (`grouped`), to llama.cpp's name of its tensor.

    Raises InputError: `layout-unsupported`, naming an unknown one.
    """
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    names = {}
    for name in grouped(parameters):
        theirs = table.get_name(key=name, try_suffixes=(".weight", ".bias"))
        linear, _, kind = name.rpartition(".")
        if theirs is None or (kind == "bias" and linear.rpartition(".")[2] not in architecture.biases):
            raise _refused(where, name, f"llama.cpp's {architecture.name} has no such tensor")
        names[name] = theirs
    return names


def turned_rows(name: str, rows: int, architecture: LlamaCppClass, config: Config) -> torch.Tensor | None:
    """Return the order of a parameter's rows in the file, [N]; None: unchanged.

    Args:
        name: name of the parameter or of its linear.
    """
    role = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    queries = config["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": config.get("num_key_value_heads") or queries}
    if not architecture.turns_neighbours or role not in heads:
        return None
    return torch.arange(rows).reshape(heads[role], 2, -1).swapaxes(1, 2).reshape(rows)


BLOCK = 32
# types of floats in files
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# formats with the names of ggml's types
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S"),
)
# other formats that a type holds without loss, in groups of 32: (format, symmetric) -> type
_OWN = {("int4", True): "Q4_0", ("int4", False): "Q4_1", ("int8", True): "Q8_0"}


def type_of(scheme: WeightScheme, where: str = "") -> str:
    """Return ggml's name for a scheme: `Q4_0`. Raises InputError `layout-unsupported` if it has none."""
    name = scheme.format.upper()
    if name in TYPES:
        return name
    own = _OWN.get((scheme.format, scheme.symmetric))
    if own is not None and scheme.granularity == "group" and scheme.group == BLOCK and scheme.scale == "float16":
        return own
    if scheme.format in ("int4", "int8"):
        value = f"{scheme.format} by {scheme.granularity}{f' of {scheme.group}' if scheme.group else ''}"
        value += f", {'symmetric' if scheme.symmetric else 'with zero points'}, scales in {scheme.scale}"
        rule = "of such integers a GGUF file holds int4 and symmetric int8, in groups of 32 with float16 scales"
        remedy = f"compile with --recipe {'gguf-q4_0' if scheme.format == 'int4' else 'gguf-q8_0'}"
        if scheme.scale == "float16":  # the checkpoint of a bfloat16 model always has bfloat16 scales
            wanted = {"granularity": "group", "group": BLOCK} | ({"symmetric": "true"} if own is None else {})
            changes = [f"--set scheme.weights.{key}={to}" for key, to in wanted.items() if getattr(scheme, key) != to]
            remedy = f"compile with {' '.join(changes)}"
    else:
        value, rule = f"weights in {scheme.format}", f"a GGUF file holds {', '.join(TYPES).lower()}"
        remedy = "use one of these"
    raise unheld(where, value, rule, f"{remedy}, or leave `gguf` out of `export`")
