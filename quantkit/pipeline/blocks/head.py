"""The language-model head, quantized: in a small model most of what is read for a token.

It is rounded to nearest, each range searched for the least squared error (`passes/solvers/ranges.py`), whichever pass
assigns the codes inside the blocks. A few rows are in memory at a time beside the codes. The embedding that a head may
share its weight with stays as it is; only the product that makes the logits uses the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.bundle import LayerEntry
from quantkit.formats import QuantTensor, joined
from quantkit.formats.base.grid import load_grid
from quantkit.model.structure.traced import weight_of
from quantkit.passes.solvers import ranges
from quantkit.pipeline.blocks.layers import Layers

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.scheme import WeightScheme

# elements rounded at a time, in float32
_PIECE = 1 << 23


def quantize_head(stream: StreamedModel, layers: Layers) -> tuple[QuantTensor, LayerEntry]:
    """Codes of the head `layers.head`, by its scheme there, and its entry in the manifest."""
    assert layers.head is not None
    if stream.transforms:
        weight = weight_of(stream.rest().get_submodule(layers.head))
    else:
        # as stored: half the memory of float32 where it is large
        weight = stream.source.weights.read(stream.files[f"{layers.head}.weight"])
    tensor, error = rounded(weight, layers.schemes[layers.head])
    return tensor, layers.entry(layers.head, tensor, error)


def rounded(weight: Tensor, scheme: WeightScheme) -> tuple[QuantTensor, float]:
    """A weight [N, K] of any float dtype rounded to nearest, a piece of its rows at a time.

    Returns:
        codes [N, K + padding of the last group], and the relative squared error `||W - dequantize(codes)||² / ||W||²`.
    """
    form = load_grid(scheme.format)
    rows, columns = weight.shape
    # rows that share a scale are taken at once
    step = max(1, _PIECE // columns) if scheme.rows_apart else rows
    parts: list[QuantTensor] = []
    lost = energy = 0.0
    for piece in weight.split(step):
        exact = torch.nn.functional.pad(piece.float(), (0, scheme.padding(columns)))
        scale, zero = ranges.searched(exact, scheme)
        parts.append(form.nearest(exact, scale, zero, scheme))
        lost += float((form.dequantize(parts[-1]) - exact).double().square().sum())
        energy += float(exact.double().square().sum())
    return joined(parts), lost / (energy or 1.0)
