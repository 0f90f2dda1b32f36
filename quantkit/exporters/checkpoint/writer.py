r"""Write a checkpoint's files: the tensors of every shard.

The shards are the source's: same names, same tensors in each. They are written with one tensor in memory.

A config states once how linears are stored; a loader takes every module for one of them unless a list excludes it
(`unpacked_names`). Names of modules differ: some linears are one in vLLM, a layer's experts are a module `experts`
there whatever the files call them, and a router is a linear where transformers has a parameter. So the list has

    the name in the files and in the class      model.layers.0.mlp.gate
    vLLM's linear, made of several              model.layers.0.self_attn.qkv_proj
    a layer's experts, and everything inside    model.layers.0.mlp.experts, re:(.*\.)?layers\.0\.mlp(\..*)?$
    a tower of images, and everything inside    model.vision_tower, re:(.*\.)?vision_tower(\..*)?$

compressed-tensors, transformers and vLLM (0.32, `find_matching_patterns`) understand all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.exporters.carried import carry
from quantkit.machine import in_order
from quantkit.model import run_time
from quantkit.model.layouts import REGEX, Header, Layout
from quantkit.model.run_time import RunTime
from quantkit.model.source.converted import ExpertTensor
from quantkit.model.source.weights import (
    INDEX,
    SINGLE,
    TensorEntry,
    dtype_name,
    torch_dtype,
    write_json,
    write_safetensors,
)
from quantkit.model.structure.names import same

if TYPE_CHECKING:
    import torch

    from quantkit.exporters.values import Values
    from quantkit.model.finished import DenseWeights, Finished
    from quantkit.model.source.open import Source
    from quantkit.scheme import WeightScheme


# bytes of free memory for each element of the largest tensor, from which on shards are written on threads: up to eight,
# each with a tensor's codes, their 32-bit integers and the packed ones, in half of the memory
_BESIDE = 8 * 12 * 2


@dataclass(frozen=True)
class Writer:
    """A checkpoint to be written, shard by shard."""

    source: Source  # source of unchanged weights
    finished: Finished  # results of the passes, by the skeleton's names
    files: Mapping[str, str]  # parameter of the skeleton -> tensor in the files
    linears: Mapping[str, bool]  # linear of the skeleton -> whether its weight is stored as [K, N]
    table: str  # parameter with the rows of the vocabulary
    stored_as: Layout | None  # layout of quantized linears; None: stored as values
    blocks: Sequence[str] = ()  # names of the skeleton's blocks
    attention: str = ""  # name of the attention in a block; needed only for a quantized cache
    apart: Collection[str] = ()  # modules of merged experts that are written linear by linear
    unread: Sequence[str] = ()  # packed linears of experts that transformers would not load

    @classmethod
    def of(cls, values: Values, stored_as: Layout | None) -> Writer:
        """Make a writer for a compile's results."""
        from quantkit.model.structure.names import apart, unread_experts
        from quantkit.model.structure.traced import is_linear, is_transposed

        stream, finished = values.original, values.finished
        assert stream is not None and finished is not None
        modules = dict(stream.skeleton.named_modules())
        linears = {name: is_transposed(module) for name, module in modules.items() if is_linear(module)}
        embedding = stream.skeleton.get_input_embeddings()  # type: ignore[operator]
        table = next((f"{name}.weight" for name, module in modules.items() if module is embedding), "")
        attention = run_time.attention_of(stream.blocks[0]) if finished.cache is not None else ""
        libraries = set(stored_as.libraries) if stored_as is not None and finished.schemes else set[str]()
        known = apart(stream.skeleton) if libraries else {}  # type: ignore[arg-type]
        alone = [path for path, others in known.items() if not libraries.isdisjoint(others)]
        named = (stream.files, linears, table, stored_as, stream.block_names, attention)
        writer = cls(stream.source, finished, *named, alone)
        if stored_as is None or (config := writer.quantization) is None:
            return writer
        unread = unread_experts(stream.skeleton, stored_as, finished.schemes, config)  # type: ignore[arg-type]
        return replace(writer, unread=unread)

    @property
    def outside(self) -> set[str]:
        """Tensors outside the blocks, by their names in the files and in the class."""
        inside = tuple(f"{block}." for block in self.blocks)
        return {one for pair in self.files.items() if not pair[0].startswith(inside) for one in pair}

    @cached_property
    def run_time(self) -> RunTime:
        """Quantization of inputs and cache at run time."""
        return run_time.of_results(self.finished, self.blocks)

    @cached_property
    def fixed(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the files -> shard and value, for fixed scales of inputs and caches."""
        entries = self.source.weights.entries
        fixed: dict[str, tuple[str, torch.Tensor]] = {}
        for linear, static in self.run_time.scales.items():
            entry = entries[self.files[f"{linear}.weight"]]
            prefix = entry.name.removesuffix(".weight")
            fixed[prefix + run_time.INPUT_SCALE] = entry.shard, static.scale.reshape(1)
            if static.zero is not None:
                fixed[prefix + run_time.INPUT_ZERO] = entry.shard, static.zero.reshape(1)
        for index, pair in self.run_time.cache_scales.items():
            inside = f"{self.blocks[index]}.{self.attention}."
            name = next(name for name in self.files if name.startswith(inside))
            entry = entries[self.files[name]]
            prefix = entry.name.removesuffix(name.removeprefix(inside)).removesuffix(".")
            for part, static in zip((run_time.KEY_SCALE, run_time.VALUE_SCALE), pair, strict=True):
                fixed[prefix + part] = entry.shard, static.scale
        return fixed

    @cached_property
    def layout(self) -> Layout | None:
        """Layout of quantized linears; None: they are stored as values, or there are none."""
        return self.stored_as if self.finished.schemes else None

    @cached_property
    def stored(self) -> dict[str, str]:
        """Prefix in the files -> linear, for linears in the layout."""
        if self.layout is None:
            return {}
        return {self.files[f"{linear}.weight"].removesuffix(".weight"): linear for linear in self.finished.schemes}

    @cached_property
    def wholes(self) -> dict[str, list[ExpertTensor]]:
        """Tensor of the source -> its parts, for merged experts."""
        wholes: dict[str, list[ExpertTensor]] = {}
        for entry in self.source.weights.entries.values():
            if isinstance(entry, ExpertTensor):
                wholes.setdefault(entry.whole.name, []).append(entry)
        return wholes

    @cached_property
    def merged(self) -> dict[str, list[ExpertTensor]]:
        """`wholes` for writing as one tensor."""
        alone = tuple(f"{path}." for path in self.apart)
        return {
            name: parts
            for name, parts in self.wholes.items()
            if not parts[0].parameter.startswith(alone)
            and not any(part.name.removesuffix(".weight") in self.stored for part in parts)
        }

    @cached_property
    def joined(self) -> dict[str, list[str]]:
        """`wholes` for writing part by part -> names of the parts."""
        split = self.wholes.keys() - self.merged.keys()
        return {name: [part.name for part in self.wholes[name]] for name in self.wholes if name in split}

    @cached_property
    def stacks(self) -> dict[str, tuple[list[ExpertTensor], str]]:
        """Layout's tensor of all experts -> their parts, and its suffix."""
        if self.layout is None or not self.layout.stacks:
            return {}
        return {
            parts[0].parameter + part: (parts, part)
            for parts in self.wholes.values()
            if parts[0].name.removesuffix(".weight") in self.stored
            for part in self.layout.parts
        }

    @property
    def names(self) -> list[str]:
        """Names of the tensors of the dense model, in the source's order; merged experts are one."""
        entries = self.source.weights.entries.values()
        return list(dict.fromkeys(one.whole.name if isinstance(one, ExpertTensor) else one.name for one in entries))

    def _written(self) -> Iterator[TensorEntry]:
        """Yield the tensors to write, unpacked: those of merged experts as one, in the place of its first part."""
        seen = set[str]()
        for entry in self.source.weights.entries.values():
            if not isinstance(entry, ExpertTensor) or entry.whole.name not in self.merged:
                yield entry
            elif entry.whole.name not in seen:
                seen.add(entry.whole.name)
                yield replace(entry.whole, shard=entry.shard)

    @cached_property
    def packed(self) -> dict[str, WeightScheme]:
        """Prefix in the files -> scheme, for linears in the layout."""
        return {prefix: self.finished.schemes[linear] for prefix, linear in self.stored.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Data type for loading the model."""
        return loading_dtype(self.source.config, self.source.dtype)

    @property
    def shards(self) -> list[str]:
        """Names of the files to write."""
        return self.source.weights.shards

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json."""
        written, schemes = None, self.finished.schemes
        if self.layout is not None:
            written = self.layout.quantization_config(schemes, self._left(), str(self.dtype).removeprefix("torch."))
            others = {linear: prefix for prefix, linear in self.stored.items() if not same(prefix, linear)}
            for group in written.get("config_groups", {}).values():  # a linear that transformers renames has both names
                group["targets"] += [others[name] for name in group["targets"] if name in others]
        return run_time.described(written, list(schemes), self.run_time.activations, self.run_time.cache)

    def _left(self) -> list[str]:
        """List the unpacked parts for other programs: linears, routers, merged experts, unused tensors.

        Unused tensors are those without a place in the class (draft heads, towers); they are copied unchanged.
        """
        one = {part.name.removesuffix(".weight") for parts in self.merged.values() for part in parts}
        left = {name: 2 for name in self.linears if name not in self.finished.schemes and name not in one}
        for entry in self._written():
            prefix = entry.name.removesuffix(".weight")
            # a depthwise convolution over time is neither a matrix nor a group of experts
            if len(entry.shape) > 1 and entry.name != self.files.get(self.table) and prefix not in self.stored:
                left[prefix] = len(entry.shape) if min(entry.shape[-2:]) > 1 else 2
        packed = {*self.finished.schemes, *self.stored}
        towers = self._towers(left, packed) if self.source.sees else {}
        inside = tuple(f"{tower}." for tower in towers)
        names = unpacked_names({name: left[name] for name in left if not name.startswith(inside)}, packed)
        return [*names, *dict.fromkeys(name for one in towers.items() for name in one)]

    def _towers(self, left: Collection[str], packed: Set[str]) -> dict[str, str]:
        """Map the outermost modules beside the text stack without packed linears to a name of all inside.

        vLLM has further modules inside of a tower, so that names of linears differ.
        """
        owners, towers = {path for name in packed for path in _above(name)}, {}
        for name in left:
            if not self.outside.isdisjoint((name, f"{name}.weight")):
                root = next((path for path in reversed([*_above(name)]) if path not in owners), name)
                pattern = rf"(.*\.)?{re.escape(root.rpartition('.')[2])}(\..*)?$"
                if root != name and not any(re.match(pattern, linear) for linear in packed):
                    towers[root] = REGEX + pattern
        return towers

    def headers(self, shard: str) -> list[Header]:
        """List the tensors of a shard, in the source's order."""
        headers: list[Header] = []
        for entry in self._written():
            if entry.shard != shard:
                continue
            prefix = entry.name.removesuffix(".weight")
            if self.layout is not None and prefix in self.stored:
                rows, columns = entry.shape
                named = self.layout.headers(prefix, (rows, columns), self.packed[prefix])
                if self.layout.stacks and isinstance(entry, ExpertTensor):
                    whole, count = entry.parameter, entry.cut.shape[0]
                    named = [(whole + name.removeprefix(prefix), kind, (count, *shape)) for name, kind, shape in named]
                    named = named if entry.number == 0 else []
                headers += named
            else:
                headers.append((entry.name, entry.dtype, entry.shape))
        fixed = {name: value for name, (place, value) in self.fixed.items() if place == shard}
        return headers + [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in fixed.items()]

    def write_shard(self, shard: str, path: Path) -> None:
        """Write one shard; the bundle's inventory hashes it.

        Raises InputError: `scale-inexact`, `layout-unsupported`; Stopped: `disk-full`.
        """
        # tensors are written by element size, so some parts of a linear come long after others: the small ones are
        # read together and kept; the codes are read and packed in their turn
        layout, waiting = self.layout, dict[str, Any]()
        parts = layout.parts if layout is not None else ()
        prefixes = {prefix + part: prefix for prefix in self.stored for part in parts}

        def produced(name: str) -> torch.Tensor:
            if name in self.fixed:
                return self.fixed[name][1]
            if name in self.stacks:
                return self._stacked(*self.stacks[name])
            if layout is None or name not in prefixes:
                return self.dense(name)
            if name in waiting:
                return waiting.pop(name)  # type: ignore[no-any-return]
            prefix = prefixes[name]
            codes = name == prefix + layout.codes
            tensor = self.finished.quantized(self.stored[prefix], codes=codes)
            if codes:
                return layout.packed(tensor)
            waiting.update(layout.companions(prefix, tensor, self.dtype))
            return waiting.pop(name)  # type: ignore[no-any-return]

        write_safetensors(path, self.headers(shard), produced, hashed=False)

    def _stacked(self, experts: Sequence[ExpertTensor], part: str) -> torch.Tensor:
        """Make one part of a layout's tensors for all experts."""
        layout, whole = self.layout, None
        assert layout is not None
        for entry in experts:
            prefix = entry.name.removesuffix(".weight")
            tensor = self.finished.quantized(self.stored[prefix], codes=part == layout.codes)
            one = layout.packed(tensor) if part == layout.codes else layout.companions("", tensor, self.dtype)[part]
            whole = one.new_empty((len(experts), *one.shape)) if whole is None else whole
            whole[entry.number] = one
        assert whole is not None
        return whole

    def write(self, folder: Path) -> None:
        """Write every shard, config.json, the index, and the copied files."""
        folder.mkdir(parents=True, exist_ok=True)
        headers = [(header, shard) for shard in self.shards for header in self.headers(shard)]  # before the threads
        largest = max((math.prod(entry.shape) for entry in self._written()), default=0)
        beside = in_order if _BESIDE * largest <= machine.memory_available() else map
        for _ in beside(lambda shard: self.write_shard(shard, folder / shard), self.shards):
            pass
        config = dict(self.source.config)
        if not config.keys() & {"dtype", "torch_dtype"}:
            # otherwise a loader takes the dtype of the first tensor, which may be a scale
            config["dtype"] = self.source.dtype
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        carry(self.source, folder, config)
        if self.shards != [SINGLE]:
            total = sum(math.prod(shape) * torch_dtype(kind).itemsize for (_, kind, shape), _ in headers)
            placed = {name: shard for (name, _, _), shard in headers}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})

    def expected(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Return the expected tensor for a name in the files; from the codes, not from the written files.

        Args:
            device: device of a packed one.
        """
        prefix = name.removesuffix(".weight")
        if name in self.joined:
            return self._whole(self.wholes[name], self.expected)
        if self.layout is not None and prefix in self.stored:
            tensor = self.finished.quantized(self.stored[prefix], device=device)
            return self.layout.as_loaded(tensor, self.dtype, self.quantization or {})
        return self.dense(name)

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor of the dense model, in its dtype and shape in the source."""
        if name in self.merged:
            return self._whole(self.merged[name], self.dense)
        return self._decided.read(name).to(torch_dtype(self.source.weights.entries[name].dtype))

    def _whole(self, parts: Sequence[ExpertTensor], read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the tensor of all experts from its parts."""
        names = {(part.number, part.leaf): part.name for part in parts}
        return parts[0].cut.whole(lambda number, leaf: read(names[number, leaf]))

    @cached_property
    def _decided(self) -> DenseWeights:
        from quantkit.model.finished import DenseWeights

        return DenseWeights.of_results(self.source.weights, self.files, self.files, self.finished, self.linears)


def loading_dtype(config: Mapping[str, Any], stored: str) -> torch.dtype:
    """Return transformers' default dtype for loading: the config's, else that of the stored weights."""
    import torch

    name = str(config.get("dtype") or config.get("torch_dtype") or stored).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, stored)  # type: ignore[no-any-return]


# vLLM's linear -> linears in the files, common to its models (`packed_modules_mapping`)
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
EXPERTS = "experts"
_ONE_EXPERT = re.compile(rf"(.*\.{EXPERTS})\.\d+\.")
_PLACE = re.compile(r"(?:^|.*?\.)([^.]+\.\d+(?:\.|$).*)")


def unpacked_names(matrices: Mapping[str, int], packed: Set[str]) -> list[str]:
    """List all names for the list of unpacked modules.

    Args:
        matrices: module or parameter in floats, of two dimensions or more -> number of dimensions.
        packed: linears that are packed.
    """
    owners = {path for name in packed for path in _above(name)}
    names = [*matrices, *(fused for fused, parts in _groups({*matrices, *packed}) if packed.isdisjoint(parts))]
    for name, dimensions in matrices.items():
        for module in _experts(name, dimensions, owners):
            names += [module, REGEX + _inside(module, packed)]
    return list(dict.fromkeys(names))


def torn(kinds: Mapping[str, object], linears: Collection[str]) -> str:
    """Name the first vLLM linear whose parts are stored differently; "" if there is none.

    Args:
        kinds: linear -> its storage; those in floats are missing.
        linears: all linears.
    """
    for fused, parts in _groups(linears):
        if any(kinds.get(part) != kinds.get(parts[0]) for part in parts):
            return fused
    return ""


def _groups(linears: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield vLLM's linear and its parts in the files, for those with several parts."""
    owners = dict.fromkeys(linear.rpartition(".")[0] for linear in linears)
    for owner in owners:
        if _ONE_EXPERT.match(f"{owner}."):
            continue
        for fused, leaves in FUSED:
            parts = [f"{owner}.{leaf}" for leaf in leaves if f"{owner}.{leaf}" in linears]
            if len(parts) > 1:
                yield f"{owner}.{fused}", parts


def _experts(name: str, dimensions: int, owners: Set[str]) -> tuple[str, ...]:
    """Return vLLM's module of a layer's experts, and the outermost module around it without packed linears.

    The latter contains routers, which have other names there. Empty for names that are no experts in floats.

    Args:
        owners: modules with packed linears.
    """
    one = _ONE_EXPERT.match(name)
    if one is None and dimensions != 3:
        return ()
    before, inside, _ = f"{name}.".partition(f".{EXPERTS}.")
    held = f"{before if inside else name.rpartition('.')[0]}.{EXPERTS}"
    path = held if inside else name
    if path in owners:
        return ()
    while (owner := path.rpartition(".")[0]) not in owners and not owner.rpartition(".")[2].isdigit():
        path = owner
    return held, path


def _inside(module: str, packed: Set[str]) -> str:
    """Return a pattern for a module and its content from the block's number on: vLLM's prefix may differ."""
    place = _PLACE.match(module)
    pattern = rf"(.*\.)?{re.escape(place[1])}(\..*)?$" if place else ""
    if not place or any(re.match(pattern, linear) for linear in packed):
        return rf"{re.escape(module)}(\..*)?$"
    return pattern


def _above(name: str) -> Iterator[str]:
    """Yield the modules around a linear, and the linear itself; the model is ""."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
