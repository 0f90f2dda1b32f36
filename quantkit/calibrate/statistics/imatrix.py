"""Importance matrices in llama.cpp's form: the mean square of each input of every linear.

    importance[k] = sum over tokens of x[k]^2 / tokens

This is the diagonal of the Hessian of a linear's squared error, up to a factor: the cost of an error in a weight of
that
input. A file is a GGUF of type `imatrix`: for each tensor `NAME.in_sum2` [1, K] and `NAME.counts` [1, 1], float32
(`tools/imatrix/imatrix.cpp`); older files, `.dat`, have name, calls, and means times calls of each. Names are those of
GGUF's tensors: `blk.0.attn_q.weight`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.errors import InputError, MissingDependency, absent, reading
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.model.streaming.stream import StreamedModel

_KIND, _SUMS, _COUNTS = "imatrix", ".in_sum2", ".counts"
_LEGACY = ".dat"
# names of the head; a tied one may have the table's name
_HEADS = ("output.weight", "token_embd.weight")


@dataclass(frozen=True)
class ImportanceMatrix:
    """Contents of a file.

    Args:
        squares: tensor -> mean square of each input, [K] float32.
        tokens: number of tokens.
        length: tokens of a sequence.
        datasets: their source, for the reader.
    """

    squares: Mapping[str, Tensor]
    tokens: int
    length: int
    datasets: Sequence[str] = ()

    def of_linears(self, linears: Mapping[str, int], where: str) -> dict[str, Tensor]:
        """Return linear -> [K] float32, for linears in the file.

        Args:
            linears: full name -> K.
            where: the file, for errors.

        Raises:
            InputError: `imatrix-foreign` if it has no linear of the model, or other widths.
        """
        stated = {}
        for linear, columns in linears.items():
            squares = self._of(tensor_names(linear), columns, where)
            if squares is not None:
                stated[linear] = squares
        if linears and not stated:
            first, spoken = tensor_names(next(iter(linears)))[0], ", ".join(list(self.squares)[:2])
            raise _foreign(where, f"no values for {first}; it has {spoken} …")
        return stated

    def _of(self, names: Sequence[str], columns: int, where: str) -> Tensor | None:
        name = next((name for name in names if name in self.squares), None)
        if name is None:
            return None
        if len(self.squares[name]) != columns:
            raise _foreign(where, f"{len(self.squares[name])} inputs of {name}, which has {columns}")
        return self.squares[name].float()

    def demand_of(self, linears: Mapping[str, int], where: str) -> None:
        """Refuse a matrix of another model: it must have linears of every block, and of no other.

        Raises:
            InputError: `imatrix-foreign`.
        """
        spoken = {_block(linear) for linear in self.of_linears(linears, where)}
        silent = next((linear for linear in linears if _block(linear) not in spoken), None)
        if silent is not None:
            raise _foreign(where, f"no values for {tensor_names(silent)[0]}, nor for the rest of {_block(silent)}")
        known = {name for linear in linears for name in tensor_names(linear)}
        other = next((name for name in self.squares if name.startswith("blk.") and name not in known), None)
        if other is not None:
            raise _foreign(where, f"it has {other}, which is not in the model")

    def of_head(self, columns: int, where: str) -> Tensor | None:
        """Return [K = columns] float32 for the head's inputs; None if the file has none, as llama-imatrix's.

        Raises:
            InputError: `imatrix-foreign` for another width.
        """
        return self._of(_HEADS, columns, where)


def _foreign(where: str, value: str) -> InputError:
    rule = "an importance matrix must come from the same model"
    remedy = "make one with quantkit imatrix MODEL"
    return InputError("imatrix-foreign", where, value, rule, remedy)


def tensor_name(linear: str, model_type: str = "llama") -> str:
    """Return GGUF's name for the weight of a linear in a model of this type in transformers: `blk.0.attn_q.weight`.

    Raises:
        InputError: `imatrix-unnamed`.
        MissingDependency: without gguf.
    """
    kind = model_type.removesuffix("_text")
    names = _names(linear, _CALLED.get(kind, kind.replace("_", "")))
    if not names:
        value = f"no tensor of llama.cpp's in a model of type {model_type}"
        rule = "an importance matrix names tensors as a GGUF file of the model does"
        remedy = "leave the matrix out: rtn: {range: importance} takes the recipe's own calibration"
        raise InputError("imatrix-unnamed", linear, value, rule, remedy)
    return names[0]


def tensor_names(linear: str) -> tuple[str, ...]:
    """Return GGUF's possible names for the weight of a linear, in any model; its own name if there is none."""
    return _names(linear, "") or (f"{linear}.weight",)


