"""Importance matrices as llama.cpp has them: of every linear, how large each of its inputs is on the mean.

    importance[k] = sum over tokens of x[k]^2 / tokens

That is the diagonal of the Hessian of a linear's squared error, up to a factor: what an error of a weight costs by the
input that it multiplies. A file is a GGUF of type `imatrix`: of each tensor `NAME.in_sum2` [1, K] and `NAME.counts`
[1, 1], float32 (`tools/imatrix/imatrix.cpp`); files of before, `.dat`, hold name, calls, and means times calls
of each. Names are those of GGUF's tensors: `blk.0.attn_q.weight`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.errors import InputError, MissingDependency, reading
from quantkit.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quantkit.model.streaming.stream import StreamedModel

_KIND, _SUMS, _COUNTS = "imatrix", ".in_sum2", ".counts"
_LEGACY = ".dat"
# a head; one that is tied to the table may be called as that is
_HEADS = ("output.weight", "token_embd.weight")


@dataclass(frozen=True)
class ImportanceMatrix:
    """What a file holds.

    Args:
        squares: tensor -> [K] float32, the mean square of each input.
        tokens: that were seen.
        length: of a sequence.
        datasets: what they are from, for the reader.
    """

    squares: Mapping[str, Tensor]
    tokens: int
    length: int
    datasets: Sequence[str] = ()

    def of_linears(self, linears: Mapping[str, int], where: str) -> dict[str, Tensor]:
        """Linear -> [K] float32, of those that the file speaks of.

        Args:
            linears: full name -> K.
            where: the file, for errors.

        Raises:
            InputError: `imatrix-foreign`: it is of no linear of the model, or of other widths.
        """
        found = {}
        for linear, columns in linears.items():
            name = tensor_name(linear)
            if name not in self.squares:
                continue
            if len(self.squares[name]) != columns:
                value = f"{len(self.squares[name])} inputs of {name}, which has {columns}"
                raise _foreign(where, value)
            found[linear] = self.squares[name].float()
        if linears and not found:
            value = f"nothing on {tensor_name(next(iter(linears)))}; it speaks of {', '.join(list(self.squares)[:2])} …"
            raise _foreign(where, value)
        return found

    def demand_of(self, linears: Mapping[str, int], where: str) -> None:
        """It is of a model whose blocks have these linears, and of no larger one.

        Raises:
            InputError: `imatrix-foreign`.
        """
        self.of_linears(linears, where)
        known = {tensor_name(linear) for linear in linears}
        other = next((name for name in self.squares if name.startswith("blk.") and name not in known), None)
        if other is not None:
            raise _foreign(where, f"it speaks of {other}, which the model has not")

    def of_head(self, columns: int, where: str) -> Tensor | None:
        """[K = columns] float32 of the head's inputs; None where the file does not speak of it, as llama-imatrix's.

        Raises:
            InputError: `imatrix-foreign`: it is of another width.
        """
        name = next((name for name in _HEADS if name in self.squares), None)
        if name is None:
            return None
        if len(self.squares[name]) != columns:
            raise _foreign(where, f"{len(self.squares[name])} inputs of {name}, which has {columns}")
        return self.squares[name].float()


def _foreign(where: str, value: str) -> InputError:
    return InputError(
        "imatrix-foreign",
        where=where,
        value=value,
        rule="an importance matrix is of the model that it is used on",
        remedy="quantkit imatrix MODEL makes the model's own",
    )


def tensor_name(linear: str) -> str:
    """What GGUF calls the weight of a linear: `blk.0.attn_q.weight`; else the linear's own name."""
    with MissingDependency.unless_found("gguf", extra="compile", purpose="an importance matrix"):
        import gguf

    number = next((int(part) for part in linear.split(".") if part.isdecimal()), 0)
    # all that we write call their linears alike
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, number + 1)
    return names.get_name(f"{linear}.weight", try_suffixes=(".weight",)) or f"{linear}.weight"


@dataclass
class _Seen:
    """Sums of squares of what linears are given."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def watch(self, block: nn.Module, name: str) -> None:
        """The linears of a block of that name, as it runs."""
        from quantkit.model.structure.traced import is_linear

        for inner, module in block.named_modules():
            if is_linear(module):
                module.register_forward_pre_hook(partial(self._note, f"{name}.{inner}"))

    def _note(self, linear: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        self.add(linear, given[0])

    def add(self, linear: str, inputs: Tensor) -> None:
        """One linear's inputs [..., K]."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = rows.double().square().sum(dim=0).cpu()
        self.sums[linear] = self.sums[linear] + squares if linear in self.sums else squares
        self.counts[linear] = self.counts.get(linear, 0) + len(rows)


