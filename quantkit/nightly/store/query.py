"""DuckDB over the files that count. It opens none of them itself: it is handed Arrow data sets, and its own access to
files is shut, so that no query, whatever it says, reads or writes anything else. (DuckDB's list of allowed paths would
let `COPY` overwrite them.)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError, MissingDependency
from quantkit.nightly.store.records import TABLES, Record, schema
from quantkit.nightly.store.write import plain

_SHOWN = 300


class Unreadable(Exception):
    """A query failed where a file may be the reason."""


@dataclass(frozen=True)
class QueryRows:
    """What a query found.

    Args:
        columns: their names, in order; a name that comes twice is numbered.
        rows: their values, as Python's.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Each row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """`columns` and `rows`, with what JSON has: NaN is null, a time its ISO 8601."""
        return {"columns": list(self.columns), "rows": plain(self.as_dicts())}


def connect() -> Any:
    """A database in memory whose own access to files is shut. MissingDependency without DuckDB or pyarrow."""
    try:
        import duckdb
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingDependency(error.name or "duckdb", extra="nightly", purpose="the store of nights") from None

    database = duckdb.connect()
    # nothing is spilled either: a query that needs more memory than there is says so
    for setting in ("timezone = 'UTC'", "temp_directory = ''", "enable_external_access = false"):
        database.execute(f"SET GLOBAL {setting}")
    database.execute("SET lock_configuration = true")
    return database


def batches(
    database: Any, files: Mapping[str, Sequence[tuple[str, Path]]], sql: str, values: Mapping[str, Any]
) -> Iterator[Any]:
    """The answer of a query as `pyarrow.RecordBatch`es, times in UTC; the first is empty and tells the columns.

    Args:
        database: of `connect`.
        files: table -> (night, file).
        sql: one statement that reads; it sees a view a table.
        values: of the parameters, `$name`.

    Raises:
        InputError: `query-invalid`, wrong SQL or another statement; `over-limit`, of its time or of what it gives.
        Unreadable: it failed, and not for what it says.
    """
    import duckdb
    import pyarrow as pa

    wrong: tuple[type[Exception], ...] = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
    wrong += (duckdb.PermissionException, duckdb.ConversionException, duckdb.OutOfRangeException)
    # views are a cursor's own
    with database.cursor() as cursor, _in_time(cursor):
        for kind in TABLES:
            cursor.register(kind.table, _dataset(kind, files[kind.table]))
        try:
            _check(duckdb, cursor.extract_statements(sql), sql)
            reader = cursor.sql(sql, params=values or None).to_arrow_reader()
            yield pa.RecordBatch.from_pylist([], schema=reader.schema)
            size = 0
            for batch in reader:
                size += batch.nbytes
                limits.UNPACKED.demand(size, sql[:_SHOWN])
                yield batch
        except duckdb.InterruptException:
            raise limits.SECONDS.exceeded(sql[:_SHOWN]) from None
        except wrong as error:
            raise InputError(
                "query-invalid",
                where=sql[:_SHOWN],
                value=_line(error),
                remedy=f"`DESCRIBE TABLE` names columns; tables: {', '.join(kind.table for kind in TABLES)}",
            ) from None
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise Unreadable(_line(error)) from error


@contextmanager
def _in_time(cursor: Any) -> Iterator[None]:
    """Ends a query that has no end."""
    late = threading.Timer(limits.SECONDS.most, cursor.interrupt)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _check(duckdb: Any, statements: Sequence[Any], sql: str) -> None:
    """One statement, and one that reads."""
    kinds = duckdb.StatementType
    # a pivot counts as several
    reads = (kinds.SELECT, kinds.EXPLAIN, kinds.MULTI)
    if len(statements) != 1 or statements[0].type not in reads:
        names = ", ".join(each.type.name for each in statements) or "nothing"
        raise InputError(
            "query-invalid",
            where=sql[:_SHOWN],
            value=f"found {names}",
            rule="one statement that reads: SELECT, FROM, WITH, PIVOT, DESCRIBE, SUMMARIZE, EXPLAIN",
            remedy=f"tables: {', '.join(kind.table for kind in TABLES)}",
        )


def _line(error: Exception) -> str:
    """What DuckDB says, without the picture of where."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())[:_SHOWN]


def _dataset(kind: type[Record], files: Sequence[tuple[str, Path]]) -> Any:
    """A table's files as one Arrow data set; a filter by night leaves those of other nights closed."""
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    if not files:
        return schema(kind).empty_table()
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet, system = ds.ParquetFileFormat(default_fragment_scan_options=options), LocalFileSystem()
    fragments = [
        parquet.make_fragment(os.fspath(path), system, partition_expression=ds.field("night") == night)
        for night, path in files
    ]
    return ds.FileSystemDataset(fragments, schema(kind), parquet, system)
