"""Rules for architectures of llama.cpp: names, config, and changes of values.

Beside names, three things differ from Hugging Face:
- rotary embedding: in a llama GGUF it rotates neighbouring rows (2i, 2i+1) of each head, in Hugging Face rows
  (i, i + d/2). So the rows of q and k are permuted back, head by head:
  `W.reshape(heads, d/2, 2, K).swapaxes(1, 2).reshape(heads * d, K)`, e.g. d = 4: rows 0 1 2 3 -> 0 2 1 3. Most other
  architectures rotate halves in both;
- norms: Gemma's multiply by 1 + w; GGUF stores 1 + w, Hugging Face w;
- llama.cpp derives some things from the architecture's name: activations, layers with a window, 27B's attention.

Sources: convert_hf_to_gguf.py of llama.cpp (its changes are undone here), llama-model.cpp (its knowledge of an
architecture beyond the file).

Extension of a rotary embedding to longer texts, as transformers' `rope_scaling`:

    linear, yarn   by name, with their numbers
    llama3         by a tensor with the divisor of each of the d / 2 frequencies: 1 for short waves, `factor` for long
                   ones, between them 1 / ((1 - s) / factor + s) with s = (context / wave - low) / (high - low). That
                   is a line over 1 / wave with two unknowns; `low` is assumed to be 1, as in every Llama, and the
                   result must reproduce the file's divisors

llama.cpp multiplies a file's YaRN attention factor by 1 + 0.1 ln(factor); transformers expects the product.
Sources: `LlamaModel.generate_extra_tensors` of llama.cpp's converter, llama-context.cpp, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.lazy import torch
from quantkit.model.source.gguf.file import Read, damaged, refused, shape_of, short, special_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_BOTH_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_QKV = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_BIASES = {
    "attention_bias": _QKV | {"attn_output.bias": "self_attn.o_proj.bias"},
    "mlp_bias": {f"ffn_{part}.bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")},
}
_ROPE_FACTORS = "rope_freqs.weight"
_GELU = "gelu_pytorch_tanh"
# the only sizes whose attention llama.cpp scales by hidden / heads: Gemma 2's and Gemma 3's 27B
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Conversion:
    """An architecture of llama.cpp in terms of Hugging Face.

    Args:
        causal: class in transformers.
        model_type: model type in transformers.
        layer: names of a layer's tensors; each layer has all of them.
        config: function of (metadata without the architecture's prefix, known sizes) to further keys of config.json;
            removes the metadata that it uses.
        biases: key of the config -> tensors that a layer has if it is true.
        turns_neighbours: True if the rotary embedding rotates rows (2i, 2i + 1) in GGUF.
        adds_one: True if GGUF stores 1 + w of every norm.
        scalings: kinds of longer rotary embeddings that llama.cpp computes as transformers does.
    """

    causal: str
    model_type: str
    layer: Mapping[str, str]
    config: Callable[[Fields, Fields], Fields]
    biases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    turns_neighbours: bool = False
    adds_one: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")


def _llama(stated: Fields, sizes: Fields) -> Fields:
    return {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _qwen2(stated: Fields, sizes: Fields) -> Fields:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(stated: Fields, sizes: Fields) -> Fields:
    return {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _olmo2(stated: Fields, sizes: Fields) -> Fields:
    return {"hidden_act": "silu", "attention_bias": False}


def _smollm3(stated: Fields, sizes: Fields) -> Fields:
    """Add llama.cpp's rule: every fourth layer has no rotary embedding."""
    return {**_llama(stated, sizes), "use_sliding_window": False, "no_rope_layer_interval": 4}


def _granite(stated: Fields, sizes: Fields) -> Fields:
    return {
        **_llama(stated, sizes),
        "attention_multiplier": short(stated.pop("attention.scale", sizes["head_dim"] ** -0.5)),
        "embedding_multiplier": short(stated.pop("embedding_scale", 1.0)),
        "residual_multiplier": short(stated.pop("residual_scale", 1.0)),
        "logits_scaling": short(stated.pop("logit_scale", 1.0)),
    }


def _gemma(stated: Fields, sizes: Fields) -> Fields:
    return {"hidden_act": _GELU, "hidden_activation": _GELU, "attention_bias": False}


def _gemma2(stated: Fields, sizes: Fields) -> Fields:
    """Add the window of every second layer."""
    layers = sizes["num_hidden_layers"]
    return {
        "hidden_activation": _GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": _scaled_by("gemma2", sizes),
        "sliding_window": stated.pop("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "attn_logit_softcapping": short(stated.pop("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": short(stated.pop("final_logit_softcapping", 30.0)),
        "use_bidirectional_attention": False,
    }


def _gemma3(stated: Fields, sizes: Fields) -> Fields:
    """Add the window and the base of five layers of six, which llama.cpp derives from the name."""
    layers = sizes["num_hidden_layers"]
    capped = stated.pop("final_logit_softcapping", None)
    return {
        "hidden_activation": _GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": _scaled_by("gemma3_text", sizes),
        "sliding_window": stated.pop("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "rope_local_base_freq": short(stated.pop("rope.freq_base_swa", 10000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": short(capped) if capped else None,
        "use_bidirectional_attention": False,
    }


def _scaled_by(model_type: str, sizes: Fields) -> int:
    large = sizes["num_hidden_layers"] == _LAYERS_OF_27B[model_type]
    return int(sizes["hidden_size"] // sizes["num_attention_heads"] if large else sizes["head_dim"])


_NORMS = _HEAD_NORMS | {key: name for key, name in _BOTH_NORMS.items() if key.startswith("post")}
RULES = {
    "llama": Conversion(
        "LlamaForCausalLM",
        "llama",
        _LAYER,
        _llama,
        _BIASES,
        turns_neighbours=True,
        scalings=("linear", "yarn", "llama3"),
    ),
    "qwen2": Conversion("Qwen2ForCausalLM", "qwen2", _LAYER | _QKV, _qwen2),
    "qwen3": Conversion("Qwen3ForCausalLM", "qwen3", _LAYER | _HEAD_NORMS, _qwen3),
    "gemma": Conversion("GemmaForCausalLM", "gemma", _LAYER, _gemma, adds_one=True),
    "gemma2": Conversion("Gemma2ForCausalLM", "gemma2", _LAYER | _BOTH_NORMS, _gemma2, adds_one=True),
    "gemma3": Conversion(
        *("Gemma3ForCausalLM", "gemma3_text", _LAYER | _HEAD_NORMS | _BOTH_NORMS, _gemma3),
        adds_one=True,
        scalings=("linear",),  # for the layers without a window, in both
    ),
    "smollm3": Conversion("SmolLM3ForCausalLM", "smollm3", _LAYER, _smollm3, _BIASES, turns_neighbours=True),
    "granite": Conversion("GraniteForCausalLM", "granite", _LAYER, _granite, _BIASES, turns_neighbours=True),
    "olmo2": Conversion(
        "Olmo2ForCausalLM", "olmo2", {key: name for key, name in _LAYER.items() if "norm" not in key} | _NORMS, _olmo2
    ),
}


def read(meta: Mapping[str, Any], stored: Mapping[str, Any], where: str) -> Read:
    """Read a file of an architecture in `RULES`. Raises InputError (`gguf-architecture`, `gguf-damaged`)."""
    rules = RULES[meta["general.architecture"]]
    stated_biases = {
        key: names for key, names in rules.biases.items() if any(f"blk.0.{name}" in stored for name in names)
    }
    config = _config(meta, rules, stored, where) | dict.fromkeys(stated_biases, True)
    layer = dict(rules.layer)
    for names in stated_biases.values():
        layer |= names
    top = {theirs: ours for theirs, ours in _TOP.items() if ours != "lm_head.weight" or "output.weight" in stored}
    known = top | {
        f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}"
        for i in range(config["num_hidden_layers"])
        for theirs, ours in layer.items()
    }
    held = [name for name in stored if name != _ROPE_FACTORS or "llama3" not in rules.scalings]
    if odd := next((name for name in held if name not in known), None):
        raise refused(where, f"tensor {odd}", "only the architecture's own are converted")
    if missing := next((theirs for theirs in known if theirs not in stored), None):
        raise damaged(where, f"no tensor {missing}", "every layer has all of its own")
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def values(name: str, array: Any) -> torch.Tensor:
        weight, role = torch.from_numpy(array), known[name].split(".")[-2]
        if rules.turns_neighbours and role in turned:
            # each head's rows, from neighbours (2i, 2i+1) back to halves (i, i + d/2)
            heads, rows = turned[role], weight.shape[0]
            return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        return weight - 1 if rules.adds_one and role.endswith("norm") else weight

    tensors = {known[name]: name for name in held}
    return Read(config, {name: shape_of(stored[theirs]) for name, theirs in tensors.items()}, tensors, values)


def _config(meta: Mapping[str, Any], rules: Conversion, stored: Mapping[str, Any], where: str) -> Fields:
    prefix = f"{meta['general.architecture']}."
    stated = {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}

    def need(key: str) -> Any:
        if key not in stated:
            raise damaged(where, f"no {prefix}{key}", "a GGUF of its kind says so")
        return stated.pop(key)

    def count(key: str, *otherwise: int) -> int:
        value = stated.pop(key, *otherwise) if otherwise else need(key)
        if not isinstance(value, int) or value < 1:
            raise damaged(where, f"{prefix}{key} = {value!r:.40}", "a number that all layers have, one or more")
        return value

    def positive(key: str, *otherwise: float) -> float:
        value = stated.pop(key, *otherwise) if otherwise else need(key)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise damaged(where, f"{prefix}{key} = {value!r:.40}", "positive and finite")
        return short(value)

    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    layers = count("block_count")
    limits.LAYERS.demand(layers, f"{where}: {prefix}block_count")
    key_heads = count("attention.head_count_kv", heads)
    if heads % key_heads:
        raise damaged(where, f"{prefix}attention.head_count_kv = {key_heads}", f"it divides {heads} heads")
    vocabulary = len(meta["tokenizer.ggml.tokens"])
    sizes: Fields = {
        "architectures": [rules.causal],
        "model_type": rules.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": positive("rope.freq_base", 10000.0),
    }
    _demand_shapes(stored, sizes, where)
    scaling = rope_scaling(stated, sizes["max_position_embeddings"])
    if _ROPE_FACTORS in stored and "llama3" in rules.scalings:
        if scaling is not None:
            raise refused(where, f"{_ROPE_FACTORS} beside rope.scaling", "a rotary embedding has one extension")
        factors = stored[_ROPE_FACTORS]
        if (kind := factors.tensor_type.name) != "F32":
            raise damaged(where, f"{_ROPE_FACTORS} is {kind}", "it is float32")
        scaling = llama3(factors.data.reshape(-1), sizes["rope_theta"], where)
    if scaling is not None and scaling["rope_type"] not in rules.scalings:
        value = f"{prefix}rope.scaling.type = {scaling['rope_type']}"
        raise refused(where, value, f"{rules.model_type} has {', '.join(rules.scalings)}")
    config = sizes | ({} if scaling is None else {"rope_scaling": scaling}) | rules.config(stated, sizes)
    config |= {"tie_word_embeddings": "output.weight" not in stored, "dtype": "float32"}
    stated.pop("vocab_size", None)
    for same in ("rope.dimension_count", "attention.value_length"):
        if stated.get(same) == head_dim:
            del stated[same]
    if stated:
        key, value = next(iter(stated.items()))
        raise refused(where, f"{prefix}{key} = {value!r:.40}", "a conversion must not change the computation")
    return config | {key: number for key, number in special_tokens(meta).items() if number is not None}


def _demand_shapes(stored: Mapping[str, Any], sizes: Fields, where: str) -> None:
    """Compare the sizes of tables and linears with the metadata: `gguf-damaged`."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    rows, keys = (sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    wanted = {"token_embd": (sizes["vocab_size"], hidden), "output": (sizes["vocab_size"], hidden)}
    for i in range(sizes["num_hidden_layers"]):
        wanted |= {f"blk.{i}.attn_q": (rows, hidden), f"blk.{i}.attn_output": (hidden, rows)}
        wanted |= {f"blk.{i}.attn_{part}": (keys, hidden) for part in "kv"}
        wanted |= {f"blk.{i}.ffn_{part}": (inner, hidden) for part in ("gate", "up")}
        wanted |= {f"blk.{i}.ffn_down": (hidden, inner)}
    for name, shape in wanted.items():
        tensor = stored.get(f"{name}.weight")
        if tensor is not None and shape_of(tensor) != shape:
            rule = f"the file's metadata say {list(shape)}"
            raise damaged(where, f"{name}.weight is {list(shape_of(tensor))}", rule)


# numbers of Llama 3.1, and contexts to try if a file's factors do not determine one
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
_CONTEXTS = [2**exponent for exponent in range(4, 21)]


def rope_scaling(stated: dict[str, Any], context: int) -> dict[str, Any] | None:
    """Return transformers' `rope_scaling`, None for plain ones; remove the understood keys from `stated`."""
    kind = stated.pop("rope.scaling.type", None)
    factors = [stated.pop(key, 0) for key in ("rope.scaling.factor", "rope.scale_linear")]
    factor = next((short(value) for value in factors if value), 1.0)
    stated.pop("rope.scaling.finetuned", None)
    original = stated.pop("rope.scaling.original_context_length", None)
    if kind in (None, "linear") and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or context}
        for key in ("beta_fast", "beta_slow"):
            if (value := stated.pop(f"rope.scaling.yarn_{key}", None)) is not None:
                yarn[key] = short(value)
        if (value := stated.pop("rope.scaling.yarn_attn_factor", None)) is not None:
            yarn["attention_factor"] = short(value * (1 + 0.1 * math.log(factor)))
        return yarn
    if kind not in (None, "linear", "none"):
        stated["rope.scaling.type"] = kind
    return None


def llama3(factors: NDArray[np.float32], base: float, where: str) -> dict[str, Any] | None:
    """Return Llama 3's `rope_scaling` for factors [d / 2]; None for ones. Raises `gguf-architecture` if none fits."""
    import numpy as np

    half = len(factors)
    waves = 2 * math.pi * float(base) ** (np.arange(half) / half)
    factor = short(float(factors.max()))
    if np.all(factors == 1):
        return None
    for low, high, context in _guesses(factors, waves, factor):
        smooth = (context / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        computed = np.where(waves < context / high, 1, np.where(waves > context / low, factor, between))
        if np.allclose(computed, factors, rtol=1e-5, atol=0):
            bounds = {"low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor, **bounds, "original_max_position_embeddings": context}
    raise refused(where, "rope_freqs.weight", "frequencies are divided as Llama 3's are")


def _guesses(
    factors: NDArray[np.float32], waves: NDArray[np.float64], factor: float
) -> Iterator[tuple[float, float, int]]:
    """Yield (low, high, context) to try: Llama's own, that of the line between, powers of two."""
    import numpy as np

    yield _LOW, _HIGH, _CONTEXT
    inside = (factors > 1) & (factors < factor)
    if inside.sum() > 1:
        smooth = (1 / factors[inside].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(1 / waves[inside], smooth, 1)
        if offset < 0:
            yield _LOW, float(f"{1 - 1 / offset:.4g}"), round(-slope / offset)
    for context in _CONTEXTS:
        yield _LOW, _HIGH, context
