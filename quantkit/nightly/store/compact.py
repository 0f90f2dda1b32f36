"""Files in place of others. Many small ones become one: what a night's cells committed, a file a table.

    write whole-HASH, with the names it replaces  ->  rename  ->  delete those

Killed before the rename, nothing has changed; killed after it, both are there, readers go by the names in the new one,
and the next call deletes the rest.

Stores of older schemas are rewritten in this one likewise. Every file says in its metadata which schema it is of, and
`store.json` is rewritten last, so that a migration that is killed goes on where it was.

    0 -> 1   attempts, rounds and the release came; the files of one commit were called HASH in every table
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.bundle.disk import fsync
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.records import TABLES, Item, Night, Record, Result, StoredDecision, Time, schema

# results last: their names are what makes the others count
KINDS: tuple[type[Record], ...] = (Time, Item, Result)
# table -> columns that schema 0 has not, and what they were
_NEW_IN_1: dict[str, dict[str, Any]] = {
    "results": {"attempt": 1, "release_sha256": None},
    "times": {"attempt": 1, "round": 0},
    "items": {"attempt": 1},
}


def compact(root: Path, damaged: set[Path], sound: set[Path]) -> int:
    """See `Store.compact`; the caller holds the lock. What is damaged is left where it is."""
    tidy(root)
    found = _files.listing(root, damaged, sound)
    count = 0
    for kind in KINDS:
        nights: dict[str, list[Path]] = {}
        for night, path in found.files[kind.table]:
            if not path.stem.startswith(_files.WHOLE):
                nights.setdefault(night, []).append(path)
        for paths in nights.values():
            kept = [path for path in paths if _files.readable(path)]
            damaged |= set(paths) - set(kept)
            if kept:
                fold(kind, kept, _files.WHOLE)
                count += len(kept)
    return count


def fold(kind: type[Record], paths: Sequence[Path], prefix: str, read: Callable[[Path], Any] | None = None) -> None:
    """One file in place of several of one folder, sorted so that what belongs to one cell lies together.

    Args:
        paths: of the files; deleted when the new one is durable.
        read: a file as a `pyarrow.Table` of this schema.
    """
    import pyarrow as pa

    take = read or (lambda path: _files.parquet().read_table(path, schema=schema(kind), partitioning=None))
    table = pa.concat_tables([take(path) for path in paths])
    keys = [name for name in ("night", "cell", "build", "attempt") if name in table.column_names]
    table = table.sort_by([(name, "ascending") for name in keys])
    data = _files.pack(kind, table, [path.stem for path in paths])
    _files.put(paths[0].parent / f"{prefix}{_files.digest(data)}.parquet", data)
    for path in paths:
        path.unlink()
    fsync(paths[0].parent)


def tidy(root: Path) -> None:
    """Delete what killed processes left: temporary files, and files that another one has replaced."""
    for kind in TABLES:
        for night in _files.nights(root, kind.table):
            place = _files.folder(root, kind.table, night)
            for path in place.glob(".*.tmp"):
                path.unlink()
            names = _files.stems(root, kind.table, night)
            # the files of single cells replace nothing
            new = [stem for stem in names if kind not in KINDS or stem.startswith(_files.WHOLE)]
            if not new or len(names) == 1:
                continue
            for path in [place / f"{stem}.parquet" for stem in new]:
                old = set(_files.about(path)["replaces"]) & set(names)
                if old and _files.readable(path):
                    for stem in old:
                        (place / f"{stem}.parquet").unlink(missing_ok=True)


# --- older schemas ---------------------------------------------------------------------------------------------------


def migrate(root: Path, version: int) -> int:
    """Rewrite all files of a store of schema 0; the number of files read. The caller holds the lock.

    Files that cannot be read stay as they are.
    """
    assert version == 0, version
    tidy(root)
    count = 0
    kinds: tuple[type[Record], ...] = (*KINDS, Night, StoredDecision)
    for kind in kinds:
        for night in _files.nights(root, kind.table):
            place = _files.folder(root, kind.table, night)
            committed = set(_files.stems(root, Result.table, night)) if kind in KINDS else None
            paths = [
                place / f"{stem}.parquet"
                for stem in _files.stems(root, kind.table, night)
                if committed is None or stem in committed
            ]
            paths = [path for path in paths if _files.readable(path) and _files.about(path)["schema"] == 0]
            if paths:
                fold(kind, paths, _prefix(kind), partial(_upgraded, kind))
                count += len(paths)
    return count


def _prefix(kind: type[Record]) -> str:
    """How the name of the new file begins."""
    if kind is Night:
        return ""
    return "000001-" if kind is StoredDecision else _files.WHOLE


def _upgraded(kind: type[Record], path: Path) -> Any:
    """A file of schema 0 as a table of schema 1."""
    import pyarrow as pa

    table = _files.parquet().read_table(path, partitioning=None)
    for name, value in _NEW_IN_1.get(kind.table, {}).items():
        column = pa.array([value] * table.num_rows, type=schema(kind).field(name).type)
        table = table.append_column(name, column)
    return table.select(schema(kind).names).cast(schema(kind))
