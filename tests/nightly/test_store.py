"""What goes in comes out, once; what is damaged, locked, newer or older."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError, Stopped
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.parquet import Store
from quantkit.nightly.store.records import Result

from .conftest import CELLS, FIRST, SECOND, THIRD, decision, files, fill, items, night, result, times


def test_an_empty_store_answers(store: Store) -> None:
    assert json.loads((store.path / "store.json").read_text())["schema"] == 1
    assert store.nights() == store.results() == store.decisions() == store.times(FIRST) == store.items(FIRST) == []
    assert store.committed(FIRST) == set()
    assert store.accepted(cells=[CELLS[0].key]) == {}
    assert store.compact() == 0
    assert not store.warnings


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
    assert again.times(FIRST, CELLS[1].key) == []
    assert again.items(FIRST, CELLS[0].build) == items(CELLS[0])
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
    assert len(files(store, "decisions")) == 3


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


def test_the_last_night_that_passed_is_accepted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # nights that lie far back are looked at last
    monkeypatch.setattr("quantkit.nightly.store.parquet._RECENT", 1)
    assert [store.accepted(None, [key])[key].night for key in (cell.key, other.key)] == [SECOND, THIRD]
    assert store.accepted(SECOND, [cell.key])[cell.key].night == FIRST
    assert store.accepted(FIRST, [cell.key]) == {}
    for named in (16, 0):
        monkeypatch.setattr("quantkit.nightly.store.parquet._NAMED", named)
        assert store.accepted(cells=[cell.key, other.key]) == found
        assert store.accepted(cells=[cell.key, "no|such|cell|there|1"]) == {cell.key: found[cell.key]}


def test_what_failed_is_not_accepted(store: Store) -> None:
    store.commit(result(CELLS[0], state="failed"))
    store.decide(FIRST, [decision(CELLS[0], answer="missing")])
    assert store.accepted() == {}


# killed, two at once, locked


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_commit_that_is_killed_between_files_never_was(
    store: Store, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    real, calls = _files.write_atomic, []

    def dying(path: Path, data: bytes) -> None:
        if len(calls) == written:
            (path.parent / f".{path.name}.tmp").write_bytes(data[: len(data) // 2])
            raise KeyboardInterrupt
        calls.append(path)
        real(path, data)

    monkeypatch.setattr(_files, "write_atomic", dying)
    with pytest.raises(KeyboardInterrupt):
        store.commit(result(CELLS[0]), times(CELLS[0], n=8), items(CELLS[0]))
    monkeypatch.undo()
    assert len(calls) == written
    assert store.results() == store.times(FIRST) == store.items(FIRST) == []
    assert store.commit(result(CELLS[0]), times(CELLS[0]), items(CELLS[0]))
    assert store.times(FIRST) == times(CELLS[0])
    store.compact()
    assert store.times(FIRST) == times(CELLS[0])
    assert store.items(FIRST) == items(CELLS[0])
    assert not list(store.path.rglob(".*.tmp"))
    assert not store.warnings


_WRITER = """
import os, sys
from quantkit.nightly.store import files as _files
from quantkit.nightly.store.records import NightCell, Result, Time
from quantkit.nightly.store.parquet import Store
path, way, night, *cells = sys.argv[1:]
store = Store.open(path)
def commit(key, attempt):
    time = Time(night, key, attempt, "candidate", 0, 0, 0, 1.0, 1.7e9)
    return store.commit(Result.of(night, NightCell.of(key), "done", attempt=attempt), [time])
commit(cells[0], 9)
print("ready", flush=True)
sys.stdin.readline()
if way == "die":
    real = _files.write_atomic
    def dying(path, data):
        real(path, data)
        os.kill(os.getpid(), 9)
    _files.write_atomic = dying
    commit(cells[0], 8)
