"""Many files become one, and whatever happens on the way, the answers stay the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.bundle import disk
from quantkit.nightly.store import compact as _compact
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.parquet import Store

from .conftest import CELLS, FIRST, SECOND, files, fill, items, result, times

TABLES = ("results", "times", "items")


def everything(store: Store) -> dict[str, Any]:
    names = ("nights", *TABLES, "decisions")
    found = {name: sorted(map(repr, store.query(f"FROM {name}").rows)) for name in names}
    assert not store.warnings
    return found


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store)
    fill(store, SECOND, CELLS[:2])
    # a killed commit's times, which no result makes count
    _files.put(store.path / "times" / f"night={FIRST}" / "0000-0000.parquet", files(store, "times")[0].read_bytes())
    return store


def test_each_night_becomes_a_file_a_table_and_says_the_same(filled: Store) -> None:
    before = everything(filled)
    assert len(before["times"]) == 4 * 6
    assert filled.compact() == 2 * (4 + 2) + 3
    assert [len(files(filled, table, SECOND)) for table in TABLES] == [1, 1, 1]
    assert [len(files(filled, table)) for table in TABLES] == [1, 2, 1]  # what never counted stays
    assert everything(filled) == everything(Store.open(filled.path)) == before
    assert filled.compact() == 0
    assert everything(filled) == before


def test_a_night_goes_on_after_it(filled: Store) -> None:
    filled.compact()
    assert not filled.commit(result(CELLS[0]), times(CELLS[0]))
    assert filled.commit(result(CELLS[0], attempt=2), times(CELLS[0], attempt=2), items(CELLS[0], attempt=2))
    assert filled.commit(result(CELLS[3], SECOND), times(CELLS[3], SECOND))
    before = everything(filled)
    assert len(before["results"]) == 8
    assert filled.compact() == 3 + 2
    assert len(files(filled, "results", SECOND)) == 2
    assert everything(filled) == before
    assert not filled.commit(result(CELLS[3], SECOND))


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("at", "after"), [("rename", 0), ("rename", 2), ("rename", 5), ("delete", 0), ("delete", 1), ("delete", 14)]
)
def test_killed_at_any_moment_it_is_as_if_nothing_had_happened(
    filled: Store, monkeypatch: pytest.MonkeyPatch, at: str, after: int
) -> None:
    before = everything(filled)
    left = [after]

    def dying(real: Any) -> Any:
        def step(self: Path | str, *given: Any, **named: Any) -> Any:
            if str(self).endswith((".parquet", ".tmp")):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
            return real(self, *given, **named)

        return step

    owner, name = {"rename": (os, "replace"), "delete": (Path, "unlink")}[at]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying(getattr(owner, name)))
        with pytest.raises(Killed):
            filled.compact()
    assert everything(Store.open(filled.path)) == before
    # and a second attempt ends what the first began
    filled.compact()
    assert everything(Store.open(filled.path)) == before
    assert [len(files(filled, table, SECOND)) for table in TABLES] == [1, 1, 1]
    assert not list(filled.path.rglob(".*.tmp"))


def test_a_new_file_that_is_damaged_costs_nothing_while_the_old_ones_are_there(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(filled)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        filled.compact()
    assert everything(filled) == before
    for table in TABLES:
        for path in (filled.path / table).rglob("whole-*.parquet"):
            path.write_bytes(path.read_bytes()[:100])
    store = Store.open(filled.path)
    store.compact()
    assert len(store.times(FIRST)) + len(store.times(SECOND)) == 4 * 6
    assert len(store.results()) == 6
    assert not store.damaged  # written anew


def test_a_file_says_what_it_replaces_and_what_belongs_together_lies_together(filled: Store) -> None:
    old = {path.stem for path in files(filled, "times", SECOND)}
    filled.compact()
    (whole,) = files(filled, "times", SECOND)
    assert set(_files.about(whole)["replaces"]) == old
    table = _files.parquet().read_table(whole, partitioning=None)
    cells = table.column("cell").to_pylist()
    assert cells == sorted(cells)
    assert table.column("position").to_pylist() == [*range(4), *range(4)]


def test_writing_is_what_disk_does(tmp_path: Path) -> None:
    assert _files.write_atomic is disk.write_atomic
    assert {kind.table for kind in _compact.KINDS} == set(TABLES)
