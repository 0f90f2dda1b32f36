"""Does a bundle still hold exactly what its manifest says? Every file, every byte, nothing more.

Each check counts its offenders, which must be none, and names the first of them.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from quantkit.bundle.disk import sha256, walk
from quantkit.bundle.manifest import MANIFEST, Check, Manifest, content_sha256


def verify_files(folder: Path, manifest: Manifest) -> list[Check]:
    """Checks `files.present`, `.size`, `.sha256`, `.unlisted`, `.links` and `content_sha256`.

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
