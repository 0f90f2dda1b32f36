"""A checkpoint as its files are written: which tensors a shard holds, and what each of them is.

The shards are the source's: same names, same tensors in each, so that what was in one file stays in one file. Each is
written with one tensor in memory.

A config says once how linears are stored; whoever loads it takes a module for one of them unless a list leaves it out
(`unpacked_names`). Modules are not called alike everywhere: some linears are one in vLLM, a layer's experts are a
module `experts` there whatever the files call them, and a router is a linear where transformers has a parameter. So it
names

    what the files and the class call it        model.layers.0.mlp.gate
    the linear that vLLM makes of several       model.layers.0.self_attn.qkv_proj
    a layer's experts, and all inside           model.layers.0.mlp.experts, re:(.*\\.)?layers\\.0\\.mlp(\\..*)?$

of which compressed-tensors, transformers and vLLM (0.32, `find_matching_patterns`) understand all three.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.exporters.carried import carry
from quantkit.model import run_time
from quantkit.model.layouts import REGEX, Header, Layout
from quantkit.model.run_time import RunTime
from quantkit.model.source.weights import INDEX, SINGLE, dtype_name, torch_dtype, write_json, write_safetensors

if TYPE_CHECKING:
    import torch

    from quantkit.exporters.values import Values
    from quantkit.model.finished import DenseWeights, Finished
    from quantkit.model.source.open import Source
    from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class Writer:
    """A checkpoint to be written, shard by shard."""

    source: Source  # what the weights come from where nothing changed them
    finished: Finished  # what the passes decided, by the skeleton's names
    files: Mapping[str, str]  # parameter of the skeleton -> tensor of the files
    linears: Mapping[str, bool]  # linears of the skeleton -> whether their weight is stored [K, N]
    table: str  # the parameter that holds the rows of the vocabulary
    stored_as: Layout | None  # how quantized linears are stored; None: as their values
    blocks: Sequence[str] = ()  # names of the skeleton's blocks
    attention: str = ""  # what a block calls its attention; only asked for where its cache is quantized

    @classmethod
    def of(cls, values: Values, stored_as: Layout | None) -> Writer:
        """Write what a compile has decided."""
        from quantkit.model.structure.traced import is_linear, is_transposed

        stream, finished = values.given, values.finished
        assert stream is not None and finished is not None
        modules = dict(stream.skeleton.named_modules())
        linears = {name: is_transposed(module) for name, module in modules.items() if is_linear(module)}
        embedding = stream.skeleton.get_input_embeddings()  # type: ignore[operator]
        table = next((f"{name}.weight" for name, module in modules.items() if module is embedding), "")
        attention = run_time.attention_of(stream.blocks[0]) if finished.cache is not None else ""
        return cls(stream.source, finished, stream.files, linears, table, stored_as, stream.block_names, attention)

    @cached_property
    def run_time(self) -> RunTime:
        """How inputs and cache are quantized when the model runs."""
        return run_time.of_results(self.finished, self.blocks)

    @cached_property
    def fixed(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the files -> shard and value, of the fixed scales of inputs and caches."""
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
        """How quantized linears are stored; None: as their values, or there are none."""
        return self.stored_as if self.finished.schemes else None

    @cached_property
    def stored(self) -> dict[str, str]:
        """Prefix in the files -> linear, of what the layout stores."""
        if self.layout is None:
            return {}
        return {self.files[f"{linear}.weight"].removesuffix(".weight"): linear for linear in self.finished.schemes}

    @cached_property
    def packed(self) -> dict[str, WeightScheme]:
        """Prefix in the files -> scheme, of what the layout stores."""
        return {prefix: self.finished.schemes[linear] for prefix, linear in self.stored.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model is loaded in."""
        return loading_dtype(self.source.config, self.source.dtype)

    @property
    def shards(self) -> list[str]:
        """The file names to write."""
        return self.source.weights.shards

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json."""
        written, schemes = None, self.finished.schemes
        if self.layout is not None:
            written = self.layout.quantization_config(schemes, self._left(), str(self.dtype).removeprefix("torch."))
        return run_time.described(written, list(schemes), self.run_time.activations, self.run_time.cache)

    def _left(self) -> list[str]:
        """What is not packed, for other programs: linears, routers, merged experts, and what the class has no place
        for (draft heads, towers), which is carried as it is."""
        left = {name: 2 for name in self.linears if name not in self.finished.schemes}
        for entry in self.source.weights.entries.values():
            prefix = entry.name.removesuffix(".weight")
            # a convolution over time of each channel alone is no matrix, and no experts
            if len(entry.shape) > 1 and entry.name != self.files.get(self.table) and prefix not in self.stored:
                left[prefix] = len(entry.shape) if min(entry.shape[-2:]) > 1 else 2
        return unpacked_names(left, {*self.finished.schemes, *self.stored})

    def headers(self, shard: str) -> list[Header]:
        """List what a shard will hold, in the source's order."""
        headers: list[Header] = []
        for entry in self.source.weights.entries.values():
            if entry.shard != shard:
                continue
            prefix = entry.name.removesuffix(".weight")
            if self.layout is not None and prefix in self.stored:
                rows, columns = entry.shape
                headers += self.layout.headers(prefix, (rows, columns), self.packed[prefix])
            else:
                headers.append((entry.name, entry.dtype, entry.shape))
        fixed = {name: value for name, (place, value) in self.fixed.items() if place == shard}
        return headers + [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in fixed.items()]

    def write_shard(self, shard: str, path: Path) -> str:
        """Write one shard and return its sha256.

        Raises InputError: `scale-inexact`, `layout-unsupported`; Stopped: `disk-full`.
        """
        # the writer asks by element size, so some parts of a linear come long after others: the small ones are read
        # together and wait; its codes are read and packed when it is their turn
        layout, waiting = self.layout, dict[str, Any]()
        parts = layout.parts if layout is not None else ()
        prefixes = {prefix + part: prefix for prefix in self.stored for part in parts}

        def produced(name: str) -> torch.Tensor:
            if name in self.fixed:
                return self.fixed[name][1]
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

        return write_safetensors(path, self.headers(shard), produced)

    def write(self, folder: Path) -> None:
        """Write every shard, config.json, the index, and what is carried over."""
        folder.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            self.write_shard(shard, folder / shard)
        config = dict(self.source.config)
        if not config.keys() & {"dtype", "torch_dtype"}:
            # else a loader takes the dtype of the first tensor it finds, which may be a scale
            config["dtype"] = self.source.dtype
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        carry(self.source, folder, config)
        if self.shards != [SINGLE]:
            headers = [(header, shard) for shard in self.shards for header in self.headers(shard)]
            total = sum(math.prod(shape) * torch_dtype(kind).itemsize for (_, kind, shape), _ in headers)
            placed = {name: shard for (name, _, _), shard in headers}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})

    def expected(self, name: str) -> torch.Tensor:
        """Return what a loader has to have under a name of the files; from the codes, not from what was written."""
        prefix = name.removesuffix(".weight")
        if self.layout is not None and prefix in self.stored:
            tensor = self.finished.quantized(self.stored[prefix])
            return self.layout.as_loaded(tensor, self.dtype, self.quantization or {})
        return self.dense(name)

    def dense(self, name: str) -> torch.Tensor:
        """Return a tensor of the dense model, in the dtype and shape it has in the source."""
        return self._decided.read(name).to(torch_dtype(self.source.weights.entries[name].dtype))

    @cached_property
    def _decided(self) -> DenseWeights:
        from quantkit.model.finished import DenseWeights

        return DenseWeights.of_results(self.source.weights, self.files, self.files, self.finished, self.linears)


