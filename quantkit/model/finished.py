"""What the passes have decided, block by block on disk: codes of quantized linears, and whatever a fold changed.

What is not here is as in the source. Exporters read from this and from the source, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.formats import QuantTensor
from quantkit.recipe import WeightScheme

_CODES, _SCALE, _ZERO = "::codes", "::scale", "::zero"


def save(path: Path, tensors: Mapping[str, QuantTensor], changed: Mapping[str, Tensor]) -> None:
    """Write one block's results.

    Args:
        path: the file.
        tensors: linear's full name -> its codes.
        changed: parameter's full name -> its new value, in the dtype it will be stored in.
    """
    flat: dict[str, Tensor] = {name: value.contiguous() for name, value in changed.items()}
    for name, tensor in tensors.items():
        flat[name + _CODES] = tensor.codes.contiguous()
        flat[name + _SCALE] = tensor.scale.contiguous()
        if tensor.zero is not None:
            flat[name + _ZERO] = tensor.zero.contiguous()
    save_file(flat, path)


class Finished:
    """All blocks' results, read lazily.

    Args:
        files: what `save` wrote.
        schemes: linear's full name -> scheme.
    """

    def __init__(self, files: Iterable[Path], schemes: Mapping[str, WeightScheme]) -> None:
        self._places: dict[str, Path] = {}
        for path in files:
            with safe_open(path, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118 (not a dict)
                    self._places[key] = path
        self.schemes = {name: scheme for name, scheme in schemes.items() if name + _CODES in self._places}
        self.changed = [key for key in self._places if not key.endswith((_CODES, _SCALE, _ZERO))]

    def _get(self, key: str) -> Tensor:
        with safe_open(self._places[key], framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(key)
            return tensor.clone()

    def quantized(self, linear: str) -> QuantTensor:
        """The codes of a linear in `schemes`, by its full name."""
        zero = self._get(linear + _ZERO) if linear + _ZERO in self._places else None
        return QuantTensor(self._get(linear + _CODES), self._get(linear + _SCALE), zero, self.schemes[linear])

    def tensor(self, name: str) -> Tensor:
        """A parameter in `changed`, by its full name."""
        return self._get(name)
