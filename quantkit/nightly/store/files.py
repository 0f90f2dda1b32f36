"""Where the files of a store lie, which of them count, and how one comes to be there.

    store.json                              {"schema": 1, "quantkit": "0.1.0"}
    .lock                                   held (flock) while something is written; reading needs no lock
    nights/night=ID/HASH.parquet            one row
    times/night=ID/KEY-HASH.parquet         of one attempt at one cell; KEY is a hash of both, HASH of all three files
    items/night=ID/KEY-HASH.parquet
    results/night=ID/KEY-HASH.parquet       written last: times and items of the same name count once this is there
    decisions/night=ID/NUMBER-HASH.parquet  of the whole night; the highest number counts
    TABLE/night=ID/whole-HASH.parquet       several of the above in one; names in its metadata those that it replaces

No file is ever changed. A writer that is killed leaves a temporary file, which has a name of its own, or times without
a result, which no reader looks at. A file is deleted only after one that replaces it is durable, and until it is gone
its name in that file's metadata tells readers not to count it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.bundle import disk
from quantkit.bundle.disk import fsync, stopping_when_full, write_atomic
from quantkit.errors import InputError, MissingDependency
from quantkit.nightly.store.records import TABLES, Record, schema

SCHEMA = 1
WHOLE = "whole-"
_METADATA = b"quantkit"
_MAGIC = b"PAR1"
_LOCK_SECONDS = 30.0
# rows that are read together: a cell's times are a few hundred
_ROW_GROUP = 16384


@dataclass
class Listing:
    """The files that count.

    Args:
        files: table -> (night, file), sorted by night.
        damaged: files that were passed over.
        twice: results of an attempt that another file holds already, which come about when stores are merged.
    """

    files: dict[str, list[tuple[str, Path]]] = field(default_factory=lambda: {kind.table: [] for kind in TABLES})
    damaged: list[Path] = field(default_factory=list)
    twice: list[Path] = field(default_factory=list)


def parquet() -> Any:
    """`pyarrow.parquet`; MissingDependency without it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency("pyarrow", extra="nightly", purpose="the store of nights") from None
    return pyarrow.parquet


def folder(root: Path, table: str, night: str) -> Path:
    """Where a night's files of one table lie."""
    return root / table / f"night={night}"


def key(cell: str, attempt: int) -> str:
    """What the names of the files of one attempt at one cell begin with."""
    return hashlib.sha256(f"{cell}#{attempt}".encode()).hexdigest()[:16]


def pack(kind: type[Record], table: Any, replaces: Sequence[str] = ()) -> bytes:
    """A `pyarrow.Table` as a Parquet file: page checksums, the store's schema and what it replaces in its metadata."""
    import pyarrow as pa

    columns = schema(kind)
    plain = [each.name for each in columns if each.type in (pa.string(), pa.bool_()) or pa.types.is_list(each.type)]
    about = json.dumps({"schema": SCHEMA, "replaces": list(replaces)})
    out = pa.BufferOutputStream()
    parquet().write_table(
        table.cast(columns).replace_schema_metadata({_METADATA: about}),
        out,
        compression="zstd",
        row_group_size=_ROW_GROUP,
        write_page_checksum=True,
        use_dictionary=[each.name for each in columns if each.type == pa.string()],
        # times differ in their last bits and counters by one: half the size of what a dictionary makes of them
        column_encoding={
            each.name: "BYTE_STREAM_SPLIT" if each.type == pa.float64() else "DELTA_BINARY_PACKED"
            for each in columns
            if each.name not in plain
        },
    )
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


def digest(*files: bytes) -> str:
    """The HASH in a name."""
    whole = hashlib.sha256()
    for data in files:
        whole.update(data)
    return whole.hexdigest()[:16]


def about(path: Path) -> dict[str, Any]:
    """`schema` and `replaces` of a file; of schema 0 where it says nothing. A damaged one replaces nothing."""
    import pyarrow as pa

    try:
        found = parquet().read_metadata(path).metadata or {}
        return {"schema": 0, "replaces": [], **json.loads(found.get(_METADATA, b"{}"))}
    except (OSError, ValueError, pa.ArrowException):
        return {"schema": SCHEMA, "replaces": []}


