"""Keep files in the user's cache with their hashes; a damaged file is detected when it is read, and made again.

.NAME.sums    beside a file or a folder: one line for each file in it, as `sha256sum` prints them
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from quantkit.bundle.disk import fsync, is_plain, sha256, walk, write_atomic
from quantkit.errors import Rebuilt

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "hidden"


def put(source: Path, place: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Move a complete file or folder to its place in the cache.

    The hashes are written first, so a file without hashes is never taken for a complete one.

    Args:
        known: sha256 of files in the folder that were hashed while they were written, by their path in it.
    """
    write_atomic(_sums(place), _said(source, place.name, known).encode())
    source.rename(place)
    fsync(place.parent)


def is_intact(place: Path) -> bool:
    """Tell whether a cached file or folder is unchanged. A damaged one is deleted, with the warning `Rebuilt`.

    The whole of it is read: about a second for a gigabyte.
    """
    if not os.path.lexists(place):
        return False
    try:
        if _sums(place).read_text(encoding="utf-8") == _said(place, place.name):
            return True
        why = "has changed"
    except FileNotFoundError:
        why = "has no hashes"
    except (OSError, ValueError):
        why = "cannot be read"
    with suppress(OSError):  # a read-only cache is reported when it is written
        remove(place)
    warnings.warn(Rebuilt(f"{place}: {why}; it is made again"), stacklevel=2)
    return False


def remove(place: Path) -> None:
    """Delete a cached file or folder; a missing one is no error."""
    _sums(place).unlink(missing_ok=True)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def read_tensor(place: Path) -> Tensor | None:
    """Read a cached tensor; None if it is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not is_intact(place):
        return None
    try:
        tensor: Tensor | None = load_file(place).get(_NAME)
    except (OSError, SafetensorError):
        return None
    return tensor


def keep_tensor(place: Path, tensor: Tensor) -> None:
    """Cache a tensor. A cache that cannot be written costs time, not the result."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({_NAME: tensor.contiguous()}, temporary)
            put(temporary, place)
        except (OSError, SafetensorError):  # SafetensorError: a full disk
            temporary.unlink(missing_ok=True)


def _sums(place: Path) -> Path:
    return place.with_name(f".{place.name}.sums")


def _said(place: Path, name: str, known: Mapping[str, str] = MappingProxyType({})) -> str:
    files = list(walk(place)) if place.is_dir() and not place.is_symlink() else [place]
    if not all(is_plain(os.lstat(path)) for path in files):
        raise ValueError("a link")
    inside = [path.relative_to(place) for path in files]
    hashes = [known.get(below.as_posix()) or sha256(path) for below, path in zip(inside, files, strict=True)]
    return "".join(f"{digest}  {Path(name, below).as_posix()}\n" for digest, below in zip(hashes, inside, strict=True))
