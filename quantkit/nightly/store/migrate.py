"""Stores of older schemas, rewritten in this one.

Every file says in its metadata which schema it is of, and `store.json` is rewritten last, so that a migration that is
killed goes on where it was.

    0 -> 1   attempts, rounds and the release came; the files of one commit were called HASH in every table
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from quantkit.nightly.store import compact, files
from quantkit.nightly.store.records import Night, Record, Result, StoredDecision, schema

# table -> columns that schema 0 has not, and what they were
_NEW_IN_1: dict[str, dict[str, Any]] = {
    "results": {"attempt": 1, "release_sha256": None},
    "times": {"attempt": 1, "round": 0},
    "items": {"attempt": 1},
}


def migrate(root: Path, version: int) -> int:
    """Rewrite all files of a store of schema 0; the number of files read. The caller holds the lock.

    Files that cannot be read stay as they are.
    """
    assert version == 0, version
    compact.tidy(root)
    count = 0
    kinds: tuple[type[Record], ...] = (*compact.KINDS, Night, StoredDecision)
    for kind in kinds:
        for night in files.nights(root, kind.table):
            place = files.folder(root, kind.table, night)
            committed = set(files.stems(root, Result.table, night)) if kind in compact.KINDS else None
            paths = [
                place / f"{stem}.parquet"
                for stem in files.stems(root, kind.table, night)
                if committed is None or stem in committed
            ]
            paths = [path for path in paths if files.readable(path) and files.about(path)["schema"] == 0]
            if paths:
                compact.fold(kind, paths, _prefix(kind), partial(_upgraded, kind))
                count += len(paths)
    return count


def _prefix(kind: type[Record]) -> str:
    """How the name of the new file begins."""
    if kind is Night:
        return ""
    return "000001-" if kind is StoredDecision else files.WHOLE


def _upgraded(kind: type[Record], path: Path) -> Any:
    """A file of schema 0 as a table of schema 1."""
    import pyarrow as pa

    table = files.parquet().read_table(path, partitioning=None)
    for name, value in _NEW_IN_1.get(kind.table, {}).items():
        column = pa.array([value] * table.num_rows, type=schema(kind).field(name).type)
        table = table.append_column(name, column)
    return table.select(schema(kind).names).cast(schema(kind))
