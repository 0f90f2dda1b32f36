"""GGUF to a Hugging Face folder in float32, for the llama architecture.

Done from the file's own metadata, because a load through transformers cannot be saved again and rebuilds the tokenizer
with another pre-tokenizer. Three things differ between the two worlds:

- names: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`; without `output.weight` the head is tied;
- rotary embedding: GGUF turns neighbouring rows (2i, 2i+1) of each head, Hugging Face rows (i, i + d/2). So the rows of
  q and k are permuted back, head by head: `W.reshape(heads, d/2, 2, K).swapaxes(1, 2).reshape(heads * d, K)`,
  e.g. d = 4: rows 0 1 2 3 -> 0 2 1 3;
- numbers: every block type is decoded to float32 by the `gguf` package, exactly as llama.cpp defines it.

Sources: gguf-py (`gguf.quants`), convert_hf_to_gguf.py of llama.cpp (the permutation it applies, undone here).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, MissingDependency
from quantkit.model.hashes import file_sha256
from quantkit.model.weights import Header, write_atomic, write_safetensors

if TYPE_CHECKING:
    import torch

PROVENANCE = "provenance.json"

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama(gguf_file: Path, folder: Path) -> None:
    """Writes config, generation config, float32 weights, tokenizer and `provenance.json` into an existing folder.

    Memory: one tensor in float32 (SmolLM2-135M: its embedding, 113 MB).

    Raises:
        InputError: `gguf-damaged`, `gguf-architecture`, `gguf-tokenizer`; MissingDependency: the `gguf` package.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependency("gguf", extra="compile", purpose="reading a GGUF file") from None
    try:
        reader = gguf.GGUFReader(gguf_file)
        meta = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as problem:
        raise InputError(
            "gguf-damaged", where=str(gguf_file), value=f"{problem}", remedy="install it again"
        ) from problem
    tensors = {_hf_name(tensor.name, gguf_file): tensor for tensor in reader.tensors}
    config = _config(meta, tied="lm_head.weight" not in tensors, where=str(gguf_file))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def produce(name: str) -> torch.Tensor:
        import numpy as np
        import torch

        tensor = tensors[name]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(np.require(array, requirements="W")).reshape(
            _shape(tensor)
        )  # float32 is mapped as is
        role = name.split(".")[-2]
        return _unpermute(values, heads[role]) if role in heads else values

    headers: list[Header] = [(name, "F32", _shape(tensor)) for name, tensor in tensors.items()]
    files = {"model.safetensors": write_safetensors(folder / "model.safetensors", headers, produce)}
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": _tokenizer_config(meta, config["max_position_embeddings"]),
        "tokenizer.json": json.loads(_tokenizer(meta, str(gguf_file))),
    }.items():
        files[name] = _write_json(folder / name, content)
    elements = Counter[str]()
    for tensor in tensors.values():
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    provenance = {
        "schema": 1,
        "source": {"file": gguf_file.name, "sha256": file_sha256(gguf_file), "name": meta.get("general.name")},
        "licence": meta.get("general.license"),
        "was": f"gguf {elements.most_common(1)[0][0]}",
        "elements": dict(elements),
        "files": files,
    }
    _write_json(folder / PROVENANCE, provenance)


def _hf_name(name: str, where: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER:
        raise InputError(
            "gguf-architecture", where=str(where), value=f"tensor {name}", rule="only plain llama tensors are converted"
        )
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest dimension first


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads * d, K): each head's rows from neighbours (2i, 2i+1) back to halves (i, i + d/2)."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(meta: dict[str, Any], *, tied: bool, where: str) -> dict[str, Any]:
    def need(key: str) -> Any:
        if key not in meta:
            raise InputError("gguf-damaged", where=where, value=f"no {key}", rule="a llama GGUF says so")
        return meta[key]

    if need("general.architecture") != "llama" or any("rope.scaling" in key or "expert" in key for key in meta):
        raise InputError(
            "gguf-architecture",
            where=where,
            value=str(meta["general.architecture"]),
            rule="only the plain llama architecture is converted",
        )
    hidden, heads = need("llama.embedding_length"), need("llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": need("llama.feed_forward_length"),
        "num_hidden_layers": need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": need("llama.context_length"),
        "rms_norm_eps": _short(need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(meta.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    rotated = meta.get("llama.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise InputError(
            "gguf-architecture",
            where=where,
            value=f"rotates {rotated} of {config['head_dim']}",
            rule="rotates whole heads",
        )
    for key, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{theirs}_token_id" in meta:
            config[key] = meta[f"tokenizer.ggml.{theirs}_token_id"]
    return config


def _short(value: float) -> float:
    """A float32's shortest decimal: GGUF's 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _tokenizer(meta: dict[str, Any], where: str) -> str:
    """tokenizer.json of a byte-level BPE.

    The pre-tokenizer is known to GGUF by a name only. `smollm`: split into single digits (any Unicode number), then
    GPT-2's regular expression over bytes; `gpt-2`: the latter alone.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(meta.get("tokenizer.ggml.add_space_prefix", False)))
    splits: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "gpt-2": [byte_level],
    }
    if kind != "gpt2" or pre not in splits:
        raise InputError(
            "gguf-tokenizer",
            where=where,
            value=f"model {kind}, pre {pre}",
            rule=f"gpt2 with one of {', '.join(splits)}",
        )
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == control
        ]
    )
    return str(tokenizer.to_str())


def _tokenizer_config(meta: dict[str, Any], length: int) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json says, no model's class on top
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
    }
    for key, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token := meta.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[key] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def _write_json(path: Path, content: dict[str, Any]) -> str:
    return write_atomic(path, [(json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()])
