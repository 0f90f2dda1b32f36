"""From `latency.op` rows to seconds a unit."""

from __future__ import annotations

import pytest

from quantkit.measurement.rows import Operation, Row
from quantkit.scheme import WeightScheme
from quantkit.tuning.candidates import Candidate
from quantkit.tuning.front import unit_seconds as seconds

CANDIDATES = [
    Candidate("int4 g32", WeightScheme(format="int4", granularity="group", group=32)),
    Candidate("float", None),
]


def row(name: str, columns: int, rows: int, batch: int, value: float | None) -> Row:
    op = Operation(K=columns, N=rows, M=batch, format=name)
    return Row(name="latency.op", value=value, unit="s", stat="median", better="lower", subject="x", op=op)


def test_fused_products_count_before_single_ones() -> None:
    rows = [row("int4", 64, 64, 1, 2.0), row("int4", 64, 32, 1, 1.0), row("int4", 64, 128, 1, 2.5)]
    rows += [row("float32", 64, 64, 1, 5.0), row("float32", 64, 32, 1, 3.0)]
    found, missing = seconds(rows, [[(64, 64), (32, 64), (32, 64)], [(64, 64)]], CANDIDATES)
    assert missing == []
    assert found[1].tolist() == [[2.5, 11.0], [2.0, 5.0]]


def test_a_batch_with_a_gap_is_left_out_and_named() -> None:
    rows = [row(name, 64, 64, batch, 1.0) for name in ("int4", "bfloat16") for batch in (1, 8)]
    rows += [row("int4", 64, 64, 32, 1.0), row("float32", 64, 64, 32, None)]
    found, missing = seconds(rows, [[(64, 64)]], CANDIDATES)
    assert sorted(found) == [1, 8, 32][:2]
    assert missing == ["batch 32: float, K 64, N 64 was not timed"] or len(missing) == 0
    wanted, missing = seconds(rows, [[(64, 64)]], CANDIDATES, batches=[8, 2])
    assert sorted(wanted) == [8]
    assert "batch 2" in missing[0]


@pytest.mark.parametrize("rows", [[], [row("int4", 64, 64, 1, None)]])
def test_no_timings_are_no_tables(rows: list[Row]) -> None:
    assert seconds(rows, [[(64, 64)]], CANDIDATES) == ({}, [])
