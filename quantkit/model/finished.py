"""What the passes have decided, block by block on disk: codes of quantized linears, and whatever a fold changed.

What is not here is as in the source. Exporters read from this and from the source, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.formats import Nested, QuantTensor, SuperBlocks, load_format
from quantkit.formats.base.activation import InputScale, Moved
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
    """Write one block's results.

    Args:
        tensors: linear's full name -> its codes.
        changed: parameter's full name -> its new value, in the dtype it will be stored in.
        inputs: linear's full name -> the fixed scale of its input.
        cache: the block's full name, the fixed scales of its keys and of its values.
    """
    flat: dict[str, Tensor] = {name: value.contiguous() for name, value in changed.items()}
    for name, tensor in tensors.items():
        found = {field: getattr(tensor, field) for field in _FIELDS}
        for part, kind in _PARTS.items():
            if (stored := getattr(tensor, part)) is not None:
                found |= {f"{part}.{each.name}": getattr(stored, each.name) for each in fields(kind)}
        # linears may have a scale in common, and safetensors wants memory of its own for each; codes are the large ones
        copied = {
            field: value.contiguous() if field == _CODES else value.clone()
            for field, value in found.items()
            if value is not None
        }
        flat |= {name + _MARK + field: value for field, value in copied.items()}
    fixed = {name + _MARK + _INPUT: scale for name, scale in (inputs or {}).items()}
    if cache is not None:
        fixed |= {cache[0] + _MARK + _KEYS: cache[1], cache[0] + _MARK + _VALUES: cache[2]}
    for prefix, scale in fixed.items():
        parts = {"scale": scale.scale, "zero": scale.zero}
        if scale.moved is not None:
            parts |= {_SHIFT: scale.moved.shift, _CHANNELS: scale.moved.scale}
        flat |= {prefix + part: value.contiguous() for part, value in parts.items() if value is not None}
    save_file(flat, path)


class Finished:
    """All blocks' results, read lazily.

    Args:
        files: what `save` wrote.
        schemes: linear's full name -> scheme.
        activations: linear's full name -> how its input is quantized, for those where it is.
        cache: how keys and values are quantized, if they are.
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
                for key in stored.keys():  # noqa: SIM118 (not a dict)
                    self._places[key] = path
        self.schemes = {name: scheme for name, scheme in schemes.items() if name + _MARK + _CODES in self._places}
        self.activations = {name: each for name, each in (activations or {}).items() if name in self.schemes}
        self.cache = cache
        self.changed = [key for key in self._places if _MARK not in key]

    def tensor(self, key: str, *, shape_alone: bool = False) -> Tensor:
        """What is stored under a name: a parameter in `changed`, by its full name."""
        with safe_open(self._places[key], framework="pt") as stored:
            if shape_alone:
                return torch.empty(stored.get_slice(key).get_shape(), device="meta")
            tensor: Tensor = stored.get_tensor(key)
            return tensor.clone()

    def quantized(self, linear: str, *, codes: bool = True) -> QuantTensor:
        """The codes of a linear in `schemes`, by its full name; without `codes`, their shape and all that is small."""
        found: dict[str, Any] = {
            field: self.tensor(linear + _MARK + field, shape_alone=field == _CODES and not codes)
            if linear + _MARK + field in self._places
            else None
            for field in _FIELDS
        }
        for part, kind in _PARTS.items():
            keys = {each.name: f"{linear}{_MARK}{part}.{each.name}" for each in fields(kind)}
            if stored := {field: self.tensor(key) for field, key in keys.items() if key in self._places}:
                found[part] = kind(**stored)
        return QuantTensor(**found, scheme=self.schemes[linear])

    def input_scale(self, linear: str) -> InputScale | None:
        """The fixed scale of a linear's input; None where there is none."""
        return self._fixed(linear + _MARK + _INPUT)

    def cache_scales(self, block: str) -> tuple[InputScale, InputScale] | None:
        """The fixed scales of a block's keys and values; None where there are none."""
        keys, values = self._fixed(block + _MARK + _KEYS), self._fixed(block + _MARK + _VALUES)
        return None if keys is None or values is None else (keys, values)

    def _fixed(self, prefix: str) -> InputScale | None:
        if prefix + "scale" not in self._places:
            return None
        zero = self.tensor(prefix + "zero") if prefix + "zero" in self._places else None
        moved = None
        if prefix + _SHIFT in self._places:
            moved = Moved(self.tensor(prefix + _SHIFT), self.tensor(prefix + _CHANNELS))
        return InputScale(self.tensor(prefix + "scale"), zero, moved)

    def dense(self, linear: str, shape: tuple[int, ...], *, transposed: bool) -> Tensor:
        """What a linear's codes stand for, float32, as its weight lies in the source: without padding.

        Args:
            shape: of its weight there.
            transposed: whether it lies [K, N] there.
        """
        tensor = self.quantized(linear)
        values: Tensor = load_format(tensor.scheme.format).dequantize(tensor)
        return (values[:, : shape[0]].T if transposed else values[:, : shape[1]]).contiguous()