# model type in transformers -> architecture in llama.cpp, if they differ
_CALLED = {"mistral": "llama", "mixtral": "llama", "gpt_bigcode": "starcoder"}


def _names(linear: str, architecture: str) -> tuple[str, ...]:
    """Return an architecture's tensors for a linear's weight; "" means any architecture, whose names may differ."""
    number = next((part for part in linear.split(".") if part.isdecimal()), "0")
    names = _names_in_first(re.sub(rf"\b{number}\b", "0", linear, count=1), architecture)
    return tuple(name.replace("blk.0.", f"blk.{number}.") for name in names)


@lru_cache(maxsize=4096)
def _names_in_first(linear: str, architecture: str) -> tuple[str, ...]:
    names = (known.get_name(f"{linear}.weight", try_suffixes=(".weight",)) for known in _maps(architecture))
    return tuple(dict.fromkeys(name for name in names if name))


@cache
def _maps(architecture: str) -> tuple[Any, ...]:
    with MissingDependency.unless_found("gguf", extra="compile", purpose="an importance matrix"):
        import gguf
    # Llama's first, the most common names
    known = sorted(gguf.MODEL_ARCH_NAMES.items(), key=lambda item: item[1] != "llama")
    chosen = [arch for arch, name in known if architecture in ("", name)] or [gguf.MODEL_ARCH.LLAMA]

    class Names(gguf.TensorNameMap):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, arch: Any) -> None:
            # copied, since gguf 0.19 writes an architecture's own names into the class's table
            self.block_mappings_cfg = dict(gguf.TensorNameMap.block_mappings_cfg)
            super().__init__(arch, 1)

    return tuple(map(Names, chosen))


def _block(linear: str) -> str:
    """Return the block of a linear: `model.layers.0` for `model.layers.0.mlp.up_proj`."""
    match = re.match(r".*?\.\d+(?=\.)", linear)
    return match[0] if match else linear


