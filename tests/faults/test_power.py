"""The power fails: what was not synced is lost, or not, in any order; data of files and names in folders apart.

A recording layer notes what each fsync made durable. At every fsync and every rename, disks are made of what may be
there after a power cut: all unsynced names there and their data not, none there, and mixtures by chance. The work goes
on from each of them and ends as if nothing had happened.
"""

import os
import random
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faults.work import WORK
from quantkit.errors import QuantkitError

Names = dict[str, int]


@dataclass
class Disk:
    """Folders by inode: their names, and the inodes behind them; files by inode: their data."""

    root: int
    names: dict[int, Names] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)


def now(folder: Path) -> Disk:
    """All that is in a folder, synced or not."""
    found = Disk(folder.stat().st_ino)
    for place, folders, names in os.walk(folder):
        here = found.names.setdefault(Path(place).stat().st_ino, {})
        for name in (*folders, *names):
            status = os.lstat(Path(place, name))
            here[name] = status.st_ino
            if stat.S_ISREG(status.st_mode):
                found.data[status.st_ino] = Path(place, name).read_bytes()
            elif stat.S_ISDIR(status.st_mode):
                found.names.setdefault(status.st_ino, {})
    return found


class Recorder:
    """What is durable in a folder, and at each moment what is there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.durable = now(folder)
        self.moments: list[tuple[Disk, Disk]] = []
        replace, rename = os.replace, os.rename

        def synced(descriptor: int) -> None:
            status, there = os.fstat(descriptor), now(folder)  # the disk is played: no real one is waited for
            if stat.S_ISDIR(status.st_mode):
                self.durable.names[status.st_ino] = dict(there.names.get(status.st_ino, {}))
            else:
                self.durable.data[status.st_ino] = there.data.get(status.st_ino, b"")
            self._note(there)

        def moved(real: Any) -> Any:
            def step(*given: Any, **named: Any) -> None:
                self._note(now(folder))
                real(*given, **named)
                self._note(now(folder))

            return step

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", moved(replace))
        monkeypatch.setattr(os, "rename", moved(rename))

    def _note(self, there: Disk) -> None:
        # an inode that nobody has any more may become another file's
        alive = {inode for disk in (there, self.durable) for names in disk.names.values() for inode in names.values()}
        self.durable.data = {inode: data for inode, data in self.durable.data.items() if inode in alive}
        copy = Disk(self.durable.root, {k: dict(v) for k, v in self.durable.names.items()}, dict(self.durable.data))
        self.moments.append((copy, there))


def cut(durable: Disk, there: Disk, lost: float, place: Path, rng: random.Random) -> None:
    """Makes a folder of what is left: each unsynced name or data is lost with this probability."""

    def folder(inode: int, path: Path) -> None:
        path.mkdir()
        old, new = durable.names.get(inode, {}), there.names.get(inode, {})
        for name in sorted({*old, *new}):
            chosen = old if rng.random() < lost else new
            if name not in chosen:
                continue
            target = chosen[name]
            if target in there.names or target in durable.names:
                folder(target, path / name)
            else:
                (path / name).write_bytes(content(target))

    def content(inode: int) -> bytes:
        synced, whole = durable.data.get(inode), there.data.get(inode)
        if whole is None:
            return synced or b""
        if synced == whole or rng.random() >= lost:
            return whole
        # blocks of data that were not synced come back as zeros, or not at all
        return synced if synced is not None else rng.choice((b"", bytes(len(whole)), whole[: len(whole) // 2]))

    folder(durable.root, place)


@pytest.mark.parametrize("name", WORK)
def test_after_a_power_cut_the_work_is_done_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, folder = WORK[name], tmp_path / "disk"
    folder.mkdir()
    work.prepare(folder)
    with monkeypatch.context() as patched:
        recorder = Recorder(folder, patched)
        work.act(folder)
    wanted, refusals = work.left(folder), set()
    rng = random.Random(0)
    assert len(recorder.moments) > 2
    for moment, (durable, there) in enumerate(recorder.moments):
        for number, lost in enumerate((1.0, 0.0, *(4 * [0.5]))):
            place = tmp_path / f"{moment}-{number}"
            cut(durable, there, lost, place, rng)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    work.act(place)
                except QuantkitError as error:
                    refusals.add(error.code)
                    assert error.code != "internal-error"
                    continue
            assert work.left(place) == wanted, f"moment {moment}, disk {number}"
    assert refusals <= {"unfinished-build", "not-a-bundle"}, refusals