def collected(stream: StreamedModel, ids: Tensor, datasets: Sequence[str] = ()) -> ImportanceMatrix:
    """The importance matrix of a model on token ids [samples, tokens]: of its blocks' linears and its head."""
    seen = _Seen()
    with torch.no_grad():
        calls = stream.begin(ids, 4)
        hidden, before = calls.hidden, -1
        for stage, index in enumerate(stream.visits):
            if index != before:  # a block that is called again stays, and goes on being watched
                block = stream.load(index)
                seen.watch(block, stream.block_names[index])
            hidden, before = calls.pass_on(stage, calls.run_all(block, stage, hidden)), index
        calls.hidden = hidden
        if stream.head is not None:
            answers = stream.answers_of(calls, ids)
            for index in range(len(ids)):
                seen.add(stream.head, answers.given(stream.head, index))
    squares = {tensor_name(name): (total / seen.counts[name]).float() for name, total in seen.sums.items()}
    return ImportanceMatrix(squares, ids.numel(), int(ids.shape[1]), datasets)


def write(matrix: ImportanceMatrix, path: Path) -> None:
    """Write a file that llama.cpp reads: a GGUF, or where the name ends so a `.dat`.

    Raises:
        InputError: `not-writable`. Stopped: `disk-full`.
    """
    from quantkit.model.source.weights import write_atomic

    write_atomic(path, [_legacy(matrix) if path.suffix == _LEGACY else _gguf(matrix)])


def _gguf(matrix: ImportanceMatrix) -> bytes:
    import tempfile

    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "imatrix")
        writer = gguf.GGUFWriter(path, "")  # it is of no architecture
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
    said = (matrix.datasets[0] if matrix.datasets else "unknown").encode()
    return b"".join([*parts, struct.pack("<ii", calls, len(said)), said])


def read(path: Path) -> ImportanceMatrix:
    """The importance matrix in a file, of either kind.

    Raises:
        InputError: `imatrix-damaged`; `file-missing`. MissingDependency: gguf.
    """
    if not path.is_file():
        raise InputError("file-missing", where=str(path), value="no such file", remedy="check the path")

    def damaged(said: str) -> InputError:
        return InputError(
            "imatrix-damaged",
            where=str(path),
            value=said,
            rule="a file of llama.cpp's llama-imatrix, or of quantkit imatrix",
            remedy="make it again: quantkit imatrix MODEL",
        )

    with reading(damaged):
        raw = limits.read(path, limits.DATA)
        found = _read_gguf(path) if raw[:4] == b"GGUF" else _read_legacy(raw)
        for name, squares in found.squares.items():
            if not bool(torch.isfinite(squares).all()) or bool((squares < 0).any()):
                raise ValueError(f"{name}: not all of it is a mean of squares")
        return found


def _read_gguf(path: Path) -> ImportanceMatrix:
    import gguf
    import numpy as np

    from quantkit.model.source.gguf import demand_lengths

    demand_lengths(path)
    reader = gguf.GGUFReader(path)
    stated = {key: value.contents() for key, value in reader.fields.items()}
    if stated.get("general.type") != _KIND:
        raise ValueError(f"a GGUF of type {stated.get('general.type')}")
    tensors = {each.name: np.array(each.data, np.float32) for each in reader.tensors}
    squares, most = {}, 0.0
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        own = name.removesuffix(_SUMS)
        counts = tensors[f"{own}{_COUNTS}"].reshape(-1)
        if len(counts) != 1 or not counts[0] > 0:  # several: of experts, one by one
            continue
        squares[own] = torch.from_numpy(sums.reshape(-1) / counts[0])
        most = max(most, float(counts[0]))
    if not squares:
        raise ValueError("it says nothing on any tensor")
    length = int(stated.get("imatrix.chunk_size", 0)) or 1
    return ImportanceMatrix(squares, int(most), length, [str(each) for each in stated.get("imatrix.datasets", [])])


def _read_legacy(raw: bytes) -> ImportanceMatrix:
    import numpy as np

    at = 0

    def number() -> int:
        nonlocal at
        (found,) = struct.unpack_from("<i", raw, at)
        at += 4
        return int(found)

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
