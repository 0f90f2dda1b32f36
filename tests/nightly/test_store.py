"""The store: what goes in comes out, once; what is damaged, locked, newer or older; questions in SQL; rows."""

import csv
import json
import math
import random
import subprocess
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import forked
import pyarrow as pa
import pytest

from quantkit.errors import InputError, Stopped
from quantkit.nightly import records
from quantkit.nightly import store as stores
from quantkit.nightly.records import NIGHT_ID, Item, Night, NightCell, Record, Result, StoredDecision, Time
from quantkit.nightly.store import FILE, Store

from .conftest import CELLS, FIRST, SECOND, THIRD, decision, fill, items, night, result, times


def test_an_empty_store_answers(store: Store) -> None:
    assert [path.name for path in store.path.iterdir()] == [FILE]
    assert store.nights() == store.results() == store.decisions() == store.times(FIRST) == store.items(FIRST) == []
    assert store.committed(FIRST) == set()
    assert store.accepted(cells=[CELLS[0].key]) == {} and not store.warnings


def test_what_is_committed_comes_back(store: Store) -> None:
    assert store.begin(night()) == night()
    kept = result(CELLS[0], bytes=7, device={"name": "x"}, error=None, flags=("noisy",))
    assert store.commit(kept, times(CELLS[0]), items(CELLS[0]))
    failed = result(CELLS[1], state="failed", error={"code": "export-failed"})
    assert store.commit(failed)
    store.decide(FIRST, [decision(CELLS[0]), decision(CELLS[1], answer="failed")])
    again = Store.open(store.path)
    assert again.nights() == [night()]
    assert again.results() == again.results(FIRST) == [kept, failed]
    assert again.results(SECOND) == []
    assert again.times(FIRST) == again.times(FIRST, CELLS[0].key) == times(CELLS[0])
    assert again.times(FIRST, CELLS[1].key) == [] and again.items(FIRST, CELLS[0].build) == items(CELLS[0])
    assert [each.answer for each in again.decisions(FIRST)] == ["same", "failed"]
    assert again.committed(FIRST) == {CELLS[0].key, CELLS[1].key}


def test_an_attempt_is_committed_once(store: Store) -> None:
    assert store.commit(result(CELLS[0], seconds=1.0), times(CELLS[0]))
    assert not store.commit(result(CELLS[0], seconds=2.0), times(CELLS[0], n=8))
    assert store.commit(result(CELLS[0], attempt=2), times(CELLS[0], attempt=2))
    assert [each.seconds for each in store.results()] == [1.0, None]
    assert len(store.times(FIRST)) == 8
    assert store.committed(FIRST) == store.committed(FIRST, attempt=2) == {CELLS[0].key}


def test_a_night_that_begins_again_stays_as_it_is(store: Store) -> None:
    store.begin(night())
    assert store.begin(night(cells=CELLS[:1])) == night()
    assert len(store.nights()) == 1


def test_the_last_decisions_of_a_night_count(store: Store) -> None:
    for answer in ("worse", "better", "same"):
        store.decide(FIRST, [decision(cell, answer=answer) for cell in CELLS])
    assert {each.answer for each in store.decisions()} == {"same"}
    assert len(store.decisions()) == len(CELLS)


