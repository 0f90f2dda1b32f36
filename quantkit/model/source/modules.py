"""Modules that sentence-transformers puts behind a transformer: `modules.json`, and the folders that it names.

    [{"path": "", "type": "sentence_transformers.models.Transformer"},
     {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
     {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]

They are part of the model: a bundle has every file of them, byte by byte, weights and all. None is unpickled here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit import limits
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError
from quantkit.model.source.weights import checked_file, strict_json

MODULES = "modules.json"
CONFIG = "config.json"
_LIBRARY = "sentence_transformers."
_CODE = (".py", ".pyc", ".so")


@dataclass(frozen=True)
class Module:
    """One of the modules that a text goes through.

    Args:
        type: as the file has it, `sentence_transformers.models.Pooling`.
        kind: the last word of the library's own, `Pooling`; "" of any other.
        folder: where it lies below the model's, as POSIX; "" is the model's own.
        config: of its `config.json`; empty where there is none.
    """

    type: str
    kind: str
    folder: str
    config: dict[str, Any]


def modules_of(folder: Path) -> list[Module]:
    """The modules of a folder, in their order; none where it has no `modules.json`.

    Raises:
        InputError: `modules-invalid`, what is no list of modules, or leads out of the folder.
    """
    if not (folder / MODULES).is_file():
        return []
    where = f"{folder.name}: {MODULES}"
    try:
        listed = json.loads(limits.read(checked_file(folder, MODULES)))
    except (ValueError, RecursionError) as problem:
        raise _invalid(where, f"not JSON: {problem}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise _invalid(where, "no list of objects")
    found = []
    for number, entry in enumerate(listed):
        kind, below = entry.get("type"), entry.get("path", "")
        if not isinstance(kind, str) or not isinstance(below, str) or not _is_inside(folder, below):
            raise _invalid(f"{where}, module {number}", f"{entry!r:.120}")
        config: dict[str, Any] = {}
        if below and (folder / below / CONFIG).is_file():
            raw = limits.read(checked_file(folder / below, CONFIG))
            config = strict_json(raw, f"{folder.name}: {below}/{CONFIG}", "modules-invalid", "modules-invalid")
        own = kind.rpartition(".")[2] if kind.startswith(_LIBRARY) else ""
        found.append(Module(kind, own, PurePosixPath(below).as_posix() if below else "", config))
    return found


def pools(folder: Path) -> bool:
    """Tell whether a model is there for the vectors that are pooled from what it gives. Raises as `modules_of`."""
    return any(module.kind == "Pooling" for module in modules_of(folder))


def files_of_modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, name below the folder) of all files in the folders of the modules but code, hidden ones and links out."""
    for below in sorted({module.folder for module in modules_of(folder)} - {""}):
        for place, folders, names in os.walk(folder / below):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            folders[:] = [name for name in folders if not _is_result(Path(place, name))]
            for name in sorted(names):
                path = Path(place, name)
                if name.startswith(".") or path.suffix.lower() in _CODE:
                    continue
                try:
                    yield checked_file(path.parent, name), path.relative_to(folder).as_posix()
                except InputError:
                    continue


def _is_result(folder: Path) -> bool:
    """Tell whether it is a bundle, or one being built."""
    return folder.name.endswith(".partial") or (folder / MANIFEST).is_file()


def _is_inside(folder: Path, below: str) -> bool:
    """Tell whether a module's path is one of folders below the model's own."""
    path = PurePosixPath(below)
    plain = not path.is_absolute() and ".." not in path.parts and "\\" not in below and below.isprintable()
    return plain and (folder / below).resolve().is_relative_to(folder.resolve())


def _invalid(where: str, value: str) -> InputError:
    return InputError(
        "modules-invalid",
        where=where,
        value=value,
        rule='a list of {"type": ..., "path": ...}, each path a folder below the model\'s',
        remedy="download the file again, or leave it out: the transformer is then compiled alone",
    )
