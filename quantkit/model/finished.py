"""What the passes have decided, block by block on disk: codes of quantized linears, and whatever a fold changed.

What is not here is as in the source. Exporters read from this and from the source, one tensor at a time: `DenseWeights`
shows both as one, and a packed checkpoint likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.formats import Nested, QuantTensor, SuperBlocks, load_format
from quantkit.formats.base.activation import InputScale, Moved
from quantkit.model import layouts
from quantkit.model.device import put
from quantkit.model.layouts import Layout
from quantkit.model.source.weights import TensorEntry, Weights
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# a linear's tensors are stored as NAME::FIELD; what has no field is a parameter
_MARK, _CODES = "::", "codes"
_FIELDS = ("codes", "scale", "zero", "codebook", "global_scale", "offset")
# how scales are stored that are quantized themselves: `nested.codes`, `super_blocks.d`, ...
_PARTS: dict[str, type[Nested] | type[SuperBlocks]] = {"nested": Nested, "super_blocks": SuperBlocks}
_SHIFT, _CHANNELS = "moved.shift", "moved.scale"
_INPUT, _KEYS, _VALUES = "input.", "keys.", "values."


def save(
    path: Path,
    tensors: Mapping[str, QuantTensor],
    changed: Mapping[str, Tensor],
    inputs: Mapping[str, InputScale] | None = None,
    cache: tuple[str, InputScale, InputScale] | None = None,
) -> None:
    """Write one block's results, all by full names.

    Args:
        changed: parameters' new values, in the dtype that they will be stored in.
        inputs: the fixed scales of linears' inputs.
        cache: the block's name, the fixed scales of its keys and of its values.
    """
    flat: dict[str, Tensor | None] = dict(changed)
    for name, tensor in tensors.items():
        parts = {field: getattr(tensor, field) for field in _FIELDS}
        for part, kind in _PARTS.items():
            if (stored := getattr(tensor, part)) is not None:
                parts |= {f"{part}.{field.name}": getattr(stored, field.name) for field in fields(kind)}
        # linears may have a scale in common, and safetensors wants memory of its own for each; codes are the large ones
        for field, value in parts.items():
            flat[name + _MARK + field] = value if field == _CODES or value is None else value.clone()
    fixed = {name + _MARK + _INPUT: scale for name, scale in (inputs or {}).items()}
    if cache is not None:
        fixed |= {cache[0] + _MARK + _KEYS: cache[1], cache[0] + _MARK + _VALUES: cache[2]}
    for prefix, scale in fixed.items():
        flat |= {prefix + "scale": scale.scale, prefix + "zero": scale.zero}
        if scale.moved is not None:
            flat |= {prefix + _SHIFT: scale.moved.shift, prefix + _CHANNELS: scale.moved.scale}
    save_file({key: value.contiguous() for key, value in flat.items() if value is not None}, path)


class Finished:
    """All blocks' results, read lazily; `files` are what `save` wrote, linears go by their full names."""

    def __init__(
        self,
        files: Iterable[Path],
        schemes: Mapping[str, WeightScheme],
        activations: Mapping[str, ActivationScheme] | None = None,
        cache: CacheScheme | None = None,
    ) -> None:
        self._places: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt") as stored:
                self._places |= dict.fromkeys(stored.keys(), path)
        self.schemes = {name: scheme for name, scheme in schemes.items() if name + _MARK + _CODES in self._places}
        self.activations = {name: how for name, how in (activations or {}).items() if name in self.schemes}
        self.cache = cache
        self.changed = [key for key in self._places if _MARK not in key]

    def tensor(self, key: str, *, shape_alone: bool = False) -> Tensor:
        """Read what is stored under a name: a parameter in `changed`, by its full name."""
        with safe_open(self._places[key], framework="pt") as stored:
            if shape_alone:
                return torch.empty(stored.get_slice(key).get_shape(), device="meta")
            tensor: Tensor = stored.get_tensor(key)
            return tensor.clone()

    def _maybe(self, key: str) -> Tensor | None:
        return self.tensor(key) if key in self._places else None

    def quantized(self, linear: str, *, codes: bool = True) -> QuantTensor:
        """Read the codes of a linear in `schemes`, by its full name; without `codes`, their shape and all else."""
        prefix = linear + _MARK
        parts: dict[str, Any] = {field: self._maybe(prefix + field) for field in _FIELDS if field != _CODES}
        for part, kind in _PARTS.items():
            keys = {field.name: f"{prefix}{part}.{field.name}" for field in fields(kind)}
            if stored := {field: self.tensor(key) for field, key in keys.items() if key in self._places}:
                parts[part] = kind(**stored)
        held = self.tensor(prefix + _CODES, shape_alone=not codes)
        return QuantTensor(codes=held, **parts, scheme=self.schemes[linear])

    def input_scale(self, linear: str) -> InputScale | None:
        """Read the fixed scale of a linear's input; None where there is none."""
        return self._fixed(linear + _MARK + _INPUT)

    def cache_scales(self, block: str) -> tuple[InputScale, InputScale] | None:
        """Read the fixed scales of a block's keys and values; None where there are none."""
        keys, values = self._fixed(block + _MARK + _KEYS), self._fixed(block + _MARK + _VALUES)
        return None if keys is None or values is None else (keys, values)

    def _fixed(self, prefix: str) -> InputScale | None:
        if (scale := self._maybe(prefix + "scale")) is None:
            return None
        shift = self._maybe(prefix + _SHIFT)
        moved = None if shift is None else Moved(shift, self.tensor(prefix + _CHANNELS))
        return InputScale(scale, self._maybe(prefix + "zero"), moved)

    def dense(self, linear: str, shape: tuple[int, ...], *, transposed: bool) -> Tensor:
        """Compute what a linear's codes stand for, float32, as its weight lies in the source: without padding."""
        tensor = self.quantized(linear)
        values: Tensor = load_format(tensor.scheme.format).dequantize(tensor)
        return (values[:, : shape[0]].T if transposed else values[:, : shape[1]]).contiguous()


