"""The store of nights: one DuckDB file in a folder of its own.

    nights.duckdb       the tables of `records`, and `about`: the schema's number and the writing version
    nights.duckdb.wal   commits of a killed process; DuckDB applies them itself

Each cell's result is committed once, in its own transaction: a killed night loses at most the current cell, and two
simultaneous runs share the work. The file is open only during a query or a write, so processes take turns: many may
read at once, one writes. Names of nights sort by their start.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from quantkit import limits
from quantkit._version import __version__
from quantkit.bundle.disk import disk_full, fsync, is_disk_full, is_left_over, writing
from quantkit.errors import InputError, MissingDependency, did_you_mean
from quantkit.nightly.records import (
    NIGHT_ID,
    TABLES,
    Item,
    Night,
    Result,
    RowKind,
    StoredDecision,
    Time,
    from_table,
    schema,
    to_table,
)

SCHEMA = 3
FILE = "nights.duckdb"
# marks a store of an earlier version: a folder of Parquet files
_OLD = "store.json"
_WAIT_SECONDS = 30.0
_SHOWN = 300
Got = TypeVar("Got")


@dataclass(frozen=True)
class QueryRows:
    """Answer of a query; repeated column names are numbered."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """Return `columns` and `rows` for JSON: NaN becomes null, a time ISO 8601."""
        return {"columns": list(self.columns), "rows": plain(self.as_dicts())}


class Store:
    """A store in its folder; `warnings` lists oddities, once each. Open one with `Store.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / FILE
        self.warnings: list[str] = []

    @classmethod
    def open(cls, path: str | Path, *, create: bool = False, config: str | Path = "nightly.yaml") -> Store:
        """Open a store.

        Args:
            create: True to create it if missing.
            config: the `nightly.yaml` that names it, for errors.

        Raises InputError: `store-missing`, `store-invalid` (not a store, one of Parquet files, or a damaged one),
        `store-newer`, `store-locked`, `file-unwritable`.
        """
        store = cls(Path(path).expanduser())
        if (store.path / _OLD).exists():
            value = f"a folder of Parquet files ({_OLD}), as earlier versions wrote it"
            remedy = f"`mv {store.path} {store.path}.parquet && quantkit nightly run {config}` makes a new one"
            raise _invalid(store.path, value, f"a store is one DuckDB file, {FILE}", remedy)
        if create and not store.file.exists():
            store._create()
        if not store.file.exists():
            remedy = "check the path, or run a night first"
            raise InputError("store-missing", where=str(store.path), value=f"no {FILE} there", remedy=remedy)
        store._check()
        return store

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.path.iterdir()]
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError("file-unwritable", where=str(self.path), value=reason, remedy="check the path") from None
        if others := [name for name in names if not is_left_over(name) and FILE not in name]:
            value, rule = f"holds {others[0]}, but no {FILE}", "a store has a folder of its own"
            raise _invalid(self.path, value, rule, "choose an empty folder")
        with self._writing() as database:
            if database.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'about'").fetchone():
                return
            for kind in TABLES:
                database.register("empty", schema(kind).empty_table())
                database.execute(f"CREATE TABLE {kind.table} AS FROM empty")
            database.execute("CREATE TABLE about AS SELECT $1 AS schema, $2 AS quantkit", [SCHEMA, __version__])

    def _check(self) -> None:
        """Refuse a store of another schema."""
        rows = self._reading("FROM about", {}, lambda batches: [row for batch in batches for row in batch.to_pylist()])
        if rows[0]["schema"] > SCHEMA:
            value = f"schema {rows[0]['schema']}, of quantkit {rows[0]['quantkit']}"
            rule, remedy = f"this quantkit {__version__} reads schemas up to {SCHEMA}", "install that version"
            remedy += "; the store is unchanged"
            raise InputError("store-newer", where=str(self.path), value=value, rule=rule, remedy=remedy)

    # --- writing -----------------------------------------------------------------------------------------------------

    def begin(self, night: Night) -> Night:
        """Record the start of a night; return it, or the stored one if it has begun already.

        A later night in the store means that the clock went back; a warning tells.
        """
        _demand(NIGHT_ID.fullmatch(night.night) is not None, f"a name like {NIGHT_ID.pattern}, got {night.night!r}")
        with self._writing() as database:
            database.execute("ALTER TABLE results ADD COLUMN IF NOT EXISTS recovery VARCHAR")  # schema 2 has none
            database.execute("UPDATE about SET schema = $1", [SCHEMA])
            known = {name for (name,) in database.execute("SELECT night FROM nights").fetchall()}
            if night.night not in known:
                _insert(database, Night, [night])
        if later := [name for name in known if name > night.night]:
            warning = f"the clock says {night.night}, but {max(later)} is in the store"
            warning += "; nights sort by their stated time, so this one comes first"
            self.warnings += [] if warning in self.warnings else [warning]
        return next(row for row in self.nights() if row.night == night.night)

    def commit(self, result: Result, times: Iterable[Time] = (), items: Iterable[Item] = ()) -> bool:
        """Write one attempt at one cell, completely or not at all.

        Args:
            items: items of its build; only with the first of its cells.

        Returns:
            False if this attempt was committed before; then nothing is written.

        Raises:
            ValueError: rows of another night, cell, build or attempt.
            InputError: `store-locked`, `file-unwritable`.
            Stopped: `disk-full`.
        """
        times, items = list(times), list(items)
        _demand(NIGHT_ID.fullmatch(result.night) is not None, f"a night's name, got {result.night!r}")
        attempt, of_build = (result.night, result.cell, result.attempt), (result.night, result.build, result.attempt)
        _demand(all((row.night, row.cell, row.attempt) == attempt for row in times), f"times of {attempt}")
        _demand(all((row.night, row.build, row.attempt) == of_build for row in items), f"items of {of_build}")
        with self._writing() as database:
            sql = "SELECT 1 FROM results WHERE night = $1 AND cell = $2 AND attempt = $3"
            if database.execute(sql, list(attempt)).fetchone():
                return False
            _insert(database, Time, times)
            _insert(database, Item, items)
            _insert(database, Result, [result])
        return True

    def decide(self, night: str, decisions: Iterable[StoredDecision]) -> None:
        """Replace all decisions of a night."""
        decisions = list(decisions)
        _demand(NIGHT_ID.fullmatch(night) is not None, f"a night's name, got {night!r}")
        _demand(all(row.night == night for row in decisions), f"decisions of {night}")
        with self._writing() as database:
            database.execute("DELETE FROM decisions WHERE night = $1", [night])
            _insert(database, StoredDecision, decisions)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Open a connection for one transaction; no other process has the file meanwhile."""
        duckdb = _duckdb()
        try:
            with self._opened(read_only=False) as database:
                database.execute("BEGIN")
                yield database
                database.execute("COMMIT")
        except duckdb.Error as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: Exception) -> Exception:
        text = _line(error)
        full = OSError(28, text) if "No space left" in text else error
        if is_disk_full(full):
            return disk_full(self.path, full)
        if "Permission denied" in text or "Read-only file system" in text or "Cannot open file" in text:
            remedy = "check the folder's permissions"
            return InputError("file-unwritable", where=str(self.path), value=text, remedy=remedy)
        return self._damaged(text)

    # --- reading -----------------------------------------------------------------------------------------------------

    def nights(self) -> list[Night]:
        """Read all nights, in the order of their names."""
        return self._rows(Night, "FROM nights ORDER BY night")

    def results(self, night: str | None = None) -> list[Result]:
        """Read the results of one night or of all, every attempt, by night, cell and attempt."""
        return self._rows(Result, f"FROM results {_of(night)} ORDER BY night, cell, attempt", night=night)

    def times(self, night: str, cell: str | None = None) -> list[Time]:
        """Read the iterations of one cell, or of all cells of a night, in order of measurement."""
        where = f"{_of(night)} AND ($cell IS NULL OR cell = $cell)"
        order = "ORDER BY cell, attempt, round, block, position, began"
        return self._rows(Time, f"FROM times {where} {order}", night=night, cell=cell)

    def items(self, night: str, build: str | None = None) -> list[Item]:
        """Read the items of one build, or of all builds of a night."""
        where = f"{_of(night)} AND ($build IS NULL OR build = $build)"
        return self._rows(Item, f"FROM items {where} ORDER BY build, attempt, item, side", night=night, build=build)

    def decisions(self, night: str | None = None) -> list[StoredDecision]:
        """Read the decisions of one night or of all."""
        return self._rows(StoredDecision, f"FROM decisions {_of(night)} ORDER BY night, cell, what", night=night)

    def committed(self, night: str, attempt: int = 1) -> set[str]:
        """Return the keys of cells with any result of that attempt."""
        sql = "SELECT cell FROM results WHERE night = $night AND attempt = $attempt"
        return {cell for (cell,) in self.query(sql, night=night, attempt=attempt).rows}

    def accepted(self, before: str | None = None, cells: Sequence[str] | None = None) -> dict[str, Result]:
        """Return the last accepted result of each cell: done, decided, and in no comparison worse or failed.

        Args:
            before: night; it and later ones are ignored.
            cells: keys of the cells; None: all.
        """
        rows = self._rows(Result, _ACCEPTED, before=before, cells=None if cells is None else list(cells))
        return {row.cell: row for row in rows}

    def query(self, sql: str, **values: Any) -> QueryRows:
        """Answer a query. It can only read the tables.

        Args:
            sql: one statement in DuckDB's dialect, or a table's name; `$name` is a parameter.

        Raises InputError: `query-invalid`, `query-failed`, `over-limit`.
        """
        table = self.arrow(_statement(sql), **values)
        # by position: two columns may share a name
        columns = [column.to_pylist() for column in table.columns]
        return QueryRows(_numbered(table.column_names), list(zip(*columns, strict=True)) if columns else [])

    def arrow(self, sql: str, **values: Any) -> Any:
        """Answer a query with a `pyarrow.Table`, which is faster for many rows."""
        import pyarrow as pa

        return self._reading(sql, values, lambda batches: pa.Table.from_batches(list(batches)))

    def export(self, what: str, out: str | Path) -> int:
        """Write a table, or the answer of a query, to a file; return the number of rows.

        Args:
            what: table's name, or query.
            out: `.csv`, or `.json` (an array of objects). NaN and infinity become null.

        Raises InputError: `query-invalid`, `query-failed`, `file-unwritable`, `usage` for another suffix.
        """
        place = Path(out).expanduser()
        if place.suffix not in _FORMATS:
            remedy = did_you_mean(place.suffix, _FORMATS)
            raise InputError("usage", where=str(out), value=f"suffix {place.suffix!r}", remedy=remedy)
        return self._reading(_statement(what), {}, lambda batches: _export(place, batches))

    def _rows(self, kind: type[RowKind], sql: str, **values: Any) -> list[RowKind]:
        return from_table(kind, self.arrow(sql, **{name: value for name, value in values.items() if f"${name}" in sql}))

    def _reading(self, sql: str, values: dict[str, Any], use: Callable[[Iterator[Any]], Got]) -> Got:
        """Apply `use` to the answer's batches; the first is empty and has the columns."""
        duckdb = _duckdb()
        wrong: tuple[type[Exception], ...] = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
        wrong += (duckdb.PermissionException, duckdb.ConversionException, duckdb.OutOfRangeException)
        wrong += (duckdb.InvalidInputException,)
        damaged = (duckdb.IOException, duckdb.SerializationException, duckdb.FatalException, duckdb.InternalException)
        late: threading.Timer | None = None
        try:
            with self._opened(read_only=True) as database:
                late = threading.Timer(limits.SECONDS.most, database.interrupt)
                late.daemon = True
                late.start()
                return use(_batches(duckdb, database, sql, values))
        except duckdb.InterruptException:
            raise limits.SECONDS.exceeded(sql[:_SHOWN]) from None
        except wrong as error:
            remedy = f"`DESCRIBE TABLE` names columns; {_TABLES}"
            raise InputError("query-invalid", where=sql[:_SHOWN], value=_line(error), remedy=remedy) from None
        except damaged as error:
            raise self._damaged(_line(error)) from None
        except duckdb.Error as error:
            if "Corrupt database file" in str(error):
                raise self._damaged(_line(error)) from None
            remedy = "select fewer rows or columns"
            raise InputError("query-failed", where=sql[:_SHOWN], value=_line(error), remedy=remedy) from None
        finally:
            if late is not None:
                late.cancel()
                late.join()  # the thread holds the connection: one that outlives Python is reported as leaked

    @contextmanager
    def _opened(self, *, read_only: bool) -> Iterator[Any]:
        """Open a connection; wait for another process that has the file."""
        duckdb = _duckdb()
        until = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                # no spilling to disk: a query that needs too much memory fails
                database = duckdb.connect(self.file, read_only=read_only, config={"temp_directory": ""})
                break
            except (duckdb.IOException, duckdb.ConnectionException) as error:
                if "Could not set lock" not in str(error) and not isinstance(error, duckdb.ConnectionException):
                    raise
                if time.monotonic() > until:
                    value = f"another process has held it for {_WAIT_SECONDS:.0f} s"
                    rule, remedy = "a writing process has the store to itself", "wait for it or end it"
                    remedy += "; the lock ends with the process"
                    where = str(self.path)
                    raise InputError("store-locked", where=where, value=value, rule=rule, remedy=remedy) from None
                time.sleep(0.02)
        try:
            database.execute("SET GLOBAL timezone = 'UTC'")
            if read_only:
                database.execute("SET GLOBAL enable_external_access = false")
                database.execute("SET lock_configuration = true")
            yield database
        finally:
            database.close()

    def _damaged(self, value: str) -> InputError:
        remedy = "restore it from a copy, or move it away and start a new one"
        return _invalid(self.file, value, "a store is an intact DuckDB file", remedy)


# last attempt of each cell's last night that passed
_ACCEPTED = """
WITH passed AS (
    SELECT night, cell FROM decisions WHERE $before IS NULL OR night < $before
    GROUP BY night, cell HAVING NOT bool_or(answer IN ('worse', 'failed'))
), last AS (
    SELECT cell, max(struct_pack(night := night, attempt := attempt)) AS which
    FROM results JOIN passed USING (night, cell)
    WHERE state = 'done' AND ($cells::VARCHAR[] IS NULL OR cell IN (SELECT unnest($cells::VARCHAR[]))) GROUP BY cell
)
SELECT results.* FROM results JOIN last ON results.cell = last.cell AND results.night = last.which.night
    AND results.attempt = last.which.attempt ORDER BY results.cell
"""
_TABLES = f"tables: {', '.join(kind.table for kind in TABLES)}"


def _invalid(where: Path, value: str, rule: str, remedy: str) -> InputError:
    return InputError("store-invalid", where=str(where), value=value, rule=rule, remedy=remedy)


def _of(night: str | None) -> str:
    return "" if night is None else "WHERE night = $night"


def _statement(what: str) -> str:
    """Turn a table's name into a query; leave a query unchanged."""
    return f"FROM {what}" if what in {kind.table for kind in TABLES} else what


def _duckdb() -> Any:
    """Import `duckdb`. Raises MissingDependency without it or pyarrow."""
    try:
        import duckdb
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingDependency(error.name or "duckdb", extra="nightly", purpose="the store of nights") from None
    return duckdb


def _insert(database: Any, kind: type[RowKind], rows: Sequence[RowKind]) -> None:
    if rows:
        database.register("taken", to_table(kind, rows))
        database.execute(f"INSERT INTO {kind.table} FROM taken")
        database.unregister("taken")


def _batches(duckdb: Any, database: Any, sql: str, values: dict[str, Any]) -> Iterator[Any]:
    """Yield the answer as `pyarrow.RecordBatch`es. Raises InputError `query-invalid`, `over-limit`."""
    import pyarrow as pa

    statements = database.extract_statements(sql)
    kinds = duckdb.StatementType
    # a pivot counts as several statements
    if len(statements) != 1 or statements[0].type not in (kinds.SELECT, kinds.EXPLAIN, kinds.MULTI):
        value = f"found {', '.join(statement.type.name for statement in statements) or 'nothing'}"
    elif (writes := _writes(duckdb, sql)) is not None:
        # DuckDB blocks all files but the database's own, which an explained `COPY` would overwrite
        value = f"found {writes}"
    else:
        reader = database.sql(sql, params=values or None).to_arrow_reader()
        yield pa.RecordBatch.from_pylist([], schema=reader.schema)
        size = 0
        for batch in reader:
            size += batch.nbytes
            limits.UNPACKED.demand(size, sql[:_SHOWN])
            yield batch
        return
    rule = "a query is one reading statement: SELECT, FROM, WITH, PIVOT, DESCRIBE, SUMMARIZE, EXPLAIN"
    raise InputError("query-invalid", where=sql[:_SHOWN], value=value, rule=rule, remedy=_TABLES)


def _writes(duckdb: Any, sql: str) -> str | None:
    """Return the first keyword of a nested statement that writes a file; quoted names do not count."""
    data = sql.encode()
    for start, kind in duckdb.tokenize(sql):
        word = data[start : start + 6].decode(errors="replace").upper()
        if kind == duckdb.token_type.keyword and word.startswith(("COPY", "EXPORT")):
            return "COPY" if word.startswith("COPY") else "EXPORT"
    return None


def _line(error: Exception) -> str:
    """Return DuckDB's message, without the marked query."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())[:_SHOWN]


def _demand(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"the store takes {rule}")


def _numbered(names: Iterable[str]) -> tuple[str, ...]:
    """Make names unique: a, a_2, ..."""
    taken: list[str] = []
    for name in names:
        tries = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
        taken.append(next(one for one in tries if one not in taken))
    return tuple(taken)


def _export(out: Path, batches: Iterator[Any]) -> int:
    """Write batches to a file, completely or not at all; the first has the columns."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with writing(out):
            with temporary.open("wb") as stream:
                count = _FORMATS[out.suffix](stream, batches)
            fsync(temporary)
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _csv(stream: IO[bytes], batches: Iterator[Any]) -> int:
    """Write CSV; nested values become JSON, null an empty field."""
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    count, writer = 0, None
    for batch in batches:
        flat = pa.RecordBatch.from_arrays([_flat(column) for column in batch.columns], names=batch.schema.names)
        writer = writer or CSVWriter(stream, flat.schema)
        writer.write_batch(flat)
        count += batch.num_rows
    if writer is not None:
        writer.close()
    return count


def _flat(column: Any) -> Any:
    """Return a column for CSV: numbers, times and text stay unchanged."""
    import pyarrow as pa

    if not (pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_interval(column.type)):
        return column
    values = [plain(value) for value in column.to_pylist()]
    texts = [json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value for value in values]
    return pa.array(texts, type=pa.string())


def _json(stream: IO[bytes], batches: Iterator[Any]) -> int:
    """Write a JSON array, one object a line."""
    count = 0
    stream.write(b"[")
    for batch in batches:
        for row in batch.to_pylist():
            text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False)
            stream.write(f"{',' if count else ''}\n{text}".encode())
            count += 1
    stream.write(b"\n]\n")
    return count


_FORMATS: dict[str, Callable[[IO[bytes], Iterator[Any]], int]] = {".csv": _csv, ".json": _json}


def plain(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity become null, times ISO 8601, other objects their text."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
