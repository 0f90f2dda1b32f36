"""Plug-ins are typed: a Protocol says what each kind can do, and nobody asks a plug-in at run time."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import quantkit
from house.source import files, nodes, tree
from quantkit import plugins
from quantkit.plugins import Kind

PACKAGE = Path(quantkit.__file__).parent
LOADERS = {"load_format", "load_pass", "load_exporter", "load_runtime", "load_layout", "load_grid"}
KINDS = {"FORMATS", "PASSES", "EXPORTERS", "RUNTIMES", "LAYOUTS"}
PROTOCOLS = {"Format", "GridFormat", "Pass", "Exporter", "Runtime", "Layout"}


def loads(node: ast.AST) -> bool:
    """Whether an expression is a plug-in just loaded: `load_pass(...)`, `plugins.PASSES.load(...)`."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in LOADERS
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "load"):
        return False
    return any(kind in ast.unparse(node.func.value).lstrip("_") for kind in KINDS)


def held(function: ast.AST) -> set[str]:
    """The names that hold a plug-in in a function: assigned from a loader, or annotated as one."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and loads(node.value):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.NamedExpr) and loads(node.value):
            found.add(node.target.id)
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation).lstrip("_") in PROTOCOLS:
            found.add(node.arg)
    return found


def asked(tree: ast.Module) -> list[str]:
    """`hasattr` and `getattr` on plug-ins, as they are written."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
        ]
        names = held(function) if calls else set()  # few functions ask anything
        for node in calls:
            about = node.args[0]
            if loads(about) or (isinstance(about, ast.Name) and about.id in names):
                found.append(ast.unparse(node))
    return found


def test_no_plugin_is_asked_what_it_can_do() -> None:
    found = {module: calls for module in files() if (calls := asked(tree(module)))}
    assert not found, "a Protocol names every member of its plug-ins; give this one a default there"


def test_the_rule_sees_what_it_forbids() -> None:
    sample = "def f(exporter: Exporter):\n    form = load_format('int4')\n    hasattr(form, 'low')\n"
    sample += "    getattr(exporter, 'moves', False)\n    getattr(plugins.PASSES.load('rtn'), 'needs')\n"
    assert len(asked(ast.parse(sample))) == 3


def test_every_loader_is_typed() -> None:
    loose = [
        module
        for module in files()
        for node in nodes(module)
        if isinstance(node, ast.Subscript)
        and getattr(node.value, "id", "") == "Kind"
        and ast.unparse(node) == "Kind[Any]"
        and module != "quantkit.plugins"
    ]
    assert not loose, "a loader gives out a Protocol"


def floors() -> dict[str, int]:
    """Module at the top of the package -> its floor, 0 at the bottom."""
    with (PACKAGE.parent / "pyproject.toml").open("rb") as file:
        contract = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]
    return {name.strip("()"): floor for floor, name in enumerate(reversed(contract["layers"]))}


@pytest.mark.parametrize("kind", plugins.KINDS, ids=lambda kind: kind.folder)
def test_loading_a_kind_imports_nothing_from_above(kind: Kind[Any]) -> None:
    """What a plug-in declares is read without importing any floor above it."""
    code = f"""
import sys
from quantkit.plugins import Kind
kind = Kind({kind.folder!r})
for name in kind.names():
    kind.load(name)
print(*{{".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("quantkit.")}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    known = floors()
    own = known[f"quantkit.{kind.folder.split('.')[0]}"]
    above = sorted(name for name in done.stdout.split() if known.get(name, 0) > own)
    assert not above, f"plug-ins in {kind.folder} import floors above their own"
