"""Tensors that transformers converts while loading: several joined to one, or one cut into several.

    linear_attn.q_conv1d.weight, k_conv1d, v_conv1d  ->  linear_attn.conv1d.weight        (joined)
    attn.Wqkv.weight                                 ->  self_attn.q_proj.weight, k_proj, v_proj  (cut)

Here they have the names of the model's parameters, and are made on reading, by transformers' own rules
(`WeightConverter`s). Exports use these names too. That requires that loading leaves them unchanged, which is checked
first. Experts are split by `model.experts` instead. Nothing here depends on a particular model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.device import put
from quantkit.model.source.weights import MadeTensor, TensorEntry, Weights, dtype_name, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NOTE = (
    "transformers joins or cuts some tensors of the files while loading; exports have the results, under the names of "
    "its parameters, which a program for the original files may not know"
)


@dataclass(frozen=True)
class ConvertedTensor(MadeTensor):
    """A tensor made by a rule; while it is read, its `parts` and all results of the rule are in memory.

    Args:
        parts: (pattern of the rule, tensor of the files), in the order of joining.
    """

    parts: tuple[tuple[str, TensorEntry], ...] = field(default=(), kw_only=True)


def may_apply(model_class: type[PreTrainedModel], config: Any) -> bool:
    """Tell whether transformers has such a rule for a class or its parts, without building the model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    from quantkit.model.structure.experts import stacks

    beside = vars(sys.modules[model_class.__module__]).values()
    names = {kind.__name__ for kind in (*model_class.__mro__, *beside) if isinstance(kind, type)}
    return any(
        isinstance(rule, WeightConverter) and not stacks(rule)
        for name in sorted(names | set(_model_types(config)))
        for rule in get_checkpoint_conversion_mapping(name) or ()
    )


def converted(weights: Weights, skeleton: PreTrainedModel) -> Weights:
    """Return the tensors under the model's names; `weights` itself if no rule applies.

    Raises:
        InputError: `architecture-unsupported` for a rule that fails, or that loading would apply to its own result;
            `weights-ambiguous` for a tensor that exists both ways.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    from quantkit.model.structure.experts import other_rules
    from quantkit.model.structure.names import rename

    mapping = get_model_conversion_mapping(skeleton)
    rules = other_rules(skeleton, [rule for rule in mapping if isinstance(rule, WeightConverter)])
    by_pattern = {pattern: rule for rule in rules for pattern in rule.source_patterns}
    wanted, prefix = skeleton.state_dict(keep_vars=True), skeleton.base_model_prefix
    groups: dict[str, list[tuple[str, TensorEntry]]] = {}
    for file in sorted(weights.entries, key=dot_natural_key):  # the order in which transformers joins them
        name, pattern = rename(file, mapping, rules, prefix, wanted)
        if pattern is not None and name in wanted:
            groups.setdefault(name, []).append((pattern, weights.entries[file]))
    if not groups:
        return weights
    results: dict[str, list[ConvertedTensor]] = {}  # first part -> converted tensors, in its place
    for name, parts in groups.items():
        results[parts[0][1].name] = _results(weights, by_pattern[parts[0][0]], name, parts, skeleton)
    gone = {part.name for parts in groups.values() for _, part in parts}
    entries: dict[str, TensorEntry] = {}
    for file, entry in weights.entries.items():
        for tensor in results.get(file, ()) if file in gone else (entry,):
            if tensor.name in entries:
                value = f"{file} becomes it while loading, and the files have it too"
                raise InputError("weights-ambiguous", tensor.name, value, "a parameter has one tensor")
            entries[tensor.name] = tensor
    fresh = get_model_conversion_mapping(skeleton)  # some rules keep state
    for result in (result for group in results.values() for result in group):
        if rename(result.name, fresh, rules, prefix, wanted) != (result.name, None):
            value = f"becomes {result.name}, which loading would convert or rename again"
            raise _unsupported(result.parts[0][1], value)
    return replace(weights, entries=entries)


def _results(
    weights: Weights, rule: Any, name: str, parts: Sequence[tuple[str, TensorEntry]], model: PreTrainedModel
) -> list[ConvertedTensor]:
    """Return the entries of a rule's results without reading a tensor."""
    first = parts[0][1]
    with torch.device("meta"):
        empty = [(pattern, torch.empty(part.shape, dtype=torch_dtype(part.dtype))) for pattern, part in parts]
        try:
            results = _convert(rule, name, empty, model)
        except Exception as problem:  # a rule may raise anything on unsuitable tensors
            text = " ".join(str(problem).split())[:160]
            raise _unsupported(first, f"cannot be made {name}: {type(problem).__name__}: {text}") from problem

    def made(target: str, device: torch.device | None) -> Tensor:
        read = [(pattern, weights.read(part.name)) for pattern, part in parts]
        tensor = _convert(rule, name, read, model)[target]
        # the pieces of a cut tensor share memory, so one piece would keep all of it
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return put(tensor.contiguous() if whole else tensor.clone(), device)

    return [
        ConvertedTensor.of(
            *(target, dtype_name(tensor.dtype), tuple(tensor.shape), first.shard),
            partial(made, target),
            parts=tuple(parts),
        )
        for target, tensor in results.items()
    ]


def _convert(rule: Any, name: str, parts: Sequence[tuple[str, Tensor]], model: Any) -> dict[str, Tensor]:
    """Apply a copy of a rule, which collects its inputs, to tensors: parameter -> value."""
    gathering = copy.deepcopy(rule)
    for pattern, tensor in parts:
        gathering.add_tensor(name, name, pattern, tensor)
    results = gathering.convert(name, model=model, config=model.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in results.items()}


def _model_types(config: Any) -> Iterator[str]:
    """List the model types of a config and of the configs in it."""
    if isinstance(model_type := getattr(config, "model_type", None), str):
        yield model_type
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _model_types(value)


def _unsupported(entry: TensorEntry, value: str) -> InputError:
    rule = "loading must leave converted tensors unchanged"
    where = f"{entry.shard}: {entry.name}"
    return InputError("architecture-unsupported", where, value, rule, "leave the model as it is")
