"""Check of a GGUF file's own layout: lengths, types, shapes and offsets."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, MissingDependency, reading
from quantkit.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# kinds of values: those of a fixed size with their `struct` format; texts; arrays
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FIXED = {kind: struct.calcsize(f"<{form}") for kind, form in _FORMS.items()}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DIMENSIONS = 4
_VERSIONS = (2, 3)


class _Cursor:
    """Reader of a mapped file from a position on."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> tuple[Any, ...]:
        ends = self.at + struct.calcsize(f"<{form}")
        if ends > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, within its metadata")
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at = ends
        return values

    def number(self, form: str) -> int:
        return int(self.take(form)[0])

    def skip(self, kind: int, count: int) -> None:
        """Step over values; ValueError if the file is shorter."""
        if count * _FIXED.get(kind, 8) > len(self.data) - self.at:
            raise ValueError(f"{count} values at byte {self.at} of {len(self.data)}")
        if kind in _FIXED:
            self.at += count * _FIXED[kind]
            return
        if kind != _STRING:
            raise ValueError(f"values of kind {kind} at byte {self.at}")
        for _ in range(count):
            length = self.number("Q")
            if length > len(self.data) - self.at:
                raise ValueError(f"a text of {length} bytes at byte {self.at} of {len(self.data)}")
            self.at += length

    def text(self) -> str:
        begins = self.at
        self.skip(_STRING, 1)
        return self.data[begins + 8 : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            inner, count = self.take("IQ")
            return [self.text() for _ in range(count)] if inner == _STRING else [*self.take(f"{count}{_FORMS[inner]}")]
        return self.text() if kind == _STRING else self.take(_FORMS[kind])[0]


def demand_lengths(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Check all stated lengths against the file; each tensor must begin at the end of the previous one, as in
    llama.cpp.

    The library would iterate over 2**63 elements one by one, and read at any offset.

    Returns:
        tensor -> its shape, and the number of its type.

    Raises:
        ValueError: if they do not fit, or arrays are nested.
        struct.error: at the end of the file.
        MissingDependency: without the `gguf` package.
    """
    with MissingDependency.unless_found("gguf", extra="compile", purpose="reading a GGUF file"):
        import gguf

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        cursor = _Cursor(data, 4)
        if (version := cursor.number("I")) not in _VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big")
            big = f"version {turned} for machines that begin at the big end"
            read = " and ".join(map(str, _VERSIONS))
            raise ValueError(f"{big if turned in _VERSIONS else f'version {version}'}, and {read} are read")
        tensors, fields = cursor.take("QQ")
        if max(tensors, fields) * 8 > len(data):
            raise ValueError(f"{tensors} tensors and {fields} fields in {len(data)} bytes")
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        for _ in range(fields):
            key, kind = cursor.text(), cursor.number("I")
            if kind == _ARRAY:
                kind = cursor.number("I")
                cursor.skip(kind, cursor.number("Q"))
            elif key == gguf.Keys.General.ALIGNMENT:
                alignment = cursor.number("I")
                if kind != _UINT32 or not alignment or alignment & (alignment - 1):
                    raise ValueError(f"an alignment of {alignment}")
            else:
                cursor.skip(kind, 1)
        known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        listed = [_tensor(cursor, known) for _ in range(tensors)]
        begins, wanted = -(-cursor.at // alignment) * alignment, 0
        for name, _, _, offset, size in listed:
            if offset != wanted or begins + offset + size > len(data):
                where = f"{size} bytes at {offset}, where {wanted} is next and the data end at {len(data) - begins}"
                raise ValueError(f"{name[:100]}: {where}")
            wanted += -(-size // alignment) * alignment
        return {name: (shape, kind) for name, shape, kind, _, _ in listed}


def _tensor(cursor: _Cursor, known: Mapping[int, tuple[int, int]]) -> tuple[str, tuple[int, ...], int, int, int]:
    """Read name, shape, type, offset and bytes; `known` maps a type to elements and bytes of a block."""
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > _DIMENSIONS:
        raise ValueError(f"{name[:100]}: {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    kind, offset = cursor.take("IQ")
    if kind not in known:
        raise ValueError(f"{name[:100]}: type {kind}, which the gguf package does not know")
    block, size = known[kind]
    if 0 in shape or (shape[-1] if shape else 1) % block:
        raise ValueError(f"{name[:100]}: {list(shape)} in blocks of {block}")
    return name, shape, kind, offset, math.prod(shape) // block * size


def fields(path: Path) -> dict[str, Any]:
    """Read a file's metadata without the library, whose reader takes seconds. Raises `gguf-damaged`."""
    with reading(lambda problem: damaged(str(path), problem)):
        demand_lengths(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, 8)  # behind magic and version
            _, count = cursor.take("QQ")
            return {cursor.text(): cursor.value(cursor.number("I")) for _ in range(count)}


def tensors(path: Path) -> list[Any]:
    """List a file's tensors as the library's reader does, but skip metadata arrays, which it reads element by element.

    The file must have passed `demand_lengths`.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != _ARRAY:
                parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return parts
            cursor = _Cursor(self.data, orig_offs)
            cursor.skip(*cursor.take("IQ"))
            return cursor.at - orig_offs, [self._get(orig_offs, np.uint32)], [], [gguf.GGUFValueType.ARRAY]

    return [*Reader(path).tensors]


@dataclass(frozen=True)
class Read:
    """A model from a file.

    Args:
        config: contents of config.json.
        shapes: parameter -> shape.
        tensors: parameter -> tensor of the file.
        values: function of (name of the file's tensor, dequantized values) to the values of a parameter.
    """

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, str]
    values: Callable[[str, NDArray[np.float32]], torch.Tensor]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of the package's reader, which lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def short(value: float) -> float:
    """Return a float32's shortest decimal: GGUF's 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def special_tokens(meta: Mapping[str, Any]) -> dict[str, int | None]:
    """Map each key in config.json to its token number; None if the file has none."""
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: meta.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in named.items()}


def refused(where: str, value: str, rule: str) -> InputError:
    """Make the error for a sound file without an exact conversion: `gguf-architecture`."""
    remedy = "open what it was made from: a Hugging Face folder (./folder), or hf:org/name"
    return InputError("gguf-architecture", where, value, rule, remedy)


def damaged(where: str, value: str, rule: str = "") -> InputError:
    """Make the error for a file that contradicts itself: `gguf-damaged`."""
    return InputError("gguf-damaged", where, value, rule, "fetch or install it again")
