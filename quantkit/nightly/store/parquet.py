"""The store of nights: append-only Parquet files, and DuckDB over them. `files.py` says where they lie.

A cell's result is committed on its own, in one step, and once: a killed night loses no more than the cell it was at,
and two runs at once share the work. Names of nights sort by their start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quantkit import limits
from quantkit._version import __version__
from quantkit.bundle.disk import is_left_over, write_atomic
from quantkit.errors import InputError, did_you_mean
from quantkit.nightly.store import compact as _compact
from quantkit.nightly.store import files as _files
from quantkit.nightly.store import query as _query
from quantkit.nightly.store import write
from quantkit.nightly.store.query import QueryRows
from quantkit.nightly.store.records import (
    NIGHT_ID,
    TABLES,
    Item,
    Night,
    Record,
    Result,
    StoredDecision,
    Time,
    from_table,
    to_table,
)

__all__ = ["QueryRows", "Store"]

RowKind = TypeVar("RowKind", bound=Record)
Found = TypeVar("Found")
# files may be damaged, or replaced between being listed and being read
_TRIES = 3


class Store:
    """Open one with `Store.open`. It keeps no file open; each question lists the files that count by then.

    Args:
        path: its folder.
        warnings: what was passed over or is odd, each said once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._damaged: set[Path] = set()
        self._sound: set[Path] = set()
        self._database: Any = None

    @classmethod
    def open(cls, path: str | Path, *, create: bool = False) -> Store:
        """Open a store; one of an older schema is rewritten in this one, and a warning says so.

        Args:
            create: make it where there is none.

        Raises:
            InputError: `store-missing`, `store-invalid` (no store, or a damaged one), `store-newer`, `store-locked`,
                `file-unwritable`.
        """
        store = cls(Path(path).expanduser())
        place = store.path / "store.json"
        if create and not place.exists():
            store._create(place)
        schema = _schema(place)
        if schema < _files.SCHEMA:
            with _files.locked(store.path):
                # another process may have done it by now
                if (schema := _schema(place)) < _files.SCHEMA:
                    count = _compact.migrate(store.path, schema)
                    _write_schema(place)
                    store._warn(f"{store.path}: rewritten from schema {schema} to {_files.SCHEMA}, {count} files")
        return store

    def _create(self, place: Path) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            others = [each.name for each in self.path.iterdir() if each.name != ".lock" and not is_left_over(each.name)]
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError("file-unwritable", where=str(self.path), value=reason, remedy="check the path") from None
        with _files.locked(self.path):
            if place.exists():
                return
            if others:
                raise InputError(
                    "store-invalid",
                    where=str(self.path),
                    value=f"holds {others[0]}, but no store.json",
                    rule="a store has a folder of its own",
                    remedy="choose an empty folder, or restore store.json",
                )
            _write_schema(place)

    def begin(self, night: Night) -> Night:
        """Write down that a night begins. One that has begun already stays as it is, and is returned.

        Where a night of the store started later, the clock has gone back, and a warning says so.
        """
        if not NIGHT_ID.fullmatch(night.night):
            raise ValueError(f"a night is called like {NIGHT_ID.pattern}, got {night.night!r}")
        with _files.locked(self.path):
            there = _files.nights(self.path, Night.table)
            if night.night not in there:
                data = _files.pack(Night, to_table(Night, [night]))
                _files.put(_files.folder(self.path, Night.table, night.night) / f"{_files.digest(data)}.parquet", data)
        if later := [name for name in there if name > night.night]:
            self._warn(
                f"the clock says {night.night}, but {later[-1]} is in the store; nights sort by the time they state, "
                "so this one comes before it"
            )
        return next((each for each in self.nights() if each.night == night.night), night)

    def commit(self, result: Result, times: Iterable[Time] = (), items: Iterable[Item] = ()) -> bool:
        """Write one attempt at one cell, whole or not at all.

        Args:
            items: of its build; give them with the first of its cells alone.

        Returns:
            False where this attempt was committed before; then nothing is written.

        Raises:
            ValueError: rows of another night, cell, build or attempt.
            InputError: `store-locked`, `file-unwritable`.
            Stopped: `disk-full`.
        """
        done = write.commit(self.path, result, list(times), list(items))
        self._recheck()
        return done

    def decide(self, night: str, decisions: Iterable[StoredDecision]) -> None:
        """Write what was decided of a night: all of it, in place of what was decided of it before."""
        write.decide(self.path, night, list(decisions))

    def compact(self) -> int:
        """Put the results, times and items of each night into one file a table; how many files were replaced.

        Safe at any time, while nights run too: what is written meanwhile waits for the next call. Queries over a year
        of nights are fast only on compacted ones, so call it when a night ends.
        """
        with _files.locked(self.path):
            count = _compact.compact(self.path, self._damaged, self._sound)
            self._recheck()
            self._tell(_files.listing(self.path, self._damaged, self._sound))
        return count

    @property
    def damaged(self) -> list[Path]:
        """The files that were found unreadable so far."""
        return sorted(self._damaged)

    def nights(self) -> list[Night]:
        """All nights, in the order of their names."""
        return self._rows(Night, "FROM nights ORDER BY night")

    def results(self, night: str | None = None) -> list[Result]:
        """The results of one night or of all, every attempt, by night, cell and attempt."""
        where, values = ("", {}) if night is None else ("WHERE night = $night", {"night": night})
        return self._rows(Result, f"FROM results {where} ORDER BY night, cell, attempt", **values)

    def times(self, night: str, cell: str | None = None) -> list[Time]:
        """The iterations of one cell, or of all cells of a night, in the order in which they were taken."""
        where, values = ("", {}) if cell is None else ("AND cell = $cell", {"cell": cell})
        order = "ORDER BY cell, attempt, round, block, position, began"
        return self._rows(Time, f"FROM times WHERE night = $night {where} {order}", night=night, **values)

    def items(self, night: str, build: str | None = None) -> list[Item]:
        """The items of one build, or of all builds of a night."""
        where, values = ("", {}) if build is None else ("AND build = $build", {"build": build})
        order = "ORDER BY build, attempt, item, side"
        return self._rows(Item, f"FROM items WHERE night = $night {where} {order}", night=night, **values)

    def decisions(self, night: str | None = None) -> list[StoredDecision]:
        """The decisions of one night or of all."""
        where, values = ("", {}) if night is None else ("WHERE night = $night", {"night": night})
        return self._rows(StoredDecision, f"FROM decisions {where} ORDER BY night, cell, what", **values)

    def committed(self, night: str, attempt: int = 1) -> set[str]:
        """The keys of the cells that have a result of that attempt, whatever it is."""
        sql = "SELECT cell FROM results WHERE night = $night AND attempt = $attempt"
        return {cell for (cell,) in self.query(sql, night=night, attempt=attempt).rows}

    def accepted(self, before: str | None = None, cells: Sequence[str] | None = None) -> dict[str, Result]:
        """Cell -> the last result that was done, decided on, and in no respect found worse or failed.

        Args:
            before: a night; it and later ones do not count.
            cells: keys of those that are asked for; None is all that there are, which takes longer.
        """
        if cells is None:
            where, values = ("", {}) if before is None else ("AND night < $before", {"before": before})
            return self._accepted(where, **values)
        nights = [name for name in _files.nights(self.path, StoredDecision.table) if before is None or name < before]
        found: dict[str, Result] = {}
        # nearly always it is one of the last nights, and the others stay closed
        for span in (nights[-_RECENT:], nights[:-_RECENT]):
            if span and (left := sorted(set(cells) - found.keys())):
                where, values = "AND night BETWEEN $first AND $last", {"first": span[0], "last": span[-1]}
                if len(left) <= _NAMED:
                    keys = {f"cell_{i}": cell for i, cell in enumerate(left)}
                    where, values = f"{where} AND cell IN ({', '.join(f'${name}' for name in keys)})", values | keys
                found |= {cell: each for cell, each in self._accepted(where, **values).items() if cell in left}
        return found

    def _accepted(self, where: str, **values: Any) -> dict[str, Result]:
        last = {tuple(row) for row in self.query(_ACCEPTED.format(where=where), **values).rows}
        if not last:
            return {}
        # whole rows are many times as long: of the nights alone that hold one
        nights = {f"night_{i}": night for i, night in enumerate(sorted({night for night, _, _ in last}))}
        named = ", ".join(f"${name}" for name in nights)
        found = self._rows(Result, f"FROM results WHERE night IN ({named}) ORDER BY cell", **nights)
        return {each.cell: each for each in found if (each.night, each.attempt, each.cell) in last}

    def query(self, sql: str, **values: Any) -> QueryRows:
        """What a query finds. It reads the tables and nothing else, and writes nothing.

        Args:
            sql: one statement, in DuckDB's dialect, or a table's name; `$name` is a parameter.

        Raises:
            InputError: `query-invalid`, `query-failed`.
        """
        table = self._answer(_statement(sql), values)
        # by position: two columns may have one name
        columns = [column.to_pylist() for column in table.columns]
        return QueryRows(_numbered(table.column_names), list(zip(*columns, strict=True)) if columns else [])

    def arrow(self, sql: str, **values: Any) -> Any:
        """What a query finds, as a `pyarrow.Table`: for many rows, which take long to make into Python's own."""
        return self._answer(sql, values)

    def export(self, what: str, out: str | Path) -> int:
        """Write a table, or what a query finds, into a file, as much as there is; the number of rows.

        Args:
            what: a table's name, or a query.
            out: `.csv`, or `.json` (an array with an object a row). NaN and infinity, which JSON has not, become null.

        Raises:
            InputError: `query-invalid`, `query-failed`, `file-unwritable`, `usage` for another suffix.
        """
        place = Path(out).expanduser()
        if place.suffix not in write.FORMATS:
            remedy = did_you_mean(place.suffix, write.FORMATS)
            raise InputError("usage", where=str(out), value=f"suffix {place.suffix!r}", remedy=remedy)
        return self._trying(_statement(what), {}, lambda batches: write.export(place, batches))

    def _rows(self, kind: type[RowKind], sql: str, **values: Any) -> list[RowKind]:
        return from_table(kind, self._answer(sql, values))

    def _answer(self, sql: str, values: dict[str, Any]) -> Any:
        """A `pyarrow.Table`."""
        import pyarrow as pa

        return self._trying(sql, values, lambda batches: pa.Table.from_batches(list(batches)))

    def _trying(self, sql: str, values: dict[str, Any], use: Callable[[Iterator[Any]], Found]) -> Found:
        """What `use` makes of the answer's batches; again without the files that turn out to be damaged."""
        self._database = self._database or _query.connect()
        problem = ""
        for _ in range(_TRIES):
            listing = _files.listing(self.path, self._damaged, self._sound)
            self._tell(listing)
            try:
                return use(_query.batches(self._database, listing.files, sql, values))
            except _query.Unreadable as error:
                problem = str(error)
                paths = [path for files in listing.files.values() for _, path in files]
                bad = {path for path in paths if not _files.readable(path)}
                if not bad:
                    break
                self._damaged |= {path for path in bad if path.exists()}
        raise InputError("query-failed", where=sql[:300], value=problem, remedy="no file of the store is damaged")

    def _recheck(self) -> None:
        """A file that was damaged may have been written anew: its name goes by its content."""
        self._damaged = {path for path in self._damaged if not _files.readable(path)}

    def _tell(self, listing: _files.Listing) -> None:
        for path in sorted(listing.damaged):
            self._warn(f"{path}: damaged, passed over; not deleted")
        for path in sorted(listing.twice):
            self._warn(f"{path}: passed over, another file holds this attempt already")

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


