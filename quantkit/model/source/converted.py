"""Tensors that transformers converts while loading: several joined to one, or one cut into several.

    linear_attn.q_conv1d.weight, k_conv1d, v_conv1d  ->  linear_attn.conv1d.weight        (joined)
    attn.Wqkv.weight                                 ->  self_attn.q_proj.weight, k_proj, v_proj  (cut)

Here they have the names of the model's parameters, and are made on reading, by transformers' own rules
(`WeightConverter`s). Exports use these names too. That requires that loading leaves them unchanged, which is checked
first. Of merged experts (`structure.experts`), each linear's part of the merged tensor is read instead:

    experts.gate_up_proj [E, 2N, K]  ->  experts.0.gate_proj.weight [N, K], experts.0.up_proj.weight, ...

Nothing here depends on a particular model.
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

    from quantkit.model.structure.stacked import Cut

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


@dataclass(frozen=True)
class ExpertTensor(MadeTensor):
    """The weight [N, K] of one expert's linear, a part of a tensor of all experts; only that expert's bytes are read.

    Args:
        whole: the merged tensor, as the model's parameter has it.
        parameter: name of this parameter in the model.
        number: number of the expert.
        leaf: name of the linear.
        cut: linears of the merged tensor.
    """

    whole: TensorEntry = field(compare=False, repr=False, kw_only=True)
    parameter: str = field(kw_only=True)
    number: int = field(kw_only=True)
    leaf: str = field(kw_only=True)
    cut: Cut = field(compare=False, repr=False, kw_only=True)


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


def may_cut(config: Any) -> bool:
    """Tell whether a config states a number of experts, which may be merged in the files."""
    from quantkit.model.structure.experts import has_experts

    return has_experts(config)


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


def cut(weights: Weights, skeleton: PreTrainedModel) -> Weights:
    """Return the tensors with those of merged experts cut into the skeleton's linears; `weights` itself without any.

    Raises InputError: `weights-shape`; `architecture-unsupported` for a rule that fails; `weights-ambiguous`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    from quantkit.model.structure.experts import other_rules, wholes
    from quantkit.model.structure.names import rename

    merged = wholes(skeleton)
    if not merged:
        return weights
    mapping = get_model_conversion_mapping(skeleton)
    rules = other_rules(skeleton, [rule for rule in mapping if isinstance(rule, WeightConverter)])
    by_pattern = {pattern: rule for rule in rules for pattern in rule.source_patterns}
    wanted = {**skeleton.state_dict(keep_vars=True), **dict.fromkeys(merged, torch.empty(0))}
    prefix = skeleton.base_model_prefix
    last: dict[str, Tensor] = {}  # the last merged tensor that is not in the files as it is
    parts: dict[str, list[ExpertTensor]] = {}
    for file in sorted(weights.entries, key=dot_natural_key):
        whole = entry = weights.entries[file]
        name, pattern = rename(file, mapping, rules, prefix, wanted)
        if name not in merged:
            continue
        if pattern is not None:
            rule = by_pattern[pattern]
            results = _results(weights, rule, name, [(pattern, entry)], skeleton)
            whole = next((one for one in results if one.name == name), entry)
            # a transposition that looks at the shape leaves its own result alone
            stays = all(getattr(step, "check_dims", False) for step in rule.operations)
            if not stays and rename(name, mapping, rules, prefix, wanted) != (name, None):
                raise _unsupported(entry, f"becomes {name}, which loading would convert or rename again")
        experts, path, leaf = merged[name]
        form = experts.cuts[leaf]
        if whole.shape != form.stored:
            rule, remedy = f"config.json makes {name} {list(form.stored)}", "check config.json against the weights"
            raise InputError("weights-shape", f"{entry.shard}: {file}", f"shape {list(whole.shape)}", rule, remedy)

        def made(whole: TensorEntry, form: Cut, number: int, linear: str, device: torch.device | None) -> Tensor:
            if not isinstance(whole, MadeTensor):
                matrix = weights.part(whole.name, number, form.shape[0]).reshape(form.shape[1:])
            else:
                if (values := last.get(whole.name)) is None:  # threads may come here together
                    last.clear()
                    values = last[whole.name] = whole.make(None)
                matrix = values.reshape(form.shape)[number]
            return put(form.part(matrix, linear), device)

        parts[file] = [
            ExpertTensor.of(
                *(f"{path}.{number}.{linear}.weight", whole.dtype, form.size, entry.shard),
                partial(made, whole, form, number, linear),
                whole=whole,
                parameter=name,
                number=number,
                leaf=linear,
                cut=form,
            )
            for number in range(form.shape[0])
            for linear in form.names
        ]
    listed: dict[str, TensorEntry] = {}
    for file, entry in weights.entries.items():
        for one in parts.get(file, (entry,)):
            if one.name in listed:
                value = f"{file} has it, and the files have it too"
                raise InputError("weights-ambiguous", one.name, value, "a parameter has one tensor")
            listed[one.name] = one
    return replace(weights, entries=listed) if parts else weights


def joined(weights: Weights) -> Weights:
    """Return the tensors with those of merged experts whole again, as transformers loads them."""
    listed: dict[str, TensorEntry] = {}
    for entry in weights.entries.values():
        if not isinstance(entry, ExpertTensor):
            listed[entry.name] = entry
        elif entry.whole.name not in listed:
            path = entry.name.removesuffix(f".{entry.number}.{entry.leaf}.weight")

            def made(device: torch.device | None, form: Cut, path: str) -> Tensor:
                return put(form.whole(lambda number, leaf: weights.read(f"{path}.{number}.{leaf}.weight")), device)

            name, read = entry.whole.name, partial(made, form=entry.cut, path=path)
            listed[name] = MadeTensor.of(name, entry.dtype, entry.cut.stored, entry.shard, read)
    return replace(weights, entries=listed)


def unstacked(weights: Weights, skeleton: PreTrainedModel, parts: Sequence[str]) -> Weights:
    """Return tensors of packed merged experts, WHOLE + a suffix in `parts`, cut into those of each expert's linear."""
    from quantkit.model.structure.experts import wholes

    listed = dict(weights.entries)
    for whole, (experts, path, leaf) in wholes(skeleton).items():
        form = experts.cuts[leaf]
        for part in parts:
            if len(form.names) > 1 or (entry := listed.pop(whole + part, None)) is None:
                continue
            shape = tuple(entry.shape[1:])

            def made(device: torch.device | None, file: str, number: int) -> Tensor:
                return put(weights.part(file, number, weights.entries[file].shape[0])[0], device)

            for number in range(form.shape[0]):
                name = f"{path}.{number}.{form.names[0]}{part}"
                read = partial(made, file=whole + part, number=number)
                listed[name] = MadeTensor.of(name, entry.dtype, shape, entry.shard, read)
    return replace(weights, entries=listed)


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
