"""Write files so that a crash or a full disk leaves either the old state or the new one.

    write to a temporary name -> fsync the file -> rename over the final name -> fsync the folder

A rename within one file system is atomic. The first fsync makes the data survive a power loss, the second the name.

A bundle may come from a stranger, who can plant links in it. So temporary names are random and created exclusively.
With `inside`, every folder below it is opened without following links.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import InputError, Stopped

# no space, over quota, over the file size limit: to the user all three mean that it does not fit
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# chunks of at least this many bytes are hashed in a thread while they are written
_LARGE = 1 << 20
# temporary names of `write_atomic`
_LEFT_OVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
# libraries in Rust (safetensors, tokenizers) raise their own types and give the error number only in the text
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def is_disk_full(error: BaseException | None) -> bool:
    """Tell whether an error, or its cause, means a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        number = _RUST_OS_ERROR.search(str(error))
        if number and int(number.group(1)) in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(where: Path, error: BaseException) -> Stopped:
    """Make the error for a full disk: exit code 75, committed steps are kept."""
    remedy = "make room, then run the same command with --resume"
    return Stopped("disk-full", str(where), str(error), "what was committed is kept", remedy)


def check_place(path: Path | None) -> None:
    """Refuse, before long work, a path that cannot be written. Raises InputError `file-unwritable`."""
    if path is None:
        return
    folder = path.expanduser().resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        value = "is a folder" if path.is_dir() else f"no folder {folder} to write into"
        raise InputError("file-unwritable", where=str(path), value=value, remedy="check the path")


def not_writable(out: Path, error: OSError) -> InputError:
    """Make the error `out-not-writable`, for a folder in which no bundle can be built."""
    value, rule = error.strerror or str(error), "the bundle is built beside its final name"
    return InputError("out-not-writable", str(out), value, rule, "choose another --out")


@contextmanager
def stopping_when_full(where: Path) -> Iterator[None]:
    """Turn "no space left" in the body into `Stopped("disk-full")`; other errors pass."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(where, error) from error
        raise


def fsync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                fsync(path)
        fsync(Path(place))


def write_atomic(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, inside: Path | None = None, hashed: bool = True
) -> str:
    """Replace the content of a file; a reader, or a crash, sees the old content or the new one.

    Args:
        path: file to write. A link at this path is replaced, never followed.
        data: new content, whole or in chunks.
        inside: folder that the file must not leave. Missing folders between the two are created.

    Returns:
        the sha256 of the content; "" if not `hashed`.

    Raises:
        InputError: `bundle-link`, a folder between `inside` and the file is a link.
    """
    digest = hashlib.sha256()
    temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
    with _folder(path.parent, inside or path.parent, make=True) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as stream, ThreadPoolExecutor(1) as beside:
                _write(stream, [data] if isinstance(data, bytes) else data, digest if hashed else None, beside)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
        os.fsync(folder)
    return digest.hexdigest() if hashed else ""


def _write(
    stream: BinaryIO, chunks: Iterable[bytes | memoryview], digest: hashlib._Hash | None, beside: ThreadPoolExecutor
) -> None:
    """Write chunks, and hash them in a thread beside it: both take as long, and release the GIL."""
    for chunk in chunks:
        waiting = None
        if digest is not None and memoryview(chunk).nbytes >= _LARGE:
            with suppress(RuntimeError):  # an interpreter that is shutting down starts no threads
                waiting = beside.submit(digest.update, chunk)
        stream.write(chunk)
        if waiting is not None:
            waiting.result()
        elif digest is not None:
            digest.update(chunk)


def write_unsynced(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a temporary file and return the sha256 of its content; a commit syncs the file."""
    digest = hashlib.sha256()
    with path.open("wb") as stream, ThreadPoolExecutor(1) as beside:
        _write(stream, chunks, digest, beside)
    return digest.hexdigest()


def is_left_over(name: str) -> bool:
    """Tell whether a name is a temporary one, left by a write that was killed."""
    return _LEFT_OVER.fullmatch(name) is not None


def lock(descriptor: int, how: int) -> None:
    """Call `flock`; file systems without it, such as some network mounts, lock nothing."""
    import fcntl

    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Let one process at a time change a folder, and delete temporary files of killed ones first."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, fcntl.LOCK_EX)
        for path in folder.iterdir():
            if is_left_over(path.name):
                with suppress(OSError):
                    path.unlink()
        yield
    finally:
        os.close(descriptor)


def remove(path: Path, *, inside: Path) -> None:
    """Delete a file if it exists; raises as `write_atomic`. A link is deleted, not its target."""
    with suppress(FileNotFoundError), _folder(path.parent, inside, make=False) as folder:
        os.unlink(path.name, dir_fd=folder)


@contextmanager
def _folder(path: Path, inside: Path, *, make: bool) -> Iterator[int]:
    """Open a folder below `inside` without following links, and yield its descriptor."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(inside, flags)
    try:
        for part in path.relative_to(inside).parts:
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                        os.fsync(descriptor)
                below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                value, rule = f"{part!r} is a link, or no folder", "nothing is written through a link"
                remedy = "fetch or compile the bundle again"
                raise InputError("bundle-link", str(path), value, rule, remedy) from None
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into `Stopped` (`disk-full`) or `InputError` (`file-unwritable`)."""
    try:
        with stopping_when_full(path):
            yield
    except OSError as error:
        value = error.strerror or str(error)
        raise InputError("file-unwritable", where=str(path), value=value, remedy="check the folder") from None


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """Hold a lock, for one process at a time; the kernel frees the lock of a killed process."""
    import fcntl

    descriptor = lock_file(place)
    try:
        lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> int:
    """Open a lock file, creating it if it is missing, without waiting and without following a link.

    Raises:
        InputError: `lock-foreign`, something else has this name. OSError: as the system reports it.
    """
    try:
        descriptor: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        descriptor = None
    if descriptor is not None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: its folder has just been deleted
            return descriptor
        os.close(descriptor)
    value, rule = "a link, not a regular file, or a file with several names", "a lock is a file of its own"
    raise InputError("lock-foreign", str(path), value, rule, "delete it; it is created again")


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Hashes:
    """Sha256 of files; one is read again only if its inode, size or times have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def __call__(self, path: Path) -> str:
        """Return the sha256 of a file's content, in hex."""
        status = os.lstat(path)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = stamp, sha256(path)
        return self._known[path][1]


def is_plain(status: os.stat_result) -> bool:
    """Tell whether `lstat` shows a regular file without a second name: a hard link changes with a file elsewhere."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def empty_folders(folder: Path) -> Iterator[Path]:
    """Yield the empty folders under a folder."""
    for place, folders, names in os.walk(folder):
        if not folders and not names and Path(place) != folder:
            yield Path(place)


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file, link and special file under a folder, sorted; links to folders are not entered."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in sorted([*names, *links]):
            yield Path(place, name)