@dataclass(frozen=True)
class DenseWeights(Weights):
    """Tensors of a model with the values that its codes stand for, wherever the codes are.

    Args:
        stored: what has no codes; of a packed checkpoint, all that is in its files.
        packed: tensor -> the linear whose codes it stands for.
        expand: (linear, shape of its weight) -> its values.
        changed: tensor -> what reads it, of those that passes changed.
        layout: of a packed checkpoint; None of a compile.
    """

    stored: Weights
    packed: Mapping[str, str]
    expand: Callable[[str, tuple[int, ...]], Tensor]
    changed: Mapping[str, Callable[[], Tensor]]
    layout: Layout | None = None

    @classmethod
    def of_results(
        cls,
        source: Weights,
        stored: Mapping[str, str],
        files: Mapping[str, str],
        results: Finished,
        transposed: Mapping[str, bool],
    ) -> DenseWeights:
        """Show a compile: the source's tensors with what the passes made of them, float32 where they are quantized.

        Args:
            stored: parameter -> tensor of the source's files.
            files: parameter -> tensor here: a quantized linear has one to itself.
            transposed: quantized linear -> whether its weight is stored [K, N].
        """

        def expand(linear: str, shape: tuple[int, ...]) -> Tensor:
            return results.dense(linear, shape, transposed=transposed[linear])

        # a tensor that only a quantized linear has is as large as the one it was shared with
        own = {files[name]: source.entries[file] for name, file in stored.items()}
        packed = {files[f"{name}.weight"]: name for name in results.schemes}
        changed = {files[name]: partial(results.tensor, name) for name in results.changed}
        return cls({**source.entries, **own}, source.folder, source.shards, source, packed, expand, changed)

    @classmethod
    def of_checkpoint(cls, stored: Weights, config: Mapping[str, Any], dtype: str) -> DenseWeights:
        """Show packed weights by the `quantization_config` in `config`, expanded by their library's own code."""
        layout = layouts.of(config)
        packed = {f"{prefix}.weight": prefix for prefix in layout.prefixes(stored.entries)}
        parts = {prefix + part for prefix in packed.values() for part in layout.parts}
        entries: dict[str, TensorEntry] = {name: entry for name, entry in stored.entries.items() if name not in parts}
        for dense, prefix in packed.items():
            codes, shape = stored.entries[prefix + layout.codes], layout.shape(prefix, stored.read)
            entries[dense] = replace(codes, name=dense, dtype="F32", shape=shape)
        expansion = layout.expansion(config, getattr(torch, dtype))

        def expand(prefix: str, _: tuple[int, ...]) -> Tensor:
            values: Tensor = expansion.weight(prefix, stored.read)
            return values

        return cls(entries, stored.folder, stored.shards, stored, packed, expand, {}, layout)

    def read(self, name: str, device: torch.device | None = None) -> Tensor:
        """Read a tensor of the dense model."""
        if name in self.packed:
            return put(self.expand(self.packed[name], self.entries[name].shape), device)
        return put(self.changed[name](), device) if name in self.changed else self.stored.read(name, device)
