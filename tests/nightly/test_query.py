"""Questions in SQL: what they see, what they cannot do, what becomes of the answer."""

from __future__ import annotations

import csv
import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.nightly import records
from quantkit.nightly.records import Record
from quantkit.nightly.store import Store

from .conftest import CELLS, FIRST, SECOND, fill, result, times


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two nights."""
    store = Store.open(tmp_path_factory.mktemp("nights"), create=True)
    fill(store)
    fill(store, SECOND)
    return store


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
    assert len(set(found.columns)) == 3
    assert found.rows == [(1, 2, 3)]


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
        ("SELECT 1; SELECT 2", "one statement"),
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
    assert part in caught.value.line()
    assert "\n" not in caught.value.line()
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
