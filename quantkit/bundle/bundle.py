"""A bundle: the folder that a compile leaves, opened by its manifest, and held against it byte by byte."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantkit.bundle.disk import fsync_tree, sha256, stopping_when_full, walk, write_atomic
from quantkit.bundle.manifest import (
    MANIFEST,
    MEASUREMENTS,
    Check,
    FileEntry,
    Manifest,
    content_sha256,
    inventory,
    role_of,
)
from quantkit.errors import InputError
from quantkit.plugins import Kind


class _ModelLoader(Protocol):
    """What a bundle needs of a runtime."""

    def load(self, bundle: Bundle, **settings: Any) -> Any: ...


@dataclass(frozen=True)
class Bundle:
    """A finished bundle on disk.

    Args:
        path: its folder.
        manifest: the parsed `manifest.json`.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Open a bundle; reads the manifest only.

        Raises:
            InputError: `not-a-bundle`, `unfinished-build`, `manifest-invalid`, `manifest-schema`.
        """
        folder = Path(path).expanduser()
        if not (folder / MANIFEST).is_file():
            partial = folder.with_name(f"{folder.name}.partial")
            if not folder.exists() and partial.is_dir():
                raise InputError(
                    "unfinished-build",
                    where=str(folder),
                    value=f"only {partial.name} is there",
                    remedy="finish it: the same compile command with --resume",
                )
            raise InputError(
                "not-a-bundle",
                where=str(folder),
                value=f"no {MANIFEST} in it" if folder.is_dir() else "no such folder",
                rule="a bundle is the folder that `quantkit compile` leaves",
                remedy="check the path",
            )
        return cls(folder, Manifest.read(folder / MANIFEST))

    @property
    def model_folder(self) -> Path:
        """The folder that transformers and vLLM load."""
        return self.path / "model"

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """The rows of `measurements.jsonl`; empty when nothing was measured.

        Raises:
            InputError: `measurements-invalid` with the line.
        """
        path = self.path / MEASUREMENTS
        if not path.is_file():
            return []
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InputError(
                    "measurements-invalid",
                    where=f"{path}:{number}",
                    value=line[:80],
                    rule="one JSON object a line",
                    remedy="measure again",
                )
            rows.append(row)
        return rows

    def model(self, **settings: Any) -> Any:
        """The quantized model as torch runs it; needs the `compile` extra."""
        return Kind[_ModelLoader]("runtimes").load("torch").load(self, **settings)

    def demand_writable(self) -> None:
        """Refuse a bundle that nothing can be put into, before hours of work end there.

        Raises:
            InputError: `bundle-not-writable`.
        """
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as problem:
            raise InputError(
                "bundle-not-writable",
                where=str(self.path),
                value=problem.strerror or str(problem),
                rule="what is measured or exported is put into the bundle",
                remedy="copy it to a place that can be written",
            ) from None

    def demand_free(self, place: str) -> None:
        """Refuse a folder that the bundle has. Raises InputError `export-exists`."""
        if any(entry.path.startswith(f"{place}/") for entry in self.manifest.files):
            raise InputError(
                "export-exists",
                where=str(self.path / place),
                value="the bundle has it already",
                rule="content never changes after the build",
                remedy="compile again with another recipe",
            )

    def demand_intact(self, entries: Sequence[FileEntry] | None = None) -> None:
        """Refuse a bundle whose content is not what its manifest says.

        Args:
            entries: the files that matter; None: all that `content_sha256` is of.

        Raises:
            InputError: `hash-mismatch` with the file.
        """
        if entries is None:
            entries = [entry for entry in self.manifest.files if entry.deterministic]
        for check in verify_files(self.path, self.manifest.model_copy(update={"files": list(entries)})):
            if check.name in ("files.present", "files.size", "files.sha256") and not check.ok:
                raise InputError(
                    "hash-mismatch",
                    where=f"{self.path}/{check.where}",
                    value=check.name,
                    rule="every file is as the manifest says",
                    remedy="fetch or compile the bundle again",
                )

    def verify(self) -> list[Check]:
        """Every file there, unchanged, and none besides: one check each; `ok` says whether it holds."""
        return verify_files(self.path, self.manifest)

    def put(self, name: str, data: bytes) -> Bundle:
        """Add or replace one file (measurements, report), then the manifest that lists it.

        Only for what is not part of the bundle's identity. Killed between the two, `verify` names the file and the
        same call mends it.

        Raises:
            ValueError: the file is deterministic content.
            Stopped: `disk-full`.
        """
        return self.put_all({name: data})

    def put_all(self, files: Mapping[str, bytes | None], **changes: Any) -> Bundle:
        """As `put`, for several files and what of the manifest goes with them (the verdict), the manifest last.

        A file that is None is removed: a report that no longer holds.
        """
        entries = {entry.path: entry for entry in self.manifest.files}
        with stopping_when_full(self.path):
            for name, data in files.items():
                role, deterministic = role_of(name)
                if deterministic:
                    raise ValueError(f"{name} is content, which never changes after the build")
                path = self.path / name
                if data is None:
                    entries.pop(name, None)
                    path.unlink(missing_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, data)
                entries[name] = FileEntry(
                    path=name, bytes=len(data), sha256=sha256(path), role=role, deterministic=False
                )
            ordered = sorted(entries.values(), key=lambda old: old.path)
            manifest = self.manifest.model_copy(update={"files": ordered, **changes})
            assert content_sha256(ordered) == manifest.content_sha256
            write_atomic(self.path / MANIFEST, manifest.as_bytes())
        return Bundle(self.path, manifest)

    def add_content(self, place: str, folder: Path, **changes: Any) -> Bundle:
        """Move a finished folder into the bundle as content (`onnx`), and give the bundle its new identity.

        The rows measured so far go on to the new identity: what they were measured on is unchanged. Files that the
        manifest lists already keep their hashes: one that was damaged since is found as before. Killed before the
        manifest is written, `verify` names the files of `place` as unlisted, and the same call mends it.

        Raises:
            InputError: `export-exists`.
            Stopped: `disk-full`.
        """
        home = self.path / place
        self.demand_free(place)
        if home.exists():  # of a call that was killed
            shutil.rmtree(home)
        with stopping_when_full(self.path):
            # a copy where the bundle is a file system of its own
            shutil.move(folder, home)
            fsync_tree(home)
            added = [entry for entry in inventory(self.path) if entry.path.startswith(f"{place}/")]
            entries = {entry.path: entry for entry in [*self.manifest.files, *added]}
            identity = content_sha256(entries.values())
            rows = entries.get(MEASUREMENTS)
            if rows is not None:
                data = (self.path / MEASUREMENTS).read_bytes()
                # whatever they say now: a call that was killed may have changed it
                for subject in {row["subject"] for row in self.measurements if "subject" in row}:
                    data = data.replace(subject.encode(), identity.encode())
                write_atomic(self.path / MEASUREMENTS, data)
                update = {"bytes": len(data), "sha256": sha256(self.path / MEASUREMENTS)}
                entries[MEASUREMENTS] = rows.model_copy(update=update)
            files = sorted(entries.values(), key=lambda entry: entry.path)
            manifest = self.manifest.model_copy(update={"files": files, "content_sha256": identity, **changes})
            write_atomic(self.path / MANIFEST, manifest.as_bytes())
        return Bundle(self.path, manifest)


def verify_files(folder: Path, manifest: Manifest) -> list[Check]:
    """Checks `files.present`, `.size`, `.sha256`, `.unlisted`, `.links`, `content_sha256`; each counts its offenders.

    A listed path that is a link is judged by what it points to if that lies inside the folder; a link that leaves the
    folder is never followed.
    """
    listed = {entry.path: entry for entry in manifest.files}
    root = folder.resolve()
    missing, sizes, hashes = [], [], []
    found = {path.relative_to(folder).as_posix() for path in walk(folder)}
    leaving = {name for name in found if not (folder / name).resolve().is_relative_to(root)}
    for name, entry in listed.items():
        path = folder / name
        # a path through a linked folder is not in `found`: what is listed has to stand where it is listed
        if name not in found or name in leaving or not _is_file(path):
            missing.append(name)
        elif path.stat().st_size != entry.bytes:
            sizes.append(name)
        elif _unreadable_or_differs(path, entry.sha256):
            hashes.append(name)
    unlisted = sorted(found - set(listed) - {MANIFEST})
    identity = [] if content_sha256(manifest.files) == manifest.content_sha256 else [MANIFEST]
    return [
        _count("files.present", missing),
        _count("files.size", sizes),
        _count("files.sha256", hashes),
        _count("files.unlisted", unlisted),
        _count("files.links", sorted(leaving)),
        _count("content_sha256", identity),
    ]


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _unreadable_or_differs(path: Path, expected: str) -> bool:
    try:
        return sha256(path) != expected
    except OSError:
        return True


def _count(name: str, offenders: Sequence[str]) -> Check:
    more = f" and {len(offenders) - 3} more" if len(offenders) > 3 else ""
    return Check(name=name, value=len(offenders), limit=0, ok=not offenders, where=", ".join(offenders[:3]) + more)
