"""Fusions of a float ONNX graph, one per file, each proved in ONNX Runtime before it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.graph.fuse._rule import LIMIT, Feeds, Fused, Fusion, difference, limit, outputs
from quantkit.graph.fuse.constants import Constants, Opset
from quantkit.graph.fuse.conv_batch_norm import ConvBatchNorm
from quantkit.graph.fuse.equalize import Equalize
from quantkit.graph.fuse.gelu import Gelu
from quantkit.graph.fuse.layer_norm import LayerNorm
from quantkit.graph.fuse.no_ops import NoOps
from quantkit.graph.fuse.pad_conv import MeanPool, PadConv
from quantkit.graph.fuse.plain_products import LinearBias, PlainProducts
from quantkit.graph.values import name_apart, parts_of

__all__ = ["LIMIT", "Fused", "Fusion", "fuse", "fusions"]


def fusions(feeds: Feeds = (), *, equalize: bool = True) -> tuple[Fusion, ...]:
    """Return all fusions in the order in which they must run.

    Args:
        feeds: inputs for the probe of `equalize`.
        equalize: False to leave out cross-layer equalization. It gains little where each channel has its own scale, and
            moves the spread of magnitudes into the activations.
    """
    exact = (
        *(Opset(), Constants(), NoOps()),
        *(PlainProducts(), LinearBias(), PadConv(), ConvBatchNorm(), LayerNorm(), Gelu(), MeanPool()),
    )
    return (*exact, Equalize(feeds)) if equalize else exact


def fuse(model: ir.Model, feeds: Feeds, *, chosen: Sequence[Fusion] | None = None) -> tuple[list[Fused], float]:
    """Fuse a model in place, and prove the result.

    After each fusion that changed the graph, its outputs in ONNX Runtime (without graph optimizations) must equal those
    of
    the original to `LIMIT` of their largest magnitude, or to rounding error where that is larger. A fusion that fails
    is
    undone, and its places are listed with the reason. Do not use values or nodes of the model from before the call:
    they no
    longer belong to it.

    Args:
        model: the graph to fuse.
        feeds: a few real inputs; the proof covers only what they exercise.
        chosen: fusions to run; None for all `fusions(feeds)`.

    Returns:
        Every place that was considered, in order, and the largest remaining difference relative to an output's largest
        magnitude.

    Raises:
        InputError: `fuse-unproved` without feeds, `onnx-unrunnable` if ONNX Runtime cannot run the model.
    """
    if not feeds:
        raise InputError("fuse-unproved", where="fuse", value="no feeds", rule="a fusion is proved on real inputs")
    expected, names, listed, error = outputs(model, feeds), _names(model), list[Fused](), 0.0
    most = limit(model, feeds, expected)
    for fusion in fusions(feeds) if chosen is None else chosen:
        before, size, known = model.clone(), _size(model), parts_of(model.graph)
        places = fusion.run(model)
        name_apart(model.graph, known)
        if any(place.done for place in places) or _size(model) != size:
            apart, reason = _proof(model, feeds, expected, most)
            if _names(model) != names:
                reason = "undone: outputs of the graph have other names"
            if reason:
                model.graph, model.ir_version = before.graph, before.ir_version
                model.functions.clear()
                model.functions.update(before.functions)
                places = [replace(place, done=False, reason=reason) if place.done else place for place in places]
            else:
                error = apart
        listed += places
    return listed, error


def _names(model: ir.Model) -> list[str | None]:
    return [value.name for value in model.graph.outputs]


def _size(model: ir.Model) -> int:
    return sum(1 for _ in ir.traversal.RecursiveGraphIterator(model.graph))


def _proof(model: ir.Model, feeds: Feeds, expected: list[list[Any]], most: float) -> tuple[float, str]:
    """Return the distance of the outputs from the expected ones, and the reason to undo the fusion, if any."""
    try:
        apart = difference(expected, outputs(model, feeds))
    except InputError as problem:
        return float("inf"), f"undone: ONNX Runtime does not run it: {problem.value}"
    return apart, f"undone: outputs differ by {apart:.2g} of their largest magnitude" if apart > most else ""
