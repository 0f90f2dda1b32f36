"""What goes in comes out, once; what is damaged, locked, newer or older."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError, Stopped
from quantkit.nightly import store as stores
from quantkit.nightly.records import Result
from quantkit.nightly.store import FILE, Store

from .conftest import CELLS, FIRST, SECOND, THIRD, decision, fill, items, night, result, times


def test_an_empty_store_answers(store: Store) -> None:
    assert [path.name for path in store.path.iterdir()] == [FILE]
    assert store.nights() == store.results() == store.decisions() == store.times(FIRST) == store.items(FIRST) == []
    assert store.committed(FIRST) == set()
    assert store.accepted(cells=[CELLS[0].key]) == {}
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
    command = [sys.executable, "-c", _WRITER, str(store.path), FIRST, str(after), *(cell.key for cell in CELLS)]
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
    command = [sys.executable, "-c", _HOLDER, str(store.file), how]
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
        database.execute("UPDATE about SET schema = 3, quantkit = '9.9'")
    with pytest.raises(InputError, match=r"\[store-newer\].*schema 3, of quantkit 9\.9.*up to 2"):
        Store.open(store.path)


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
