"""Sizes of a model that no family of `model/sizes` describes: transformers builds its class without weights.

A class that transformers does not have either is read as a Llama, where its keys allow that.

Linears, experts, embeddings and other parameters are counted on that class. Its attention follows the config: heads,
their sizes, windows by `layer_types`. Layers with another mixer (a state space, a convolution) have no attention, and
their states are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, MissingDependency
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, Attention, BlockShapes, Figures, Matrix

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from quantkit.kinds import Kind

# names of the number of experts that a token passes through
_CHOSEN = re.compile(r"(num_)?(experts_(per|top)_?(tok|token|k)|selected_experts)|(moe_?)?top_?k(_experts)?|moe_k")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


def read(reference: str) -> Architecture:
    """Read a model's sizes by its config alone, of whatever class transformers knows.

    Raises InputError, those of `configs.read`, and of building the class.
    """
    config, name, notes = configs.stated(reference)
    known: Architecture | None = None
    try:
        known = configs.read(reference)
    except InputError as problem:
        if problem.code != "config-unknown":
            raise
        unknown = problem
    if known is not None and (configs.is_known(config) or find_spec("transformers") is None):
        return known
    with MissingDependency.unless_found("transformers", extra="compile", purpose="the sizes of its class"):
        built = _built(config, name)
    if built is not None:
        return replace(built, assumed=[*built.assumed, *notes])
    if known is None:
        raise unknown
    return known


def _built(config: Mapping[str, Any], name: str) -> Architecture | None:
    """Build the class of a config on the meta device and count; None for a class that transformers does not have."""
    from quantkit.model.structure import kinds

    model = _on_meta(config, name)
    if model is None:
        return None
    kind, figures = kinds.kind_of(type(model), dict(config), name), Figures(config, name)
    sizes = sizes_of(model, kind, name, figures.dtype("bfloat16"))
    counted = f"the sizes of {type(model).__name__}, as transformers builds it without weights"
    return configs.of_source(replace(sizes, assumed=(counted, *figures.assumed, *sizes.assumed)), config, name)


def skeleton(reference: str, blocks: int | None = None) -> PreTrainedModel | None:
    """Build the class of a model's config without weights, its experts split; None for a class of another library.

    Args:
        blocks: number of first blocks to keep; None for all.

    Raises InputError: of `configs.stated`, and of building the class.
    """
    config, name, _ = configs.stated(reference)
    return _on_meta(config, name, blocks)


def _on_meta(config: Mapping[str, Any], name: str, blocks: int | None = None) -> PreTrainedModel | None:
    import torch
    from transformers import initialization

    from quantkit.model.source import pretrained
    from quantkit.model.structure import experts, kinds
    from quantkit.model.structure.names import merging_rules
    from quantkit.model.structure.traced import find_stacks

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    pretrained.demand_layers(plain, name)
    model_class = kinds.native_class(kinds.class_name(plain, name))
    if model_class is None:
        return None
    try:
        config_class = model_class.config_class
        # infinity is {"__float__": "Infinity"} in a file
        loaded = config_class.from_dict(config_class._decode_special_floats(dict(plain)))
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            model = model_class._from_config(loaded, dtype=torch.float32)
    except Exception as problem:  # a class may raise anything on an inconsistent config
        reason = " ".join(str(problem).split())[:160]
        raise InputError("config-invalid", name, reason, f"it describes a {model_class.__name__}") from problem
    for path in find_stacks(model) if blocks is not None else ():
        model.set_submodule(path, model.get_submodule(path)[:blocks])
    experts.split(model, merging_rules(model))
    return model


def sizes_of(model: nn.Module, kind: Kind, name: str, dtype: str) -> Architecture:
    """Count the sizes of a model with split experts, with or without weights. Raises InputError `blocks-not-found`."""
    from quantkit.model.structure import experts
    from quantkit.model.structure.traced import blocks_of, find_head, find_stacks, layer_config, names_of, token_table

    config: Any = getattr(model.config, "get_text_config", lambda: model.config)()  # type: ignore[union-attr, operator]
    paths, routers, assumed = find_stacks(model), experts.routers(model), list[str]()
    layers = []
    for index, (path, block) in enumerate(zip(names_of(model, paths), blocks_of(model, paths), strict=True)):
        own = layer_config(config, index)
        matrices = _matrices(block, path, own, routers)
        stored = sum(value.numel() for value in block.parameters())
        others = max(stored - sum(matrix.parameters for matrix in matrices), 0)
        layers.append(BlockShapes(path, matrices, _attention(block, own, index, kind == "decoder"), others))
    if any(layer.attention is None for layer in layers):
        assumed.append("layers without attention keep no states")
    table, place = getattr(token_table(model), "weight", None), find_head(model) if kind == "decoder" else None
    head = None if place is None else Matrix(place, *model.get_parameter(f"{place}.weight").shape)
    tied = place is not None and model.get_parameter(f"{place}.weight") is table
    inside = {id(value) for block in blocks_of(model, paths) for value in block.parameters()}
    rest = sum(value.numel() for value in model.parameters() if id(value) not in inside)
    embeddings = 0 if table is None else table.numel()
    rest -= embeddings + (0 if head is None or tied else head.parameters)
    return Architecture(
        name=name,
        kind=kind,
        model_type=str(config.model_type),
        dtype=dtype,
        hidden=_size(config, "hidden_size", "d_model", "n_embd") or max((m.K for m in layers[0].matrices), default=1),
        layers=layers,
        embeddings=embeddings,
        others=max(rest, 0),
        head=head,
        tied=tied,
        vocabulary=_size(config, "vocab_size"),
        max_context=_size(config, "max_position_embeddings", "n_positions"),
        assumed=tuple(assumed),
        class_name=type(model).__name__,
    )


def _size(config: Any, *keys: str) -> int | None:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _matrices(block: nn.Module, path: str, config: Any, routers: set[str]) -> list[Matrix]:
    """List the linears of a block; those of its experts once, with their count."""
    from quantkit.model.structure import experts
    from quantkit.model.structure.traced import is_linear, weight_of

    owners = [re.escape(owner) for owner in experts.found_in(block)]
    merged = re.compile(f"({'|'.join(owners)})\\.(\\d+)\\.(.+)") if owners else _EXPERT
    counts, matrices = dict[str, int](), dict[str, Matrix]()
    for place, module in block.named_modules():
        if not is_linear(module):
            continue
        one = merged.fullmatch(place) or _EXPERT.fullmatch(place)
        name = place if one is None else f"{one[1]}.*.{one[3]}"
        counts[name] = counts.get(name, 0) + 1
        rows, columns = weight_of(module).shape
        bias, router = getattr(module, "bias", None) is not None, f"{path}.{name}" in routers
        matrices.setdefault(name, Matrix(f"{path}.{name}", rows, columns, bias=bias, router=router))
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]  # DBRX has one for experts
    stated = ((key, value) for part in parts for key, value in vars(part).items() if type(value) is int)
    chosen = next((value for key, value in stated if value > 0 and _CHOSEN.fullmatch(key)), None)
    sizes = {name: (count, min(chosen or count, count)) for name, count in counts.items()}
    return [replace(matrix, count=sizes[name][0], active=sizes[name][1]) for name, matrix in matrices.items()]


def _attention(block: nn.Module, config: Any, index: int, causal: bool) -> Attention | None:
    """Return the attention of a block; None if it has none, or no heads are stated."""
    listed = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kind = listed[index] if isinstance(listed, list) and index < len(listed) else ""
    named = any("attention" in type(module).__name__.lower() for module in block.modules())
    if not (named if not kind else "attention" in kind and "linear" not in kind):
        return None
    heads, hidden = _size(config, "num_attention_heads", "n_head"), _size(config, "hidden_size", "d_model", "n_embd")
    if heads is None or hidden is None:
        return None
    latent, rope = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    if latent and rope:
        wide = (_size(config, "qk_nope_head_dim") or 0) + rope
        value = _size(config, "v_head_dim") or wide
        return Attention("latent", heads, heads, wide, value, latent=latent, rope_dim=rope, causal=causal)
    shared = min(_size(config, "num_key_value_heads", "num_kv_heads") or heads, heads)
    wide = _size(config, "head_dim") or hidden // heads
    keys = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
    key = next((key for word, key in keys.items() if word in kind), "")
    window = _size(config, key) if key else None
    sizes = (heads, shared, wide, _size(config, "v_head_dim") or wide)
    return Attention("sliding" if window else "full", *sizes, window=window, causal=causal)