def test_rows_of_another_cell_are_refused(store: Store) -> None:
    for wrong in (
        {"times": times(CELLS[1])},
        {"times": times(CELLS[0], attempt=2)},
        {"items": items(CELLS[2])},
        {"items": items(CELLS[0], SECOND)},
    ):
        with pytest.raises(ValueError):
            store.commit(result(CELLS[0]), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        store.commit(result(CELLS[0], "../elsewhere"))
    with pytest.raises(ValueError):
        store.decide(FIRST, [decision(CELLS[0], SECOND)])
    assert store.results() == []


def test_times_that_are_no_numbers_are_kept_as_they_came(store: Store) -> None:
    import dataclasses

    odd = [
        dataclasses.replace(each, seconds=value)
        for each, value in zip(times(CELLS[0]), (math.nan, math.inf), strict=False)
    ]
    store.commit(result(CELLS[0]), odd)
    found = [each.seconds for each in store.times(FIRST)]
    assert math.isnan(found[0]) and math.isinf(found[1])


def test_a_clock_that_goes_back_is_told(store: Store) -> None:
    store.begin(night(SECOND))
    assert not store.warnings
    store.begin(night(FIRST))
    assert [SECOND in warning and FIRST in warning for warning in store.warnings] == [True]
    assert [each.night for each in store.nights()] == [FIRST, SECOND]


# what is accepted


def test_the_last_night_that_passed_is_accepted(store: Store) -> None:
    cell, other = CELLS[0], CELLS[1]
    for name in (FIRST, SECOND, THIRD):
        for each in (cell, other):
            store.commit(result(each, name, content_sha256=f"{name}1"))
            store.commit(result(each, name, attempt=2, content_sha256=f"{name}2"))
    store.decide(FIRST, [decision(cell), decision(cell, what="size", answer="inconclusive"), decision(other)])
    store.decide(SECOND, [decision(cell, SECOND, "missing"), decision(other, SECOND)])
    assert store.accepted(cells=[cell.key])[cell.key].content_sha256 == f"{SECOND}2"
    # undecided so far
    assert store.accepted(cells=[other.key])[other.key].night == SECOND
    store.decide(THIRD, [decision(cell, THIRD), decision(cell, THIRD, "worse", "accuracy"), decision(other, THIRD)])
    found = store.accepted()
    assert {key: each.night for key, each in found.items()} == {cell.key: SECOND, other.key: THIRD}
    assert {each.night for each in store.accepted(before=SECOND).values()} == {FIRST}
    assert store.accepted(before=FIRST) == {}
    assert store.accepted(SECOND, [cell.key])[cell.key].night == FIRST
    assert store.accepted(FIRST, [cell.key]) == {}
    assert store.accepted(cells=[cell.key, "no|such|cell|there|1"]) == {cell.key: found[cell.key]}


def test_what_failed_is_not_accepted(store: Store) -> None:
    store.commit(result(CELLS[0], state="failed"))
    store.decide(FIRST, [decision(CELLS[0], answer="missing")])
    assert store.accepted() == {}


# killed, two at once, locked


_WRITER = """
import os, sys, threading, time
from quantkit.nightly.records import NightCell, Result, Time
from quantkit.nightly.store import Store
path, night, after, *cells = sys.argv[1:]
store = Store.open(path)
def commit(key, attempt):
    time = Time(night, key, attempt, "candidate", 0, 0, 0, 1.0, 1.7e9)
    return store.commit(Result.of(night, NightCell.of(key), "done", attempt=attempt), [time])
print("ready", flush=True)
sys.stdin.readline()
if float(after):
    threading.Timer(float(after), lambda: os.kill(os.getpid(), 9)).start()
    for attempt in range(100, 10000):
        commit(cells[0], attempt)
print(sum(commit(key, attempt) for attempt in range(1, 4) for key in cells))
"""


def _writer(store: Store, after: float) -> subprocess.Popen[str]:
    command = forked.python(
        "-c", _WRITER, str(store.path), FIRST, str(after), *(cell.key for cell in CELLS), light=True
    )
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_processes_that_write_at_once_commit_each_cell_once_and_killed_ones_harm_nobody(store: Store) -> None:
    generator = random.Random(0)
    dying = [_writer(store, 0.05 + 0.5 * generator.random()) for _ in range(3)]
    running = [_writer(store, 0.0), *dying]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    # this process is one more
    done = sum(
        store.commit(result(cell, attempt=attempt), times(cell, attempt=attempt, n=1))
        for attempt in range(1, 4)
        for cell in CELLS
    )
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, -9, -9, -9]
    assert done + int(said[0]) == 3 * len(CELLS)
    rows = [(each.cell, each.attempt) for each in store.results()]
    assert len(set(rows)) == len(rows) and len([row for row in rows if row[1] < 100]) == 3 * len(CELLS)
    # a killed commit is there whole or not at all
    assert sorted(rows) == sorted((each.cell, each.attempt) for each in store.times(FIRST))
    assert not store.warnings


