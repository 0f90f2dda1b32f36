"""What exists is what stands in a folder: one file, one thing.

A pass, format, exporter, runtime or layout is a module in `quantkit/<kind>/`; its name is the file's stem with `_` as
it is, its summary the first line of its docstring (read without importing, so that listing needs no torch), and
importing it yields one constant: `PASS`, `FORMAT`, `EXPORT`, `RUNTIME`, `LAYOUT`. Files whose name starts with `_` are
helpers.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.errors import unknown_name

CONSTANTS = {
    "passes": "PASS",
    "formats": "FORMAT",
    "export": "EXPORT",
    "runtimes": "RUNTIME",
    "model.layouts": "LAYOUT",
}
_SINGULAR = {
    "passes": "pass",
    "formats": "format",
    "export": "exporter",
    "runtimes": "runtime",
    "model.layouts": "layout",
}


@cache
def summaries(kind: str) -> dict[str, str]:
    """Name -> one-line summary of all that exists of a kind ("passes", "formats", "export", "runtimes", ...)."""
    folder = Path(__file__).parent.joinpath(*kind.split("."))
    found = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = docstring.split("\n", 1)[0].strip()
    return found


def names(kind: str) -> list[str]:
    """The names that exist of a kind, sorted."""
    return list(summaries(kind))


def load(kind: str, name: str, *, where: str = "") -> Any:
    """The constant that the module of that name exposes; a near miss gets a did-you-mean.

    Raises:
        InputError: no file of that name (`unknown-pass`, `unknown-format`, ...).
    """
    if name not in summaries(kind):
        raise unknown_name(_SINGULAR[kind], name, names(kind), where=where)
    return getattr(importlib.import_module(f"quantkit.{kind}.{name}"), CONSTANTS[kind])
