"""A checkpoint as its files are written: which tensors a shard holds, and what each of them is.

The shards are the source's: same names, same tensors in each, so that what was in one file stays in one file. Each is
written with one tensor in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.exporters.carried import carry
from quantkit.exporters.checkpoint import loading, unpacked
from quantkit.model import run_time
from quantkit.model.layouts import Header, Layout
from quantkit.model.run_time import RunTime
from quantkit.model.source.weights import INDEX, SINGLE, dtype_name, torch_dtype, write_json, write_safetensors

if TYPE_CHECKING:
    import torch

    from quantkit.exporters.values import Decided
    from quantkit.model.finished import Finished
    from quantkit.model.source.open import Source
    from quantkit.scheme import WeightScheme


@dataclass(frozen=True)
class Writer:
    """A checkpoint to be written, shard by shard.

    Args:
        source: what the weights come from where nothing changed them.
        finished: what the passes decided, by the skeleton's names.
        files: parameter of the skeleton -> tensor of the files.
        linears: linears of the skeleton -> whether their weight is stored [K, N].
        table: the parameter that holds the rows of the vocabulary.
        stored_as: how quantized linears are stored; None: as their values.
        blocks: names of the skeleton's blocks.
        attention: what a block calls its attention; only asked for where its cache is quantized.
    """

    source: Source
    finished: Finished
    files: Mapping[str, str]
    linears: Mapping[str, bool]
    table: str
    stored_as: Layout | None
    blocks: Sequence[str] = ()
    attention: str = ""

    @cached_property
    def run_time(self) -> RunTime:
        """How inputs and cache are quantized when the model runs."""
        return run_time.of_results(self.finished, self.blocks)

    @cached_property
    def fixed(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the files -> shard and value, of the fixed scales of inputs and caches."""
        entries = self.source.weights.entries
        found: dict[str, tuple[str, torch.Tensor]] = {}
        for linear, static in self.run_time.scales.items():
            entry = entries[self.files[f"{linear}.weight"]]
            prefix = entry.name.removesuffix(".weight")
            found[prefix + run_time.INPUT_SCALE] = entry.shard, static.scale.reshape(1)
            if static.zero is not None:
                found[prefix + run_time.INPUT_ZERO] = entry.shard, static.zero.reshape(1)
        for index, pair in self.run_time.cache_scales.items():
            inside = f"{self.blocks[index]}.{self.attention}."
            name = next(name for name in self.files if name.startswith(inside))
            entry = entries[self.files[name]]
            prefix = entry.name.removesuffix(name.removeprefix(inside))
            for part, static in zip((run_time.KEY_SCALE, run_time.VALUE_SCALE), pair, strict=True):
                found[prefix.removesuffix(".") + part] = entry.shard, static.scale
        return found

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
        """What the model is loaded in."""
        return loading.loading_dtype(self.source.config, self.source.dtype)

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
        """List what is not packed, for other programs: linears, routers, merged experts, and what the class has no
        place for (draft heads, towers), which is carried as it is."""
        left = {name: 2 for name in self.linears if name not in self.finished.schemes}
        for entry in self.source.weights.entries.values():
            prefix = entry.name.removesuffix(".weight")
            # a convolution over time of each channel alone is no matrix, and no experts
            if len(entry.shape) > 1 and entry.name != self.files.get(self.table) and prefix not in self.stored:
                left[prefix] = len(entry.shape) if min(entry.shape[-2:]) > 1 else 2
        return unpacked.names(left, {*self.finished.schemes, *self.stored})

    def headers(self, shard: str) -> list[Header]:
        """What a shard will hold, in the source's order."""
        found: list[Header] = []
        for entry in self.source.weights.entries.values():
            if entry.shard != shard:
                continue
            prefix = entry.name.removesuffix(".weight")
            if self.layout is not None and prefix in self.stored:
                rows, columns = entry.shape
                found += self.layout.headers(prefix, (rows, columns), self.packed[prefix])
            else:
                found.append((entry.name, entry.dtype, entry.shape))
        fixed = {name: value for name, (place, value) in self.fixed.items() if place == shard}
        return found + [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in fixed.items()]

    def write_shard(self, shard: str, path: Path) -> str:
        """Write one shard and return its sha256.

        Raises:
            InputError: `scale-inexact`, `layout-unsupported`.
            Stopped: `disk-full`.
        """
        producer = _Producer(self)
        return write_safetensors(path, self.headers(shard), producer)

    def write_rest(self, folder: Path) -> None:
        """Write config.json, the index, and what is carried over."""
        config = dict(self.source.config)
        if not config.keys() & {"dtype", "torch_dtype"}:
            # else a loader takes the dtype of the first tensor it finds, which may be a scale
            config["dtype"] = self.source.dtype
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
        carry(self.source, folder, config)
        if self.shards != [SINGLE]:
            placed = {header[0]: shard for shard in self.shards for header in self.headers(shard)}
            total = sum(_size(header) for shard in self.shards for header in self.headers(shard))
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})

    def write(self, folder: Path) -> None:
        """Write everything."""
        folder.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            self.write_shard(shard, folder / shard)
        self.write_rest(folder)

    def expected(self, name: str) -> torch.Tensor:
        """What a loader has to have under a name of the files; from the codes, and not from what was written."""
        prefix = name.removesuffix(".weight")
        if self.layout is not None and prefix in self.stored:
            tensor = self.finished.quantized(self.stored[prefix])
            return self.layout.as_loaded(tensor, self.dtype, self.quantization or {})
        return self.dense(name)

    def dense(self, name: str) -> torch.Tensor:
        """A tensor of the dense model, in the dtype and shape it has in the source."""
        return self._decided.read(name).to(torch_dtype(self.source.weights.entries[name].dtype))

    @cached_property
    def _decided(self) -> Decided:
        from quantkit.exporters.values import Decided

        return Decided.of(self.source, self.files, self.files, self.finished, self.linears)


class _Producer:
    """Name -> tensor of a shard, each asked for once.

    The writer asks by element size, so some parts of a linear come long after others. The small ones are read together
    and wait; its codes are read and packed when it is their turn.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: dict[str, torch.Tensor] = {}
        # stored tensor -> the linear it is of
        self._prefixes = {prefix + part: prefix for prefix in writer.stored for part in self._parts}

    @property
    def _parts(self) -> tuple[str, ...]:
        return self._writer.layout.parts if self._writer.layout is not None else ()

    def __call__(self, name: str) -> torch.Tensor:
        writer = self._writer
        if name in writer.fixed:
            return writer.fixed[name][1]
        if writer.layout is None or name not in self._prefixes:
            return writer.dense(name)
        if name in self._waiting:
            return self._waiting.pop(name)
        prefix = self._prefixes[name]
        codes = name == prefix + writer.layout.codes
        tensor = writer.finished.quantized(writer.stored[prefix], codes=codes)
        if codes:
            return writer.layout.packed(tensor)
        self._waiting.update(writer.layout.companions(prefix, tensor, writer.dtype))
        return self._waiting.pop(name)


def _size(header: Header) -> int:
    return math.prod(header[2]) * torch_dtype(header[1]).itemsize
