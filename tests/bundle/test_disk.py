"""Files are written whole or not at all, and one process at a time holds a lock."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from quantkit.bundle.disk import Hashes, alone, write_atomic, writing
from quantkit.errors import InputError, Stopped


def test_chunks_are_one_file_with_one_hash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    digest = write_atomic(path, [b"ab", memoryview(b"cd")])
    assert (path.read_bytes(), digest) == (b"abcd", hashlib.sha256(b"abcd").hexdigest())
    assert write_atomic(path, b"abcd") == digest
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_is_hashed_again_only_once_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes, path = Hashes(), tmp_path / "file"
    path.write_bytes(b"one")
    first = hashes(path)
    with monkeypatch.context() as patched:
        patched.setattr("quantkit.bundle.disk.sha256", None)
        assert hashes(path) == first == hashlib.sha256(b"one").hexdigest()
    write_atomic(path, b"two", hashed=False)
    assert hashes(path) == hashlib.sha256(b"two").hexdigest()


def test_what_ends_in_the_middle_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, chunks())
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(errno.EACCES, InputError, "file-unwritable"), (errno.ENOSPC, Stopped, "disk-full")]
)
def test_what_the_file_system_says_becomes_one_of_our_errors(
    tmp_path: Path, number: int, kind: type[InputError | Stopped], code: str
) -> None:
    with pytest.raises(kind) as caught, writing(tmp_path / "file"):
        raise OSError(number, "no")
    assert caught.value.code == code


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with alone(lock), lock.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_no_lock_is_neither_written_nor_waited_for(tmp_path: Path) -> None:
    lock, precious = tmp_path / "lock", tmp_path / "precious"
    precious.write_text("kept")
    for make in (lock.symlink_to, lock.hardlink_to, lambda _: os.mkfifo(lock), lambda _: lock.mkdir()):
        lock.unlink(missing_ok=True)
        make(precious)
        with pytest.raises(InputError, match="lock-foreign"), alone(lock):
            pass
    assert precious.read_text() == "kept"


def test_a_link_planted_under_a_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (tmp_path / ".file.guessed.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "file", b"theirs")
    assert precious.read_bytes() == b"mine"
