"""A store of schema 0, as it lay on disk: no attempts, no rounds, no release; one HASH for all files of a commit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantkit.errors import InputError
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.parquet import Store
from quantkit.nightly.store.records import Item, Night, Record, Result, StoredDecision, Time, to_table

from .conftest import CELLS, FIRST, SECOND, decision, files, items, night, result, times

NEW = {"results": ["attempt", "release_sha256"], "times": ["attempt", "round"], "items": ["attempt"]}


def write(root: Path, kind: type[Record], name: str, stem: str, rows: list[Any]) -> None:
    table = to_table(kind, rows).drop_columns(NEW.get(kind.table, []))
    place = root / kind.table / f"night={name}"
    place.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, place / f"{stem}.parquet")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for name in (FIRST, SECOND):
        write(root, Night, name, "aa", [night(name)])
        for number, cell in enumerate(CELLS):
            stem = f"{number:02x}"
            write(root, Result, name, stem, [result(cell, name)])
            write(root, Time, name, stem, times(cell, name))
            if cell.batch == 1:
                write(root, Item, name, stem, items(cell, name))
        write(root, Time, name, "ff", times(CELLS[0], name, n=8))  # of a commit that was killed
        write(root, StoredDecision, name, "bb", [decision(cell, name) for cell in CELLS])
    (root / "store.json").write_text('{"schema": 0, "quantkit": "0.0.9"}')
    return root


def check(store: Store) -> None:
    assert [each.night for each in store.nights()] == [FIRST, SECOND]
    assert store.results(FIRST) == [result(cell) for cell in sorted(CELLS, key=lambda cell: cell.key)]
    for name in (FIRST, SECOND):
        for cell in CELLS:
            assert store.times(name, cell.key) == times(cell, name)
        assert store.items(name, CELLS[0].build) == items(CELLS[0], name)
        assert len(store.decisions(name)) == len(CELLS)
    assert json.loads((store.path / "store.json").read_text())["schema"] == 1


def test_an_old_store_is_rewritten_and_says_so(old: Path) -> None:
    store = Store.open(old)
    assert [f"rewritten from schema 0 to 1, {2 * (1 + 4 + 4 + 2 + 1)} files" in each for each in store.warnings] == [
        True
    ]
    check(store)
    again = Store.open(old)
    assert not again.warnings
    check(again)
    # it goes on as any other
    assert not again.commit(result(CELLS[0]), times(CELLS[0]))
    assert again.commit(result(CELLS[0], attempt=2))
    again.decide(FIRST, [decision(CELLS[0], answer="worse")])
    assert [each.answer for each in again.decisions(FIRST)] == ["worse"]
    again.compact()
    assert len(again.results(FIRST)) == 5


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["replace", "unlink"])
@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_a_migration_that_is_killed_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch, at: str, after: int) -> None:
    owner: Any = {"replace": os, "unlink": Path}[at]
    real, left = getattr(owner, at), [after]

    def dying(self: Path | str, *given: Any, **named: Any) -> Any:
        if str(self).endswith((".parquet", ".tmp")):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        return real(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, dying)
        with pytest.raises(Killed):
            Store.open(old)
    check(Store.open(old))


def test_what_cannot_be_read_stays_as_it_is(old: Path) -> None:
    lost = old / "results" / f"night={FIRST}" / "01.parquet"
    lost.write_bytes(b"PAR1 nothing")
    store = Store.open(old)
    assert lost.exists()
    assert len(store.results(FIRST)) == len(CELLS) - 1
    assert store.damaged == [lost]


def test_an_old_store_that_cannot_be_written_says_so(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    before = sorted(path.name for path in old.rglob("*.parquet"))
    with monkeypatch.context() as patched:
        patched.setattr(_files, "write_atomic", refused)
        with pytest.raises(InputError, match=r"\[file-unwritable\]"):
            Store.open(old)
    assert sorted(path.name for path in old.rglob("*.parquet")) == before
    check(Store.open(old))


def test_files_say_their_schema(old: Path) -> None:
    place = old / "times" / f"night={FIRST}" / "00.parquet"
    assert _files.about(place)["schema"] == 0
    store = Store.open(old)
    assert {_files.about(path)["schema"] for path in files(store, "results")} == {1}
    assert isinstance(_files.parquet().read_table(files(store, "results")[0], partitioning=None), pa.Table)
