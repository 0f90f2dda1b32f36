"""Does ONNX Runtime compute from the written graph what was decided on?

    max |logits - expected| / max |expected| <= 1e-4

with products computed in float32 (accuracy level 0, and no input rounded), whatever the file asks for: a wrong nibble,
zero point, mask or position is to show, and not to hide in int8 rounding. What is compared: `exporters/check.py`. Where
inputs are quantized, every product is held against what was decided besides: `check_integers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.exporters.check import counted, judged, prompt, worst
from quantkit.exporters.onnx import check_integers as check_w8a8
from quantkit.exporters.onnx import check_prefill
from quantkit.exporters.onnx.ends import HEAD_ROWS, TABLE, Storage, with_ends
from quantkit.exporters.values import Values
from quantkit.runtimes.onnxruntime.session import MODEL, OnnxModel

LIMIT = 1e-4
DOMAINS = {"", "ai.onnx", "com.microsoft"}


def check(folder: Path, values: Values | None) -> list[Check]:
    """All checks of `onnx/` of a bundle; the numbers only if the file is sound, and there are values to hold it to."""
    found = sound(folder)
    if values is None or not all(each.ok for each in found):
        return found
    values = with_ends(values, *_stored(folder))
    error, where = numbers(folder, values)
    found.append(judged("reload.onnxruntime", error, LIMIT, where))
    if not found[-1].ok:
        return found
    ids = prompt(values)
    return [*found, *check_w8a8.check(folder, values, ids), *check_prefill.check(folder, values, ids)]


def sound(folder: Path, name: str = MODEL) -> list[Check]:
    """`onnx.valid` (the checker's word), `onnx.operators` (foreign domains), `onnx.contained` (paths outside)."""
    import onnx

    path = folder / name
    # before the checker, which opens the files
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as problem:  # protobuf's own, and the system's
        return [counted("onnx.valid", [f"{name} cannot be read: {_first_line(problem)}"])]
    outside = sorted({place for place in locations(model) if not _inside(folder, place)})
    contained = counted("onnx.contained", outside)
    foreign = sorted({node.domain for graph in _graphs(model.graph) for node in graph.node} - DOMAINS)
    # functions of the file itself could take the place of the runtime's operators
    foreign += sorted(f"{function.domain}::{function.name}" for function in model.functions)
    operators = counted("onnx.operators", foreign)
    if outside:
        return [contained, operators]
    try:
        onnx.checker.check_model(str(path))
        valid = counted("onnx.valid", [])
    except Exception as problem:
        valid = counted("onnx.valid", [_first_line(problem)])
    return [valid, operators, contained]


def _stored(folder: Path) -> tuple[Any, int]:
    """How the graph says that it stores its token embeddings, and of how many rows of the head it has more bits."""
    import onnx

    model = onnx.load(str(folder / MODEL), load_external_data=False)
    said = {entry.key: entry.value for entry in model.metadata_props}
    table, rows = said.get(TABLE, "float"), said.get(HEAD_ROWS, "0")
    return table if table in get_args(Storage) else "float", int(rows) if rows.isdecimal() else 0


def locations(model: Any) -> list[str]:
    """The files that a model's tensors are said to lie in."""
    return [
        entry.value
        for graph in _graphs(model.graph)
        for tensor in _tensors(graph)
        for entry in tensor.external_data
        if entry.key == "location"
    ]


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    sparse = list(graph.sparse_initializer)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)
            sparse += [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])]
            sparse += attribute.sparse_tensors
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]


def _inside(folder: Path, place: str) -> bool:
    """Whether a location is a plain file of the folder itself: no link, no path (CVE-2024-27318, CVE-2026-27489)."""
    path = folder / place
    return Path(place).name == place and path.is_file() and not path.is_symlink()


def numbers(folder: Path, values: Values) -> tuple[float | None, str]:
    """The largest relative difference, and in which of the runs."""
    try:
        return worst(OnnxModel(folder, threads=torch.get_num_threads(), accuracy_level=0), values)
    except InputError as problem:
        return None, problem.line()
