"""The package as syntax trees, parsed once; what the rules of the house are tested on."""

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


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """Every node of a module's tree, walked once for all rules."""
    return tuple(ast.walk(tree(module)))


@cache
def words(module: str) -> frozenset[str]:
    """The text literals of a module."""
    return frozenset(
        node.value for node in nodes(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def imports(module: str, *, types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module of quantkit) that a module imports anywhere in it, also inside functions.

    Args:
        module: dotted name.
        types: also what is imported for annotations alone.
    """
    skipped = set() if types else _typing_alone(module)
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            within = [f"{node.module}.{each.name}" for each in node.names]
            names = [each if each in files() else node.module for each in within]
        else:
            continue
        if node not in skipped:
            yield from ((node.lineno, name) for name in names if name.split(".")[0] == "quantkit")


def _typing_alone(module: str) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING`."""
    found = (node for node in nodes(module) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {inner for node in found for inner in ast.walk(node)}
