"""Writing so that a crash or a full disk leaves either the old state or the new one.

    write to a temporary name -> fsync the file -> rename over the final name -> fsync the folder

A rename within one file system is atomic; the two fsyncs make that its data, and then its name, survive a power loss.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import InputError, Stopped

# no space, over quota, over the file size limit: for the user all three are "it does not fit here"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# libraries written in Rust (safetensors, tokenizers) raise their own types, with the number only in the text
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one it was raised from, means that the disk took no more."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        found = _RUST_OS_ERROR.search(str(error))
        if found and int(found.group(1)) in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(where: Path, error: BaseException) -> Stopped:
    """The error for a full disk: exit code 75, what is committed is kept."""
    return Stopped(
        "disk-full",
        where=str(where),
        value=str(error),
        rule="what was committed is kept",
        remedy="make room, then run the same command with --resume",
    )


def check_place(path: Path | None) -> None:
    """Refuse to begin long work for a file that cannot be written. Raises InputError `file-unwritable`."""
    if path is None:
        return
    folder = path.expanduser().resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        value = "is a folder" if path.is_dir() else f"no folder {folder} to write into"
        raise InputError("file-unwritable", where=str(path), value=value, remedy="check the path")


def not_writable(out: Path, error: OSError) -> InputError:
    """The error for a place where no bundle can be built, which happens beside its final name: `out-not-writable`."""
    return InputError(
        "out-not-writable",
        where=str(out),
        value=error.strerror or str(error),
        rule="the bundle is built beside its final name",
        remedy="choose another --out",
    )


@contextmanager
def stopping_when_full(where: Path) -> Iterator[None]:
    """Turns "no space left" in the body into `Stopped("disk-full")`; other errors pass."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(where, error) from error
        raise


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make everything under a folder, and the folder itself, durable."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                fsync(path)
        fsync(Path(place))


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> str:
    """Replace a file's content, whole or in chunks; a reader, or a crash, sees the old content or the new one.

    Returns:
        the sha256 of what was written.
    """
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            for chunk in [data] if isinstance(data, bytes) else data:
                digest.update(chunk)
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)
    return digest.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what a file system answers in the body into `Stopped` (`disk-full`) or `InputError` (`file-unwritable`)."""
    try:
        with stopping_when_full(path):
            yield
    except OSError as error:
        value = error.strerror or str(error)
        raise InputError("file-unwritable", where=str(path), value=value, remedy="check the folder") from None


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of one that is killed."""
    import fcntl

    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def walk(folder: Path) -> Iterator[Path]:
    """Everything under a folder that is not a real folder: files, links (of folders too), the rest; sorted."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in sorted([*names, *links]):
            yield Path(place, name)
