"""Does a bundle still hold exactly what its manifest says? Every file, every byte, nothing more.

Each check counts its offenders, which must be none, and names the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from quantkit.bundle import seal
from quantkit.bundle.disk import empty_folders, is_left_over, is_plain, sha256, walk
from quantkit.bundle.manifest import MANIFEST, UNLISTED, Check, FileEntry, Manifest, content_sha256, role_of


def verify_files(folder: Path, manifest: Manifest) -> list[Check]:
    """Checks `files.present`, `.size`, `.sha256`, `.unlisted`, `.links`, `content_sha256` and `seal`."""
    return [_count(name, names) for name, names in offenders(folder, manifest, manifest.files).items()]


def offenders(folder: Path, manifest: Manifest, entries: Collection[FileEntry]) -> dict[str, list[str]]:
    """Check -> the files that fail it.

    A link is never followed. A file that has a second name elsewhere (a hard link) can be changed there, and counts as
    a link. A folder in which nothing lies counts as unlisted, with a slash behind its name.

    Args:
        folder: of the bundle.
        manifest: what it should hold.
        entries: of the manifest; only their content is read.
    """
    found = {path.relative_to(folder).as_posix(): os.lstat(path) for path in walk(folder)}
    found = {name: status for name, status in found.items() if not _is_nobodys(name)}
    links = sorted(name for name, status in found.items() if not is_plain(status))
    missing, sizes, hashes = [], [], []
    for entry in entries:
        path = folder / entry.path
        # a path through a linked folder is not in `found`: what is listed has to stand where it is listed
        if entry.path not in found or path.is_symlink() or not path.is_file():
            missing.append(entry.path)
        elif found[entry.path].st_size != entry.bytes:
            sizes.append(entry.path)
        elif _unreadable_or_differs(path, entry.sha256):
            hashes.append(entry.path)
    empty = [f"{path.relative_to(folder).as_posix()}/" for path in empty_folders(folder)]
    unlisted = sorted({*found, *empty} - {entry.path for entry in manifest.files} - UNLISTED)
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
    """As `offenders`, of these entries; of what is unlisted or linked, what lies in these folders.

    A library that opens `model`, `onnx` or `engine` reads files that it finds there, listed or not. Elsewhere what is
    unlisted is read by nobody: a write that was killed may have left it.
    """
    found = offenders(folder, manifest, entries)
    for name in ("files.unlisted", "files.links"):
        found[name] = [each for each in found[name] if each.partition("/")[0] in places and role_of(each)[1]]
    return found


def _is_nobodys(name: str) -> bool:
    """What a killed write, a file manager, git or a download leaves in a folder, and no library reads."""
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
