"""What llama.cpp calls a model, and what it has to be told of it: tensors by its names, sizes, rotary embedding.

Names come from the `gguf` package's own table (`get_tensor_name_map`). What a file says besides is what llama.cpp's
converter writes (`conversion/base.py`, `TextModel.set_gguf_parameters`, and the class of each architecture), since
llama.cpp computes by it. Three things differ between the two worlds:

- rotary embedding of `llama` turns neighbouring rows (2i, 2i + 1) of a head, transformers' turns (i, i + d/2): the rows
  of q and k are put in the other order, `W.reshape(heads, 2, d/2, K).swapaxes(1, 2)`, d = 4: rows 0 2 1 3;
- Gemma's norms multiply by 1 + w, of which a file holds 1 + w;
- tables of embeddings and heads that are tied are one tensor.

Whatever of a config would make llama.cpp compute something else is refused.
"""

from __future__ import annotations

import math
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
    """An architecture of llama.cpp, as a class of transformers computes it."""

    name: str  # llama.cpp's
    activation: str = "silu"  # of its feed-forward layers, which llama.cpp knows by the architecture alone
    turns_neighbours: bool = False  # rotary embedding turns rows (2i, 2i + 1) in the file
    adds_one: bool = False  # the file holds 1 + w of every norm
    more: Callable[[gguf.GGUFWriter, Config], None] | None = None  # what is said beyond what all say
    windows: bool = False  # whether layers see a window of the text, told by `more`
    # the linears that may have one; a file with a tensor that llama.cpp does not look for is not loaded
    biases: frozenset[str] = frozenset()
    ropes: frozenset[str] = frozenset({"default", "linear", "yarn"})  # the kinds of rotary embedding
    head_dim: bool = True  # whether heads may be of another size than hidden / heads
    untied: bool = True  # whether the head may be a tensor of its own
    larger: int = 0  # the number of layers by which llama.cpp knows the model that scales attention by hidden / heads


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


_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_ROPES = frozenset({"default", "linear", "yarn"})
_LLAMA = LlamaCppClass("llama", turns_neighbours=True, more=_llama, biases=_QKV | {"o_proj"}, ropes=_ROPES | {"llama3"})
_GEMMA = {"activation": "gelu_pytorch_tanh", "adds_one": True, "windows": True}
KNOWN = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": LlamaCppClass("qwen2", biases=_QKV, head_dim=False),
    "Qwen3ForCausalLM": LlamaCppClass("qwen3"),
    "Gemma2ForCausalLM": LlamaCppClass("gemma2", more=_gemma2, untied=False, larger=46, **_GEMMA),  # type: ignore[arg-type]
    # YaRN's factors would turn the layers with a window too
    "Gemma3ForCausalLM": LlamaCppClass("gemma3", more=_gemma3, ropes=_ROPES - {"yarn"}, larger=62, **_GEMMA),  # type: ignore[arg-type]
}


def architecture_of(class_name: str, config: Config, where: str = "config.json") -> LlamaCppClass:
    """Return the architecture of a class, for a config that llama.cpp computes as transformers does.

    Args:
        config: with transformers' own defaults filled in.

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
        rule = f"in llama.cpp's {own.name} those that see everything alone are scaled"
        raise _refused(where, f"rope_type {kind} of layers with a window", rule)
    if (share := rope.get("partial_rotary_factor", local.get("partial_rotary_factor"))) not in (None, 1):
        raise _refused(where, f"partial_rotary_factor {share}", f"llama.cpp's {own.name} turns whole heads")
    kind = rope.get("rope_type", "default")
    if kind not in own.ropes:
        raise _refused(where, f"rope_type {kind}", f"of {own.name} {', '.join(sorted(own.ropes))} are written")
    if kind != "yarn":
        return
    if rope.get("truncate") is False:
        raise _refused(where, "yarn with truncate false", "llama.cpp rounds the ends of the ramp to whole dimensions")
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise _refused(where, f"yarn with {key} {rope[key]}", "llama.cpp scales so in DeepSeek's models alone")


def _demand_windows(own: LlamaCppClass, config: Config, where: str) -> None:
    """llama.cpp knows by the architecture which layers see a window, and how attention is scaled.

    Gemma 2: every second layer; Gemma 3: five of six. Both scale by the head's size, but for Gemma's 27B.
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
    """Make `float16-overflow`: a weight beyond float16, that bfloat16 holds."""
    remedy += "--set 'export=[{gguf: {floats: bfloat16}}]'"
    return InputError("float16-overflow", where=where, value=f"up to {reaches:.3g}", rule=rule, remedy=remedy)


