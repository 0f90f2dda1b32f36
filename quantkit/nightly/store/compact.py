"""Many small files into one: what a night's cells committed, a file a table.

    write whole-HASH, with the names it replaces  ->  rename  ->  delete those

Killed before the rename, nothing has changed; killed after it, both are there, readers go by the names in the new one,
and the next call deletes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle.disk import fsync
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.records import TABLES, Item, Record, Result, Time, schema

# results last: their names are what makes the others count
KINDS: tuple[type[Record], ...] = (Time, Item, Result)


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
