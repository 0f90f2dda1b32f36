"""The language-model head, quantized: in a small model most of what is read for a token.

It is rounded to nearest, each range searched for the least squared error (`passes/solvers/ranges.py`), whichever pass
assigns the codes inside the blocks. A few rows are in memory at a time beside the codes. The embedding that a head may
share its weight with stays as it is; only the product that makes the logits uses the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.bundle import LayerEntry
from quantkit.formats import QuantTensor
from quantkit.model.structure.traced import weight_of
from quantkit.passes.assign import nearest_in_pieces
from quantkit.pipeline.blocks.layers import Layers

if TYPE_CHECKING:
    from quantkit.model.streaming.stream import StreamedModel


def quantize_head(stream: StreamedModel, layers: Layers) -> tuple[QuantTensor, LayerEntry]:
    """Codes of the head `layers.head`, by its scheme there, and its entry in the manifest."""
    assert layers.head is not None
    if stream.transforms:
        weight = weight_of(stream.rest().get_submodule(layers.head))
    else:
        # as stored: half the memory of float32 where it is large
        weight = stream.source.weights.read(stream.files[f"{layers.head}.weight"])
    tensor, error = nearest_in_pieces(weight, layers.schemes[layers.head])
    return tensor, layers.entry(layers.head, tensor, error)
