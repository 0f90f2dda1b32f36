"""The package as syntax trees, parsed once; what the rules of the house are tested on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import quantkit

PACKAGE = Path(quantkit.__file__).parent


@cache
def files() -> dict[str, Path]:
    """Every module's dotted name and file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(files()[module].read_text(encoding="utf-8"))


def imports(module: str, *, types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module of quantkit) that a module imports anywhere in it, also inside functions.

    Args:
        module: dotted name.
        types: also what is imported for annotations alone.
    """
    for node in _nodes(tree(module), types=types):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            within = [f"{node.module}.{each.name}" for each in node.names]
            names = [each if each in files() else node.module for each in within]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "quantkit")


def _nodes(node: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _nodes(child, types=types)
