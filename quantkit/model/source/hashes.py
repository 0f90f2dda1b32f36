"""sha256 of files, remembered in the user's cache so that opening a model again does not read it again.

A remembered hash holds for one (path, device, inode, size, mtime and ctime in ns). Whoever changes a file can set its
mtime back, but not its ctime. A file changed within the last two seconds is not remembered: it could change again in
the resolution of its time stamp (the "racy" entry of git's index). An entry that is damaged does not fit its own hash.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.machine import cores

T = TypeVar("T")
R = TypeVar("R")
_RACY_NS = 2_000_000_000


def file_sha256(path: Path) -> str:
    """The sha256 of a file's content, in hex; from the cache where the file has not changed since."""
    real = path.resolve()
    before = real.stat()
    key = {"path": str(real), "size": before.st_size, "mtime_ns": before.st_mtime_ns}
    key |= {"ctime_ns": before.st_ctime_ns, "device": before.st_dev, "inode": before.st_ino}
    slot = cache_dir() / "hashes" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(slot.read_text(encoding="utf-8"))
        if {name: known[name] for name in key} == key and known["check"] == _check(key, known["sha256"]):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there or not ours: hash the file
    with real.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _RACY_NS:
        _remember(slot, {**key, "sha256": found, "check": _check(key, found)})
    return found


def at_once(look: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """What `look` gives for each; see `in_order`."""
    return list(in_order(look, each))


def in_order(look: Callable[[T], R], each: Sequence[T]) -> Iterator[R]:
    """What `look` gives for each, in order, or raises when its turn comes.

    On a thread for every four cores, up to eight: reading and hashing hold no lock.
    """
    threads = min(cores() // 4, 8)
    if threads < 2:
        yield from map(look, each)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(look, each)


def source_changed(ref: str) -> InputError:
    """The error `source-changed`."""
    return InputError(
        "source-changed",
        where=ref,
        value="its files changed while it was compiled",
        rule="a bundle says what it was made from",
        remedy="compile again, and leave the model alone meanwhile",
    )


def _check(key: dict[str, object], sha256: str) -> str:
    return hashlib.sha256(f"{json.dumps(key, sort_keys=True)} {sha256}".encode()).hexdigest()[:16]


def _remember(slot: Path, entry: dict[str, object]) -> None:
    try:
        slot.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(slot, json.dumps(entry).encode())
    except Exception:  # a cache that cannot be written (full, read-only) costs time, nothing else
        return
