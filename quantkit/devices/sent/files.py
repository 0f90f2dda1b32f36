"""Store files on a device, one folder at a time; a broken transfer resumes, and nothing is stored twice.

    WORKDIR/files/NAME/...    a complete carried folder; its name contains a hash of the contents
                 /.NAME/...   an incomplete one: complete files, and PATH.part for the current one
    WORKDIR/wheels/SHA256/    an unpacked wheel: a folder for PYTHONPATH
    WORKDIR/made/SHA256       a program's output, to be fetched

Two senders of one folder write the same bytes at the same places; neither waits for the other.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # sent with it
    from quantkit.devices.sent import lock_file

LAYOUT = 2
# bytes read at a time; bytes of a line sent back
_CHUNK, _LINE = 1 << 20, 3 << 18
# seconds of silence until the sender counts as gone
_PATIENCE = 60


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Run `do`, one of `have`, `receive`, `unpack`, `send`, `drop`, `clean`, in `workdir`."""
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    if asked["do"] == "clean" and not place.exists():
        return {"bundles": 0, "wheels": 0, "bytes": 0}
    problem = _opened(place)
    if problem:
        return problem
    known = {"have": have, "receive": receive, "unpack": unpack, "send": send, "drop": drop, "clean": clean}
    return known[asked["do"]](place, asked)


def _opened(place: Path) -> dict[str, str] | None:
    """Create the folder, or check that it belongs to this version."""
    mark = place / "quantkit.json"
    if not mark.exists():
        if place.exists() and any(place.iterdir()):
            return {"error": "workdir-foreign"}
        (place / "files").mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"layout": LAYOUT}))
    try:
        layout = json.loads(mark.read_text())["layout"]
    except (ValueError, KeyError, TypeError):
        layout = None
    return None if layout == LAYOUT else {"error": "workdir-version", "value": str(layout)[:40]}


def have(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return bytes present of each of `files` in folder `name`, free bytes, and the unpacked ones of `wheels`."""
    folder, free = place / "files" / asked["name"], shutil.disk_usage(place).free
    wheels = [sha for sha in asked.get("wheels", ()) if (place / "wheels" / sha).is_dir()]
    if folder.is_dir():
        return {"whole": True, "there": {}, "wheels": wheels, "free": free}
    coming, sizes = folder.with_name(f".{folder.name}"), dict[str, int]()
    for name in asked["files"]:
        for path in (coming / name, coming / f"{name}.part"):
            with contextlib.suppress(OSError):
                sizes[name] = max(path.stat().st_size, sizes.get(name, 0))
    return {"whole": False, "there": sizes, "wheels": wheels, "free": free}


def receive(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Receive files of folder `name`, [path, size, sha256, first byte sent], from standard input, in order."""
    folder = place / "files" / asked["name"]
    coming, damaged = folder.with_name(f".{folder.name}"), []
    with _held(place, fcntl.LOCK_SH):  # blocks `clean` meanwhile
        for name, size, sha, begin in asked["files"]:
            whole, part = coming / name, coming / f"{name}.part"
            part.parent.mkdir(parents=True, exist_ok=True)
            if whole.exists() and begin >= size:
                continue
            part.touch()
            with part.open("r+b") as stream:
                stream.seek(begin)
                if not _arrived(stream, size - begin):
                    return {"error": "cut"}
                stream.truncate(size)
                stream.flush()
                os.fsync(stream.fileno())
                stream.seek(0)
                good = hashlib.file_digest(stream, "sha256").hexdigest() == sha
            with contextlib.suppress(FileNotFoundError):  # another sender of the same file was first
                if good:
                    part.replace(whole)
                else:
                    part.unlink()
            damaged += [] if good else [name]
        if not damaged:
            coming.mkdir(exist_ok=True)
            try:
                coming.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                shutil.rmtree(coming, ignore_errors=True)
    return {"damaged": damaged}


def _arrived(stream: Any, missing: int) -> bool:
    """Copy the missing bytes; tell whether all arrived."""
    source: Any = sys.stdin.buffer
    while missing:
        signal.alarm(_PATIENCE)
        chunk = source.read1(min(missing, _CHUNK))
        if not chunk:
            return False
        stream.write(chunk)
        missing -= len(chunk)
    signal.alarm(0)
    return True


def unpack(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Unpack the `wheels` of folder `name`, file -> sha256, each into a folder for PYTHONPATH, without tests."""
    folder = place / "files" / asked["name"]
    with _held(place, fcntl.LOCK_SH), _held(place, fcntl.LOCK_EX, "unpacking"):
        for name, sha in asked["wheels"].items():
            target = place / "wheels" / sha
            unpacked = target.with_name(f".{sha}")
            if target.is_dir():
                continue
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir(parents=True)
            try:
                with zipfile.ZipFile(folder / name) as wheel:
                    for member in wheel.namelist():
                        parts = member.split("/")
                        if "tests" not in parts and not parts[0].endswith(".data"):
                            wheel.extract(member, unpacked)
            except FileNotFoundError:
                return {"error": "absent", "value": name}
            unpacked.replace(target)
        shutil.rmtree(folder, ignore_errors=True)
    return {}


def send(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Print a program's output from byte `begin` on, in lines of base64; the last line is `sent`."""
    try:
        stream = (place / "made" / asked["sha"]).open("rb")
    except FileNotFoundError:
        return {"error": "absent", "value": asked["sha"]}
    with stream:
        stream.seek(asked["begin"])
        while chunk := stream.read(_LINE):
            signal.alarm(_PATIENCE)
            sys.stdout.buffer.write(base64.b64encode(chunk) + b"\n")
            sys.stdout.buffer.flush()
    signal.alarm(0)
    return {"sent": True}


def drop(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Remove a program's output after it was fetched."""
    (place / "made" / asked["sha"]).unlink(missing_ok=True)
    return {}


def clean(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Remove everything carried; return the number of `bundles` and `wheels`, and all `bytes`.

    While a program runs or files arrive, nothing is removed, and `holder` names the owner.
    """
    with lock_file(place / "lock") as lock, lock_file(place / "files" / ".coming") as coming:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(coming, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            with contextlib.suppress(ValueError):
                return {"holder": json.loads(lock.read())}
            return {"holder": {"what": "carrying"}}
        bundles = [path for path in (place / "files").iterdir() if path.name not in (".coming", ".unpacking")]
        wheels = list((place / "wheels").glob("*"))
        rest = [*(place / "made").glob("*"), *(place / "tmp").glob("*")]
        size = sum(map(_removed, [*bundles, *wheels, *rest]))
    whole = [path for path in bundles if not path.name.startswith(".")]
    return {"bundles": len(whole), "wheels": len(wheels), "bytes": size}


def _removed(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_symlink() or file.is_file())
    shutil.rmtree(path)
    return size


@contextlib.contextmanager
def _held(place: Path, how: int, name: str = "coming") -> Iterator[None]:
    with lock_file(place / "files" / f".{name}") as stream:
        fcntl.flock(stream, how)
        yield
