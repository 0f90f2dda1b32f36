"""Fusions of a float ONNX graph, one a file, each proved in ONNX Runtime before it stands."""

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
    """Return all of them, in the order in which one makes room for the next; `equalize` probes clips with the feeds.

    Where each channel has a scale, `equalize` gains hardly anything, and moves the difference into activations.
    """
    exact = (
        *(Opset(), Constants(), NoOps()),
        *(PlainProducts(), LinearBias(), PadConv(), ConvBatchNorm(), LayerNorm(), Gelu(), MeanPool()),
    )
    return (*exact, Equalize(feeds)) if equalize else exact


def fuse(model: ir.Model, feeds: Feeds, *, chosen: Sequence[Fusion] | None = None) -> tuple[list[Fused], float]:
    """Fuse a model in place, and prove it.

    After each fusion that changed something, the outputs are those of the model as it came, to `LIMIT` of their
    largest magnitude (or to rounding, where that is more), in ONNX Runtime with its graph optimisations off. A fusion
    that fails this is undone and its places are listed with the reason. Values and nodes of the model from before are
    not part of it any more.

    Args:
        feeds: a few real inputs; what cannot be seen on them is not proved.
        chosen: instead of all `fusions(feeds)`.

    Returns:
        Every place looked at, in order; the largest difference that stands, relative to the output's largest magnitude.

    Raises:
        InputError: `fuse-unproved` without feeds, `onnx-unrunnable` where ONNX Runtime does not run the model itself.
    """
    if not feeds:
        raise InputError("fuse-unproved", where="fuse", value="no feeds", rule="a fusion is proved on real inputs")
    expected, names, found, error = outputs(model, feeds), _names(model), list[Fused](), 0.0
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
        found += places
    return found, error


def _names(model: ir.Model) -> list[str | None]:
    return [value.name for value in model.graph.outputs]


def _size(model: ir.Model) -> int:
    return sum(1 for _ in ir.traversal.RecursiveGraphIterator(model.graph))


def _proof(model: ir.Model, feeds: Feeds, expected: list[list[Any]], most: float) -> tuple[float, str]:
    """Tell how far the outputs are from what is expected, and why that undoes a fusion, "" where it does not."""
    try:
        apart = difference(expected, outputs(model, feeds))
    except InputError as problem:
        return float("inf"), f"undone: ONNX Runtime does not run it: {problem.value}"
    return apart, f"undone: outputs differ by {apart:.2g} of their largest magnitude" if apart > most else ""
