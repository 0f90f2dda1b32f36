"""Merge adapters into an opened model: its changed weights are computed when they are read.

    open_merged("./base", ["./french", "./polite"])     ./french first, as if merged and saved, then ./polite

A module of the adapter gets its name in the model as a tensor of the files does, by transformers' own rules, so an
adapter of an older version of a class fits too. An adapter fits a model if every module is there and the shapes of A
and B are those of its weight; the base model that its config names is only a hint.

A tensor that several parameters share (an embedding and a head) is changed for all of them only if the adapter replaces
all by the same values; else each gets its own tensor, and the model computes what it computed with the adapter beside
it. (PEFT's merge would change the others too.)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.bundle.manifest import AdapterEntry, SourceEntry
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.device import put
from quantkit.model.source.adapter import Adapter, misfit
from quantkit.model.source.converted import ExpertTensor
from quantkit.model.source.files import remembered
from quantkit.model.source.open import Source, open_again, open_model, untied
from quantkit.model.source.places import from_hub
from quantkit.model.source.weights import MadeTensor, Weights
from quantkit.model.structure.kinds import model_graph
from quantkit.model.structure.names import match_names, merging_rules, rename

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from quantkit.model.structure.stacked import Cut


@dataclass(frozen=True)
class _Change:
    """Change of one parameter: a tensor that replaces it, then a product that is added.

    Args:
        part: (function that returns the product, its factor) of one of the merged experts' linears.
    """

    adapter: Adapter
    replaced: str | None = None
    module: str | None = None
    bias: str | None = None
    transposed: bool = False
    part: tuple[Callable[[], Tensor], float] | None = None

    def of(self, before: Tensor) -> Tensor:
        """Return the parameter's new value, in the dtype of the old one."""
        value, read = before, self.adapter.weights.read
        if self.replaced is not None:
            value = read(self.replaced).to(before.dtype)
        if self.part is not None:
            return (value.float() + self.part[0]() * self.part[1]).to(before.dtype)
        if self.module is not None and self.bias is not None:
            value = (value.float() + read(self.bias).float() * self.adapter.factor(self.module)).to(before.dtype)
        elif self.module is not None:
            value = self.adapter.merged(value, self.module, transposed=self.transposed)
        return value


def open_adapter(ref: str, model: str = "") -> Adapter:
    """Open an adapter of a model by path or hub id. Raises InputError: those of `Adapter.open` and of the hub."""
    return Adapter.open(from_hub(ref, False), ref, model) if ref.startswith("hf:") else Adapter.at(ref, model)


def open_merged(
    ref: str, adapters: Sequence[str] = (), *, trust_remote_code: bool | None = False, hashed: bool = True
) -> Source:
    """Open a model, and merge adapters in their order. Raises InputError: those of `open_model` and `merge`."""
    opened = [open_adapter(adapter, ref) for adapter in adapters]

    def together(*, hashed: bool) -> Source:
        source = open_model(ref, trust_remote_code=trust_remote_code, hashed=hashed)
        if opened and source.kind == "network":
            raise model_graph(source.architecture, source.ref)
        return functools.reduce(merge, opened, source)

    if opened and hashed:
        together(hashed=False)  # one that does not fit is refused before the files are hashed
    return together(hashed=hashed)


def open_origin(entry: SourceEntry) -> Source | None:
    """Open the original of a bundle, as its manifest records it; None if a part is gone, or has changed."""
    base = entry.base or entry.sha256
    if entry.ref.startswith("path:"):
        source = open_again(base)
    else:
        source = open_model(entry.ref.removeprefix("alias:"), trust_remote_code=None)
    for recorded in entry.adapters:
        adapter = _again(recorded)
        if source is None or adapter is None:
            return None
        source = merge(source, adapter)
    return source


def _again(recorded: AdapterEntry) -> Adapter | None:
    if recorded.ref.startswith("hf:"):
        return open_adapter(recorded.ref)
    for place in remembered(recorded.sha256):
        with suppress(InputError):
            if (adapter := Adapter.open(place, recorded.ref)).sha256 == recorded.sha256:
                return adapter
    return None