def test_a_commit_that_fails_midway_never_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stores._insert

    def dying(database: Any, kind: Any, rows: Any) -> None:
        if kind is Result:
            raise KeyboardInterrupt
        real(database, kind, rows)

    with monkeypatch.context() as patched:
        patched.setattr(stores, "_insert", dying)
        with pytest.raises(KeyboardInterrupt):
            store.commit(result(CELLS[0]), times(CELLS[0], n=8), items(CELLS[0]))
    assert store.results() == store.times(FIRST) == store.items(FIRST) == []
    assert store.commit(result(CELLS[0]), times(CELLS[0]), items(CELLS[0]))
    assert store.times(FIRST) == times(CELLS[0])


_HOLDER = (
    "import duckdb, sys; held = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == 'r'); print(flush=True); input()"
)


@pytest.mark.parametrize("how", ["r", "w"])
def test_a_lock_that_is_not_let_go_is_told(store: Store, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(stores, "_WAIT_SECONDS", 0.05)
    command = forked.python("-c", _HOLDER, str(store.file), how, light=True)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        with pytest.raises(InputError, match=r"\[store-locked\]"):
            store.commit(result(CELLS[0]))
        if how == "r":
            assert store.results() == [], "many read at once"
        other.communicate(b"\n")
    assert store.commit(result(CELLS[0]))


def test_a_store_that_cannot_be_written_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    fill(store)
    real = duckdb.connect

    def read_only(path: Any, read_only: bool = False, **others: Any) -> Any:
        if not read_only:
            raise duckdb.IOException(f'IO Error: Cannot open file "{path}": Permission denied')
        return real(path, read_only=True, **others)

    monkeypatch.setattr(duckdb, "connect", read_only)
    assert len(Store.open(store.path).results()) == len(CELLS)
    with pytest.raises(InputError, match=r"\[file-unwritable\].*Permission denied"):
        store.commit(result(CELLS[0], attempt=2))


def test_a_full_disk_stops_safely(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb

    def full(*_: object) -> None:
        raise duckdb.IOException('IO Error: Could not write file "x": No space left on device')

    monkeypatch.setattr(stores, "_insert", full)
    with pytest.raises(Stopped, match=r"\[disk-full\]"):
        store.commit(result(CELLS[0]))


# damaged, older, newer, no store


def _torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    """A bit of each block, between unharmed ends."""
    harmed = bytearray(data)
    for place in range(3 * 4096 + 100, len(data) - 4096, 4096):
        harmed[place] ^= 1
    return bytes(harmed)


@pytest.mark.parametrize("harm", [_torn, _flipped, lambda _: b"nothing"], ids=["torn", "flipped", "strange"])
def test_a_damaged_file_is_one_line_and_kept(store: Store, harm: Any) -> None:
    fill(store)
    damaged = harm(store.file.read_bytes())
    store.file.write_bytes(damaged)
    with pytest.raises(InputError, match=r"\[store-invalid\].*nights\.duckdb.*move it away") as caught:
        Store.open(store.path, create=True).results()
    assert "\n" not in caught.value.line()
    assert store.file.read_bytes() == damaged


def test_a_store_of_a_newer_version_is_left_alone(store: Store) -> None:
    with store._writing() as database:
        database.execute("UPDATE about SET schema = 4, quantkit = '9.9'")
    with pytest.raises(InputError, match=r"\[store-newer\].*schema 4, of quantkit 9\.9.*up to 3"):
        Store.open(store.path)


def test_a_store_of_the_schema_before_is_read_and_gets_the_new_column(store: Store) -> None:
    store.begin(night(FIRST))
    store.commit(Result.of(FIRST, CELLS[0], "done", recovery={"piqa acc": [0.9, 0.8, 1.0, 50]}))
    with store._writing() as database:
        database.execute("ALTER TABLE results DROP COLUMN recovery")
        database.execute("UPDATE about SET schema = 2")
    (old,) = Store.open(store.path).results()
    assert (old.state, old.recovery) == ("done", None)
    store.begin(night(SECOND))
    kept = Result.of(SECOND, CELLS[0], "done", flags=("reused",), recovery={"piqa acc": [0.9, 0.8, 1.0, 50]})
    store.commit(kept)
    assert Store.open(store.path).results() == [old, kept]
    assert store.query("SELECT schema FROM about").rows == [(3,)]


def test_a_store_of_parquet_files_is_refused_with_the_command_that_makes_a_new_one(tmp_path: Path) -> None:
    old = tmp_path / "store"
    (old / "results").mkdir(parents=True)
    (old / "store.json").write_text('{"schema": 1}')
    for create in (True, False):
        with pytest.raises(InputError, match=r"\[store-invalid\].*Parquet") as caught:
            Store.open(old, create=create, config="x.yaml")
    assert "\n" not in caught.value.line()
    move, _, run = caught.value.remedy.split("`")[1].partition(" && ")
    assert run == "quantkit nightly run x.yaml"
    subprocess.run(move.split(), check=True)
    assert Store.open(old, create=True).nights() == [], "what the run begins with"
    assert (tmp_path / "store.parquet" / "store.json").exists()


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[store-missing\]"):
        Store.open(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"\[store-invalid\].*notes\.txt"):
        Store.open(tmp_path, create=True)
    with pytest.raises(InputError, match=r"\[file-unwritable\]"):
        Store.open(tmp_path / "notes.txt" / "store", create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_result_s_own_columns_follow_from_its_cell() -> None:
    found = Result.of(FIRST, CELLS[1], "done")
    assert (found.cell, found.build, found.batch) == (CELLS[1].key, CELLS[1].build, 8)


def test_a_query_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "store", create=True)
    monkeypatch.setenv("QUANTKIT_LIMIT_SECONDS", "0.3")
    with pytest.raises(InputError, match="over-limit"):
        store.query("SELECT count(*) FROM range(10000000000) a, range(10000000000) b WHERE a.range + b.range = 7")
    monkeypatch.setenv("QUANTKIT_LIMIT_SECONDS", "60")
    monkeypatch.setenv("QUANTKIT_LIMIT_UNPACKED", "1e6")
    with pytest.raises(InputError, match="over-limit"):
        store.query("SELECT * FROM range(1000000000)")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two nights."""
    store = Store.open(tmp_path_factory.mktemp("nights"), create=True)
    fill(store)
    fill(store, SECOND)
    return store


def test_nothing_holds_the_connection_after_a_query(filled: Store) -> None:
    before = threading.active_count()
    for _ in range(20):
        filled.query("FROM nights")
        assert threading.active_count() == before, "DuckDB reports what outlives Python as leaked"


def test_a_query_sees_every_table(filled: Store) -> None:
    found = filled.query("SELECT night, count(*) AS n, max(seconds) FROM times GROUP BY night ORDER BY night")
    assert found.columns[:2] == ("night", "n")
    assert [row[:2] for row in found.rows] == [(FIRST, 16), (SECOND, 16)]
    assert filled.query("SELECT count(*) FROM items").rows == [(12,)]
    assert filled.query("FROM nights SELECT started ORDER BY night LIMIT 1").rows == [
        (datetime(2026, 1, 1, 3, tzinfo=UTC),)
    ]
    assert filled.query("SELECT 1 WHERE false").as_dicts() == []


def test_values_go_in_as_parameters(filled: Store) -> None:
    found = filled.query("SELECT DISTINCT cell FROM times WHERE cell = $cell", cell=CELLS[0].key)
    assert found.as_dicts() == [{"cell": CELLS[0].key}]
    assert filled.query("SELECT count(*) FROM results WHERE cell = $cell", cell="' OR true --").rows == [(0,)]


def test_columns_of_one_name_are_numbered(filled: Store) -> None:
    found = filled.query("SELECT 1 AS a, 2 AS a, 3 AS a_2")
    assert len(set(found.columns)) == 3 and found.rows == [(1, 2, 3)]


@pytest.mark.parametrize("kind", records.TABLES, ids=lambda kind: kind.table)
def test_columns_need_no_quotes(filled: Store, kind: type[Record]) -> None:
    names = records.schema(kind).names
    assert filled.query(f"SELECT {', '.join(names)} FROM {kind.table}").columns == tuple(names)


@pytest.mark.parametrize(
    "sql", ["DESCRIBE results", "SUMMARIZE times", "EXPLAIN FROM results", "PIVOT results ON state", "SHOW TABLES;"]
)
def test_whatever_reads_is_a_query(filled: Store, sql: str) -> None:
    assert filled.query(sql).rows


@pytest.mark.parametrize(
    ("sql", "part"),
    [
        ("selec 1", "syntax error"),
        ("SELECT colour FROM results", "colour"),
        ("FROM result", "results"),
        ("", "found nothing"),
        ("-- nothing", "found nothing"),
        ("SELECT 1; SELECT 2", "one reading statement"),
        ("DROP TABLE results", "found DROP"),
        ("DELETE FROM results", "found DELETE"),
        ("CREATE TABLE mine AS FROM results", "found CREATE"),
        ("SET enable_external_access = true", "found SET"),
        ("INSTALL httpfs", "found LOAD"),
        ("ATTACH 'other.db'", "found ATTACH"),
        ("SELECT CAST('x' AS INTEGER)", "Could not convert"),
        ("SELECT $cell", ""),
    ],
)
def test_what_is_no_query_is_one_line(filled: Store, sql: str, part: str) -> None:
    with pytest.raises(InputError, match=r"\[query-(invalid|failed)\]") as caught:
        filled.query(sql)
    assert part in caught.value.line() and "\n" not in caught.value.line()
    assert not filled.warnings


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{other}')",
        "SELECT * FROM '{other}'",
        "SELECT * FROM read_csv('{other}')",
        "SELECT * FROM glob('{folder}/*')",
        "COPY (SELECT 1) TO '{other}'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{own}' (FORMAT parquet, USE_TMP_FILE false)",
        "WITH a AS (COPY (SELECT 1) TO '{own}' (FORMAT parquet, USE_TMP_FILE false)) SELECT 1",
        "/**/eXplain analyze/**/cOpy (SELECT 1) TO '{own}.wal' (FORMAT csv)",
        "EXPLAIN ANALYZE EXPORT DATABASE '{folder}/x'",
        "EXPLAIN ANALYZE DELETE FROM results",
        "SELECT * FROM query('WITH a AS (COPY (SELECT 1) TO ''{own}'' (FORMAT parquet)) SELECT 1')",
    ],
)
def test_no_query_reaches_a_file(filled: Store, tmp_path: Path, sql: str) -> None:
    other = tmp_path / "other.csv"
    other.write_text("secret")
    before = {path: path.read_bytes() for path in filled.path.iterdir()}
    with pytest.raises(InputError):
        filled.query(sql.format(other=other, folder=tmp_path, own=filled.file))
    assert {path: path.read_bytes() for path in filled.path.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["other.csv"]
    assert other.read_text() == "secret"


def test_a_table_is_exported_as_csv(filled: Store, tmp_path: Path) -> None:
    assert filled.export("nights", tmp_path / "nights.csv") == 2
    with (tmp_path / "nights.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["night"] for row in rows] == [FIRST, SECOND]
    assert json.loads(rows[0]["matrix"]) == [cell.key for cell in CELLS]
    assert rows[0]["started"].startswith("2026-01-01 03:00:00")


def test_an_answer_is_exported_as_json(filled: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sql = "SELECT night, 'nan'::DOUBLE AS x, NULL AS y, [1, 2] AS z, started FROM nights ORDER BY night"
    assert filled.export(sql, out) == 2
    rows = json.loads(out.read_text())
    assert rows[0] == {"night": FIRST, "x": None, "y": None, "z": [1, 2], "started": "2026-01-01T03:00:00+00:00"}
    assert filled.export("SELECT 1 AS a WHERE false", out) == 0
    assert json.loads(out.read_text()) == []
    assert filled.export("SELECT INTERVAL 1 DAY, 'x'::BLOB, uuid(), 1::HUGEINT, NULL, {'a': 1}", tmp_path / "odd.csv")
    assert filled.export("SELECT 1 AS a WHERE false", tmp_path / "out.csv") == 0
    assert (tmp_path / "out.csv").read_text().strip() == '"a"'


def test_an_export_that_fails_leaves_nothing(filled: Store, tmp_path: Path) -> None:
    for what, place, code in (
        ("SELECT wrong", "out.csv", "query-invalid"),
        ("results", "no/such/folder.csv", "file-unwritable"),
        ("results", "out.xlsx", "usage"),
    ):
        with pytest.raises(InputError) as caught:
            filled.export(what, tmp_path / place)
        assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_number_stays_so_in_csv(store: Store, tmp_path: Path) -> None:
    import dataclasses

    store.commit(result(CELLS[0]), [dataclasses.replace(times(CELLS[0])[0], seconds=math.nan)])
    store.export("SELECT seconds FROM times", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().split() == ['"seconds"', "nan"]


CELL = NightCell("smollm2-135m", "awq-int4", "cpu-x86", "onnxruntime", 8)
NIGHT = "20260102T030405Z-3f2a81"
EXAMPLES: list[Record] = [
    Night(NIGHT, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), None, "ab" * 32, "builder", (CELL.key,)),
    Result.of(NIGHT, CELL, "failed", error={"code": "x"}, device={"threads": 2, "name": "é"}, flags=("noisy",)),
    Result.of(NIGHT, CELL, "done", bytes=3 * 2**40, seconds=1.5, versions={"torch": "2.9"}),
    Time(NIGHT, CELL.key, 1, "baseline", 0, 3, 1, 1.25e-3, 1.7e9, throttled=False),
    Item(NIGHT, CELL.build, 1, 7, "candidate", True, text="line\nbreak"),
    Item(NIGHT, CELL.build, 2, 7, "baseline", None, 0.1, -2.0, 4),
    StoredDecision(NIGHT, CELL.key, "latency", "worse", 1.07, 1.04, 1.1, 0.001, 0.02, 1.05, 1.03, 240, True, "slower"),
]


def test_keys_name_cells_and_builds() -> None:
    assert CELL.build == "smollm2-135m|awq-int4|cpu-x86|onnxruntime" and CELL.key == f"{CELL.build}|8"
    assert NightCell.of(CELL.key) == CELL
    for wrong in (CELL.build, f"{CELL.key}|1", f"{CELL.build}|many"):
        with pytest.raises(ValueError):
            NightCell.of(wrong)


def test_a_night_s_name_sorts_by_its_start_whatever_the_zone() -> None:
    early = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    late = datetime(2026, 1, 2, 1, 0, 0, tzinfo=timezone(timedelta(hours=-5)))
    names = [records.night_id(when) for when in (early, early, late)]
    assert all(NIGHT_ID.fullmatch(name) for name in names)
    assert names[0] != names[1] and max(names) == names[2]


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: row.table)
def test_rows_come_back_as_they_were(row: Record) -> None:
    table = records.to_table(type(row), [row, row])
    assert table.schema == records.schema(type(row))
    assert records.from_table(type(row), table) == [row, row]


@pytest.mark.parametrize("kind", records.TABLES)
def test_no_rows_have_the_same_schema(kind: type[Record]) -> None:
    table = records.to_table(kind, [])
    assert table.schema == records.schema(kind)
    assert records.from_table(kind, table) == []


@pytest.mark.parametrize("change", [{"batch": "eight"}, {"seconds": "long"}, {"flags": (1,)}])
def test_a_value_of_another_type_is_refused(change: dict[str, Any]) -> None:
    import dataclasses

    row = dataclasses.replace(Result.of(NIGHT, CELL, "done"), **change)
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
        records.to_table(Result, [row])
