"""What exists is what stands in a folder: one file, or one folder, one thing.

A pass, format, exporter, runtime or layout is a module or a package in `quantkit/<kind>/` that has one constant:
`PASS`, `FORMAT`, `EXPORT`, `RUNTIME`, `LAYOUT`. Its name is the stem, its summary the first line of its docstring; both
are read without importing, so that listing needs no torch. What has no such constant is a helper.
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
    for path in sorted({*folder.glob("*.py"), *folder.glob("*/__init__.py")}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if CONSTANTS[kind] in _defined(tree):
            name = path.parent.name if path.name == "__init__.py" else path.stem
            found[name] = (ast.get_docstring(tree) or "").split("\n", 1)[0].strip()
    return dict(sorted(found.items()))


def _defined(tree: ast.Module) -> set[str]:
    """The names that a module assigns or imports at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
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
