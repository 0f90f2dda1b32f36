"""A plan names no pass and no exporter: what it has to know of one, the plug-in declares in its own file."""

from __future__ import annotations

import ast

from house.source import files, tree
from quantkit import plugins

# (module, name) -> what else the word stands for there
OTHER_WORDS = {
    ("quantkit.planning.compiling.graph", "mixed"): "a stage of the compile",
    ("quantkit.planning.matrix", "tensorrt"): "a runtime, with what people call it",
    ("quantkit.planning.model.configs", "onnx"): "a folder of a bundle",
}


def test_a_plan_names_no_pass_and_no_exporter() -> None:
    names = {*plugins.PASSES.names(), *plugins.EXPORTERS.names()}
    found = {
        (module, node.value): node.lineno
        for module in files()
        if module.startswith("quantkit.planning")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found.keys() <= OTHER_WORDS.keys(), (
        f"{ {place: line for place, line in found.items() if place not in OTHER_WORDS} }: read it from what the "
        "plug-in declares (`stores` of an exporter; `work`, `learned`, `needs_with` of a pass)"
    )
