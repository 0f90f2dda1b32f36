"""Sizes by a model's config: how many tokens a sequence can have, and the same model with its first blocks alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.lazy import torch
from quantkit.model.structure.kinds import class_name, native_class

_STATED = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "seq_length")


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a sequence can have; None where the config does not say.

    RoBERTa and its relatives count from behind the padding's index, in a table that has that index: of 514 rows with
    padding 1 they take 512. The table is looked at, in a model of one block without weights.

    Args:
        config: a config.json. Of a class that is not transformers' own, what it states is taken.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    model_class = native_class(class_name(dict(config), "config.json")) if config.get("architectures") else None
    stated = next((inner[name] for name in _STATED if type(inner.get(name)) is int and inner[name] > 0), None)
    if model_class is None or (stated is not None and inner.get("pad_token_id") is None and text is None):
        return stated
    try:
        loaded = model_class.config_class.from_dict({k: v for k, v in config.items() if k != "quantization_config"})
        whole = loaded.get_text_config()
        # XLNet's is -1: any number
        sizes = (getattr(whole, name, None) for name in _STATED)
        stated = next((size for size in sizes if type(size) is int and size > 0), stated)
        cut_config(loaded, 1)
        with torch.device("meta"):
            modules = dict(model_class._from_config(loaded).named_modules())
    except Exception:  # whatever a class makes of a config: opening the model says what is wrong with it
        return stated
    behind = [
        module.padding_idx + 1
        for name, module in modules.items()
        if "position" in name.rpartition(".")[2]
        and isinstance(getattr(module, "padding_idx", None), int)
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and module.weight.shape[0] == stated
    ]
    return stated - max(behind) if stated is not None and behind else stated


def cut_config(config: Any, blocks: int) -> None:
    """Make a config that of a model with only the first blocks, in place."""
    inner = config.get_text_config()
    count = inner.num_hidden_layers
    for key, value in list(vars(inner).items()):
        # one entry a layer: layer_types and the like
        if isinstance(value, list) and len(value) == count:
            setattr(inner, key, value[:blocks])
    inner.num_hidden_layers = min(blocks, count)
