"""What a GGUF of an architecture without rules of ours is in Hugging Face's words: as transformers itself reads it.

Its tables say what config keys and tensors are called, and its processors undo what llama.cpp's converter did to a
tensor; one tensor is in memory at a time. It passes over keys that it does not know, which could change what the model
computes: a file that has any is refused, and one whose tensors are not just the model's. Experts, which it merges, and
encoder-decoders are refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.source import pretrained

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# keys that say nothing beyond what transformers has from elsewhere
_SAME = ("vocab_size", "rope.dimension_count", "attention.value_length")
# what transformers 5.23 does not read of these, though its configs have a place for it
_PLACES = {"attention.key_length": "head_dim", "attn_logit_softcapping": "attn_logit_softcapping"}
_PLACES |= {"final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window"}


@dataclass(frozen=True)
class Read:
    """A model as transformers reads its file.

    Args:
        config: config.json.
        shapes: parameter -> its shape.
        tensors: parameter -> the file's tensor.
        values: tensor of the file and its dequantized values -> the parameter's.
    """

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, str]
    values: Callable[[str, NDArray[np.float32]], torch.Tensor]


def read(path: Path, meta: Mapping[str, Any], names: Mapping[str, Any]) -> Read:
    """A file's config, and how its tensors become parameters.

    Args:
        path: the file.
        meta: its metadata.
        names: its tensors.

    Raises:
        InputError: `gguf-architecture`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    stated = str(meta.get("general.architecture"))
    if stated not in GGUF_SUPPORTED_ARCHITECTURES:
        raise _refused(path, stated, f"one of {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}")
    found = pretrained.config_of_gguf(path)
    _demand_read(path, meta, stated, found)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(found)]
    except KeyError:
        raise _refused(path, stated, "a decoder of transformers") from None
    with torch.device("meta"):
        model = model_class._from_config(found, dtype=torch.float32)
    processor = TENSOR_PROCESSORS.get(stated, TensorProcessor)(config=found.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    tensors = {places[name]: name for name in names if places.get(name) in shapes}
    if odd := next((name for name in names if places.get(name) not in shapes), None):
        raise _refused(path, f"tensor {odd}", "only the architecture's own are converted")
    if missing := next((name for name in shapes if name not in tensors), None):
        raise _refused(path, f"no tensor for {missing}", "every parameter has one")

    def values(name: str, array: NDArray[np.float32]) -> torch.Tensor:
        made = processor.process(array, name, tensor_key_mapping=places, parsed_parameters={"tensors": {}})
        if made.name != name:
            raise _refused(path, f"tensor {name}", "one tensor is one parameter")
        return torch.from_numpy(made.weights.copy())

    config = {**found.to_dict(), "architectures": [model_class.__name__], "dtype": "float32"}
    return Read({key: value for key, value in config.items() if not key.startswith("_")}, shapes, tensors, values)


def _demand_read(path: Path, meta: Mapping[str, Any], stated: str, config: Any) -> None:
    """Every key of the architecture is one that transformers reads, or is put in its place here."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known = GGUF_CONFIG_MAPPING[stated]
    for key, value in meta.items():
        if not key.startswith(f"{stated}."):
            continue
        inner = key.removeprefix(f"{stated}.")
        place = _PLACES.get(inner)
        if place is not None and hasattr(config, place):
            setattr(config, place, value)
        elif known.get(inner) is None and inner not in _SAME:
            raise _refused(path, f"{key} = {value!r:.40}", "nothing is converted that would compute something else")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = meta.get(f"{stated}.rope.dimension_count", head)
    if turned != head and getattr(config, "partial_rotary_factor", None) is None:
        raise _refused(path, f"{stated}.rope.dimension_count = {turned}", f"heads of {head} are turned whole")


def _refused(path: Path, value: str, rule: str) -> InputError:
    remedy = "open what it was made from: a Hugging Face folder (./folder), or hf:org/name"
    return InputError("gguf-architecture", where=str(path), value=value, rule=rule, remedy=remedy)
