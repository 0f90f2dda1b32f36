"""Build a bundle so that the process can be killed at any moment and the build resumed.

    <out>.partial/lock          held by the one process that builds (flock: the kernel frees it when the process ends)
    <out>.partial/build.json    the fingerprint: everything that the result depends on
    <out>.partial/steps/        journal.jsonl, block files, hidden states: deleted at the end
    <out>.partial/bundle/       the files of the future bundle; renamed to <out> at the end

Committing a step means: fsync its files, rename them into place, fsync the folders, append one line to the journal,
fsync the journal. The line is the commit, and holds the sha256 of every file of the step. The next opening deletes
files without a line. It drops a torn last line, and a line whose files have changed, with all lines that follow.

Short steps may wait and be committed together, since a disk takes as long for one as for several: their lines are
written once all their files are synced. A killed process loses the steps that waited; one that ends commits them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from quantkit.bundle import disk, seal
from quantkit.bundle.bundle import Bundle
from quantkit.bundle.disk import (
    Hashes,
    disk_full,
    fsync,
    fsync_tree,
    is_disk_full,
    is_plain,
    not_writable,
    sha256,
    stopping_when_full,
    walk,
    write_atomic,
)
from quantkit.bundle.manifest import UNLISTED, Manifest
from quantkit.errors import InputError, QuantkitError, Stopped

_FINGERPRINT = "build.json"
_JOURNAL = "journal.jsonl"


class Build:
    """Folder in which one bundle is built; a context manager.

    Leaving it on an error keeps the committed steps for `--resume`, or deletes the folder if nothing was committed.

    Args:
        out: final name of the bundle.
        folder: `<out>.partial`, in the same folder as `out`, so that a rename is possible.
        finished: the bundle, when the resumed build is already complete. If the process was killed after the partial
            folder was deleted, the fingerprint is gone too: compare the manifest of this bundle with the request.
        hashes: sha256 of files in the folder, each read once.
    """

    def __init__(self, out: Path, lock: int, finished: Bundle | None = None) -> None:
        """Use `Build.open`."""
        self.out = out
        self.folder = _partial(out)
        self.finished = finished
        self._lock = lock
        self._committed: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []
        self._dropped = ""
        self.hashes = Hashes()
        self._hashes: dict[str, str | None] = {}

    @property
    def bundle(self) -> Path:
        """Folder with the files of the future bundle."""
        return self.folder / "bundle"

    @property
    def steps(self) -> Path:
        """Folder of the journal, and of files that one step leaves for the next."""
        return self.folder / "steps"

    @property
    def dropped(self) -> str:
        """Committed steps to be done again, and the reason; "" for none."""
        return self._dropped

    @classmethod
    def open(cls, out: str | Path, fingerprint: Mapping[str, Any], *, resume: bool) -> Build:
        """Start a build, or resume one.

        Args:
            out: final name of the bundle; missing parent folders are created.
            fingerprint: everything that the result depends on, as JSON. A build resumes only with an equal one.
            resume: go on with an unfinished build; start one where there is none.

        Raises:
            InputError: `out-exists`, `out-not-writable`, `unfinished-build`, `resume-mismatch`, `build-locked`.
            Stopped: `disk-full`.
        """
        final = Path.cwd() / Path(out).expanduser()
        try:
            with stopping_when_full(final):
                return cls._open(final, json.loads(json.dumps(fingerprint)), resume)
        except OSError as error:
            raise not_writable(final, error) from None

    @classmethod
    def beside(cls, out: Path) -> Build:
        """Open the build of another process, to read its files and to write temporary ones for it."""
        return cls(out, -1)

    @staticmethod
    def demand_free(out: Path) -> None:
        """Refuse, before any work, a name that is taken or a place where no folder can be created; `open` checks again.

        Raises:
            InputError, Stopped: those of `open`.
        """
        if os.path.lexists(out):
            raise exists_already(out)
        if (_partial(out) / _FINGERPRINT).exists():
            raise _unfinished(_partial(out))
        # only a trial tells: /proc claims to be writable, and /dev/null cannot hold folders
        above = next((path for path in out.absolute().parents if path.exists()), Path())
        try:
            with stopping_when_full(out):
                Path(tempfile.mkdtemp(prefix=f".{out.name[:64]}-", dir=above)).rmdir()
        except OSError as error:
            raise not_writable(out, error) from None

    @classmethod
    def _open(cls, out: Path, fingerprint: Any, resume: bool) -> Build:
        folder = _partial(out)
        if os.path.lexists(out) and not resume:
            raise exists_already(out)
        if os.path.lexists(out) and not folder.exists():
            return cls(out, -1, _finished(out))
        out.parent.mkdir(parents=True, exist_ok=True)
        build = cls(out, _acquire(folder))
        try:
            build._begin(fingerprint, resume)
        except BaseException:
            build._release()
            raise
        return build

    def _begin(self, fingerprint: Any, resume: bool) -> None:
        begun = self.folder / _FINGERPRINT
        if begun.exists():
            if not resume:
                raise _unfinished(self.folder)
            _same(json.loads(begun.read_text(encoding="utf-8")), fingerprint, self.folder)
        else:
            self._refuse_foreign()
        if os.path.lexists(self.out):
            # the process was killed after the last rename, before the partial folder was deleted
            finished = _finished(self.out) if resume else None
            self._remove()
            self._release()
            if finished is None:
                raise exists_already(self.out)
            self.finished = finished
        elif begun.exists():
            self._recover()
        else:
            try:
                self._start(fingerprint)
            except BaseException:
                self._remove()
                raise

    def _refuse_foreign(self) -> None:
        ours = {"lock", "steps", "bundle"}
        there = [path.name for path in self.folder.iterdir()]
        foreign = sorted(name for name in there if name not in ours and not name.startswith(f".{_FINGERPRINT}."))
        if foreign:
            (self.folder / "lock").unlink()
            value, rule = f"holds {foreign[0]!r}, which no build put there", "the build needs a folder of this name"
            remedy = "move the folder away, or choose another --out"
            raise InputError("unfinished-build", str(self.folder), value, rule, remedy)

    def __enter__(self) -> Self:
        """Return the build itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock; on an error, delete the folder if nothing was committed or if the input was wrong.

        Wrong input would fail again, so its steps are not kept, except where only the name `out` was taken meanwhile.
        """
        hopeless = isinstance(error, InputError) and error.code != "out-exists"
        if self._lock >= 0 and error is not None and not hopeless:
            with suppress(OSError, Stopped):
                self.sync()
        self._waiting.clear()
        useless = self._lock >= 0 and (hopeless or not self._committed)
        if error is not None and useless and self.folder.exists():
            self._remove()
        self._release()
        if isinstance(error, Exception) and not isinstance(error, QuantkitError) and is_disk_full(error):
            raise disk_full(self.folder, error) from error

    def done(self) -> dict[str, dict[str, Any]]:
        """Map the key of every step to its record, in order; the last ones may wait for `sync`."""
        return {step["key"]: step["record"] for step in (*self._committed, *self._waiting)}

    def temporary(self, name: str) -> Path:
        """Return a path for a file that is not committed yet; its folder exists."""
        path = self.steps / "temporary" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(
        self,
        key: str,
        record: Mapping[str, Any],
        files: Mapping[Path, Path],
        *,
        remove: Iterable[Path] = (),
        hashes: Mapping[Path, str] = MappingProxyType({}),
        sync: bool = True,
    ) -> None:
        """Commit a step: all of it, or none of it if the process is killed.

        Args:
            key: name of the step; used once.
            record: JSON that `done` returns.
            files: temporary path -> final path, both under `folder`. A final path is written once: a later step never
                replaces the file of an earlier step, because a resume may need it.
            remove: files of earlier steps that no later step needs, such as the hidden states before this block.
            hashes: sha256 of temporary files that were hashed while they were written.
            sync: False lets the step wait, with its files, for the next `sync`.

        Raises:
            ValueError: the key or a path is already used.
            Stopped: `disk-full`.
        """
        finals = [self._name(final) for final in files.values()]
        removed = [self._name(path) for path in remove]
        taken = {name for step in (*self._committed, *self._waiting) for name in step["files"]}
        if key in self.done():
            raise ValueError(f"step {key!r} is committed already")
        if taken & set(finals):
            raise ValueError(f"{sorted(taken & set(finals))[0]} belongs to an earlier step")
        with stopping_when_full(self.folder):
            digests = {}
            for (temporary, final), name in zip(files.items(), finals, strict=True):
                digests[name] = hashes.get(temporary) or sha256(temporary)
                self._make(final.parent)
                temporary.replace(final)
        self._waiting.append({"key": key, "record": dict(record), "files": digests, "removed": removed})
        if sync:
            self.sync()

    def sync(self) -> None:
        """Commit the waiting steps, in order. Raises Stopped: `disk-full`."""
        if not self._waiting:
            return
        steps = self._waiting
        paths = [self.folder / name for step in steps for name in step["files"]]
        with stopping_when_full(self.folder):
            for path in (*paths, *sorted({path.parent for path in paths})):
                fsync(path)
            self._append(steps)
        self._waiting = []
        self._committed += steps
        for name in (name for step in steps for name in step["removed"]):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, manifest: Manifest) -> Bundle:
        """Write the manifest, rename the bundle to its final name, delete the partial folder.

        Raises:
            ValueError: the files of the manifest and those in the folder differ.
            InputError: `out-exists`, another process created it meanwhile.
            Stopped: `disk-full`.
        """
        listed = {entry.path: entry.bytes for entry in manifest.files}
        there = {path.relative_to(self.bundle).as_posix(): os.lstat(path).st_size for path in walk(self.bundle)}
        for name in UNLISTED:
            there.pop(name, None)
        if listed != there:
            differing = sorted(name for name in listed.keys() | there.keys() if listed.get(name) != there.get(name))
            raise ValueError(f"the manifest and the folder differ in {differing}")
        self.sync()
        with stopping_when_full(self.folder):
            seal.write_manifest(self.bundle, manifest.as_bytes())
            fsync_tree(self.bundle)
            if os.path.lexists(self.out):
                raise exists_already(self.out)
            self.bundle.rename(self.out)
            fsync(self.out.parent)
        self._remove()
        self._release()
        return Bundle(self.out, manifest)

    def _start(self, fingerprint: Any) -> None:
        for place in (self.steps, self.bundle):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        write_atomic(self.folder / _FINGERPRINT, json.dumps(fingerprint, indent=1).encode())
        fsync(self.folder.parent)

    def _recover(self) -> None:
        """Read the journal, drop steps with missing or changed files, delete every file that belongs to no step."""
        self.steps.mkdir(exist_ok=True)
        self.bundle.mkdir(exist_ok=True)
        journal = self.steps / _JOURNAL
        raw = journal.read_bytes() if journal.exists() else b""
        steps, ends = _whole_lines(raw)
        count, damaged = len(steps), ""
        while count and (changed := self._differs(steps[:count])):
            damaged = damaged or changed
            count -= 1
        if damaged:
            again = ", ".join(step["key"] for step in steps[count:][:3]) + (", ..." if len(steps) - count > 3 else "")
            self._dropped = f"{damaged} is missing or has changed: {again} done again"
        self._committed = steps[:count]
        kept = ends[count - 1] if count else 0
        if kept != len(raw):
            with journal.open("r+b") as stream:
                stream.truncate(kept)
                os.fsync(stream.fileno())
        live = _live(self._committed).keys() | {self._name(journal)}
        for place in (self.steps, self.bundle):
            for path in list(walk(place)):
                if self._name(path) not in live:
                    path.unlink()

    def _differs(self, steps: list[dict[str, Any]]) -> str:
        """Return the first committed file that is missing or has changed; "" for none."""
        return next((name for name, digest in _live(steps).items() if self._hash(name) != digest), "")

    def _hash(self, name: str) -> str | None:
        """Hash a file once; None if it cannot be read."""
        if name not in self._hashes:
            path = self.folder / name
            try:
                self._hashes[name] = sha256(path) if is_plain(os.lstat(path)) else None
            except OSError:
                self._hashes[name] = None
        return self._hashes[name]

    def _append(self, steps: Iterable[Mapping[str, Any]]) -> None:
        journal = self.steps / _JOURNAL
        new = not journal.exists()
        start = 0 if new else journal.stat().st_size
        lines = "".join(json.dumps(step, ensure_ascii=False, allow_nan=False) + "\n" for step in steps)
        try:
            with journal.open("ab") as stream:
                stream.write(lines.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError:
            # half a line would corrupt the next one
            os.truncate(journal, start)
            raise
        if new:
            fsync(self.steps)

    def _make(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for place in reversed(missing):
            place.mkdir()
            fsync(place.parent)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _remove(self) -> None:
        # delete the fingerprint after the rest: a folder without one is not taken for an unfinished build
        for place in (self.steps, self.bundle):
            shutil.rmtree(place, ignore_errors=True)
        (self.folder / _FINGERPRINT).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _unfinished(folder: Path) -> InputError:
    value, remedy = "a build of this name was not finished", "go on with --resume, or delete the folder"
    return InputError("unfinished-build", str(folder), value, "one folder, one build", remedy)


def exists_already(out: Path, value: str = "exists already") -> InputError:
    """Make the error `out-exists`."""
    remedy = "choose another folder (--out; in Python, out=), or delete it"
    return InputError("out-exists", str(out), value, "nothing is overwritten", remedy)


def _finished(out: Path) -> Bundle:
    try:
        return Bundle.load(out)
    except InputError:
        raise exists_already(out) from None


def _acquire(folder: Path) -> int:
    """Create the build folder if it is missing, lock it, and return the lock's descriptor."""
    while True:
        folder.mkdir(exist_ok=True)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            value, rule = "a link, or a folder of another user", "a build needs its own folder, which it empties"
            remedy = "move it away, or choose another --out"
            raise InputError("unfinished-build", str(folder), value, rule, remedy)
        try:
            lock = disk.lock_file(folder / "lock")
        except FileNotFoundError:  # another build has just finished and deleted the folder
            continue
        try:
            disk.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (folder / "lock").stat().st_ino:
                return lock
            os.close(lock)
        except FileNotFoundError:
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            value, rule = "another process is building here", "one folder, one build at a time"
            remedy = "wait for it, or choose another --out"
            raise InputError("build-locked", str(folder), value, rule, remedy) from None


