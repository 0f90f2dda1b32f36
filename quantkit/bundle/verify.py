"""Check that a bundle holds exactly the files of its manifest, byte for byte, and no others.

A check counts the files that fail it, which must be none, and names the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from quantkit.bundle import seal
from quantkit.bundle.disk import empty_folders, is_left_over, is_plain, sha256, walk
from quantkit.bundle.manifest import MANIFEST, UNLISTED, Check, FileEntry, Manifest, content_sha256, role_of


def verify_files(folder: Path, manifest: Manifest) -> list[Check]:
    """Run the checks `files.present`, `.size`, `.sha256`, `.unlisted`, `.links`, `content_sha256` and `seal`."""
    return [_count(name, names) for name, names in offenders(folder, manifest, manifest.files).items()]


def offenders(folder: Path, manifest: Manifest, entries: Collection[FileEntry]) -> dict[str, list[str]]:
    """Map every check to the files that fail it.

    A link is never followed. A file with a second name elsewhere (a hard link) can be changed there, and counts as a
    link. An empty folder counts as unlisted, with a slash after its name.

    Args:
        folder: folder of the bundle.
        manifest: expected content.
        entries: entries of the manifest whose content is read.
    """
    present = {path.relative_to(folder).as_posix(): os.lstat(path) for path in walk(folder)}
    present = {name: status for name, status in present.items() if not _is_nobodys(name)}
    links = sorted(name for name, status in present.items() if not is_plain(status))
    missing, sizes, hashes = [], [], []
    for entry in entries:
        path = folder / entry.path
        # a path through a linked folder is not in `present`, so a listed file has to be where the manifest lists it
        if entry.path not in present or path.is_symlink() or not path.is_file():
            missing.append(entry.path)
        elif present[entry.path].st_size != entry.bytes:
            sizes.append(entry.path)
        elif _unreadable_or_differs(path, entry.sha256):
            hashes.append(entry.path)
    empty = [f"{path.relative_to(folder).as_posix()}/" for path in empty_folders(folder)]
    unlisted = sorted({*present, *empty} - {entry.path for entry in manifest.files} - UNLISTED)
    identity = [] if content_sha256(manifest.files) == manifest.content_sha256 else [MANIFEST]
    return {
        "files.present": missing,
        "files.size": sizes,
        "files.sha256": hashes,
        "files.unlisted": unlisted,
        "files.links": links,
        "content_sha256": identity,
        "seal": [MANIFEST] if seal.is_broken(folder) else [],
    }


def content_offenders(
    folder: Path, manifest: Manifest, entries: Collection[FileEntry], places: Collection[str]
) -> dict[str, list[str]]:
    """Map every check to the files that fail it, for these entries and the unlisted or linked files in these folders.

    A library that opens `model`, `onnx` or `engine` reads files there whether they are listed or not. Unlisted files
    elsewhere are never read: a killed write may have left them.
    """
    failing = offenders(folder, manifest, entries)
    for name in ("files.unlisted", "files.links"):
        failing[name] = [path for path in failing[name] if path.partition("/")[0] in places and role_of(path)[1]]
    return failing


def _is_nobodys(name: str) -> bool:
    """Tell whether a file was left by a killed write, a file manager, git or a download; no library reads it."""
    place, _, _ = name.partition("/")
    return (
        (is_left_over(name) and "/" not in name)
        or name.rpartition("/")[2] == ".DS_Store"
        or place in (".git", ".gitattributes", ".gitignore")
        or name.startswith(".cache/huggingface/")
    )


def _unreadable_or_differs(path: Path, expected: str) -> bool:
    try:
        return sha256(path) != expected
    except OSError:
        return True


def _count(name: str, names: Sequence[str]) -> Check:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return Check(name=name, value=len(names), limit=0, ok=not names, where=", ".join(names[:3]) + more)
