"""What tracing hands to the dialects.

Apart from `trace/transformer.py`, which imports transformers: a float ONNX graph is rewritten without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

# of the placeholder nodes
DOMAIN = "quantkit"


@dataclass(frozen=True)
class Traced:
    """A graph without weights.

    Args:
        model: its initializers outside placeholders stand among the graph's inputs' values in `parameters`.
        parameters: value in the graph -> parameter or buffer of the skeleton that it stands for.
        decoder: whether it has a cache.
        layers: how many layers have a cache.
    """

    model: ir.Model
    parameters: Mapping[str, str]
    decoder: bool
    layers: int
