"""Answers of all cells on all nights, as arrays."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from quantkit.nightly.page import data
from quantkit.nightly.page.data import ANSWERS, NONE
from quantkit.nightly.store import Store

from ..conftest import CELLS, FIRST, SECOND, THIRD, fill, night, result
from .conftest import AWAY, BROKEN, FINE, HOSTILE, NOW, RETIRED, SLOW


def answers(found: data.History, key: str) -> list[str | None]:
    row = found.answer[found.cells.index(key)]
    return [None if code == NONE else ANSWERS[code] for code in row]


def test_the_worst_answer_of_each_night_in_the_order_of_their_names(story: Store) -> None:
    found = data.read(story)
    assert [each.night for each in found.nights] == [FIRST, SECOND, THIRD]
    assert answers(found, FINE.key) == ["same", "same", "same"]
    assert answers(found, SLOW.key) == ["same", "worse", "worse"]
    assert answers(found, BROKEN.key) == [None, "failed", "failed"]
    assert answers(found, AWAY.key) == [None, "missing", "missing"]
    assert answers(found, HOSTILE.key) == [None, "better", "inconclusive"]
    assert answers(found, RETIRED.key) == ["same", None, None]
    assert found.last[found.cells.index(RETIRED.key)] == 0
    assert sorted(found.current) == sorted(cell.key for cell in NOW)


def test_figures_that_are_no_numbers_are_left_out_and_said(story: Store) -> None:
    found = data.read(story)
    values = found.decided["latency"].value[found.cells.index(FINE.key)]
    np.testing.assert_array_equal(values, [0.0, np.nan, 0.001])
    assert any("NaN" in note for note in found.notes)
    assert found.itself[found.cells.index(FINE.key)].all()
    assert not found.itself[found.cells.index(SLOW.key)].any()


def test_what_was_measured_and_not_decided_waits(store: Store) -> None:
    store.begin(night())
    store.commit(result(CELLS[0]))
    found = data.read(store)
    assert answers(found, CELLS[0].key) == ["missing"]
    assert answers(found, CELLS[1].key) == ["missing"]
    assert found.waits[:, 0].tolist() == [key == CELLS[0].key for key in found.cells]


def test_a_night_whose_own_row_is_gone_keeps_its_answers(store: Store) -> None:
    fill(store)
    with store._writing() as database:
        database.execute("DELETE FROM nights")
    found = data.read(store)
    assert answers(found, CELLS[0].key) == ["same"]
    assert found.nights[0].started == datetime(2026, 1, 1, 3, tzinfo=UTC)
    assert any("is gone" in note for note in found.notes)


def test_clocks_that_were_wrong_are_said(store: Store) -> None:
    store.begin(night(THIRD))
    early = datetime(2026, 1, 2, 1, tzinfo=UTC)
    assert data.read(store, now=datetime(2026, 1, 4, tzinfo=UTC)).notes == []
    (note,) = data.read(store, now=early).notes
    assert THIRD in note
    assert "future" in note


def test_an_empty_store(tmp_path: Path) -> None:
    found = data.read(Store.open(tmp_path / "empty", create=True))
    assert (found.cells, found.nights, found.answer.shape) == ([], [], (0, 0))


def test_a_key_that_is_none_is_a_model_s_name() -> None:
    assert data.parts("no key").model == "no key"
    assert data.parts(FINE.key) == FINE