def put(path: Path, data: bytes) -> None:
    """Write a file under its final name, whole and durable; the caller holds the lock."""
    new = not path.parent.is_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    if new:
        fsync(path.parent.parent)
        fsync(path.parent.parent.parent)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the store for writing: one process at a time, and a killed one lets go.

    Raises:
        InputError: `store-locked` after 30 seconds, `file-unwritable`.
        Stopped: `disk-full`.
    """
    try:
        with stopping_when_full(root), os.fdopen(disk.lock_file(root / ".lock"), "rb") as stream:
            _acquire(stream.fileno(), root)
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            "file-unwritable", where=str(error.filename or root), value=reason, remedy="check the folder's permissions"
        ) from None


def _acquire(descriptor: int, root: Path) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise InputError(
                    "store-locked",
                    where=str(root),
                    value=f"another process has been writing for {_LOCK_SECONDS:.0f} s",
                    rule="one process writes at a time",
                    remedy="wait for it or end it; the lock goes with the process",
                ) from None
            time.sleep(0.02)


def nights(root: Path, table: str) -> list[str]:
    """The nights that have a folder in a table, sorted."""
    try:
        with os.scandir(root / table) as entries:
            return sorted(each.name[6:] for each in entries if each.name.startswith("night="))
    except FileNotFoundError:
        return []


def stems(root: Path, table: str, night: str) -> list[str]:
    """The names of a night's files of one table, sorted, without their suffix; temporary ones left out."""
    try:
        with os.scandir(folder(root, table, night)) as entries:
            names = [each.name for each in entries]
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(".parquet") for name in names if name.endswith(".parquet") and name[0] != ".")


def listing(root: Path, damaged: set[Path], sound: set[Path]) -> Listing:
    """The files that count now.

    Args:
        damaged: files known to be unreadable, which are passed over; more are added.
        sound: files whose ends were looked at; more are added.
    """
    found = Listing()
    for night in sorted({night for kind in TABLES for night in nights(root, kind.table)}):
        there: dict[str, list[str]] = {}
        for kind in TABLES:
            place = folder(root, kind.table, night)
            there[kind.table] = []
            for stem in stems(root, kind.table, night):
                path = place / f"{stem}.parquet"
                if path not in sound and path not in damaged:
                    (sound if _has_ends(path) else damaged).add(path)
                if path in damaged:
                    found.damaged.append(path)
                else:
                    there[kind.table].append(stem)
        counted, twice = _counted(root, night, there)
        found.twice += [folder(root, "results", night) / f"{stem}.parquet" for stem in twice]
        for table, names in counted.items():
            place = folder(root, table, night)
            found.files[table] += [(night, place / f"{stem}.parquet") for stem in names]
    return found


def _counted(root: Path, night: str, there: dict[str, list[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Of a night's names by table: those that count, and results that another file holds already."""
    wholes = {table: [stem for stem in names if stem.startswith(WHOLE)] for table, names in there.items()}
    plain = {table: [stem for stem in names if not stem.startswith(WHOLE)] for table, names in there.items()}
    # read only where it matters: a night in one file has nothing else to be told apart
    loose = any(plain[table] for table in ("results", "times", "items"))
    replaced: dict[str, set[str]] = {
        table: {old for stem in names for old in about(folder(root, table, night) / f"{stem}.parquet")["replaces"]}
        if loose
        else set()
        for table, names in wholes.items()
    }
    keys = {old.partition("-")[0] for old in replaced["results"]}
    results: list[str] = []
    twice: list[str] = []
    for stem in plain["results"]:
        if stem in replaced["results"]:
            continue
        attempt = stem.partition("-")[0]
        (twice if attempt in keys else results).append(stem)
        keys.add(attempt)
    committed = {*results, *replaced["results"]}
    counted = {
        table: [stem for stem in plain[table] if stem in committed and stem not in replaced[table]]
        for table in ("times", "items")
    }
    counted = {table: wholes[table] + names for table, names in (counted | {"results": results}).items()}
    counted["nights"] = there["nights"][:1]
    counted["decisions"] = there["decisions"][-1:]
    return counted, twice


def _has_ends(path: Path) -> bool:
    """Whether a file begins and ends as Parquet does: a torn copy does not."""
    try:
        with path.open("rb", buffering=0) as stream:
            head = stream.read(4)
            stream.seek(-4, os.SEEK_END)
            return head == _MAGIC and stream.read(4) == _MAGIC
    except OSError:
        return not path.exists()  # gone meanwhile: replaced, not damaged


def readable(path: Path) -> bool:
    """Whether all of a file can be read and its checksums hold."""
    import pyarrow as pa

    try:
        with parquet().ParquetFile(path, page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
    except (OSError, ValueError, pa.ArrowException):
        return False
    return True
