"""GGUF to a Hugging Face folder in float32: by rules of ours (`rules.py`), else as transformers reads it.

Done from the file's own metadata, because a load through transformers cannot be saved again and rebuilds the tokenizer
with another pre-tokenizer. Every block type is decoded to float32 by the `gguf` package, exactly as llama.cpp defines
it: a 6-bit code times an 8-bit code of its scale times a float16 has up to 24 significant bits, which no 16-bit type
holds. What of the metadata or the tensors no rule speaks of is refused, since it could change what the model computes.

Source: gguf-py (`gguf.quants`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, reading
from quantkit.lazy import torch
from quantkit.model.source.gguf import by_transformers, rules
from quantkit.model.source.gguf.file import damaged, fields, shape_of, short, tensors
from quantkit.model.source.gguf.tokenizer import demand_whole, tokenizer_config, tokenizer_json
from quantkit.model.source.hashes import file_sha256
from quantkit.model.source.weights import Header, write_json, write_safetensors

PROVENANCE, GGUF = "provenance.json", ".gguf"

_FLOATS = ("F32", "F16", "BF16", "F64")
# elements in a byte, of the format that has most
_DENSEST = 8


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes config, generation config, float32 weights, tokenizer and `provenance.json` into an existing folder.

    Memory: one tensor in float32 (Gemma 3 270M: its embedding, 671 MB).

    Raises:
        InputError: `gguf-damaged`, `gguf-split`, `gguf-architecture`, `gguf-tokenizer`; MissingDependency: the `gguf`
            package.
    """
    where = str(gguf_file)
    with reading(lambda said: damaged(where, said)):
        _convert(fields(gguf_file), tensors(gguf_file), gguf_file, folder)


def note_on(name: str, was: str) -> str:
    """What a reader of figures on a model out of a GGUF must know: on which grid it lies."""
    floats = was.removeprefix("gguf ").removeprefix("ALL_") in _FLOATS
    if floats:
        return f"{name} was converted from {was}: losses are against that"
    return (
        f"{name} was converted from {was}: its weights lie on the grids of that, and requantizing a quantized model "
        "adds harm to harm; losses are against it, not against what it was made from"
    )


def _convert(meta: dict[str, Any], listed: Sequence[Any], gguf_file: Path, folder: Path) -> None:
    import gguf

    where = str(gguf_file)
    size = gguf_file.stat().st_size
    if int(meta.get("split.count", 1)) > 1:
        raise InputError(
            "gguf-split",
            where=where,
            value=f"one of {meta['split.count']} files",
            rule="a model is one file",
            remedy="join them with llama-gguf-split, and give the whole",
        )
    for tensor in listed:  # the library's own count of elements is of 64 bits, and overflows
        if math.prod(shape_of(tensor)) > _DENSEST * size:
            raise damaged(where, f"{tensor.name}: {list(shape_of(tensor))} in a file of {size} bytes"[:300])
    stored = {tensor.name: tensor for tensor in listed}
    demand_whole(meta, where)
    if meta.get("general.architecture") in rules.RULES:
        read = rules.read(meta, stored, where)
    else:
        read = by_transformers.read(gguf_file, meta, stored)
    config = {key: short(value) if isinstance(value, float) else value for key, value in read.config.items()}
    length = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    texts = {
        "config.json": config,
        "generation_config.json": {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        },
        "tokenizer.json": json.loads(tokenizer_json(meta, where)),
        "tokenizer_config.json": tokenizer_config(meta, length),
    }

    def produce(name: str) -> torch.Tensor:
        import numpy as np

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
        elements[stored[theirs].tensor_type.name] += int(stored[theirs].n_elements)
        if len(shape_of(stored[theirs])) > 1:
            matrices[stored[theirs].tensor_type.name] += int(stored[theirs].n_elements)
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
    """What a file's matrices are: what it says (`Q4_K_M`, a mixture of types), and what most of their elements are
    where the name speaks of another type. One with any codes is none of floats, whatever it says.
    """
    import gguf

    try:
        said = str(gguf.LlamaFileType(meta["general.file_type"]).name).removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        said = ""
    codes = Counter({name: count for name, count in matrices.items() if name not in _FLOATS})
    most = (codes or matrices).most_common(1)[0][0]
    floats = said.removeprefix("ALL_") in _FLOATS
    if not said or floats != (not codes) or (floats and said.removeprefix("ALL_") != most):
        return most
    stem = said[: -len("_S")] if said.endswith(("_S", "_M", "_L")) else said
    return said if floats or stem in (most, f"{most}_MOE") else f"{said} mostly {most}"