def add_parameters(writer: gguf.GGUFWriter, architecture: LlamaCppClass, config: Config) -> None:
    """Tell a file what llama.cpp has to know to compute the model."""
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
    """Return the factor of attention, less what llama.cpp multiplies by where there is none; None where none is."""
    factor = rope.get("attention_factor")
    return None if factor is None else float(factor / (1 + 0.1 * math.log(rope["factor"])))


def scaled_rope(config: Config) -> Config:
    """Return what scales rotary embedding, of layers that see everything; empty where nothing does."""
    rope = _rope(config)
    return {} if rope.get("rope_type", "default") == "default" else rope


def _rope(config: Config) -> Config:
    """Of rotary embedding, where layers differ that of those which see everything."""
    rope: Config = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_factors(config: Config) -> torch.Tensor | None:
    """Return what Llama 3 divides each frequency of its rotary embedding by, [d / 2]; None where nothing is.

    Long waves are stretched by `factor`, short ones stay, and between lies a straight line in the wave's length:
    `rope_freqs` of the file, as `LlamaModel.generate_extra_tensors` of the converter has it.
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


def names_of(
    parameters: Iterable[str], architecture: LlamaCppClass, config: Config, where: str = "config.json"
) -> dict[str, str]:
    """Name the tensor of a file that llama.cpp looks for, by parameter.

    Raises InputError: `layout-unsupported`, naming one that it does not.
    """
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    names = {}
    for name in parameters:
        theirs = table.get_name(key=name, try_suffixes=(".weight", ".bias"))
        linear, _, kind = name.rpartition(".")
        if theirs is None or (kind == "bias" and linear.rpartition(".")[2] not in architecture.biases):
            raise _refused(where, name, f"llama.cpp's {architecture.name} has no such tensor")
        names[name] = theirs
    return names


def turned_rows(name: str, rows: int, architecture: LlamaCppClass, config: Config) -> torch.Tensor | None:
    """Return the order in which a file has the rows of a parameter, [N]; None: as they are.

    Args:
        name: of the parameter or of its linear.
    """
    role = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    queries = config["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": config.get("num_key_value_heads") or queries}
    if not architecture.turns_neighbours or role not in heads:
        return None
    return torch.arange(rows).reshape(heads[role], 2, -1).swapaxes(1, 2).reshape(rows)


BLOCK = 32
# what files hold for floats
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# formats that are called as ggml calls its types
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# of other formats those that a type holds without a loss, in groups of 32: (format, symmetric) -> type
_OWN = {("int4", True): "Q4_0", ("int4", False): "Q4_1", ("int8", True): "Q8_0"}


def type_of(scheme: WeightScheme, where: str = "") -> str:
    """Return the name that ggml has for a scheme: `Q4_0`. Raises InputError `layout-unsupported`: it has none."""
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
        if scheme.scale == "float16":  # a bfloat16 model's checkpoint has scales in bfloat16, whatever is set
            wanted = {"granularity": "group", "group": BLOCK} | ({"symmetric": "true"} if own is None else {})
            changes = [f"--set scheme.weights.{key}={to}" for key, to in wanted.items() if getattr(scheme, key) != to]
            remedy = f"compile with {' '.join(changes)}"
    else:
        value, rule = f"weights in {scheme.format}", f"a GGUF file holds {', '.join(TYPES).lower()}"
        remedy = "use one of these"
    raise unheld(where, value, rule, f"{remedy}, or leave `gguf` out of `export`")
