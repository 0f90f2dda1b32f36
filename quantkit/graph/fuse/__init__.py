"""Fusions of a float ONNX graph, one a file, each proved in ONNX Runtime before it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.graph.fuse._fused import Fused, Fusion
from quantkit.graph.fuse._proof import LIMIT, difference, outputs
from quantkit.graph.fuse.constants import Constants
from quantkit.graph.fuse.conv_batch_norm import ConvBatchNorm
from quantkit.graph.fuse.gelu import Gelu
from quantkit.graph.fuse.layer_norm import LayerNorm
from quantkit.graph.fuse.linear_bias import LinearBias
from quantkit.graph.fuse.no_ops import NoOps

__all__ = ["LIMIT", "Fused", "Fusion", "fuse", "fusions"]


def fusions() -> tuple[Fusion, ...]:
    """All of them, in the order in which one makes room for the next."""
    return (Constants(), NoOps(), LinearBias(), ConvBatchNorm(), LayerNorm(), Gelu())


def fuse(
    model: ir.Model, feeds: Sequence[Mapping[str, NDArray[Any]]], *, chosen: Sequence[Fusion] | None = None
) -> tuple[list[Fused], float]:
    """Fuse a model in place, and prove it.

    After each fusion that changed something, the outputs are those of the model as it came, to `LIMIT` of their largest
    magnitude, in ONNX Runtime with its graph optimisations off. A fusion that fails this is undone and its places are
    listed with the reason. Values and nodes of the model from before are not part of it any more.

    Args:
        model: float; its inputs are those that the feeds name.
        feeds: a few real inputs; what cannot be seen on them is not proved.
        chosen: instead of all `fusions()`.

    Returns:
        Every place looked at, in order; the largest difference that stands, relative to the output's largest magnitude.

    Raises:
        InputError: `fuse-unproved` without feeds.
    """
    if not feeds:
        raise InputError("fuse-unproved", where="fuse", value="no feeds", rule="a fusion is proved on real inputs")
    expected, found, error = outputs(model, feeds), [], 0.0
    for fusion in fusions() if chosen is None else chosen:
        before = model.graph.clone()
        places = fusion.run(model)
        if any(place.done for place in places):
            apart = difference(expected, outputs(model, feeds))
            if apart > LIMIT:
                model.graph = before
                reason = f"undone: outputs differ by {apart:.2g} of their largest magnitude"
                places = [replace(place, done=False, reason=reason) if place.done else place for place in places]
            else:
                error = apart
        found += places
    return found, error