def merge(source: Source, adapter: Adapter) -> Source:
    """Return a model with an adapter merged into its weights; nothing is read yet.

    Raises InputError `adapter-misfit` for an adapter of another model.
    """
    skeleton = source.skeleton()
    files, changes = match_names(source.weights, skeleton), _changes(adapter, skeleton)
    owners: dict[str, list[str]] = {}
    for name, file in files.items():
        owners.setdefault(file, []).append(name)
    shared = [names for names in owners.values() if len(names) > 1]
    for name in [name for names in shared for name in names if name in changes]:
        if changes[name].module is None and _is_same(source.weights, files[name], changes[name]):
            del changes[name]  # PEFT saves an embedding beside the adapter, trained or not
    apart = [names for names in shared if not _alike(names, changes)]
    notes = [*source.notes, note(adapter)]
    if apart:
        source = untied(source, files)
        files = match_names(source.weights, source.skeleton())
        notes.append(f"the adapter changes one of {' and '.join(apart[0])} alone, so they no longer share a tensor")
    before, entries = source.weights, dict(source.weights.entries)
    for name, change in changes.items():
        file = files[name]
        entry = before.entries[file]
        compute = partial(_made, before, file, change)
        if isinstance(entry, ExpertTensor):  # stays a part of the merged tensor
            entries[file] = replace(entry, make=compute)
        else:
            entries[file] = MadeTensor.of(entry.name, entry.dtype, entry.shape, entry.shard, compute)
    base, adapters = source.base or source, (*source.adapters, adapter)
    return replace(
        source,
        name=f"{source.name}+{adapter.name}",
        notes=notes,
        weights=replace(before, entries=entries),
        hashing=functools.cache(partial(_combined, base, adapters)),
        base=base,
        adapters=adapters,
    )


def note(adapter: Adapter) -> str:
    """Describe a merged adapter for the reader of figures."""
    ranks = " and ".join(map(str, adapter.ranks))
    count, others = len(adapter.parts), len(adapter.replaced)
    parts = [f"{adapter.kind} of rank {ranks} in {count} weight{'s' * (count > 1)}"] if count else []
    parts += [f"{others} tensor{'s' * (others > 1)} replaced"] if others else []
    return f"the adapter {adapter.name} is merged ({', '.join(parts)}); the original is the merged model"


def _made(weights: Weights, file: str, change: _Change, device: torch.device | None) -> Tensor:
    # on the processor, so that every device gets the same values
    return put(change.of(weights.read(file)), device)


def _is_same(weights: Weights, file: str, change: _Change) -> bool:
    before = weights.read(file)
    return bool(torch.equal(before, change.of(before)))


