"""Does ONNX Runtime compute from the written graph what was decided on?

    max |logits - expected| / max |expected| <= 1e-4

with products computed in float32 (accuracy level 0, and no input rounded), whatever the file asks for: a wrong nibble,
zero point, mask or position is to show, and not to hide in int8 rounding. `expected` comes from torch, block by block,
with weights expanded from the codes. Compared are a prompt, steps with the cache after it, and a batch padded on the
left. Where inputs are quantized, every product is held against what was decided besides: `_check_w8a8`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.export.onnx import check_w8a8
from quantkit.export.values import Values
from quantkit.runtimes.onnxruntime.session import FOLDER, MODEL, Loaded

if TYPE_CHECKING:
    from quantkit.model.finished import Finished
    from quantkit.model.source.open import Source
    from quantkit.model.streaming.stream import StreamedModel

LIMIT = 1e-4
DOMAINS = {"", "ai.onnx", "com.microsoft"}
_ROWS, _PROMPT, _STEPS, _PADDED = 2, 12, 4, 5

Array = NDArray[Any]


def check(bundle: Path, source: Source | None, stream: StreamedModel | None, results: Finished | None) -> list[Check]:
    """All checks of `onnx/` of a bundle; the numbers only if the file is sound."""
    folder = bundle / FOLDER
    found = sound(folder)
    if not all(each.ok for each in found):
        return found
    if source is not None and stream is not None and results is not None:
        values = Values.of_results(source, stream, results)
    elif (bundle / "model" / "config.json").is_file():
        values = Values.of_bundle(bundle)
    else:
        return found
    error, where = numbers(folder, values)
    ok = error is not None and error <= LIMIT
    found.append(Check(name="reload.onnxruntime", value=error, limit=LIMIT, ok=ok, where=where))
    return found + check_w8a8.check(folder, values, _prompt(values)) if ok else found


def sound(folder: Path, name: str = MODEL) -> list[Check]:
    """`onnx.valid` (the checker's word), `onnx.operators` (foreign domains), `onnx.contained` (paths outside)."""
    import onnx

    path = folder / name
    # before the checker, which opens the files
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as problem:  # protobuf's own, and the system's
        return [_count("onnx.valid", [f"{name} cannot be read: {_first_line(problem)}"])]
    outside = sorted({place for place in locations(model) if not _inside(folder, place)})
    contained = _count("onnx.contained", outside)
    foreign = sorted({node.domain for graph in _graphs(model.graph) for node in graph.node} - DOMAINS)
    # functions of the file itself could take the place of the runtime's operators
    foreign += sorted(f"{function.domain}::{function.name}" for function in model.functions)
    operators = _count("onnx.operators", foreign)
    if outside:
        return [contained, operators]
    try:
        onnx.checker.check_model(str(path))
        valid = _count("onnx.valid", [])
    except Exception as problem:
        valid = _count("onnx.valid", [_first_line(problem)])
    return [valid, operators, contained]


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


def _count(name: str, wrong: list[str]) -> Check:
    return Check(name=name, value=len(wrong), limit=0, ok=not wrong, where="; ".join(wrong[:3]))


def numbers(folder: Path, values: Values) -> tuple[float | None, str]:
    """The largest relative difference, and in which of the runs."""
    ids = _prompt(values)
    try:
        model = Loaded(folder, threads=torch.get_num_threads(), accuracy_level=0)
    except InputError as problem:
        return None, problem.line()
    try:
        return _worst(_decoded(model, values, ids) if model.decoder else _encoded(model, values, ids))
    except RuntimeError as problem:  # what onnxruntime raises when an operator refuses its inputs
        return None, _first_line(problem)


def _prompt(values: Values) -> torch.Tensor:
    """Ids [B, S] of any tokens."""
    vocabulary = int(values.source.config.get("vocab_size", 2))
    return torch.randint(0, vocabulary, (_ROWS, _PROMPT + _STEPS), generator=torch.Generator().manual_seed(0))


def _worst(runs: Mapping[str, float]) -> tuple[float | None, str]:
    for name, error in runs.items():
        if not np.isfinite(error):
            return None, f"{name}: not finite"
    worst = max(runs, key=lambda name: runs[name])
    return runs[worst], worst


def _expected(values: Values, ids: torch.Tensor) -> Array:
    """What torch gives: logits, or an encoder's last hidden states."""
    stream = values.stream
    return stream.answers(ids).all().float().numpy()  # type: ignore[no-any-return]


def _difference(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _decoded(model: Loaded, values: Values, ids: torch.Tensor) -> dict[str, float]:
    expected, tokens = _expected(values, ids), ids.numpy()
    room = ids.shape[1]
    state = model.state(_ROWS, room)
    runs = {"prompt": _difference(model.run(state, tokens[:, :_PROMPT]), expected[:, :_PROMPT])}
    steps = [model.run(state, tokens[:, [column]]) for column in range(_PROMPT, room)]
    runs["steps"] = _difference(np.concatenate(steps, axis=1), expected[:, _PROMPT:])
    # the last row begins later: its first columns are padding
    padded, mask = tokens[:, :_PROMPT].copy(), np.ones((_ROWS, _PROMPT), np.int64)
    padded[-1, :_PADDED], mask[-1, :_PADDED] = 0, 0
    padded[-1, _PADDED:] = tokens[-1, : _PROMPT - _PADDED]
    state = model.state(_ROWS, _PROMPT + _STEPS)
    parts = [model.run(state, padded, mask)]
    for step in range(_STEPS):
        following = tokens[:, [_PROMPT + step]].copy()
        following[-1] = tokens[-1, _PROMPT - _PADDED + step]
        parts.append(model.run(state, following))
    together = np.concatenate(parts, axis=1)
    runs["padded row"] = _difference(together[-1, _PADDED:], expected[-1, : room - _PADDED])
    runs["row beside it"] = _difference(together[0], expected[0])
    return runs


def _encoded(model: Loaded, values: Values, ids: torch.Tensor) -> dict[str, float]:
    tokens = ids.numpy()
    runs = {"batch": _difference(model.encode(tokens), _expected(values, ids))}
    mask = np.ones_like(tokens)
    mask[-1, _PROMPT:] = 0
    short = _expected(values, ids[-1:, :_PROMPT])
    runs["padded row"] = _difference(model.encode(tokens, mask)[-1:, :_PROMPT], short)
    return runs
