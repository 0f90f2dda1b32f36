from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from quantkit.nightly import records
from quantkit.nightly.records import NIGHT_ID, Item, Night, NightCell, Record, Result, StoredDecision, Time

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
    assert CELL.build == "smollm2-135m|awq-int4|cpu-x86|onnxruntime"
    assert CELL.key == f"{CELL.build}|8"
    assert NightCell.of(CELL.key) == CELL
    for wrong in (CELL.build, f"{CELL.key}|1", f"{CELL.build}|many"):
        with pytest.raises(ValueError):
            NightCell.of(wrong)


def test_a_night_s_name_sorts_by_its_start_whatever_the_zone() -> None:
    early = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    late = datetime(2026, 1, 2, 1, 0, 0, tzinfo=timezone(timedelta(hours=-5)))
    names = [records.night_id(when) for when in (early, early, late)]
    assert all(NIGHT_ID.fullmatch(name) for name in names)
    assert names[0] != names[1]
    assert max(names) == names[2]


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