def loading_dtype(config: Mapping[str, Any], stored: str) -> torch.dtype:
    """Return the dtype that transformers loads in by default: the config's, else that of the stored weights."""
    import torch

    name = str(config.get("dtype") or config.get("torch_dtype") or stored).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, stored)  # type: ignore[no-any-return]


# vLLM's linear -> those of the files that it is made of: what its models have in common (`packed_modules_mapping`)
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
    """List everything that a list of what is not packed has to name.

    Args:
        matrices: module or parameter of two dimensions or more that stays in floats -> how many it has.
        packed: linears that are packed.
    """
    owners = {path for name in packed for path in _above(name)}
    names = [*matrices, *(fused for fused, parts in _groups({*matrices, *packed}) if packed.isdisjoint(parts))]
    for name, dimensions in matrices.items():
        for module in _experts(name, dimensions, owners):
            names += [module, REGEX + _inside(module, packed)]
    return list(dict.fromkeys(names))


def torn(kinds: Mapping[str, object], linears: Collection[str]) -> str:
    """Name the first linear that vLLM would make of several that are stored in several ways; "" where there is none.

    Args:
        kinds: linear -> how it is stored; those that stay in floats are missing.
        linears: all of them.
    """
    for fused, parts in _groups(linears):
        if any(kinds.get(part) != kinds.get(parts[0]) for part in parts):
            return fused
    return ""


def _groups(linears: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """(the linear that vLLM makes of them, those of the files), of several that there are."""
    owners = dict.fromkeys(linear.rpartition(".")[0] for linear in linears)
    for owner in owners:
        if _ONE_EXPERT.match(f"{owner}."):
            continue
        for fused, leaves in FUSED:
            parts = [f"{owner}.{leaf}" for leaf in leaves if f"{owner}.{leaf}" in linears]
            if len(parts) > 1:
                yield f"{owner}.{fused}", parts


def _experts(name: str, dimensions: int, owners: Set[str]) -> tuple[str, ...]:
    """The module that holds a layer's experts in vLLM, and the outermost one around it in which nothing is packed,
    where routers are that have other names there; none for what is no part of experts that stay in floats.

    Args:
        owners: modules in which something is packed.
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
    """A pattern for a module and all in it, from the block's number on, where that means nothing else: vLLM may have
    other names in front of it."""
    place = _PLACE.match(module)
    pattern = rf"(.*\.)?{re.escape(place[1])}(\..*)?$" if place else ""
    if not place or any(re.match(pattern, linear) for linear in packed):
        return rf"{re.escape(module)}(\..*)?$"
    return pattern


def _above(name: str) -> Iterator[str]:
    """The modules that a linear is in, and itself; the model is ""."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