# of the last nights, so many are looked at first; of more cells than this a query asks for all of them
_RECENT, _NAMED = 30, 16
# a cell's last night whose decisions let it pass, and of that its last attempt
_ACCEPTED = """
WITH judged AS (
    SELECT night, cell FROM decisions WHERE true {where}
    GROUP BY night, cell HAVING NOT bool_or(answer IN ('worse', 'failed'))
), last AS (
    SELECT cell, max(struct_pack(night := night, attempt := attempt)) AS which
    FROM results JOIN judged USING (night, cell) WHERE state = 'done' {where} GROUP BY cell
)
SELECT which.night, which.attempt, cell FROM last
"""


def _statement(what: str) -> str:
    """A table's name as a query; a query stays one."""
    return f"FROM {what}" if what in {kind.table for kind in TABLES} else what


def _schema(place: Path) -> int:
    """The schema of the store that a `store.json` tells of."""
    where = str(place.parent)
    try:
        found = json.loads(limits.read(place))
        schema, version = int(found["schema"]), found.get("quantkit", "a version unknown")
    except FileNotFoundError:
        raise InputError(
            "store-missing", where=where, value="no store.json there", remedy="check the path, or run a night first"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "store-invalid", where=str(place), value=str(error), remedy=f'it says {{"schema": {_files.SCHEMA}}}'
        ) from None
    if schema > _files.SCHEMA:
        raise InputError(
            "store-newer",
            where=where,
            value=f"schema {schema}, of quantkit {version}",
            rule=f"this quantkit {__version__} reads schemas up to {_files.SCHEMA}",
            remedy="install that version; the store is as it was",
        )
    return schema


def _write_schema(place: Path) -> None:
    text = json.dumps({"schema": _files.SCHEMA, "quantkit": __version__})
    write_atomic(place, f"{text}\n".encode())


def _numbered(names: Iterable[str]) -> tuple[str, ...]:
    """Names of which none comes twice: a, a_2, ..."""
    found: list[str] = []
    for name in names:
        tries = [name, *(f"{name}_{number}" for number in range(2, len(found) + 3))]
        found.append(next(each for each in tries if each not in found))
    return tuple(found)