def collected(stream: StreamedModel, ids: Tensor, datasets: Sequence[str] = ()) -> ImportanceMatrix:
    """Return a model's importance matrix on token ids [samples, tokens], for its blocks' linears and its head.

    Raises:
        InputError: `imatrix-unnamed`, before any work.
    """
    from quantkit.model.structure.traced import is_linear

    kind = str(stream.source.config["model_type"])
    blocks = tuple(f"{name}." for name in stream.block_names)
    for name, module in stream.skeleton.named_modules():
        if name.startswith(blocks) and is_linear(module):
            tensor_name(name, kind)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(linear: str, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = rows.double().square().sum(dim=0).cpu()
        sums[linear] = sums[linear] + squares if linear in sums else squares
        counts[linear] = counts.get(linear, 0) + len(rows)

    def note(linear: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        add(linear, inputs[0])

    with torch.no_grad():
        calls = stream.begin(ids, 4)
        hidden, before = calls.hidden, -1
        for stage, index in enumerate(stream.visits):
            if index != before:  # a block that is called again stays loaded, with its hooks
                block = stream.load(index)
                for inner, module in block.named_modules():
                    if is_linear(module):
                        module.register_forward_pre_hook(partial(note, f"{stream.block_names[index]}.{inner}"))
            hidden, before = calls.pass_on(stage, calls.run_all(block, stage, hidden)), index
        calls.hidden = hidden
        if stream.head is not None:
            answers = stream.answers_of(calls, ids)
            for index in range(len(ids)):
                add(stream.head, answers.given(stream.head, index))
    squares = {tensor_name(name, kind): (total / counts[name]).float() for name, total in sums.items()}
    return ImportanceMatrix(squares, ids.numel(), int(ids.shape[1]), datasets)


def write(matrix: ImportanceMatrix, path: Path) -> None:
    """Write a file for llama.cpp: a GGUF, or a `.dat` by its name.

    Raises:
        InputError: `not-writable`.
        Stopped: `disk-full`.
    """
    from quantkit.model.source.weights import write_atomic

    write_atomic(path, [_legacy(matrix) if path.suffix == _LEGACY else _gguf(matrix)])


def _gguf(matrix: ImportanceMatrix) -> bytes:
    import tempfile

    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "imatrix")
        writer = gguf.GGUFWriter(path, "")  # no architecture
        writer.add_type(_KIND)
        writer.add_array("imatrix.datasets", list(matrix.datasets) or ["unknown"])
        writer.add_uint32("imatrix.chunk_count", -(-matrix.tokens // matrix.length))
        writer.add_uint32("imatrix.chunk_size", matrix.length)
        count = np.full((1, 1), float(matrix.tokens), np.float32)
        for name, squares in sorted(matrix.squares.items()):
            writer.add_tensor(f"{name}{_SUMS}", (squares.double() * matrix.tokens).float().reshape(1, -1).numpy())
            writer.add_tensor(f"{name}{_COUNTS}", count)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return limits.read(path, limits.DATA)


def _legacy(matrix: ImportanceMatrix) -> bytes:
    calls = -(-matrix.tokens // matrix.length)
    parts = [struct.pack("<i", len(matrix.squares))]
    for name, squares in sorted(matrix.squares.items()):
        raw = name.encode()
        parts += [struct.pack("<i", len(raw)), raw, struct.pack("<ii", calls, len(squares))]
        parts.append((squares * calls).numpy().astype("<f4").tobytes())
    dataset = (matrix.datasets[0] if matrix.datasets else "unknown").encode()
    return b"".join([*parts, struct.pack("<ii", calls, len(dataset)), dataset])


def read(path: Path) -> ImportanceMatrix:
    """Read an importance matrix of either form.

    Raises:
        InputError: `imatrix-damaged`; `file-missing`.
        MissingDependency: without gguf.
    """
    if not path.is_file():
        raise absent(path)

    def damaged(reason: str) -> InputError:
        rule = "a file of llama.cpp's llama-imatrix, or of quantkit imatrix"
        return InputError("imatrix-damaged", str(path), reason, rule, "make it again: quantkit imatrix MODEL")

    with reading(damaged):
        raw = limits.read(path, limits.DATA)
        matrix = _read_gguf(path) if raw[:4] == b"GGUF" else _read_legacy(raw)
        for name, squares in matrix.squares.items():
            if not bool(torch.isfinite(squares).all()) or bool((squares < 0).any()):
                raise ValueError(f"{name}: some values are no means of squares")
        return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    import gguf
    import numpy as np

    from quantkit.model.source.gguf import demand_lengths

    demand_lengths(path)
    reader = gguf.GGUFReader(path)
    stated = {key: value.contents() for key, value in reader.fields.items()}
    if stated.get("general.type") != _KIND:
        raise ValueError(f"a GGUF of type {stated.get('general.type')}")
    tensors = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    squares, most = {}, 0.0
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        own = name.removesuffix(_SUMS)
        counts = tensors[f"{own}{_COUNTS}"].reshape(-1)
        if len(counts) != 1 or not (counts.any() or sums.any()):  # experts one by one; tensors without tokens
            continue
        if not 0 < counts[0] < math.inf:
            raise ValueError(f"{own}: sums of {counts[0]:g} tokens")
        squares[own] = torch.from_numpy(sums.reshape(-1) / counts[0])
        most = max(most, float(counts[0]))
    if not squares:
        raise ValueError("it has no values for any tensor")
    length = int(stated.get("imatrix.chunk_size", 0)) or 1
    return ImportanceMatrix(squares, int(most), length, [str(name) for name in stated.get("imatrix.datasets", [])])


def _read_legacy(raw: bytes) -> ImportanceMatrix:
    import numpy as np

    at = 0

    def number() -> int:
        nonlocal at
        (value,) = struct.unpack_from("<i", raw, at)
        at += 4
        return int(value)

    def take(length: int) -> bytes:
        nonlocal at
        if not 0 <= length <= len(raw) - at:
            raise ValueError(f"{length} bytes at byte {at} of {len(raw)}")
        at += length
        return raw[at - length : at]

    count, squares, calls = number(), {}, 1
    if not 0 < count <= len(raw) // 12:
        raise ValueError(f"{count} tensors in {len(raw)} bytes")
    for _ in range(count):
        name = take(number()).decode()
        calls = max(number(), 1)
        squares[name] = torch.from_numpy(np.frombuffer(take(4 * number()), "<f4") / calls).float()
    return ImportanceMatrix(squares, calls, 1, [])
