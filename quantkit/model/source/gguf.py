"""GGUF to a Hugging Face folder in float32: by rules of ours for `_ARCHITECTURES`, else as transformers reads it.

Done from the file's own metadata, because a load through transformers cannot be saved again and rebuilds the tokenizer
with another pre-tokenizer. Four things differ between the two worlds:

- names: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`; without `output.weight` the head is tied;
- rotary embedding: in a llama GGUF it turns neighbouring rows (2i, 2i+1) of each head, in Hugging Face rows
  (i, i + d/2). So the rows of q and k are permuted back, head by head:
  `W.reshape(heads, d/2, 2, K).swapaxes(1, 2).reshape(heads * d, K)`, e.g. d = 4: rows 0 1 2 3 -> 0 2 1 3. Other
  architectures turn halves in both;
- norms: Gemma's multiply by 1 + w; GGUF holds 1 + w, Hugging Face w;
- numbers: every block type is decoded to float32 by the `gguf` package, exactly as llama.cpp defines it. A 6-bit code
  times an 8-bit code of its scale times a float16 has up to 24 significant bits: no 16-bit type holds it.

What of the metadata or the tensors no rule here speaks of is refused, since it could change what the model computes.

Sources: gguf-py (`gguf.quants`), convert_hf_to_gguf.py of llama.cpp (what it changes, undone here), llama-model.cpp
(what it knows of an architecture without the file saying so).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError, MissingDependency, reading
from quantkit.lazy import torch
from quantkit.model.source import gguf_by_transformers
from quantkit.model.source.gguf_tokenizer import tokenizer_config, tokenizer_json
from quantkit.model.source.hashes import file_sha256
from quantkit.model.source.weights import Header, write_json, write_safetensors

PROVENANCE, GGUF = "provenance.json", ".gguf"

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


@dataclass(frozen=True)
class _Architecture:
    """What an architecture of llama.cpp is in Hugging Face's words.

    Args:
        layer: names of a layer's tensors, all of which each layer has.
        config: metadata without the architecture's name, and where the model's sizes are known -> what config.json says
            besides what all say; takes what it reads of the metadata out of it.
        turns_neighbours: rotary embedding turns rows (2i, 2i + 1) in GGUF.
        adds_one: GGUF holds 1 + w of every norm.
    """

    causal: str
    model_type: str
    layer: Mapping[str, str]
    config: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    turns_neighbours: bool = False
    adds_one: bool = False


def _gemma3(stated: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Five layers of six see a window and turn by a base of their own; llama.cpp knows it from the name."""
    layers = sizes["num_hidden_layers"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": sizes["head_dim"],  # of all but 27B, whose rope scaling is refused
        "sliding_window": stated.pop("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "rope_local_base_freq": _short(stated.pop("rope.freq_base_swa", 10000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }


_ARCHITECTURES = {
    "llama": _Architecture(
        causal="LlamaForCausalLM",
        model_type="llama",
        layer=_LAYER,
        config=lambda stated, sizes: {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        turns_neighbours=True,
    ),
    "qwen2": _Architecture(
        causal="Qwen2ForCausalLM",
        model_type="qwen2",
        layer=_LAYER | {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
        config=lambda stated, sizes: {"hidden_act": "silu", "use_sliding_window": False},
    ),
    "gemma3": _Architecture(
        causal="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=_LAYER
        | {
            "attn_q_norm.weight": "self_attn.q_norm.weight",
            "attn_k_norm.weight": "self_attn.k_norm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "pre_feedforward_layernorm.weight",
            "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        },
        config=_gemma3,
        adds_one=True,
    ),
}


_ORIGINAL = "open what it was made from: a Hugging Face folder (./folder), or hf:org/name"
# GGUF's kinds of values: bytes of those of a fixed size, texts, arrays
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DIMENSIONS = 4
# elements in a byte, of the format that has most
_DENSEST = 8


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes config, generation config, float32 weights, tokenizer and `provenance.json` into an existing folder.

    Memory: one tensor in float32 (Gemma 3 270M: its embedding, 671 MB).

    Raises:
        InputError: `gguf-damaged`, `gguf-architecture`, `gguf-tokenizer`; MissingDependency: the `gguf` package.
    """
    with MissingDependency.unless_found("gguf", extra="compile", purpose="reading a GGUF file"):
        import gguf
    where = str(gguf_file)
    damaged = partial(InputError, "gguf-damaged", where=where, remedy="fetch or install it again")
    with reading(lambda said: damaged(value=said)):
        demand_lengths(gguf_file)
        _convert(gguf.GGUFReader(gguf_file), gguf_file, folder)


def note_on(name: str, was: str) -> str:
    """What a reader of figures on a model out of a GGUF must know: on which grid it lies."""
    floats = was.removeprefix("gguf ").removeprefix("ALL_") in ("F32", "F16", "BF16")
    if floats:
        return f"{name} was converted from {was}: losses are against that"
    return (
        f"{name} was converted from {was}: its weights lie on the grids of that, and requantizing a quantized model "
        "adds harm to harm; losses are against it, not against what it was made from"
    )


def demand_lengths(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """What the metadata says is long fits into the file, and so do the tensors, each where the one before it ends, as
    llama.cpp demands it. The library would go through 2**63 elements one by one, and read whatever lies at an offset.

    Returns:
        tensor -> its shape, and the number of its type.

    Raises:
        ValueError: it does not, or nests arrays. struct.error: the file ends. MissingDependency: the `gguf` package.
    """
    with MissingDependency.unless_found("gguf", extra="compile", purpose="reading a GGUF file"):
        import gguf

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def take(form: str) -> int:
            nonlocal at
            (found,) = struct.unpack_from(f"<{form}", data, at)
            at += struct.calcsize(f"<{form}")
            return int(found)

        def skip(kind: int, count: int) -> None:
            nonlocal at
            least = _FIXED.get(kind, 8)
            if count * least > len(data) - at:
                raise ValueError(f"{count} values at byte {at} of {len(data)}")
            if kind in _FIXED:
                at += count * _FIXED[kind]
                return
            if kind != _STRING:
                raise ValueError(f"values of kind {kind} at byte {at}")
            for _ in range(count):
                length = take("Q")
                if length > len(data) - at:
                    raise ValueError(f"a text of {length} bytes at byte {at} of {len(data)}")
                at += length

        def text() -> str:
            begins = at
            skip(_STRING, 1)
            return data[begins + 8 : at].decode()

        def tensor() -> tuple[str, tuple[int, ...], int, int, int]:
            """Name, shape, type, offset and bytes."""
            name, dimensions = text(), take("I")
            if dimensions > _DIMENSIONS:
                raise ValueError(f"{name[:100]}: {dimensions} dimensions")
            shape = tuple(take("Q") for _ in range(dimensions))[::-1]
            kind, offset = take("I"), take("Q")
            if kind not in known:
                raise ValueError(f"{name[:100]}: type {kind}, which the gguf package does not know")
            block, size = known[kind]
            if 0 in shape or (shape[-1] if shape else 1) % block:
                raise ValueError(f"{name[:100]}: {list(shape)} in blocks of {block}")
            return name, shape, kind, offset, math.prod(shape) // block * size

        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        at = 4
        take("I")
        tensors, fields = take("Q"), take("Q")
        if max(tensors, fields) * 8 > len(data):
            raise ValueError(f"{tensors} tensors and {fields} fields in {len(data)} bytes")
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        for _ in range(fields):
            key, kind = text(), take("I")
            if kind == _ARRAY:
                kind = take("I")
                skip(kind, take("Q"))
            elif key == gguf.Keys.General.ALIGNMENT:
                alignment = take("I")
                if kind != _UINT32 or not alignment or alignment & (alignment - 1):
                    raise ValueError(f"an alignment of {alignment}")
            else:
                skip(kind, 1)
        known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        found = [tensor() for _ in range(tensors)]
        begins, wanted = -(-at // alignment) * alignment, 0
        for name, _, _, offset, size in found:
            if offset != wanted or begins + offset + size > len(data):
                where = f"{size} bytes at {offset}, where {wanted} is next and the data end at {len(data) - begins}"
                raise ValueError(f"{name[:100]}: {where}")
            wanted += -(-size // alignment) * alignment
        return {name: (shape, kind) for name, shape, kind, _, _ in found}


def _convert(reader: Any, gguf_file: Path, folder: Path) -> None:
    import gguf

    where = str(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    size = gguf_file.stat().st_size
    for tensor in reader.tensors:  # the library's own count of elements is of 64 bits, and overflows
        if math.prod(_shape(tensor)) > _DENSEST * size:
            value = f"{tensor.name}: {list(_shape(tensor))} in a file of {size} bytes"
            raise InputError("gguf-damaged", where=where, value=value[:300], remedy="fetch or install it again")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if meta.get("general.architecture") in _ARCHITECTURES:
        config, shapes, tensors, values = _by_rules(meta, stored, where)
    else:
        theirs = gguf_by_transformers.read(gguf_file, meta, stored)
        config = {key: _short(value) if isinstance(value, float) else value for key, value in theirs.config.items()}
        shapes, values = dict(theirs.shapes), theirs.values
        tensors = {name: stored[named] for name, named in theirs.tensors.items()}

    def produce(name: str) -> torch.Tensor:
        import numpy as np

        tensor = tensors[name]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # float32 is mapped as is
        return values(tensor.name, np.require(array, requirements="W").reshape(_shape(tensor))).contiguous()

    headers: list[Header] = [(name, "F32", tuple(shapes[name])) for name in tensors]
    files = {"model.safetensors": write_safetensors(folder / "model.safetensors", headers, produce)}
    generation = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config(
            meta, int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
        ),
        "tokenizer.json": json.loads(tokenizer_json(meta, where)),
    }.items():
        files[name] = write_json(folder / name, content)
    elements = Counter[str]()
    for tensor in tensors.values():
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    provenance = {
        "schema": 1,
        "source": {"file": gguf_file.name, "sha256": file_sha256(gguf_file), "name": meta.get("general.name")},
        "licence": meta.get("general.license"),
        "was": f"gguf {_stored(meta, elements)}",
        "elements": dict(elements),
        "files": files,
    }
    write_json(folder / PROVENANCE, provenance)


def _by_rules(
    meta: dict[str, Any], stored: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any], Callable[[str, Any], torch.Tensor]]:
    """Of an architecture in `_ARCHITECTURES`: config, shapes, tensors by parameter, and what their values become."""
    architecture = _ARCHITECTURES[meta["general.architecture"]]
    config = _config(meta, architecture, tied="output.weight" not in stored, where=where)
    names = _names(architecture, config)
    if odd := next((name for name in stored if name not in names), None):
        raise InputError(
            "gguf-architecture",
            where=where,
            value=f"tensor {odd}",
            rule="only the architecture's own are converted",
            remedy=_ORIGINAL,
        )
    tensors = {names[name]: tensor for name, tensor in stored.items()}
    if missing := next((theirs for theirs, ours in names.items() if ours not in tensors), None):
        raise InputError(
            "gguf-damaged", where=where, value=f"no tensor {missing}", rule="every layer has all of its own"
        )
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def values(name: str, array: Any) -> torch.Tensor:
        found = torch.from_numpy(array)
        role = names[name].split(".")[-2]
        if architecture.turns_neighbours and role in turned:
            return _unpermute(found, turned[role])
        return found - 1 if architecture.adds_one and role.endswith("norm") else found

    return config, {name: _shape(tensor) for name, tensor in tensors.items()}, tensors, values


def _stored(meta: dict[str, Any], elements: Counter[str]) -> str:
    """What a file says it mostly is (`Q4_K_M`, a mixture of types), or the type of most of its elements."""
    import gguf

    try:
        return str(gguf.LlamaFileType(meta["general.file_type"]).name).removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        return elements.most_common(1)[0][0]


def _names(architecture: _Architecture, config: dict[str, Any]) -> dict[str, str]:
    """GGUF's name -> Hugging Face's, of every tensor that the model has."""
    top = {
        theirs: ours for theirs, ours in _TOP.items() if ours != "lm_head.weight" or not config["tie_word_embeddings"]
    }
    return top | {
        f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}"
        for i in range(config["num_hidden_layers"])
        for theirs, ours in architecture.layer.items()
    }


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest dimension first


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads * d, K): each head's rows from neighbours (2i, 2i+1) back to halves (i, i + d/2)."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(meta: dict[str, Any], architecture: _Architecture, *, tied: bool, where: str) -> dict[str, Any]:
    prefix = f"{meta['general.architecture']}."
    stated = {key.removeprefix(prefix): value for key, value in meta.items() if key.startswith(prefix)}

    def need(key: str) -> Any:
        if key not in stated:
            raise InputError("gguf-damaged", where=where, value=f"no {prefix}{key}", rule="a GGUF of its kind says so")
        return stated.pop(key)

    if "tokenizer.ggml.tokens" not in meta:
        raise InputError("gguf-tokenizer", where=where, value="no tokens", rule="a model comes with its vocabulary")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        value = f"{prefix}attention.head_count = {heads!r:.40}"
        raise InputError("gguf-damaged", where=where, value=value, rule="every layer has as many heads, one or more")
    head_dim = stated.pop("attention.key_length", hidden // heads)
    layers = need("block_count")
    limits.LAYERS.demand(layers, f"{where}: {prefix}block_count")
    sizes = {
        "architectures": [architecture.causal],
        "model_type": architecture.model_type,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": stated.pop("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(stated.pop("rope.freq_base", 10000.0)),
    }
    config = sizes | architecture.config(stated, sizes) | {"tie_word_embeddings": tied, "dtype": "float32"}
    stated.pop("vocab_size", None)
    for same in ("rope.dimension_count", "attention.value_length"):
        if stated.get(same) == head_dim:
            del stated[same]
    if stated:
        key, value = next(iter(stated.items()))
        raise InputError(
            "gguf-architecture",
            where=where,
            value=f"{prefix}{key} = {value!r:.40}",
            rule="nothing is converted that would compute something else",
            remedy=_ORIGINAL,
        )
    for key, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{theirs}_token_id" in meta:
            config[key] = meta[f"tokenizer.ggml.{theirs}_token_id"]
    return config


def _short(value: float) -> float:
    """A float32's shortest decimal: GGUF's 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
