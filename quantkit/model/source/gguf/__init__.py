"""Conversion of GGUF to a Hugging Face folder in float32: by our rules (`rules.py`), else by transformers' tables.

It works from the file's own metadata, because a load through transformers cannot be saved again and builds the
tokenizer
with another pre-tokenizer. The `gguf` package decodes every block type to float32, exactly as llama.cpp defines it: a
6-bit code times an 8-bit code of its scale times a float16 has up to 24 significant bits, which no 16-bit type holds.
Metadata and tensors without a rule are refused, since they could change the model's computation.

An architecture without our rules is read by transformers' tables: they map config keys and tensors, and its processors
undo the changes of llama.cpp's converter, one tensor at a time. transformers skips unknown keys, which could change the
computation, so a file with any is refused, and so is one with other tensors than the model's. Experts, which
transformers
merges, are refused too.
Source: gguf-py (`gguf.quants`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.errors import InputError, reading
from quantkit.lazy import torch
from quantkit.model.source import pretrained
from quantkit.model.source.files import file_sha256
from quantkit.model.source.gguf import rules
from quantkit.model.source.gguf.file import (
    Read,
    damaged,
    demand_lengths,
    fields,
    refused,
    shape_of,
    short,
    special_tokens,
    tensors,
)
from quantkit.model.source.gguf.tokenizer import demand_whole, tokenizer_config, tokenizer_json
from quantkit.model.source.weights import Header, strict_json, write_json, write_safetensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "GGUF",
    "PROVENANCE",
    "convert_gguf",
    "demand_lengths",
    "fields",
    "hashes_of",
    "note_on",
    "stored_as",
    "tensors",
]

PROVENANCE, GGUF = "provenance.json", ".gguf"

_FLOATS = ("F32", "F16", "BF16", "F64")
# most elements per byte of any format
_DENSEST = 8
# architectures whose files were compared with their originals; transformers' tables have others, Falcon's wrongly
_READ = ("bloom", "gpt2", "lfm2", "nemotron", "phi3", "stablelm", "starcoder2")
# key -> config attribute that transformers 5.23 does not set from it
_PLACES = {
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_PLACES_OF = {"gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"}}
# keys whose values follow from others; a Bloom reads texts of any length
_NOTHING = ("vocab_size", "context_length", "attention.value_length", "rope.freq_base", "rope.dimension_count")
_PARTLY_TURNED = ("nemotron", "phi3", "stablelm")


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, float32 weights, tokenizer and `provenance.json` into an existing folder.

    Memory: one tensor in float32 (Gemma 3 270M: its embedding, 671 MB).

    Raises:
        InputError: `gguf-damaged`, `gguf-split`, `gguf-architecture`, `gguf-tokenizer`.
        MissingDependency: without the `gguf` package.
    """
    with reading(lambda problem: damaged(str(gguf_file), problem)):
        _convert(fields(gguf_file), tensors(gguf_file), gguf_file, folder)


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file of a folder that was just converted, as its `provenance.json` states them."""
    files: dict[str, str] = strict_json(limits.read(folder / PROVENANCE), PROVENANCE)["files"]
    return files


def note_on(name: str, was: str) -> str:
    """Return a note on the original grid of a model from a GGUF file, for readers of its figures."""
    if was.removeprefix("gguf ").removeprefix("ALL_") in _FLOATS:
        return f"{name} was converted from {was}: losses are against that"
    return (
        f"{name} was converted from {was}: its weights are already quantized, and quantizing them again adds to that "
        "loss; losses are against this model, not against its original"
    )


def _convert(meta: dict[str, Any], listed: Sequence[Any], gguf_file: Path, folder: Path) -> None:
    import gguf
    import numpy as np

    where, size = str(gguf_file), gguf_file.stat().st_size
    if int(meta.get("split.count", 1)) > 1:
        remedy = "join them with llama-gguf-split, and give the whole"
        raise InputError("gguf-split", where, f"one of {meta['split.count']} files", "a model is one file", remedy)
    for tensor in listed:  # the library's own count of elements overflows 64 bits
        if math.prod(shape_of(tensor)) > _DENSEST * size:
            raise damaged(where, f"{tensor.name}: {list(shape_of(tensor))} in a file of {size} bytes"[:300])
    stored = {tensor.name: tensor for tensor in listed}
    demand_whole(meta, where)
    ours = meta.get("general.architecture") in rules.RULES
    read = rules.read(meta, stored, where) if ours else _read(gguf_file, meta, stored)
    config = {key: short(value) if isinstance(value, float) else value for key, value in read.config.items()}
    length = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    texts = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in special if config.get(key) is not None},
        "tokenizer.json": json.loads(tokenizer_json(meta, where)),
        "tokenizer_config.json": tokenizer_config(meta, length),
    }

    def produce(name: str) -> torch.Tensor:
        tensor = stored[read.tensors[name]]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)  # float32 is mapped as is
        values = np.require(array, requirements="W").reshape(shape_of(tensor))
        return read.values(tensor.name, values).contiguous()

    headers: list[Header] = [(name, "F32", tuple(read.shapes[name])) for name in read.tensors]
    files = {"model.safetensors": write_safetensors(folder / "model.safetensors", headers, produce)}
    for name, content in texts.items():
        files[name] = write_json(folder / name, content)
    elements, matrices = Counter[str](), Counter[str]()
    for theirs in read.tensors.values():
        kind, count = stored[theirs].tensor_type.name, int(stored[theirs].n_elements)
        elements[kind] += count
        if len(shape_of(stored[theirs])) > 1:
            matrices[kind] += count
    provenance = {
        "schema": 1,
        "source": {"file": gguf_file.name, "sha256": file_sha256(gguf_file), "name": meta.get("general.name")},
        "licence": meta.get("general.license"),
        "was": f"gguf {stored_as(meta, matrices)}",
        "elements": dict(elements),
        "files": files,
    }
    write_json(folder / PROVENANCE, provenance)


def stored_as(meta: Mapping[str, Any], matrices: Counter[str]) -> str:
    """Name the type of a file's matrices: the stated one (`Q4_K_M`, a mixture), with the most common type if it
    differs.

    A file with any codes is not one of floats, whatever it states.
    """
    import gguf

    try:
        stated = str(gguf.LlamaFileType(meta["general.file_type"]).name).removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        stated = ""
    codes = Counter({name: count for name, count in matrices.items() if name not in _FLOATS})
    most = (codes or matrices).most_common(1)[0][0]
    floats = stated.removeprefix("ALL_") in _FLOATS
    if not stated or floats != (not codes) or (floats and stated.removeprefix("ALL_") != most):
        return most
    stem = stated[: -len("_S")] if stated.endswith(("_S", "_M", "_L")) else stated
    return stated if floats or stem in (most, f"{most}_MOE") else f"{stated} mostly {most}"


# --- as transformers reads it -------------------------------------------------------------------------------------


def _read(path: Path, meta: Mapping[str, Any], names: Mapping[str, Any]) -> Read:
    stated = str(meta.get("general.architecture"))
    if stated not in _READ:
        raise refused(str(path), stated, f"one of {', '.join(sorted([*_READ, *rules.RULES]))}")
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    loaded = pretrained.config_of_gguf(path)
    _demand_read(path, meta, stated, loaded)
    for key, number in special_tokens(meta).items():  # a class's defaults are for another vocabulary
        setattr(loaded, key, number)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(loaded)]
    except KeyError:
        raise refused(str(path), stated, "a decoder of transformers") from None
    with torch.device("meta"):
        model = model_class._from_config(loaded, dtype=torch.float32)
    processor = TENSOR_PROCESSORS.get(stated, TensorProcessor)(config=loaded.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    placed = {places[name]: name for name in names if places.get(name) in shapes}
    if odd := next((name for name in names if places.get(name) not in shapes), None):
        raise refused(str(path), f"tensor {odd}", "only the architecture's own are converted")
    if missing := next((name for name in shapes if name not in placed), None):
        raise refused(str(path), f"no tensor for {missing}", "every parameter has one")

    def values(name: str, array: NDArray[np.float32]) -> torch.Tensor:
        processed = processor.process(array, name, tensor_key_mapping=places, parsed_parameters={"tensors": {}})
        if processed.name != name:
            raise refused(str(path), f"tensor {name}", "one tensor is one parameter")
        return torch.from_numpy(processed.weights.copy())

    config = {**loaded.to_dict(), "architectures": [model_class.__name__], "dtype": "float32"}
    return Read({key: value for key, value in config.items() if not key.startswith("_")}, shapes, placed, values)


def _demand_read(path: Path, meta: Mapping[str, Any], stated: str, config: Any) -> None:
    """Check every key of the architecture: read by transformers, placed here, or redundant."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known, places = GGUF_CONFIG_MAPPING[stated], _PLACES | _PLACES_OF.get(stated, {})
    keys = {key.removeprefix(f"{stated}."): value for key, value in meta.items() if key.startswith(f"{stated}.")}
    same = {"rope.scaling.type": "none"}
    if stated == "bloom":
        same |= {"attention.head_count_kv": config.n_head, "feed_forward_length": 4 * config.hidden_size}
    for key, value in keys.items():
        where = f"{stated}.{key} = {value!r:.40}"
        if key.endswith(("epsilon", "freq_base")) and not 0 < value < math.inf:
            raise damaged(str(path), where, "positive and finite")
        if key in places and hasattr(config, places[key]):
            setattr(config, places[key], value or None)
        elif known.get(key) is None and key not in _NOTHING and same.get(key, getattr(config, key, None)) != value:
            raise refused(str(path), where, "a conversion must not change the computation")
    if (rope := getattr(config, "rope_parameters", None)) is None:
        return
    # base of the rotary embedding, and the part of each head that it rotates
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope["rope_theta"] = keys.get("rope.freq_base", 10000.0)
    turned = keys.get("rope.dimension_count", head)
    if stated in _PARTLY_TURNED:
        rope["partial_rotary_factor"] = turned / head
    elif turned != head:
        raise refused(str(path), f"{stated}.rope.dimension_count = {turned}", f"heads of {head} are rotated whole")
