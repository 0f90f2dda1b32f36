"""Rooms: who may look into which, and that no two modules need each other."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict

from house.source import files, imports, tree


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
