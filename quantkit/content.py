"""Finds the three folders of content that users read and edit: recipes, calibration sets, targets.

They stand at the top of a clone, and inside the package (`quantkit/content/...`) of an installed wheel. A shipped thing
goes by a bare word; a user's own file starts with `/`, `./` or `../`, or has a suffix. The two are never confused: a
bare word is never looked up as a path, a path never as a shipped name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from quantkit.errors import InputError, unknown_name

Kind = Literal["recipes", "calibration", "export"]
_SINGULAR = {"recipes": "recipe", "calibration": "calibration", "export": "target"}


@cache
def folder(kind: Kind) -> Path:
    """The folder of that kind: the packaged copy, else the one beside `quantkit/`.

    Raises:
        InputError: `content-missing`, a broken installation.
    """
    here = Path(__file__).parent
    for candidate in (here / "content" / kind, here.parent / kind):
        if candidate.is_dir():
            return candidate
    raise InputError(
        "content-missing", where=kind, value="not found in the package or beside it", remedy="reinstall quantkit"
    )


def names(kind: Kind) -> list[str]:
    """Shipped names, sorted: YAML stems for recipes and targets, folders with a card for calibration sets."""
    root = folder(kind)
    if kind == "calibration":
        return sorted(path.parent.name for path in root.glob("*/card.yaml"))
    return sorted(path.stem for path in root.glob("*.yaml"))


def is_path(reference: str) -> bool:
    """Whether a reference means a user's own file rather than a shipped name."""
    return reference.startswith(("/", "./", "../", "~")) or Path(reference).suffix != ""


def find(kind: Kind, reference: str) -> Path:
    """The file (recipe, target) or the card or data path (calibration set) that a reference means.

    Raises:
        InputError: `unknown-recipe|target|calibration` with a did-you-mean, or `file-missing`.
    """
    if is_path(reference):
        path = Path(reference).expanduser()
        if not path.exists():
            raise InputError("file-missing", where=reference, value="no such file or folder", remedy="check the path")
        return path
    if reference not in names(kind):
        raise unknown_name(_SINGULAR[kind], reference, names(kind))
    root = folder(kind)
    return root / reference / "card.yaml" if kind == "calibration" else root / f"{reference}.yaml"
