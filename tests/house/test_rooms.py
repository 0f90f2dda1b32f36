"""Rooms: who may look into which, and that no two modules need each other."""

import ast
import graphlib
from collections import defaultdict

from house.source import PACKAGE, files, imports, tree


def test_a_leading_underscore_is_for_its_own_package() -> None:
    foreign = [
        f"{module}:{line} imports {name}"
        for module in files()
        for line, name in imports(module)
        if any(part.startswith("_") for part in name.split(".")[2:]) and name.split(".")[1] != module.split(".")[1]
    ]
    assert not foreign, "what others use is public and has a public name"


def test_no_two_modules_need_each_other() -> None:
    sorter = graphlib.TopologicalSorter(
        {module: {name for _, name in imports(module, types=False)} - {module} for module in files()}
    )
    sorter.prepare()  # CycleError names the circle: what both need belongs below them


def test_one_noun_is_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in files():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    shared = {name: found for name, found in homes.items() if len(found) > 1}
    assert not shared, "a name says the thing, so that two things have two names"


def test_benchmarks_import_what_there_is() -> None:
    """Nothing else runs them all: a module that moves would break one in silence."""
    missing = []
    for path in (PACKAGE.parent / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("quantkit"):
                continue
            known = _defined(node.module) if node.module in files() else set()
            missing += [
                f"{path.name}: {node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in known and f"{node.module}.{alias.name}" not in files()
            ]
    assert not missing


def _defined(module: str) -> set[str]:
    """What stands at the top of a module, also under a condition."""
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
