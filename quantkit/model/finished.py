"""Results of the passes, block by block on disk: codes of quantized linears, and parameters that a fold changed.

Everything else is as in the source. Exporters read from both, one tensor at a time; `DenseWeights` shows both, or a
packed checkpoint, as one set of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.formats import Nested, QuantTensor, SuperBlocks, is_halved, load_format
from quantkit.formats.base.activation import InputScale, Moved
from quantkit.model import layouts
from quantkit.model.device import put
from quantkit.model.layouts import Layout
from quantkit.model.source.weights import TensorEntry, Weights, dtype_name, write_headers
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# a linear's tensors are stored as NAME::FIELD; a name without field is a parameter
_MARK, _CODES = "::", "codes"
# bits of half a byte, and the fields of codes that share bytes: unsigned, signed
_HALF, _JOINED = 4, ("joined", "joined_signed")
_FIELDS = ("codes", "scale", "zero", "codebook", "global_scale", "offset")
# nested scales are stored in parts: `nested.codes`, `super_blocks.d`, ...
_PARTS: dict[str, type[Nested] | type[SuperBlocks]] = {"nested": Nested, "super_blocks": SuperBlocks}
_SHIFT, _CHANNELS = "moved.shift", "moved.scale"
_INPUT, _KEYS, _VALUES = "input.", "keys.", "values."


def save(
    path: Path,
    tensors: Mapping[str, QuantTensor],
    changed: Mapping[str, Tensor],
    inputs: Mapping[str, InputScale] | None = None,
    cache: tuple[str, InputScale, InputScale] | None = None,
) -> str:
    """Write one block's results, and return the file's sha256; a commit syncs the file. Arguments as for `flat`."""
    stored = _stored(tensors, changed, inputs, cache)
    headers = [(name, *_header(value)) for name, value in stored.items()]
    return write_headers(path, headers, lambda name: _made(stored[name]))


@dataclass(frozen=True)
class _Halved:
    """Codes that are stored two to a byte, joined only as they are written."""

    codes: Tensor


def _header(value: Tensor | _Halved) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, _Halved):
        return "U8", (len(value.codes) // 2, *value.codes.shape[1:])
    return dtype_name(value.dtype), tuple(value.shape)


def _made(value: Tensor | _Halved) -> Tensor:
    return _joined(value.codes) if isinstance(value, _Halved) else value


def flat(
    tensors: Mapping[str, QuantTensor],
    changed: Mapping[str, Tensor],
    inputs: Mapping[str, InputScale] | None = None,
    cache: tuple[str, InputScale, InputScale] | None = None,
) -> dict[str, Tensor]:
    """Return one block's results as they are stored, all by full names, on the device where they are.

    Codes of up to 4 bits are stored two to a byte, the first half of the rows in the lower bits, so that half as many
    bytes are copied from a GPU, hashed and written.

    Args:
        changed: parameter -> new value, in its stored dtype.
        inputs: linear -> fixed scale of its input.
        cache: name of the block, fixed scales of its keys and of its values.
    """
    return {name: _made(value) for name, value in _stored(tensors, changed, inputs, cache).items()}


def _stored(
    tensors: Mapping[str, QuantTensor],
    changed: Mapping[str, Tensor],
    inputs: Mapping[str, InputScale] | None,
    cache: tuple[str, InputScale, InputScale] | None,
) -> dict[str, Tensor | _Halved]:
    stored: dict[str, Tensor | _Halved | None] = dict(changed)
    for name, tensor in tensors.items():
        parts = {field: getattr(tensor, field) for field in _FIELDS}
        for part, kind in _PARTS.items():
            if (inner := getattr(tensor, part)) is not None:
                parts |= {f"{part}.{field.name}": getattr(inner, field.name) for field in fields(kind)}
        # linears may share a scale, but safetensors requires separate memory; codes are large and never shared
        for field, value in parts.items():
            stored[name + _MARK + field] = value if field == _CODES or value is None else value.clone()
        # the sign of int8 codes says their range, except in formats that add an offset
        if is_halved(tensor.scheme) and tensor.offset is None and len(tensor.codes) % 2 == 0:
            signed = tensor.codes.dtype == torch.int8
            stored[name + _MARK + _CODES] = None
            stored[name + _MARK + _JOINED[signed]] = _Halved(tensor.codes)
    fixed = {name + _MARK + _INPUT: scale for name, scale in (inputs or {}).items()}
    if cache is not None:
        fixed |= {cache[0] + _MARK + _KEYS: cache[1], cache[0] + _MARK + _VALUES: cache[2]}
    for prefix, scale in fixed.items():
        stored |= {prefix + "scale": scale.scale, prefix + "zero": scale.zero}
        if scale.moved is not None:
            stored |= {prefix + _SHIFT: scale.moved.shift, prefix + _CHANNELS: scale.moved.scale}
    return {key: value for key, value in stored.items() if value is not None}


def _joined(codes: Tensor) -> Tensor:
    """Store two codes in a byte: [N, K] -> uint8 [N / 2, K]."""
    lower, upper = codes.view(torch.uint8).chunk(2)
    return lower.bitwise_and(15).bitwise_or_(upper << _HALF)


def _apart(joined: Tensor, *, signed: bool) -> Tensor:
    """Invert `_joined`."""
    codes = torch.cat((joined & 15, joined >> _HALF))
    return ((codes ^ 8) - 8).view(torch.int8) if signed else codes


def scale_key(linear: str) -> str:
    """Return the stored name of a linear's scale."""
    return f"{linear}{_MARK}scale"


