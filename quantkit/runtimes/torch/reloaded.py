"""Stream a written checkpoint block by block, with weights expanded by their library's own code.

`from_pretrained` expands a whole model at once. Here a linear is expanded when its block is loaded, by the call that
transformers makes for it, so memory stays at one block. transformers builds the classes; only the reading of tensors is
ours. `described` and `built` return transformers' class for a checkpoint, and a model of that class from tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import MissingDependency
from quantkit.model import layouts, run_time
from quantkit.model.finished import DenseWeights
from quantkit.model.source import converted, pretrained
from quantkit.model.source.open import Source, model_class_of, open_written
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.experts import has_experts
from quantkit.model.structure.names import match_names, named, unread_experts


def reloaded(folder: Path, *, cache: bool = True, library: bool = False) -> StreamedModel:
    """Stream a checkpoint, packed or dense, in blocks that round inputs and cache as the checkpoint states.

    Args:
        cache: whether to quantize the cache, if the checkpoint states so.
        library: whether tokens share the scale of an input where compressed-tensors lets them: `QuantizedInput`.
    """
    source = open_written(folder)
    config, stored = source.config.get("quantization_config"), source.weights
    model = StreamedModel(expanded(source))
    how = run_time.read(config, model.linears(), stored.entries, stored.read)
    how = how if cache else replace(how, cache=None)
    # blocks are computed in float32, but fixed scales are rounded to the model's dtype
    model.transforms += how.transforms(model.block_names, getattr(torch, source.dtype), library=library)
    return model


def expanded(source: Source) -> Source:
    """Return a checkpoint with packed weights as a dense one, without the scales of inputs and cache."""
    config, stored = source.config.get("quantization_config"), source.weights
    if config is None:
        return source
    kept = {name: entry for name, entry in stored.entries.items() if not name.endswith(run_time.PARTS)}
    rest = replace(stored, entries=kept)
    dense = run_time.weights_are_dense(config)
    if not dense and (layout := layouts.of(config)).stacks:
        rest = converted.unstacked(rest, source.skeleton(), layout.parts)
    return replace(source, weights=rest if dense else DenseWeights.of_checkpoint(rest, config, source.dtype))


def unread(folder: Path) -> bool:
    """Tell whether a packed checkpoint has experts that transformers would not load."""
    config = pretrained.config(folder)
    if not has_experts(config):
        return False
    source, layout = open_written(folder), layouts.of(config.quantization_config)
    skeleton, stated = source.skeleton(), source.config["quantization_config"]
    if layout.stacks:
        return False
    files = match_names(expanded(source).weights, skeleton)
    packed = named(files, layout.prefixes(source.weights.entries))
    return bool(unread_experts(skeleton, layout, packed, stated))


def described(folder: Path) -> tuple[Any, Any]:
    """Return the model class and the config of a checkpoint. Raises MissingDependency: transformers."""
    try:
        import transformers
    except ImportError:
        raise MissingDependency("transformers", extra="compile", purpose="loading a bundle in torch") from None
    config = pretrained.config(folder)
    name = (config.architectures or [""])[0]
    if pretrained.is_trusted(folder):
        return model_class_of(config.to_dict(), folder, folder.name, True), config
    return getattr(transformers, name, transformers.AutoModel), config


def built(model_class: Any, config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Build a model from dense tensors, in eval mode; the quantization settings are removed from `config`."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return pretrained.network(model_class, None, config=config, state_dict=dict(state), dtype=dtype).eval()
