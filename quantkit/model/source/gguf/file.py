"""What a GGUF file says of its own layout, held against the file: lengths, types, shapes and offsets.

What a GGUF file becomes, whoever read it, and how one is refused.
"""

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


# GGUF's kinds of values: bytes of those of a fixed size, texts, arrays
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DIMENSIONS = 4
_VERSIONS = (2, 3)


def demand_lengths(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """What the metadata says is long fits into the file, and so do the tensors, each where the one before it ends, as
    llama.cpp demands it. The library would go through 2**63 elements one by one, and read whatever lies at an offset.

    Returns:
        tensor -> its shape, and the number of its type.

    Raises:
        ValueError: it does not, or nests arrays. struct.error: the file ends. MissingDependency: the `gguf` package.
    """
    with MissingDependency.unless_found("gguf", extra="compile", purpose="reading a GGUF file"):
        import gguf

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def take(form: str) -> int:
            nonlocal at
            (found,) = struct.unpack_from(f"<{form}", data, at)
            at += struct.calcsize(f"<{form}")
            return int(found)

        def skip(kind: int, count: int) -> None:
            nonlocal at
            least = _FIXED.get(kind, 8)
            if count * least > len(data) - at:
                raise ValueError(f"{count} values at byte {at} of {len(data)}")
            if kind in _FIXED:
                at += count * _FIXED[kind]
                return
            if kind != _STRING:
                raise ValueError(f"values of kind {kind} at byte {at}")
            for _ in range(count):
                length = take("Q")
                if length > len(data) - at:
                    raise ValueError(f"a text of {length} bytes at byte {at} of {len(data)}")
                at += length

        def text() -> str:
            begins = at
            skip(_STRING, 1)
            return data[begins + 8 : at].decode()

        def tensor() -> tuple[str, tuple[int, ...], int, int, int]:
            """Name, shape, type, offset and bytes."""
            name, dimensions = text(), take("I")
            if dimensions > _DIMENSIONS:
                raise ValueError(f"{name[:100]}: {dimensions} dimensions")
            shape = tuple(take("Q") for _ in range(dimensions))[::-1]
            kind, offset = take("I"), take("Q")
            if kind not in known:
                raise ValueError(f"{name[:100]}: type {kind}, which the gguf package does not know")
            block, size = known[kind]
            if 0 in shape or (shape[-1] if shape else 1) % block:
                raise ValueError(f"{name[:100]}: {list(shape)} in blocks of {block}")
            return name, shape, kind, offset, math.prod(shape) // block * size

        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        at = 4
        version = take("I")
        if version not in _VERSIONS:
            turned = int.from_bytes(version.to_bytes(4, "little"), "big")
            said = (
                f"version {turned} for machines that begin at the big end"
                if turned in _VERSIONS
                else f"version {version}"
            )
            raise ValueError(f"{said}, and {' and '.join(map(str, _VERSIONS))} are read")
        tensors, fields = take("Q"), take("Q")
        if max(tensors, fields) * 8 > len(data):
            raise ValueError(f"{tensors} tensors and {fields} fields in {len(data)} bytes")
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        for _ in range(fields):
            key, kind = text(), take("I")
            if kind == _ARRAY:
                kind = take("I")
                skip(kind, take("Q"))
            elif key == gguf.Keys.General.ALIGNMENT:
                alignment = take("I")
                if kind != _UINT32 or not alignment or alignment & (alignment - 1):
                    raise ValueError(f"an alignment of {alignment}")
            else:
                skip(kind, 1)
        known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        found = [tensor() for _ in range(tensors)]
        begins, wanted = -(-at // alignment) * alignment, 0
        for name, _, _, offset, size in found:
            if offset != wanted or begins + offset + size > len(data):
                where = f"{size} bytes at {offset}, where {wanted} is next and the data end at {len(data) - begins}"
                raise ValueError(f"{name[:100]}: {where}")
            wanted += -(-size // alignment) * alignment
        return {name: (shape, kind) for name, shape, kind, _, _ in found}


def fields(path: Path) -> dict[str, Any]:
    """A file's metadata, without the library: its reader takes seconds where a vocabulary is large.

    Raises:
        InputError: `gguf-damaged`. MissingDependency: the `gguf` package.
    """
    where = str(path)
    with reading(lambda said: damaged(where, said)):
        demand_lengths(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 8  # behind magic and version

            def take(form: str) -> tuple[Any, ...]:
                nonlocal at
                found = struct.unpack_from(f"<{form}", data, at)
                at += struct.calcsize(f"<{form}")
                return found

            def text() -> str:
                (length,) = take("Q")
                return bytes(*take(f"{length}s")).decode()

            def value(kind: int) -> Any:
                if kind == _ARRAY:
                    inner, count = take("IQ")
                    return [text() for _ in range(count)] if inner == _STRING else [*take(f"{count}{_FORMS[inner]}")]
                return text() if kind == _STRING else take(_FORMS[kind])[0]

            _, count = take("QQ")
            return {text(): value(*take("I")) for _ in range(count)}


def tensors(path: Path) -> list[Any]:
    """A file's tensors as the library's reader has them, which goes through arrays of metadata element by element: here
    they are stepped over, so that a vocabulary takes no seconds. `demand_lengths` was satisfied by the file.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != _ARRAY:
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            inner, count = struct.unpack_from("<IQ", self.data, orig_offs)
            at = orig_offs + struct.calcsize("<IQ")
            if inner == _STRING:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", self.data, at)[0]
            else:
                at += count * _FIXED[inner]
            return at - orig_offs, [self._get(orig_offs, np.uint32)], [], [gguf.GGUFValueType.ARRAY]

    return [*Reader(path).tensors]


@dataclass(frozen=True)
class Read:
    """A model out of a file.

    Args:
        config: config.json.
        shapes: parameter -> its shape.
        tensors: parameter -> the file's tensor.
        values: tensor of the file and its dequantized values -> the parameter's.
    """

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, str]
    values: Callable[[str, NDArray[np.float32]], torch.Tensor]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor of the package's reader, which counts the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def short(value: float) -> float:
    """A float32's shortest decimal: GGUF's 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def special_tokens(meta: Mapping[str, Any]) -> dict[str, int | None]:
    """config.json's key of each -> its number, None where a file says none."""
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: meta.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in named.items()}


def refused(where: str, value: str, rule: str) -> InputError:
    """A sound file of a model that is not converted exactly: `gguf-architecture`."""
    remedy = "open what it was made from: a Hugging Face folder (./folder), or hf:org/name"
    return InputError("gguf-architecture", where=where, value=value, rule=rule, remedy=remedy)


def damaged(where: str, value: str, rule: str = "") -> InputError:
    """A file that contradicts itself: `gguf-damaged`."""
    return InputError("gguf-damaged", where=where, value=value, rule=rule, remedy="fetch or install it again")