class Finished:
    """Results of all blocks, read lazily; `files` were written by `save`, linears have their full names.

    Of tensors that several files hold, the last one's counts.
    """

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
        self.schemes = {name: scheme for name, scheme in schemes.items() if self._codes(name)}
        self.activations = {name: how for name, how in (activations or {}).items() if name in self.schemes}
        self.cache = cache
        self.changed = [key for key in self._places if _MARK not in key]

    def tensor(self, key: str, *, shape_alone: bool = False) -> Tensor:
        """Read one stored tensor, such as a parameter in `changed`, by its full name."""
        with safe_open(self._places[key], framework="pt") as stored:
            if shape_alone:
                return torch.empty(stored.get_slice(key).get_shape(), dtype=torch.uint8, device="meta")
            tensor: Tensor = stored.get_tensor(key)
            return tensor.clone()

    def _maybe(self, key: str) -> Tensor | None:
        return self.tensor(key) if key in self._places else None

    def _codes(self, linear: str) -> str:
        """Return the field with a linear's codes; "" for none."""
        return next((field for field in (_CODES, *_JOINED) if linear + _MARK + field in self._places), "")

    def quantized(self, linear: str, *, codes: bool = True, device: torch.device | None = None) -> QuantTensor:
        """Read a linear in `schemes`, by its full name, to a device; without `codes`, only their shape."""
        prefix = linear + _MARK
        parts: dict[str, Any] = {
            field: put(self.tensor(prefix + field), device) if prefix + field in self._places else None
            for field in _FIELDS
            if field != _CODES
        }
        for part, kind in _PARTS.items():
            keys = {field.name: f"{prefix}{part}.{field.name}" for field in fields(kind)}
            if stored := {field: put(self.tensor(key), device) for field, key in keys.items() if key in self._places}:
                parts[part] = kind(**stored)
        field = self._codes(linear) or _CODES
        held = put(self.tensor(prefix + field), device) if codes else self.tensor(prefix + field, shape_alone=True)
        if field != _CODES:
            held = _apart(held, signed=field == _JOINED[True])
        return QuantTensor(codes=held, **parts, scheme=self.schemes[linear])

    def input_scale(self, linear: str) -> InputScale | None:
        """Read the fixed scale of a linear's input, or None."""
        return self._fixed(linear + _MARK + _INPUT)

    def cache_scales(self, block: str) -> tuple[InputScale, InputScale] | None:
        """Read the fixed scales of a block's keys and values, or None."""
        keys, values = self._fixed(block + _MARK + _KEYS), self._fixed(block + _MARK + _VALUES)
        return None if keys is None or values is None else (keys, values)

    def _fixed(self, prefix: str) -> InputScale | None:
        if (scale := self._maybe(prefix + "scale")) is None:
            return None
        shift = self._maybe(prefix + _SHIFT)
        moved = None if shift is None else Moved(shift, self.tensor(prefix + _CHANNELS))
        return InputScale(scale, self._maybe(prefix + "zero"), moved)

    def dense(self, linear: str, shape: tuple[int, ...], *, transposed: bool) -> Tensor:
        """Return the dequantized weight of a linear, float32, in the source's layout and without padding."""
        tensor = self.quantized(linear)
        values: Tensor = load_format(tensor.scheme.format).dequantize(tensor)
        return (values[:, : shape[0]].T if transposed else values[:, : shape[1]]).contiguous()


