"""Tensors of a whole calibration set that are not hidden states: kept in files without a name where they are many.

Per-layer embeddings, masks of each sequence, what a forward that stands still holds in its variables. As hidden states
do (`calls.gathered`), they lie in files from so many bytes on, and the system has their pages in memory as it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from quantkit import content

# bytes of one file; and what is smaller than this stays where it is
_FILE, _LEAST = 1 << 26, 1 << 10
_ALIGNED = 64


def in_file(count: int, dtype: torch.dtype) -> Tensor:
    """Room for so many elements in a file without a name: it is gone when nothing refers to it any more."""
    folder = content.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-") as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)


class Shelf:
    """Files that tensors are put into, one after the other; a file is gone when no tensor in it is left."""

    def __init__(self) -> None:
        self._file: Tensor | None = None
        self._taken = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values, in a file; a small one, and what lies in one, as it is."""
        if tensor.numel() * tensor.itemsize < _LEAST or _is_in_file(tensor):
            return tensor
        file, start = self._room(tensor.numel() * tensor.itemsize)
        place = file[start : start + tensor.numel() * tensor.itemsize]
        return place.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)

    def move(self, tensors: Iterable[Tensor], fixed: Collection[int] = ()) -> None:
        """Move what tensors hold into files, in place: each stays the object that it is, and views stay views.

        What somebody else has a view of too is left: a change of one would not be seen in the other any more.

        Args:
            tensors: all that refer to what is to be moved.
            fixed: addresses of what is not, such as parameters.
        """
        for users in _by_storage(tensors):
            storage = users[0].untyped_storage()
            count = storage.nbytes()
            if count < _LEAST or storage.data_ptr() in fixed or _is_in_file(users[0]) or not all(map(_can_move, users)):
                continue
            if torch._C._storage_Use_Count(storage._cdata) != len(users) + 1:  # ours, while we look
                continue
            file, start = self._room(count)
            file[start : start + count] = torch.empty(0, dtype=torch.uint8).set_(storage)
            for user in users:
                offset = start // user.itemsize + user.storage_offset()
                place = torch.empty(0, dtype=user.dtype)
                user.data = place.set_(file.untyped_storage(), offset, user.shape, user.stride())

    def _room(self, size: int) -> tuple[Tensor, int]:
        if self._file is None or self._taken + size > len(self._file):
            self._file, self._taken = in_file(max(size, _FILE), torch.uint8), 0
        start = self._taken
        self._taken = -(-(start + size) // _ALIGNED) * _ALIGNED
        return self._file, start


def held(frame: FrameType | None) -> list[Tensor]:
    """The tensors in the variables of a frame that stands still and of those that called it, with what they view."""
    found: dict[int, Tensor] = {}
    while frame is not None:
        for leaf in tree_flatten(list(frame.f_locals.values()))[0]:
            viewed = leaf
            while isinstance(viewed, Tensor):
                found[id(viewed)] = viewed
                viewed = viewed._base
        frame = frame.f_back
    return list(found.values())


def size(tensors: Iterable[Tensor], fixed: Collection[int] = ()) -> int:
    """Bytes that they hold, wherever that is, each counted once; without what lies at `fixed` addresses."""
    storages = (users[0].untyped_storage() for users in _by_storage(tensors))
    return sum(each.nbytes() for each in storages if each.data_ptr() not in fixed)


def addresses(model: nn.Module) -> set[int]:
    """Of all parameters and buffers of a model."""
    return {value.untyped_storage().data_ptr() for value in _values(model) if not value.is_meta}


def _values(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[int, dict[int, Tensor]] = {}
    for each in tensors:
        if each.device.type == "cpu" and each.layout == torch.strided:
            groups.setdefault(each.untyped_storage()._cdata, {})[id(each)] = each
    return [list(group.values()) for group in groups.values()]


def _is_in_file(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def _can_move(tensor: Tensor) -> bool:
    # one that is conjugated or negated when it is read says so in itself, and not by what it holds
    return type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
