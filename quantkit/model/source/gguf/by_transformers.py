"""What a GGUF of an architecture without rules of ours is in Hugging Face's words: as transformers itself reads it.

Its tables say what config keys and tensors are called, and its processors undo what llama.cpp's converter did to a
tensor; one tensor is in memory at a time. It passes over keys that it does not know, which could change what the model
computes: a file that has any is refused, and one whose tensors are not just the model's. Experts, which it merges,
are refused too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.lazy import torch
from quantkit.model.source import pretrained
from quantkit.model.source.gguf.file import Read, damaged, refused, special_tokens
from quantkit.model.source.gguf.rules import RULES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# whose files were held against what they were made from; transformers' tables speak of others too, of Falcon's wrongly
READ = ("bloom", "gpt2", "lfm2", "nemotron", "phi3", "stablelm", "starcoder2")
# what transformers 5.23 does not read of these, though their configs have a place for it
_PLACES = {
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_PLACES_OF = {"gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"}}
# keys that say nothing beyond what is known from elsewhere; a Bloom reads texts of any length
_NOTHING = ("vocab_size", "context_length", "attention.value_length", "rope.freq_base", "rope.dimension_count")
_PARTLY_TURNED = ("nemotron", "phi3", "stablelm")


def read(path: Path, meta: Mapping[str, Any], names: Mapping[str, Any]) -> Read:
    """A file's config, and how its tensors become parameters.

    Args:
        path: the file.
        meta: its metadata.
        names: its tensors.

    Raises:
        InputError: `gguf-architecture`.
    """
    stated = str(meta.get("general.architecture"))
    if stated not in READ:
        raise refused(str(path), stated, f"one of {', '.join(sorted([*READ, *RULES]))}")
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    found = pretrained.config_of_gguf(path)
    _demand_read(path, meta, stated, found)
    for key, number in special_tokens(meta).items():  # a class's own are of another vocabulary
        setattr(found, key, number)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(found)]
    except KeyError:
        raise refused(str(path), stated, "a decoder of transformers") from None
    with torch.device("meta"):
        model = model_class._from_config(found, dtype=torch.float32)
    processor = TENSOR_PROCESSORS.get(stated, TensorProcessor)(config=found.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    tensors = {places[name]: name for name in names if places.get(name) in shapes}
    if odd := next((name for name in names if places.get(name) not in shapes), None):
        raise refused(str(path), f"tensor {odd}", "only the architecture's own are converted")
    if missing := next((name for name in shapes if name not in tensors), None):
        raise refused(str(path), f"no tensor for {missing}", "every parameter has one")

    def values(name: str, array: NDArray[np.float32]) -> torch.Tensor:
        made = processor.process(array, name, tensor_key_mapping=places, parsed_parameters={"tensors": {}})
        if made.name != name:
            raise refused(str(path), f"tensor {name}", "one tensor is one parameter")
        return torch.from_numpy(made.weights.copy())

    config = {**found.to_dict(), "architectures": [model_class.__name__], "dtype": "float32"}
    return Read({key: value for key, value in config.items() if not key.startswith("_")}, shapes, tensors, values)


def _demand_read(path: Path, meta: Mapping[str, Any], stated: str, config: Any) -> None:
    """Every key of the architecture is one that transformers reads, is put in its place here, or says nothing new."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known, places = GGUF_CONFIG_MAPPING[stated], _PLACES | _PLACES_OF.get(stated, {})
    fields = {key.removeprefix(f"{stated}."): value for key, value in meta.items() if key.startswith(f"{stated}.")}
    same = {"rope.scaling.type": "none"}
    if stated == "bloom":
        same |= {"attention.head_count_kv": config.n_head, "feed_forward_length": 4 * config.hidden_size}
    for key, value in fields.items():
        if key.endswith(("epsilon", "freq_base")) and not 0 < value < math.inf:
            raise damaged(str(path), f"{stated}.{key} = {value!r:.40}", "above nothing, and finite")
        if key in places and hasattr(config, places[key]):
            setattr(config, places[key], value or None)
        elif known.get(key) is None and key not in _NOTHING and same.get(key, getattr(config, key, None)) != value:
            rule = "nothing is converted that would compute something else"
            raise refused(str(path), f"{stated}.{key} = {value!r:.40}", rule)
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        _turn(path, fields, stated, config, rope)


def _turn(path: Path, fields: Mapping[str, Any], stated: str, config: Any, rope: dict[str, Any]) -> None:
    """The base of a rotary embedding, and how much of each head it turns."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope["rope_theta"] = fields.get("rope.freq_base", 10000.0)
    turned = fields.get("rope.dimension_count", head)
    if stated in _PARTLY_TURNED:
        rope["partial_rotary_factor"] = turned / head
    elif turned != head:
        raise refused(str(path), f"{stated}.rope.dimension_count = {turned}", f"heads of {head} are turned whole")