@dataclass(frozen=True)
class DenseWeights(Weights):
    """Tensors of a model with dequantized values, for a compile or a packed checkpoint.

    Args:
        stored: tensors without codes; for a packed checkpoint, all tensors of its files.
        packed: tensor -> linear with its codes.
        expand: function of (linear, shape of its weight, device) to its values, there or in main memory.
        changed: tensor that a pass changed -> function that reads it.
        layout: layout of a packed checkpoint; None for a compile.
    """

    stored: Weights
    packed: Mapping[str, str]
    expand: Callable[[str, tuple[int, ...], torch.device | None], Tensor]
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
        """Show a compile: the source's tensors with the results of the passes, float32 where they are quantized.

        Args:
            stored: parameter -> tensor in the source's files.
            files: parameter -> tensor here; a quantized linear has one of its own.
            transposed: quantized linear -> True if its weight is stored [K, N].
        """

        def expand(linear: str, shape: tuple[int, ...], _: torch.device | None) -> Tensor:
            return results.dense(linear, shape, transposed=transposed[linear])

        # a quantized linear's own tensor has the shape of the shared one
        own = {files[name]: source.entries[file] for name, file in stored.items()}
        packed = {files[f"{name}.weight"]: name for name in results.schemes}
        changed = {files[name]: partial(results.tensor, name) for name in results.changed}
        return cls({**source.entries, **own}, source.folder, source.shards, source, packed, expand, changed)

    @classmethod
    def of_checkpoint(cls, stored: Weights, config: Mapping[str, Any], dtype: str) -> DenseWeights:
        """Show packed weights under the `quantization_config` in `config`, expanded by their library's own code."""
        layout = layouts.of(config)
        packed = {f"{prefix}.weight": prefix for prefix in layout.prefixes(stored.entries)}
        parts = {prefix + part for prefix in packed.values() for part in layout.parts}
        entries: dict[str, TensorEntry] = {name: entry for name, entry in stored.entries.items() if name not in parts}
        for dense, prefix in packed.items():
            codes, shape = stored.entries[prefix + layout.codes], layout.shape(prefix, stored.read)
            entries[dense] = TensorEntry(dense, "F32", shape, codes.shard, codes.start, codes.end)
        expansion = layout.expansion(config, getattr(torch, dtype))

        def expand(prefix: str, _: tuple[int, ...], device: torch.device | None) -> Tensor:
            """Copy the packed tensors to the device, a quarter of what they become there."""
            values: Tensor = expansion.weight(prefix, stored.packed_on(device if expansion.anywhere else None))
            return values

        return cls(entries, stored.folder, stored.shards, stored, packed, expand, {}, layout)

    def read(self, name: str, device: torch.device | None = None) -> Tensor:
        """Read a tensor of the dense model."""
        if name in self.packed:
            return put(self.expand(self.packed[name], self.entries[name].shape, device), device)
        return put(self.changed[name](), device) if name in self.changed else self.stored.read(name, device)
