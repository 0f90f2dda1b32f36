"""What is kept in the user's cache is what was put there, or it is made again: its hashes are checked when it is read.

.NAME.sums    beside a file or a folder: a line for each file in it, as `sha256sum` prints them
"""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.bundle.disk import fsync, is_plain, sha256, walk, write_atomic
from quantkit.errors import Rebuilt

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "hidden"


def put(made: Path, place: Path) -> None:
    """Give a file or folder that is whole its name in the cache.

    Its hashes stand there first: what has the name and no hashes is nobody's work in progress.
    """
    write_atomic(_sums(place), _said(made, place.name).encode())
    made.rename(place)
    fsync(place.parent)


def is_intact(place: Path) -> bool:
    """Whether it is there as it was sealed. One that is not is removed, with the warning `Rebuilt`.

    It is read whole: about a second for a gigabyte.
    """
    if not os.path.lexists(place):
        return False
    try:
        if _sums(place).read_text(encoding="utf-8") == _said(place, place.name):
            return True
        why = "is not what was kept"
    except FileNotFoundError:
        why = "has no hashes"
    except (OSError, ValueError):
        why = "cannot be read"
    with suppress(OSError):  # a cache that is not ours to write says so when it is written
        remove(place)
    warnings.warn(Rebuilt(f"{place}: {why} there; it is made again"), stacklevel=2)
    return False


def remove(place: Path) -> None:
    """Forget a file or folder; one that is not there is no error."""
    _sums(place).unlink(missing_ok=True)
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def read_tensor(place: Path) -> Tensor | None:
    """A tensor that was kept; None where there is none, or where the file is not what was kept."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not is_intact(place):
        return None
    try:
        found: Tensor | None = load_file(place).get(_NAME)
    except (OSError, SafetensorError):
        return None
    return found


def keep_tensor(place: Path, tensor: Tensor) -> None:
    """Keep a tensor; a cache that cannot be written costs time, not the result."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save_file({_NAME: tensor.contiguous()}, temporary)
            put(temporary, place)
        except (OSError, SafetensorError):  # the library says so of a full disk
            temporary.unlink(missing_ok=True)


def _sums(place: Path) -> Path:
    return place.with_name(f".{place.name}.sums")


def _said(place: Path, name: str) -> str:
    files = list(walk(place)) if place.is_dir() and not place.is_symlink() else [place]
    if not all(is_plain(os.lstat(path)) for path in files):
        raise ValueError("a link")
    return "".join(f"{sha256(path)}  {Path(name, path.relative_to(place)).as_posix()}\n" for path in files)