def _whole_lines(raw: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Parse the journal up to the first torn line; return its steps and the position where each line ends."""
    steps: list[dict[str, Any]] = []
    ends: list[int] = []
    position = 0
    for line in raw.splitlines(keepends=True):
        position += len(line)
        try:
            step = json.loads(line)
            step["key"], step["record"], step["files"], step["removed"]
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n"):
            break
        steps.append(step)
        ends.append(position)
    return steps, ends


def _live(steps: list[dict[str, Any]]) -> dict[str, str]:
    """Map files of these steps to their sha256, without the files that a later step removed."""
    live: dict[str, str] = {}
    for step in steps:
        live.update(step["files"])
        for name in step["removed"]:
            live.pop(name, None)
    return live


def _same(before: Any, now: Any, folder: Path) -> None:
    """Raise `resume-mismatch` for the first key in which two fingerprints differ."""
    difference = _first_difference(before, now, "")
    if difference is not None:
        key, old, new = difference
        value = f"the build was begun with {_short(old)}, now it is {_short(new)}"
        rule = "a resumed build has the same inputs and settings"
        remedy = "repeat the first command with --resume, or delete the folder"
        raise InputError("resume-mismatch", f"{folder}: {key}", value, rule, remedy)


def _short(value: Any) -> str:
    """Shorten a value for a message; code from outside is shown by name and hash."""
    if isinstance(value, list) and value and all(isinstance(file, dict) and "sha256" in file for file in value):
        return ", ".join(f"{file.get('kind')} {file.get('name')} {file['sha256'][:12]}" for file in value)
    return f"{value!r:.80}"


def _first_difference(before: Any, now: Any, key: str) -> tuple[str, Any, Any] | None:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *(name for name in now if name not in before)]:
            inner = f"{key}.{name}" if key else name
            difference = _first_difference(before.get(name), now.get(name), inner)
            if difference is not None:
                return difference
        return None
    return None if before == now else (key, before, now)
