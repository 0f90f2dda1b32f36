"""Tensors that transformers makes of those in the files while it loads: several joined to one, one cut into several.

    linear_attn.q_conv1d.weight, k_conv1d, v_conv1d  ->  linear_attn.conv1d.weight        (joined)
    attn.Wqkv.weight                                 ->  self_attn.q_proj.weight, k_proj, v_proj  (cut)

Here they are seen under the names of the model's parameters, each made when it is read, by transformers' own rules
(`WeightConverter`s). What is written then has these names too. That is right only if loading leaves them alone, which
is looked at first; the experts that `model.experts` takes apart are not among them. Nothing is known of any model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.device import put
from quantkit.model.source.weights import TensorEntry, Weights, dtype_name, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NOTE = (
    "transformers joins or cuts some tensors of the files while loading; they are written as it then has them, under "
    "the names of its parameters, where a program that reads the original's names does not look for them"
)


@dataclass(frozen=True)
class ConvertedTensor(TensorEntry):
    """A tensor that a rule makes; `start` and `end` say no more than how many bytes it takes.

    Args:
        rule: the `WeightConverter`, never used itself but copied: it gathers what it converts.
        group: the parameter by which transformers calls what the rule makes in one go, its first.
        target: which of those this is.
        parts: (the rule's pattern, tensor of the files), in the order in which they are joined.
    """

    rule: Any = field(default=None, compare=False, repr=False)
    group: str = ""
    target: str = ""
    parts: tuple[tuple[str, TensorEntry], ...] = ()


@dataclass(frozen=True)
class Converted(Weights):
    """The tensors of a folder as the model has them; entries that are `Made` are made when they are read.

    `model` is the one without weights: a rule may ask it for sizes. In memory while a tensor is read: its parts, and
    what the rule makes of them.
    """

    model: Any = field(compare=False, repr=False)

    def beginning(self, name: str, rows: int) -> Tensor:
        """Read the first rows; of one that is made, after making all of it."""
        if isinstance(self.entries[name], ConvertedTensor):
            return self.read(name)[:rows].clone()
        return super().beginning(name, rows)

    def same(self, one: str, other: str) -> bool:
        """Compare two tensors; if one of them is made, whole."""
        entries = self.entries[one], self.entries[other]
        if not any(isinstance(entry, ConvertedTensor) for entry in entries):
            return super().same(one, other)
        if (entries[0].dtype, entries[0].shape) != (entries[1].dtype, entries[1].shape):
            return False
        return torch.equal(*(self.read(name).contiguous().view(-1).view(torch.uint8) for name in (one, other)))

    def _read(self, entry: TensorEntry, device: torch.device | None = None) -> Tensor:
        if not isinstance(entry, ConvertedTensor):
            return super()._read(entry, device)
        parts = [(pattern, super(Converted, self)._read(part)) for pattern, part in entry.parts]
        made = _convert(entry.rule, entry.group, parts, self.model)[entry.target]
        # of one that was cut the pieces share memory, and a piece would hold all of it
        whole = made.untyped_storage().nbytes() == made.nbytes
        found = made.contiguous() if whole else made.clone()
        return put(found, device)


def may_apply(model_class: type[PreTrainedModel], config: Any) -> bool:
    """Tell whether transformers has any such rule for a class or what it may be made of, without building it."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    from quantkit.model.structure.experts import stacks

    beside = vars(sys.modules[model_class.__module__]).values()
    names = {each.__name__ for each in (*model_class.__mro__, *beside) if isinstance(each, type)}
    return any(
        isinstance(rule, WeightConverter) and not stacks(rule)
        for name in sorted(names | set(_model_types(config)))
        for rule in get_checkpoint_conversion_mapping(name) or ()
    )


def converted(weights: Weights, skeleton: PreTrainedModel) -> Weights:
    """Return the tensors as the model has them; the very same `weights` where no rule applies to any of them.

    Raises InputError (`architecture-unsupported`, a rule that cannot be followed, or that loading would apply again to
    what it has made; `weights-ambiguous`, a tensor is there both ways).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    from quantkit.model.structure.experts import other_rules
    from quantkit.model.structure.names import rename

    mapping = get_model_conversion_mapping(skeleton)
    rules = other_rules(skeleton, [each for each in mapping if isinstance(each, WeightConverter)])
    by_pattern = {pattern: rule for rule in rules for pattern in rule.source_patterns}
    wanted, prefix = skeleton.state_dict(keep_vars=True), skeleton.base_model_prefix
    groups: dict[str, list[tuple[str, TensorEntry]]] = {}
    for file in sorted(weights.entries, key=dot_natural_key):  # the order in which transformers joins them
        name, pattern = rename(file, mapping, rules, prefix, wanted)
        if pattern is not None and name in wanted:
            groups.setdefault(name, []).append((pattern, weights.entries[file]))
    if not groups:
        return weights
    made: dict[str, list[ConvertedTensor]] = {}  # a part -> what stands in its place
    for name, parts in groups.items():
        # where the files have its first part
        made[parts[0][1].name] = _made(by_pattern[parts[0][0]], name, parts, skeleton)
    gone = {part.name for parts in groups.values() for _, part in parts}
    entries: dict[str, TensorEntry] = {}
    for file, entry in weights.entries.items():
        for each in made.get(file, ()) if file in gone else (entry,):
            if each.name in entries:
                value = f"{file} becomes it while loading, and it is there already"
                raise InputError("weights-ambiguous", each.name, value, "one tensor does")
            entries[each.name] = each
    fresh = get_model_conversion_mapping(skeleton)  # some rules remember what they have seen
    for each in (each for group in made.values() for each in group):
        if rename(each.name, fresh, rules, prefix, wanted) != (each.name, None):
            raise _unsupported(each.parts[0][1], f"becomes {each.name}, which loading would convert or rename again")
    return Converted(entries, weights.folder, weights.shards, skeleton)


def _made(
    rule: Any, name: str, parts: Sequence[tuple[str, TensorEntry]], model: PreTrainedModel
) -> list[ConvertedTensor]:
    """Make the entries of what a rule makes of tensors of the files; none of them is read."""
    first = parts[0][1]
    with torch.device("meta"):
        empty = [(pattern, torch.empty(part.shape, dtype=torch_dtype(part.dtype))) for pattern, part in parts]
        try:
            results = _convert(rule, name, empty, model)
        except Exception as problem:  # whatever a rule makes of tensors that are not what it is for
            text = " ".join(str(problem).split())[:160]
            raise _unsupported(first, f"cannot be made {name}: {type(problem).__name__}: {text}") from problem
    return [
        ConvertedTensor(
            *(target, dtype_name(tensor.dtype), tuple(tensor.shape), first.shard, 0, tensor.nbytes),
            **{"rule": rule, "group": name, "target": target, "parts": tuple(parts)},
        )
        for target, tensor in results.items()
    ]


def _convert(rule: Any, name: str, parts: Sequence[tuple[str, Tensor]], model: Any) -> dict[str, Tensor]:
    """Apply a rule to tensors: parameter -> value."""
    gathering = copy.deepcopy(rule)
    for pattern, tensor in parts:
        gathering.add_tensor(name, name, pattern, tensor)
    results = gathering.convert(name, model=model, config=model.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in results.items()}


def _model_types(config: Any) -> Iterator[str]:
    """List the model types of a config and of the configs in it."""
    if isinstance(found := getattr(config, "model_type", None), str):
        yield found
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _model_types(value)


def _unsupported(entry: TensorEntry, value: str) -> InputError:
    rule = "what transformers makes of a tensor while loading is what it loads when that is written"
    where = f"{entry.shard}: {entry.name}"
    return InputError("architecture-unsupported", where, value, rule, "leave the model as it is")
