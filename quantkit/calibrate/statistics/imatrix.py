"""Importance matrices as llama.cpp has them: of every linear, how large each of its inputs is on the mean.

    importance[k] = sum over tokens of x[k]^2 / tokens

That is the diagonal of the Hessian of a linear's squared error, up to a factor: what an error of a weight costs by the
input that it multiplies. A file is a GGUF of type `imatrix`: of each tensor `NAME.in_sum2` [1, K] and `NAME.counts`
[1, 1], float32 (`tools/imatrix/imatrix.cpp`); files of before, `.dat`, hold name, calls, and means times calls
of each. Names are those of GGUF's tensors: `blk.0.attn_q.weight`.
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
        stated = {}
        for linear, columns in linears.items():
            squares = self._of(tensor_names(linear), columns, where)
            if squares is not None:
                stated[linear] = squares
        if linears and not stated:
            first, spoken = tensor_names(next(iter(linears)))[0], ", ".join(list(self.squares)[:2])
            raise _foreign(where, f"nothing on {first}; it speaks of {spoken} …")
        return stated

    def _of(self, names: Sequence[str], columns: int, where: str) -> Tensor | None:
        name = next((name for name in names if name in self.squares), None)
        if name is None:
            return None
        if len(self.squares[name]) != columns:
            raise _foreign(where, f"{len(self.squares[name])} inputs of {name}, which has {columns}")
        return self.squares[name].float()

    def demand_of(self, linears: Mapping[str, int], where: str) -> None:
        """It is of a model whose blocks have these linears: it speaks of each block, and of no other.

        Raises:
            InputError: `imatrix-foreign`.
        """
        spoken = {_block(linear) for linear in self.of_linears(linears, where)}
        silent = next((linear for linear in linears if _block(linear) not in spoken), None)
        if silent is not None:
            raise _foreign(where, f"nothing on {tensor_names(silent)[0]}, nor on what else is in {_block(silent)}")
        known = {name for linear in linears for name in tensor_names(linear)}
        other = next((name for name in self.squares if name.startswith("blk.") and name not in known), None)
        if other is not None:
            raise _foreign(where, f"it speaks of {other}, which the model has not")

    def of_head(self, columns: int, where: str) -> Tensor | None:
        """[K = columns] float32 of the head's inputs; None where the file does not speak of it, as llama-imatrix's.

        Raises:
            InputError: `imatrix-foreign`: it is of another width.
        """
        return self._of(_HEADS, columns, where)


def _foreign(where: str, value: str) -> InputError:
    rule = "an importance matrix is of the model that it is used on"
    remedy = "quantkit imatrix MODEL makes the model's own"
    return InputError("imatrix-foreign", where, value, rule, remedy)


def tensor_name(linear: str, model_type: str = "llama") -> str:
    """Return what GGUF calls the weight of a linear in a model of a type of transformers': `blk.0.attn_q.weight`.

    Raises:
        InputError: `imatrix-unnamed`. MissingDependency: gguf.
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
    """Return what GGUF may call the weight of a linear, in whatever model; its own name where it has no word for it."""
    return _names(linear, "") or (f"{linear}.weight",)


# what transformers calls otherwise
_CALLED = {"mistral": "llama", "mixtral": "llama", "gpt_bigcode": "starcoder"}


def _names(linear: str, architecture: str) -> tuple[str, ...]:
    """The tensors of an architecture, "" of any, that a linear's weight is: as many as architectures disagree on."""
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
    # Llama's first, which most are called like
    known = sorted(gguf.MODEL_ARCH_NAMES.items(), key=lambda each: each[1] != "llama")
    chosen = [arch for arch, name in known if architecture in ("", name)] or [gguf.MODEL_ARCH.LLAMA]

    class Names(gguf.TensorNameMap):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, arch: Any) -> None:
            # gguf 0.19 writes an architecture's own names into the class's
            self.block_mappings_cfg = dict(gguf.TensorNameMap.block_mappings_cfg)
            super().__init__(arch, 1)

    return tuple(map(Names, chosen))


def _block(linear: str) -> str:
    """`model.layers.0` of `model.layers.0.mlp.up_proj`."""
    match = re.match(r".*?\.\d+(?=\.)", linear)
    return match[0] if match else linear


def collected(stream: StreamedModel, ids: Tensor, datasets: Sequence[str] = ()) -> ImportanceMatrix:
    """Return the importance matrix of a model on token ids [samples, tokens]: of its blocks' linears and its head.

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
            if index != before:  # a block that is called again stays, and goes on being watched
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
    """Return the importance matrix in a file, of either kind.

    Raises:
        InputError: `imatrix-damaged`; `file-missing`. MissingDependency: gguf.
    """
    if not path.is_file():
        raise absent(path)

    def damaged(said: str) -> InputError:
        rule = "a file of llama.cpp's llama-imatrix, or of quantkit imatrix"
        return InputError("imatrix-damaged", str(path), said, rule, "make it again: quantkit imatrix MODEL")

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
        if len(counts) != 1 or not (counts.any() or sums.any()):  # of experts, one by one; of what was never reached
            continue
        if not 0 < counts[0] < math.inf:
            raise ValueError(f"{own}: sums of {counts[0]:g} tokens")
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
