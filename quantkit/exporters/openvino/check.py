"""Does a model of OpenVINO hold the codes that were decided on, and compute from them what they stand for?

`openvino.codes`: every weight that has codes is a constant of 4 or 8 bits, and the bytes of codes and zero points, and
the scales, are those that were decided on, as OpenVINO itself reads them back.

`reload.openvino`: max |found - expected| / max |expected| <= 1e-4 on the CPU, in float32, with no input rounded,
whatever the file asks for (`exporters/check.py` says what is compared). Pairs before quantized inputs are taken out for
that; their scales are held against those that were decided on, beside the codes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.bundle import Check
from quantkit.errors import InputError
from quantkit.exporters.check import counted, judged, worst
from quantkit.exporters.onnx.exporter import dialect_weights
from quantkit.exporters.openvino.model import (
    CODES,
    around_zero,
    channel_scales,
    constants,
    converted,
    nibbles_signed,
    packed_weights,
    signed,
    without_pairs,
    write,
)
from quantkit.exporters.values import Values
from quantkit.runtimes.openvino.library import first_line
from quantkit.runtimes.openvino.open import MODEL, read
from quantkit.runtimes.openvino.session import OpenvinoGraph, OpenvinoModel

LIMIT = 1e-4
# of graphs, as `reload.onnxruntime` of them: a value at the edge of two codes may fall to either
ROUNDED = 0.05


def check(folder: Path, values: Values) -> list[Check]:
    """All checks; the numbers only if every code is right."""
    try:
        found = [counted("openvino.codes", wrong_codes(folder, values))]
    except InputError as problem:
        return [counted("openvino.codes", [problem.line()])]
    if not found[0].ok:
        return found
    error, where = _numbers(folder, values)
    return [*found, judged("reload.openvino", error, LIMIT, where)]


def wrong_codes(folder: Path, values: Values) -> list[str]:
    """The linears whose constants are not what was decided on. Raises InputError `openvino-unreadable`."""
    weights, wrong = dialect_weights(values), []
    stored = {name: (kind, data) for name, kind, data in constants(read(folder / MODEL))}
    for name, linear in weights.linears.items():
        if linear.scheme is None:
            continue
        wanted: dict[str, Any]
        if linear.input is None:
            packed = packed_weights(weights, name)
            kinds = (f"u{packed.bits}",)
            wanted = {"codes": packed.codes(), "scales": packed.scales()}
            if not linear.scheme.symmetric:
                wanted["zeros"] = packed.zeros()
            elif packed.bits == 4:
                kinds, wanted["codes"] = ("i4",), nibbles_signed(packed.codes())
        else:
            kinds = ("i8",)
            wanted = {"codes": weights.codes(name).T, "scales": channel_scales(weights, name)}
        for part, expected in wanted.items():
            kind, data = stored.get(f"{name}.{part}", ("", None))
            if data is None or (part != "scales" and kind not in kinds) or not _same(data, expected):
                wrong.append(f"{name}.{part}")
        # linears that share an input share its scale, under the first one's name
        shared = f"{name}/input.scale"
        if linear.input is not None and shared in stored:
            wrong += [] if _same(stored[shared][1], np.float32(linear.input.scale)) else [shared]
    return wrong


def check_graph(graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
    """A graph's codes, and its outputs beside those of ONNX Runtime, which rounds the same values.

    Of a graph that chooses what it gives, both compute what the choice is made of: as many boxes they need not keep.
    """
    import onnx_ir as ir

    from quantkit.graph.outputs import steady
    from quantkit.graph.run import Runner, showing

    try:
        model = OpenvinoGraph(folder / MODEL, device="CPU")
        stored = {name: data for name, _, data in constants(read(folder / MODEL))}
    except InputError as problem:
        return [counted("openvino.codes", [problem.line()])]
    whole = ir.external_data.load_to_model(ir.load(graph))
    codes = {name: value.const_value for name, value in whole.graph.initializers.items() if name.endswith(CODES)}
    wanted = {name: around_zero(tensor.numpy()) for name, tensor in codes.items() if tensor is not None}
    wrong = [name for name, values in wanted.items() if name not in stored or not _same(stored[name], values)]
    found = [counted("openvino.codes", wrong)]
    if wrong:
        return found
    by, own = steady(whole), Runner(graph)
    if not set(by) <= set(own.names):
        with tempfile.TemporaryDirectory() as place:
            shown = Path(place) / graph.name
            ir.save(showing(whole, by), shown)
            own = Runner(shown)
            write(converted(signed(shown, shown.parent)), shown.parent / MODEL, {"kind": "network", "device": "CPU"})
            model = OpenvinoGraph(shown.parent / MODEL, device="CPU")
    expected, given = own(feed), model(feed)
    floats = {name: each for name, each in expected.items() if name in by and each.dtype.kind == "f" and each.size}
    errors = {
        name: float(np.abs(given[name] - each).max() / (np.abs(each).max() or 1.0)) for name, each in floats.items()
    }
    worst_of = max(errors, key=lambda name: errors[name])
    return [*found, judged("reload.openvino", errors[worst_of], ROUNDED, worst_of)]


def _same(found: Any, wanted: Any) -> bool:
    """Bit by bit, in whatever shape."""
    found, wanted = np.ascontiguousarray(found).reshape(-1), np.ascontiguousarray(wanted).reshape(-1)
    return bool(found.view(np.uint8).tobytes() == wanted.view(np.uint8).tobytes())


def _numbers(folder: Path, values: Values) -> tuple[float | None, str]:
    try:
        model = OpenvinoModel(
            folder, threads=torch.get_num_threads(), accuracy_level=0, device="CPU", change=without_pairs
        )
        return worst(model, values)
    except InputError as problem:
        return None, problem.line()
    except RuntimeError as problem:  # what OpenVINO raises when a run fails
        return None, first_line(problem)
