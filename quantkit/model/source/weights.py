"""Strict, lazy reading of safetensors files, and a streaming writer.

A file is `<u64 n, little-endian><n bytes of JSON><data>`; the JSON maps a tensor's name to its dtype, shape and
`data_offsets` [start, end) in the data; see https://github.com/huggingface/safetensors#format.
A header is not trusted, so all of it is checked before data are read: for every tensor
`bits(dtype) x product(shape) = 8 (end - start)`, and the tensors, sorted by start, cover the data without overlap, gap
or rest.
Memory: `Weights.read` and `write_safetensors` hold one tensor, in memory of its own (no map of the whole file).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from quantkit import limits
from quantkit.bundle import disk
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.machine import in_order
from quantkit.model.device import filled, put

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PIECE = 1 << 20  # bytes that are looked at together
HEADER_LIMIT = 100_000_000  # the format's own limit
_AGAIN = "copy or download it again"
_INSIDE = "a model's files are in its own folder"
_SAME_TENSORS = "the index and the shards name the same tensors"
_METADATA = "__metadata__"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# format's name -> (bytes of an element, torch's name)
_TORCH_NAMES = {
    **{"BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "F8_E4M3": (1, "float8_e4m3fn")},
    **{"F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"), "U16": (2, "uint16"), "I16": (2, "int16")},
    **{"F16": (2, "float16"), "BF16": (2, "bfloat16"), "U32": (4, "uint32"), "I32": (4, "int32")},
    **{"F32": (4, "float32"), "U64": (8, "uint64"), "I64": (8, "int64"), "F64": (8, "float64")},
}


_FORMAT_NAMES = {torch_name: name for name, (_, torch_name) in _TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a name of the format: `torch.bfloat16` for `"BF16"`."""
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[name][1])
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a torch dtype: `"BF16"` for `torch.bfloat16`; KeyError for one without a name."""
    return _FORMAT_NAMES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a shard; `start` and `end` are byte offsets in the file itself, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.start

    @property
    def place(self) -> tuple[str, int, int]:
        """Shard, start and end."""
        return self.shard, self.start, self.end


@dataclass(frozen=True)
class MadeTensor(TensorEntry):
    """A tensor that is computed on reading; `start` and `end` only give its size in bytes.

    Args:
        make: function of a device (None for the CPU) that returns it with its dtype and shape, in memory of its own.
    """

    make: Callable[[torch.device | None], torch.Tensor] = field(compare=False, repr=False, kw_only=True)

    @classmethod
    def of(
        cls, name: str, dtype: str, shape: tuple[int, ...], shard: str, make: Callable[[Any], torch.Tensor], **more: Any
    ) -> Self:
        """Make the entry; `shard` is the file that an export writes it to."""
        return cls(name, dtype, shape, shard, 0, _TORCH_NAMES[dtype][0] * math.prod(shape), make=make, **more)


@dataclass(frozen=True)
class Weights:
    """All tensors of a model folder by name, unread; `shards` are its files, in the order of the index.

    `magnitudes` are the largest ones of tensors that `hashed` or `largest` has seen, by (shard, start, end). These are
    finite, and `read` does not look again.
    """

    entries: dict[str, TensorEntry]
    folder: Path
    shards: list[str]
    magnitudes: dict[tuple[str, int, int], float] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Read and check the header of every shard.

        Reads `model.safetensors` if it exists (as transformers does), else `model.safetensors.index.json` and its
        shards. A
        symbolic link must not lead out of the folder, except from a hub cache's `snapshots/<revision>` to its `blobs`.

        Raises:
            InputError: as `checked_file`; `weights-` followed by `absent`, `pickle`, `empty`, `header`, `duplicate`,
                `name`, `dtype`, `shape`, `overlap`, `gap`, `truncated`, `trailing`, `index`.
        """
        if (folder / SINGLE).is_symlink() or (folder / SINGLE).exists():
            entries = {entry.name: entry for entry in read_header(checked_file(folder, SINGLE), SINGLE)}
            return cls(entries, folder, [SINGLE])
        if not (folder / INDEX).exists():
            raise no_weights(folder)
        weight_map = _read_index(checked_file(folder, INDEX))
        shards = list(dict.fromkeys(weight_map.values()))
        paths = {shard: checked_file(folder, shard) for shard in shards}
        entries = {}
        for shard in shards:
            for entry in read_header(paths[shard], shard):
                if (there := weight_map.get(entry.name)) != shard:
                    value = f"the shard holds it, the index places it {f'in {there}' if there else 'nowhere'}"
                    raise InputError("weights-index", f"{shard}: {entry.name}", value, _SAME_TENSORS)
                entries[entry.name] = entry
        for name, shard in weight_map.items():
            if name not in entries:
                raise InputError("weights-index", f"{INDEX}: {name}", f"{shard} holds no such tensor", _SAME_TENSORS)
        return cls(entries, folder, shards)

    def read(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Read a tensor with its stored dtype and shape, in memory of its own, to a device (None for the CPU).

        Raises InputError (`weights-nonfinite` for NaN or infinity; `weights-truncated` if the file became shorter).
        """
        return self._read(self.entries[name], device)

    def packed_on(self, device: torch.device | None) -> Callable[[str], torch.Tensor]:
        """Return a reader of packed weights on a device; integers of 64 bits, which are shapes, stay in main memory."""
        return lambda name: self.read(name, None if self.entries[name].dtype == "I64" else device)

    def largest(self, names: Iterable[str]) -> dict[str, float]:
        """Return the largest magnitude of each float tensor, 0 for others. Raises InputError, as `read`."""
        wanted = list(names)
        return dict(zip(wanted, in_order(lambda name: self._largest(self.entries[name]), wanted), strict=True))

    def _largest(self, entry: TensorEntry) -> float:
        if isinstance(entry, MadeTensor):
            values = self._read(entry)
            return float(values.abs().max()) if values.is_floating_point() and values.numel() else 0.0
        if (known := self.magnitudes.get(entry.place)) is not None:
            return known
        with (self.folder / entry.shard).open("rb") as file:
            value = _looked_at(file, entry)
        if not math.isfinite(value):
            self._read(entry)  # the error counts the values
        self.magnitudes[entry.place] = value
        return value

    def unread(self) -> dict[str, UnreadTensor]:
        """Return every tensor in the form in which transformers takes an unread state dict."""
        return {name: UnreadTensor(self, name) for name in self.entries}

    def hashed(self, shard: str) -> str:
        """Hash a file, and look at its tensors in the same pass; for weights as opened."""
        entries = sorted((one for one in self.entries.values() if one.shard == shard), key=lambda one: one.start)
        digest = hashlib.sha256()
        with (self.folder / shard).open("rb") as file:
            digest.update(file.read(entries[0].start if entries else -1))
            for entry in entries:
                if math.isfinite(value := _looked_at(file, entry, digest.update)):
                    self.magnitudes[entry.place] = value
        return digest.hexdigest()

    def beginning(self, name: str, rows: int) -> torch.Tensor:
        """Read the first rows of a tensor, and only those; one that is made on reading is made whole first."""
        entry = self.entries[name]
        if isinstance(entry, MadeTensor):
            return self._read(entry)[:rows].clone()
        kept = min(rows, entry.shape[0])
        row = entry.bytes // max(entry.shape[0], 1)
        return self._read(replace(entry, shape=(kept, *entry.shape[1:]), end=entry.start + kept * row))

    def part(self, name: str, number: int, count: int) -> torch.Tensor:
        """Read one of `count` equal parts of a tensor of the files, in order of the first dimension, and only that."""
        entry = self.entries[name]
        size, rows = entry.bytes // count, entry.shape[0] // count
        at = entry.start + number * size
        return self._read(replace(entry, shape=(rows, *entry.shape[1:]), start=at, end=at + size))

    def _read(self, entry: TensorEntry, device: torch.device | None = None) -> torch.Tensor:
        where = f"{entry.shard}: {entry.name}"
        if isinstance(entry, MadeTensor):
            computed = entry.make(device)
            _check_finite(computed, where)
            return put(computed, device)
        with (self.folder / entry.shard).open("rb") as file:
            file.seek(entry.start)

            def fill(raw: torch.Tensor) -> torch.Tensor:
                return _filled(file, raw, entry)

            if device is not None and device.type == "cuda":
                raw = filled(entry.bytes, fill, device)
            else:
                raw = fill(torch.empty(entry.bytes, dtype=torch.uint8))
        tensor = raw.view(torch_dtype(entry.dtype)).reshape(entry.shape)
        if entry.place not in self.magnitudes:
            _check_finite(tensor, where)
        return tensor

    def cache(self, names: Iterable[str]) -> None:
        """Read the bytes of tensors of the files and drop them: the system then has them in its cache, if it has
        room."""
        piece = memoryview(bytearray(1 << 20))
        for entry in (self.entries[name] for name in names):
            if not isinstance(entry, MadeTensor):
                with (self.folder / entry.shard).open("rb", buffering=0) as file:
                    file.seek(entry.start)
                    while file.readinto(piece[: entry.end - file.tell()]):
                        pass

    def same(self, one: str, other: str) -> bool:
        """Tell whether two tensors are equal bit for bit, piece by piece."""
        first, second = self.entries[one], self.entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        if isinstance(first, MadeTensor) or isinstance(second, MadeTensor):
            raw = (self._read(entry).contiguous().view(-1).view(torch.uint8) for entry in (first, second))
            return torch.equal(*raw)
        piece = 1 << 24
        with (self.folder / first.shard).open("rb") as left, (self.folder / second.shard).open("rb") as right:
            for at in range(0, first.bytes, piece):
                size = min(piece, first.bytes - at)
                left.seek(first.start + at)
                right.seek(second.start + at)
                if left.read(size) != right.read(size):
                    return False
        return True

    def total_bytes(self) -> int:
        """Return the bytes of all tensors, without the headers."""
        return sum(entry.bytes for entry in self.entries.values())


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor that is read by `tensor[...]`, as a slice of safetensors is."""

    weights: Weights
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.weights.read(self.name)


def checked_file(folder: Path, name: str) -> Path:
    """Return the regular file `name` directly in `folder`.

    Raises:
        InputError: `weights-outside` for a path in the name, or a link out of the folder; `weights-missing-shard`;
            `file-unreadable`.
    """
    if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
        raise InputError("weights-outside", repr(name), "has a path in it", _INSIDE)
    path, home = folder / name, folder.resolve()
    real = path.resolve()
    # the hub cache: snapshots/<revision>/x -> ../../blobs/<hash>, also from its subfolders
    allowed = [home, *(place.parent / "blobs" for place in home.parents if place.name == "snapshots")]
    if not any(real.is_relative_to(place) for place in allowed):
        raise InputError("weights-outside", name, f"is a link to {real}", _INSIDE, "copy the file into it")
    try:
        mode = path.stat().st_mode
    except OSError:
        raise InputError("weights-missing-shard", name, f"no such file in {folder}", "", _AGAIN) from None
    if not stat.S_ISREG(mode):
        raise InputError("weights-missing-shard", name, "is not a regular file")
    if not os.access(path, os.R_OK):
        raise InputError("file-unreadable", name, f"may not be read in {folder}", "", "change its permissions")
    return path


def read_header(path: Path, shard: str) -> list[TensorEntry]:
    """Read the checked entries of one safetensors file, in header order; `shard` is its name in errors."""
    size = path.stat().st_size
    if size == 0:
        raise InputError("weights-empty", shard, "0 bytes", "", _AGAIN)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length < 2 or length > HEADER_LIMIT:
            value = f"header length {length if size >= 8 else 'cut off'}, file of {size} bytes"
            rule = f"a safetensors file begins with its header's length, 2 to {HEADER_LIMIT}"
            raise InputError("weights-header", shard, value, rule)
        if 8 + length > size:
            value = f"{size} bytes, the header alone ends at {8 + length}"
            raise InputError("weights-truncated", shard, value, "", _AGAIN)
        header = strict_json(file.read(length), shard)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError("weights-header", f"{shard}: {_METADATA}", f"{metadata!r:.80}", "maps strings to strings")
    entries = [_entry(name, claim, shard, 8 + length) for name, claim in header.items()]
    _check_tiling(entries, shard, 8 + length, size)
    return entries


def strict_json(
    raw: bytes, where: str, code: str = "weights-header", duplicate: str = "weights-duplicate"
) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys at any depth; InputError `code` or `duplicate` otherwise."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for key, value in items:
            if key in keys:
                raise InputError(duplicate, f"{where}: {key}", "occurs twice", "a key occurs once")
            keys[key] = value
        return keys

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as problem:
        raise InputError(code, where, f"not JSON: {problem}", "it is a JSON object", _AGAIN) from None
    if not isinstance(parsed, dict):
        raise InputError(code, where, f"a JSON {type(parsed).__name__}", "it is a JSON object")
    return parsed


def _entry(name: str, claim: Any, shard: str, base: int) -> TensorEntry:
    where = f"{shard}: {name!r:.120}"
    if not name or ".." in name or name.startswith(".") or any(c in "/\\" or not c.isprintable() for c in name):
        raise InputError("weights-name", where, "has a path or control character in it", "a tensor's name is no path")
    if not isinstance(claim, dict) or set(claim) != {"dtype", "shape", "data_offsets"}:
        rule = "an entry has exactly dtype, shape and data_offsets"
        raise InputError("weights-header", where, f"{claim!r:.80}", rule)
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TORCH_NAMES:
        raise InputError("weights-dtype", where, f"{dtype!r:.40}", f"known: {', '.join(_TORCH_NAMES)}")
    if not _naturals(shape):
        raise InputError("weights-header", where, f"shape {shape!r:.80}", "a list of integers, none negative")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError("weights-header", where, f"data_offsets {offsets!r:.80}", "two integers, 0 <= start <= end")
    start, end = offsets
    need = _TORCH_NAMES[dtype][0] * math.prod(shape)
    if need != end - start:
        raise InputError("weights-shape", where, f"{dtype} {shape} needs {need} bytes, the offsets hold {end - start}")
    return TensorEntry(name, dtype, tuple(shape), shard, base + start, base + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_tiling(entries: list[TensorEntry], shard: str, base: int, size: int) -> None:
    at, before = base, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        where = f"{shard}: {entry.name}"
        if entry.end > size:
            value = f"ends at byte {entry.end}, the file at {size}"
            raise InputError("weights-truncated", where, value, "", _AGAIN)
        if entry.start < at:
            raise InputError("weights-overlap", where, f"shares {at - entry.start} bytes with {before}")
        if entry.start > at:
            raise InputError("weights-gap", where, f"{entry.start - at} unclaimed bytes after {before}")
        at, before = entry.end, entry.name
    if at != size:
        value = f"{size - at} bytes after the last tensor"
        raise InputError("weights-trailing", shard, value, "the tensors fill the file")


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size == 0:
        raise InputError("weights-empty", INDEX, "0 bytes", "", _AGAIN)
    index = strict_json(limits.read(path), INDEX, "weights-index")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        value, rule = f"weight_map {weight_map!r:.80}", "maps every tensor's name to its shard"
        raise InputError("weights-index", INDEX, value, rule)
    for name, shard in weight_map.items():
        if not shard.endswith(".safetensors"):
            raise InputError("weights-index", f"{INDEX}: {name}", f"{shard!r}", "a shard is a .safetensors file")
    return weight_map


def _filled(file: BinaryIO, raw: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Read the next bytes of a tensor."""
    if raw.numel() and file.readinto(_view(raw)) != raw.numel():  # type: ignore[attr-defined]
        where, value = f"{entry.shard}: {entry.name}", f"{file.tell() - entry.start} of {entry.bytes} bytes"
        raise InputError("weights-truncated", where, value, "the file changed while in use")
    return raw


def _looked_at(file: BinaryIO, entry: TensorEntry, note: Callable[[memoryview], object] | None = None) -> float:
    """Return the largest magnitude of a float tensor, NaN where it has one, else 0; read in pieces that a cache holds.

    Args:
        note: function of the bytes read; without one, tensors of integers are not read.
    """
    dtype, worst = torch_dtype(entry.dtype), 0.0
    if note is None and not dtype.is_floating_point:
        return 0.0
    file.seek(entry.start)
    buffer = torch.empty(min(entry.bytes, _PIECE), dtype=torch.uint8)
    for at in range(0, entry.bytes, _PIECE):
        raw = _filled(file, buffer[: min(_PIECE, entry.bytes - at)], entry)
        if note is not None:
            note(_view(raw))
        if dtype.is_floating_point:
            values = raw.view(dtype)
            low, high = torch.aminmax(values if dtype.itemsize > 1 else values.float())
            largest = max(-float(low), float(high))
            worst = largest if not worst >= largest else worst
    return worst


def _check_finite(tensor: torch.Tensor, where: str) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    # the extremes propagate NaN, and need no mask as large as the tensor
    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low) & torch.isfinite(high)):  # one synchronization with a GPU, not two
        return
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    value = f"{nan} NaN and {inf} infinite of {tensor.numel()} values"
    remedy = "the checkpoint is damaged: download or train it again"
    raise InputError("weights-nonfinite", where, value, "weights are finite", remedy)


def no_weights(folder: Path) -> InputError:
    """Make the error for a folder without safetensors: `weights-pickle` if there are pickles, else `weights-absent`."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if not pickled:
        rule = "a model's weights are safetensors"
        return InputError("weights-absent", str(folder), f"neither {SINGLE} nor {INDEX}", rule)
    rule = "quantkit never unpickles: a pickle can run any code"
    remedy = "convert to safetensors where you trust the file: model.save_pretrained(folder)"
    return InputError("weights-pickle", str(folder), f"only pickled weights ({pickled[0]})", rule, remedy)


Header = tuple[str, str, tuple[int, ...]]


def write_safetensors(
    path: Path, headers: Iterable[Header], producer: Callable[[str], torch.Tensor], *, hashed: bool = True
) -> str:
    """Write one safetensors file with one tensor in memory at a time, and return its sha256; "" if not `hashed`.

    The file appears under `path` complete or not at all (temporary name beside it, fsync, rename). Tensors are laid out
    and
    produced by falling element size, so that each is aligned to its own element, as in the reference writer; ties keep
    the
    given order. `producer` returns the tensor of a name, in the dtype and shape of its header.

    Raises:
        Stopped: `disk-full`.
        InputError: `not-writable`.
        ValueError: for a repeated name, or a tensor that differs from its header.
    """
    return write_atomic(path, _chunks(headers, producer), hashed=hashed)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors into a temporary file of a build, whose commit syncs it, and return the file's sha256."""
    headers = [(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in tensors.items()]
    return write_headers(path, headers, tensors.__getitem__)


def write_headers(path: Path, headers: Iterable[Header], producer: Callable[[str], torch.Tensor]) -> str:
    """Write them likewise, each made by `producer` in its turn."""
    return disk.write_unsynced(path, _chunks(headers, producer))


def _chunks(headers: Iterable[Header], producer: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    """Yield a file's content: its header, then tensor after tensor."""
    listed = sorted(headers, key=lambda header: -_TORCH_NAMES[header[1]][0])
    layout: dict[str, Any] = {_METADATA: {"format": "pt"}}  # which transformers insists on
    at = 0
    for name, dtype, shape in listed:
        if name in layout:
            raise ValueError(f"{name} is given twice")
        end = at + _TORCH_NAMES[dtype][0] * math.prod(shape)
        layout[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name, dtype, shape in listed:
        yield _raw(producer(name), name, dtype, shape)


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview], *, hashed: bool = True) -> str:
    """Write chunks to `path`, complete or not at all, durable on return, and return their sha256; see `disk_errors`."""
    with disk_errors(path):
        return disk.write_atomic(path, chunks, hashed=hashed)


def write_json(path: Path, content: Mapping[str, Any], *, indent: int = 2) -> str:
    """Write JSON likewise; with an indent of 2, as transformers writes it."""
    return write_atomic(path, [(json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode()])


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of a file system into `Stopped` (disk-full) or `InputError` (not-writable)."""
    try:
        with disk.stopping_when_full(path):
            yield
    except OSError as problem:
        if problem.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            value, remedy = os.strerror(problem.errno), "choose a folder you may write to"
            raise InputError("not-writable", str(path), value, remedy=remedy) from problem
        raise


def _raw(tensor: torch.Tensor, name: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
    if dtype_name(tensor.dtype) != dtype or tuple(tensor.shape) != tuple(shape):
        there = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
        raise ValueError(f"{name}: the header says {dtype} {tuple(shape)}, got {there}")
    # a tensor of one element counts as contiguous whatever its strides, and then has no view as bytes
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return _view(flat.view(torch.uint8))


def _view(raw: torch.Tensor) -> memoryview:
    array: Any = raw.numpy()
    return memoryview(array)
