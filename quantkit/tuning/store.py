"""Measured harms, kept in the user's cache as they become known: a killed search goes on, another budget costs nothing.

One JSON line a unit and candidate, in a file that is named by the hash of all that a harm depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit import content
from quantkit.bundle.disk import write_atomic
from quantkit.tuning.harm import UnitHarm


def place(key: Mapping[str, Any]) -> Path:
    """The file of the harms that depend on `key`."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "tune" / f"{name}.jsonl"


def read(path: Path) -> list[UnitHarm]:
    """What is known; nothing where the file is not there or was damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [UnitHarm(**{**row, "members": tuple(row["members"])}) for row in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write(path: Path, harms: Sequence[UnitHarm]) -> None:
    """Replace what is known by more. A cache that cannot be written costs time, not the result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text(harms).encode())
    except OSError:
        return


def text(harms: Sequence[UnitHarm]) -> str:
    """The lines."""
    return "".join(json.dumps(asdict(harm)) + "\n" for harm in harms)
