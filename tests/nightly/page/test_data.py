"""What a store holds, for its site: answers of all cells on all nights, and what a cell's page tells beyond them."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from quantkit.nightly.page import data
from quantkit.nightly.page.data import ANSWERS, NONE, Detail
from quantkit.nightly.records import Item, NightCell
from quantkit.nightly.store import Store

from ..conftest import CELLS, FIRST, SECOND, THIRD, fill, night, result
from ..planted import timed
from .conftest import AWAY, BROKEN, FINE, HOSTILE, NOW, RETIRED, SLOW

CELL = CELLS[0]


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
    assert found.of(found.cells.index(RETIRED.key)).tolist() == [0]
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
    assert answers(found, CELLS[0].key) == ["missing"] and answers(found, CELLS[1].key) == ["missing"]
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
    assert THIRD in note and "future" in note


def test_an_empty_store(tmp_path: Path) -> None:
    found = data.read(Store.open(tmp_path / "empty", create=True))
    assert (found.cells, found.nights, found.answer.shape) == ([], [], (0, 0))


def test_a_key_that_is_none_is_a_model_s_name() -> None:
    assert data.parts("no key").model == "no key"
    assert data.parts(FINE.key) == FINE


def read(store: Store, cell: NightCell = CELL) -> Detail:
    return data.details(store, data.read(store))[cell.key]


def test_times_in_order_and_the_ratio_of_each_block(store: Store) -> None:
    store.begin(night())
    first = timed(CELL, rounds=2, blocks=3, noise=0.0, slower=0.1)
    first[0] = replace(first[0], seconds=math.nan, throttled=True, temperature_c=61.0)
    first[9] = replace(first[9], seconds=-1.0, temperature_c=64.0)
    store.commit(result(CELL), first)
    store.commit(result(CELL, attempt=2), timed(CELL, rounds=2, blocks=3, noise=0.0, slower=0.1, attempt=2))
    raw = read(store).raw
    assert raw
    assert (len(raw.seconds), raw.dropped, raw.throttled, raw.temperature) == (2 * len(first) - 2, 2, 1, (61.0, 64.0))
    assert (raw.round.max() + 1, raw.block.max() + 1, raw.again) == (4, 12, 2)
    np.testing.assert_allclose(raw.ratios(), 1.1)
    assert len(raw.ratios()) == 12
    places = np.concatenate([at for at, _ in raw.sides().values()])
    assert sorted(places) == list(range(len(raw.seconds)))


def test_a_first_night_has_times_and_no_ratio(store: Store) -> None:
    store.begin(night())
    store.commit(result(CELL), [each for each in timed(CELL, rounds=2, blocks=2) if each.side == "candidate"])
    raw = read(store).raw
    assert raw and list(raw.sides()) == ["candidate"] and len(raw.ratios()) == 0


def test_flips_are_what_one_side_has_right_and_the_other_wrong(store: Store) -> None:
    def item(number: int, side: str, correct: bool | None, text: str | None) -> Item:
        return Item(FIRST, CELL.build, 1, number, side, correct, text=text)  # type: ignore[arg-type]

    rows = [
        item(1, "candidate", False, "a → c"),
        item(1, "baseline", True, "a → b"),
        item(2, "candidate", True, "same words"),
        item(2, "baseline", False, "same words"),
        item(3, "candidate", True, "both right"),
        item(3, "baseline", True, "both right"),
        item(4, "candidate", False, None),
        item(4, "baseline", True, None),
        item(5, "candidate", None, "not known"),
    ]
    store.begin(night())
    store.commit(result(CELL), items=rows)
    found = read(store)
    assert [(each.item, each.lost, list(each.texts)) for each in found.flips] == [
        (1, True, [("baseline", "a → b"), ("candidate", "a → c")]),
        (2, False, [("", "same words")]),
    ]
    assert found.flipped == (2, 1)  # one has no text
    assert [score[:3] for score in found.scores] == [("baseline", 4, 0.75), ("candidate", 5, 0.5)]
    assert read(store, CELLS[1]).flips == []  # no result of its own


def test_an_environment_is_told_where_it_changes(store: Store) -> None:
    for name, versions, device in (
        (FIRST, {"onnx": "1", "torch": "2"}, {"name": "big", "threads": 4}),
        (SECOND, {"onnx": "1", "torch": "2"}, {}),  # failed early: what it is silent on is as it was
        (THIRD, {"onnx": "2", "torch": "2"}, {"name": "big", "threads": 4}),
    ):
        store.begin(night(name))
        store.commit(result(CELL, name, versions=versions, device=device))
    found = read(store).environments
    assert [each.night for each in found] == [FIRST, THIRD]
    assert found[-1].names == {"onnx": "2", "torch": "2", "device.name": "big", "device.threads": "4"}


def test_the_last_errors_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "ERRORS", 2)
    for name in (SECOND, FIRST, THIRD):
        store.begin(night(name))
        store.commit(result(CELL, name, "failed", error={"code": name[:8]}))
    found = read(store)
    assert [(name, error["code"]) for name, _, error in found.errors] == [(THIRD, "20260103"), (SECOND, "20260102")]
    assert found.failed == 3
