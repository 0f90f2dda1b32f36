"""Files on a device, by their content: nothing travels twice, and a broken transfer goes on where it was.

    WORKDIR/store/SHA256        a whole file, its hash checked; or one that a job has made, to be fetched
                 /SHA256.part   as much of it as has arrived
                 /SHA256.at     where it lies since it was laid out: a path below WORKDIR
    WORKDIR/bundles/NAME/...    laid out
    WORKDIR/wheels/SHA256/...   a wheel, unpacked: a folder for PYTHONPATH

Two that send the same file write the same bytes at the same places: neither waits for the other.
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
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # sent with it
    from quantkit.devices.sent.answer import lock_file

LAYOUT = 1
_CHUNK = 1 << 20
# bytes of a line on their way back
_LINE = 3 << 18
# seconds that nothing has to come for, until whoever sends has gone; that the answers of a job which ended wait
_PATIENCE, _OLD = 60, 86_400.0


def main(asked: dict[str, Any]) -> dict[str, Any] | None:
    """`do` is one of `have`, `receive`, `lay_out`, `unpack`, `send`, `drop`, `clean`; `workdir` where."""
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    if asked["do"] == "clean" and not place.exists():
        return {"bundles": 0, "wheels": 0, "bytes": 0}
    problem = _opened(place)
    if problem:
        return problem
    known = {"have": have, "receive": receive, "lay_out": lay_out, "unpack": unpack, "send": send, "drop": drop}
    known |= {"clean": clean}
    return known[asked["do"]](place, asked)


def _opened(place: Path) -> dict[str, str] | None:
    """Make the folder, or see that it is one of this version's."""
    mark = place / "quantkit.json"
    if not mark.exists():
        if place.exists() and any(place.iterdir()):
            return {"error": "workdir-foreign"}
        (place / "store").mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps({"layout": LAYOUT}))
    try:
        layout = json.loads(mark.read_text())["layout"]
    except (ValueError, KeyError, TypeError):
        layout = None
    return None if layout == LAYOUT else {"error": "workdir-version", "value": str(layout)[:40]}


def have(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Bytes there of each of `files`, sha256 -> size, None of a whole one; and bytes that the disk has free."""
    found: dict[str, int | None] = {}
    for sha, size in asked["files"].items():
        part = place / "store" / f"{sha}.part"
        found[sha] = None
        if _where(place, sha, size) is None and not (place / "wheels" / sha).is_dir():
            found[sha] = min(part.stat().st_size, size) if part.exists() else 0
    return {"there": found, "free": shutil.disk_usage(place).free}


def _where(place: Path, sha: str, size: int | None = None) -> Path | None:
    """The whole file of that content."""
    whole = place / "store" / sha
    if not whole.exists():
        try:
            whole = place / (place / "store" / f"{sha}.at").read_text()
        except OSError:
            return None
    try:
        there = whole.stat().st_size
    except OSError:
        return None
    return whole if size is None or there == size else None


def receive(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """`files` in their order, [sha256, size, where its bytes begin], from standard input."""
    with lock_file(place / "store" / "coming") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)  # nothing is removed meanwhile
        return _received(place, asked)


def _received(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    damaged: list[str] = []
    coming: Any = sys.stdin.buffer
    for sha, size, begin in asked["files"]:
        part = place / "store" / f"{sha}.part"
        part.touch()
        with part.open("r+b") as stream:
            stream.seek(begin)
            missing = size - begin
            while missing:
                signal.alarm(_PATIENCE)
                chunk = coming.read1(min(missing, _CHUNK))
                if not chunk:
                    return {"error": "cut"}
                stream.write(chunk)
                missing -= len(chunk)
            signal.alarm(0)
            stream.truncate(size)
            stream.flush()
            os.fsync(stream.fileno())
            stream.seek(0)
            good = hashlib.file_digest(stream, "sha256").hexdigest() == sha
        with contextlib.suppress(FileNotFoundError):  # another one that sent the same was first
            if good:
                part.replace(place / "store" / sha)
            else:
                part.unlink()
        damaged += [] if good else [sha]
    return {"damaged": damaged}


def send(place: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Print the file of a content from byte `begin` on, in lines of base64; the last line is `sent`."""
    path = place / "store" / asked["sha"]
    try:
        stream = path.open("rb")
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
    """Remove the file of a content that a job has left, once it has been fetched."""
    (place / "store" / asked["sha"]).unlink(missing_ok=True)
    return {}


def lay_out(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """A folder `name` of `files`, relative path -> sha256: each is there once, or copied from where it lies already."""
    folder = place / "bundles" / asked["name"]
    made = folder.with_name(f".{folder.name}")
    with _alone(place):
        if not folder.is_dir():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            for name, sha in asked["files"].items():
                where = _where(place, sha)
                if where is None:
                    return {"error": "absent", "value": sha}
                target = made / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    if where.parent != place / "store" or where.stat().st_nlink > 1:
                        raise OSError
                    target.hardlink_to(where)
                except OSError:  # it lies elsewhere too, or the file system has no links
                    shutil.copyfile(where, target)
            made.replace(folder)
        # of the two names of a file one stays
        for name, sha in asked["files"].items():
            if (place / "store" / sha).exists():
                (place / "store" / f"{sha}.at").write_text(f"bundles/{asked['name']}/{name}")
                (place / "store" / sha).unlink()
    return {}


def unpack(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The wheels `files`, each in a folder for PYTHONPATH, without tests and what belongs elsewhere."""
    with _alone(place):
        for sha in asked["files"]:
            folder = place / "wheels" / sha
            made = folder.with_name(f".{sha}")
            if folder.is_dir():
                continue
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            where = _where(place, sha)
            if where is None:
                return {"error": "absent", "value": sha}
            with zipfile.ZipFile(where) as wheel:
                for name in wheel.namelist():
                    parts = name.split("/")
                    if "tests" not in parts and not parts[0].endswith(".data"):
                        wheel.extract(name, made)
            made.replace(folder)
            where.unlink()
    return {}


def clean(place: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Remove what no unfinished job of the last day names: how many `bundles` and `wheels`, and `bytes` of all.

    While a job runs, or something arrives, nothing is removed: `holder` says whose that is.
    """
    with lock_file(place / "lock") as lock, lock_file(place / "store" / "coming") as coming, _alone(place):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(coming, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            return {"holder": _said(lock.read())}
        size, used = 0, ""
        for job in (place / "jobs").glob("*"):
            if time.time() - job.stat().st_mtime > _OLD:
                size += _removed(job)
            else:
                used += "".join(each.read_text() for name in ("job.json", "wheels") if (each := job / name).exists())
        bundles = [each for each in (place / "bundles").glob("*") if f"bundles/{each.name}" not in used]
        wheels = [each for each in (place / "wheels").glob("*") if each.name not in used]
        size += sum(map(_removed, [*bundles, *wheels]))
        for each in (place / "store").iterdir():
            left = each.suffix == ".at" and (place / each.read_text()).exists()
            if each.name not in ("coming", "laying") and not left:
                size += _removed(each)
    return {"bundles": len(bundles), "wheels": len(wheels), "bytes": size}


def _said(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"what": "carrying"}


def _removed(path: Path) -> int:
    """Remove a file or a folder; its bytes."""
    if path.is_symlink() or not path.is_dir():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(each.lstat().st_size for each in path.rglob("*") if each.is_symlink() or each.is_file())
    shutil.rmtree(path)
    return size


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    with lock_file(place / "store" / "laying") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