def _combined(base: Source, adapters: Sequence[Adapter]) -> str:
    """Hash a merged model: over the hashes of its base and its adapters, in their order; "" for an unhashed base."""
    if not base.sha256:
        return ""
    lines = [f"{base.sha256}\n", *(f"{adapter.sha256}\n" for adapter in adapters)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _alike(names: Sequence[str], changes: Mapping[str, _Change]) -> bool:
    """Tell whether one tensor may go on serving several parameters."""
    own = [changes.get(name) for name in names]
    if not any(own):
        return True
    replaced = [change.replaced for change in own if change is not None and change.module is None]
    if len(replaced) != len(names):
        return False
    weights = own[0].adapter.weights if own[0] is not None else None
    first, *others = [name for name in replaced if name is not None]
    return weights is not None and all(weights.same(first, other) for other in others)


def _changes(adapter: Adapter, skeleton: PreTrainedModel) -> dict[str, _Change]:
    """Map parameters of the skeleton to their changes. Raises InputError `adapter-misfit`."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    from quantkit.model.structure.experts import other_rules

    wanted = skeleton.state_dict(keep_vars=True)
    mapping, rules = get_model_conversion_mapping(skeleton), other_rules(skeleton, merging_rules(skeleton))
    absent: list[str] = []

    def named(tensor: str) -> str | None:
        name, pattern = rename(tensor, mapping, rules, skeleton.base_model_prefix, wanted)
        if name in wanted and pattern is None:
            return name
        absent.append(tensor)
        return None

    changes: dict[str, _Change] = {}
    for tensor, own in adapter.replaced.items():
        if (name := named(tensor)) is not None:
            _demand_shape(adapter, own, tuple(wanted[name].shape), tensor)
            changes[name] = _Change(adapter, replaced=own)
    experts, merged = _experts(adapter, skeleton)
    changes |= experts
    for module, low in adapter.parts.items():
        if module in merged or (name := named(f"{module}.weight")) is None:
            continue
        transposed = _is_transposed(adapter, skeleton.get_submodule(name.rpartition(".")[0]), module)
        shape = tuple(wanted[name].shape)
        rows, columns = (shape[1], shape[:1]) if transposed else (shape[0], shape[1:])
        assert low.a is not None and low.b is not None
        rank = adapter.weights.entries[low.a].shape[0]
        _demand_shape(adapter, low.a, (rank, *columns), module)
        _demand_shape(adapter, low.b, (rows, rank, *(1 for _ in columns[1:])), module)
        before = changes.get(name)
        changes[name] = _Change(adapter, before.replaced if before else None, module, transposed=transposed)
        if low.bias is not None and (bias := named(f"{module}.bias")) is not None:
            _demand_shape(adapter, low.bias, tuple(wanted[bias].shape), module)
            before = changes.get(bias)
            changes[bias] = _Change(adapter, before.replaced if before else None, module, low.bias)
    if absent:
        count, whole = len(absent), len(adapter.parts) + len(adapter.replaced)
        raise misfit(adapter, absent[0], f"the model has no such weight ({count} of {whole} are missing)")
    return changes


def _experts(adapter: Adapter, skeleton: PreTrainedModel) -> tuple[dict[str, _Change], set[str]]:
    """Return the changes of merged experts' linears (`target_parameters`), and their modules in the adapter.

    PEFT wraps a module once for each parameter: the first one's matrices are the innermost.
    """
    from quantkit.model.structure.experts import found_in

    targets = tuple(str(name) for name in adapter.config.get("target_parameters") or ())
    changes, modules = dict[str, _Change](), set[str]()
    for path, experts in found_in(skeleton).items():
        aimed = [name for name in experts.cuts if f".{path}.{name}".endswith(tuple(f".{one}" for one in targets))]
        for depth, name in enumerate(reversed(aimed)):
            module, key, form = path + ".base_layer" * depth, f"{path}.{name}", experts.cuts[name]
            if (low := adapter.parts.get(module)) is None:
                continue
            assert low.a is not None and low.b is not None
            modules.add(module)
            count, first, second = form.shape
            rank, factor = adapter.rank(module, key), adapter.factor(module, key)
            a, b = (adapter.weights.entries[tensor].shape for tensor in (low.a, low.b))
            # of square ones PEFT decides by how the experts are stored
            turned = form.transposed if first == second else (a[1], b[0]) == (first, second)
            across, rows = (first, second) if turned else (second, first)
            _demand_shape(adapter, low.a, (rank * count, across), module)
            _demand_shape(adapter, low.b, (rows, rank * count), module)
            for number in range(count):
                for leaf in form.names:
                    part = partial(_part, adapter, module, form, number, leaf, turned)
                    changes[f"{path}.{number}.{leaf}.weight"] = _Change(adapter, module=module, part=(part, factor))
    return changes, modules


def _part(adapter: Adapter, module: str, form: Cut, number: int, leaf: str, turned: bool) -> Tensor:
    return form.part(adapter.of_expert(module, number, form.shape[0], turned=turned), leaf)


def _is_transposed(adapter: Adapter, owner: Any, module: str) -> bool:
    """Tell whether a module's weight is stored as [K, N]."""
    from torch import nn

    from quantkit.model.structure.traced import is_linear, is_transposed

    if isinstance(owner, nn.Embedding):
        return True
    if getattr(owner, "groups", 1) != 1:
        raise misfit(adapter, module, "the model has a convolution in groups there, whose product has no rule")
    return is_linear(owner) and is_transposed(owner)


def _demand_shape(adapter: Adapter, tensor: str, shape: tuple[int, ...], where: str) -> None:
    """Refuse a tensor of another shape than the model's."""
    own = adapter.weights.entries[tensor]
    if own.shape != shape:
        raise misfit(adapter, where, f"{tensor.rpartition(f'{where}.')[2]} is {list(own.shape)}, not {list(shape)}")
    if not own.dtype.startswith(("F", "BF")):
        raise InputError("adapter-invalid", f"{adapter.ref}: {tensor}", f"stored as {own.dtype}", "weights are floats")