print(sum(commit(key, attempt) for attempt in range(1, 6) for key in cells))
"""


def test_processes_that_write_at_once_commit_each_cell_once_and_a_killed_one_harms_nobody(store: Store) -> None:
    keys = [cell.key for cell in CELLS]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(store.path), way, FIRST, *keys],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in ("live", "die")
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    # this process is a third one
    done = sum(
        store.commit(result(cell, attempt=attempt), times(cell, attempt=attempt, n=1))
        for attempt in range(1, 6)
        for cell in CELLS
    )
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, -9]
    assert done + int(said[0]) == 5 * len(CELLS)
    assert len(store.results()) == len(store.times(FIRST)) == 5 * len(CELLS) + 1
    assert store.committed(FIRST, attempt=8) == set()
    assert not store.warnings


def test_a_lock_that_is_not_let_go_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "_LOCK_SECONDS", 0.05)
    with (store.path / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"\[store-locked\]"):
            store.commit(result(CELLS[0]))
        assert store.results() == []  # reading needs no lock
    assert store.commit(result(CELLS[0]))


def test_a_store_that_cannot_be_written_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    real = os.open

    def read_only(path: Any, flags: int, *others: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *others, **more)

    monkeypatch.setattr(os, "open", read_only)
    assert len(Store.open(store.path).results()) == len(CELLS)
    with pytest.raises(InputError, match=r"\[file-unwritable\].*Permission denied"):
        store.commit(result(CELLS[0], attempt=2))


def test_a_full_disk_stops_safely(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(_files, "write_atomic", full)
    with pytest.raises(Stopped, match=r"\[disk-full\]"):
        store.commit(result(CELLS[0]))


# damaged, newer, no store


def _torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    """A bit of a page, between unharmed ends."""
    return data[:60] + bytes([data[60] ^ 1]) + data[61:]


@pytest.mark.parametrize("harm", [_torn, _flipped, lambda _: b""], ids=["torn", "flipped", "empty"])
def test_a_damaged_file_is_passed_over_named_and_kept(store: Store, harm: Any) -> None:
    fill(store)
    lost = store.results()[0].cell
    place = next(path for path in files(store, "results") if path.name.startswith(_files.key(lost, 1)))
    place.write_bytes(harm(place.read_bytes()))
    store = Store.open(store.path)
    assert {each.cell for each in store.results()} == {cell.key for cell in CELLS} - {lost}
    assert store.damaged == [place]
    assert [str(place) in warning for warning in store.warnings] == [True]
    # times without their result do not count, and the cell can be done again
    assert lost not in {each.cell for each in store.times(FIRST)}
    store.compact()
    assert place.exists()
    assert store.commit(result(next(cell for cell in CELLS if cell.key == lost)))
    assert len(Store.open(store.path).results()) == len(CELLS)


def test_a_damaged_file_of_a_compacted_night_is_told(store: Store) -> None:
    fill(store)
    fill(store, SECOND)
    store.compact()
    place = files(store, "times")[0]
    place.write_bytes(_flipped(place.read_bytes()))
    store = Store.open(store.path)
    assert store.times(FIRST) == []
    assert store.damaged == [place]
    assert len(store.times(SECOND)) == 4 * len(CELLS)


def test_decisions_before_a_damaged_one_count_again(store: Store) -> None:
    for answer in ("worse", "same"):
        store.decide(FIRST, [decision(CELLS[0], answer=answer)])
    last = files(store, "decisions")[-1]
    last.write_bytes(b"")
    assert [each.answer for each in store.decisions()] == ["worse"]
    assert str(last) in store.warnings[0]


def test_a_store_of_a_newer_version_is_left_alone(store: Store) -> None:
    (store.path / "store.json").write_text('{"schema": 2, "quantkit": "9.9"}')
    with pytest.raises(InputError, match=r"\[store-newer\].*schema 2, of quantkit 9\.9.*up to 1"):
        Store.open(store.path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"quantkit": "1"}', '{"schema": "one"}', "null"])
def test_a_damaged_store_json_is_one_line(store: Store, text: str) -> None:
    (store.path / "store.json").write_text(text)
    with pytest.raises(InputError, match=r"\[store-invalid\]") as caught:
        Store.open(store.path, create=True)
    assert "\n" not in caught.value.line()


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\[store-missing\]"):
        Store.open(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"\[store-invalid\].*notes\.txt"):
        Store.open(tmp_path, create=True)
    with pytest.raises(InputError, match=r"\[file-unwritable\]"):
        Store.open(tmp_path / "notes.txt" / "store", create=True)
    assert not (tmp_path / "store.json").exists()


def test_merged_stores_count_an_attempt_once_and_say_so(store: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other", create=True)
    store.commit(result(CELLS[0], seconds=1.0), times(CELLS[0]))
    other.commit(result(CELLS[0], seconds=2.0), times(CELLS[0], n=8))
    other.commit(result(CELLS[1]), times(CELLS[1]))
    shutil.copytree(other.path, store.path, dirs_exist_ok=True)
    found = {each.cell: each for each in store.results()}
    assert set(found) == {CELLS[0].key, CELLS[1].key}
    assert len(store.results()) == 2
    assert len(store.times(FIRST, CELLS[0].key)) == (4 if found[CELLS[0].key].seconds == 1.0 else 8)
    assert len(store.warnings) == 1
    store.compact()
    assert {each.cell: each for each in store.results()} == found


def test_files_that_are_replaced_while_they_are_read_are_looked_for_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    stale = _files.listing(store.path, set(), set())
    Store.open(store.path).compact()
    real, first = _files.listing, [stale]
    monkeypatch.setattr(_files, "listing", lambda *given: first.pop() if first else real(*given))
    assert len(store.results()) == len(CELLS)
    assert not store.warnings


def test_a_result_s_own_columns_follow_from_its_cell() -> None:
    found = Result.of(FIRST, CELLS[1], "done")
    assert (found.cell, found.build, found.batch) == (CELLS[1].key, CELLS[1].build, 8)
    assert os.sep not in _files.key(found.cell, 1)


def test_a_query_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path / "store", create=True)
    monkeypatch.setenv("QUANTKIT_LIMIT_SECONDS", "0.3")
    with pytest.raises(InputError, match="over-limit"):
        store.query("SELECT count(*) FROM range(10000000000) a, range(10000000000) b WHERE a.range + b.range = 7")
    monkeypatch.setenv("QUANTKIT_LIMIT_SECONDS", "60")
    monkeypatch.setenv("QUANTKIT_LIMIT_UNPACKED", "1e6")
    with pytest.raises(InputError, match="over-limit"):
        store.query("SELECT * FROM range(1000000000)")
