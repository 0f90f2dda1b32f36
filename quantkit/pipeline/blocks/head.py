"""The language-model head: its inputs as sums, and its codes by the pass that assigns them in the blocks.

A head is a product like those of a graph (`passes/assign.py`), larger than any other and with one input: what the final
norm gives. It is solved last, on what all quantized blocks put out, and a piece of its rows at a time, so that of its
floats few are in memory beside its codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quantkit.bundle import LayerEntry
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.formats import QuantTensor
from quantkit.model.structure.traced import weight_of
from quantkit.passes.assign import Moments, assigner, in_pieces

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.streaming.stream import Answers, StreamedModel
    from quantkit.pipeline.blocks.layers import Layers
    from quantkit.pipeline.blocks.work import PassRun, Worked


def settings_of(steps: Sequence[PassRun]) -> dict[str, Any]:
    """Name of each pass -> its settings, as `passes.assign.product` takes them."""
    return {step.run.name: step.settings for step in steps}


def needs(steps: Sequence[PassRun]) -> frozenset[str]:
    """The statistics that the pass needs which gives the head its codes."""
    passes = settings_of(steps)
    found = assigner(passes)
    return found.needs_with(passes[found.name]) if found is not None else frozenset()


def brought(stream: StreamedModel, head: str, steps: Sequence[PassRun]) -> Moments | None:
    """What the pass that gives the head its codes knows of its inputs without calibration; None: nothing.

    Raises:
        InputError: the pass's.
    """
    passes = settings_of(steps)
    found = assigner(passes)
    if found is None:
        return None
    columns = int(stream.skeleton.get_parameter(f"{head}.weight").shape[1])
    return found.brought(head, columns, passes[found.name])


def moments_of(
    stream: StreamedModel, worked: Worked, ids: Tensor, head: str, steps: Sequence[PassRun]
) -> Moments | None:
    """Of the head's inputs, behind the quantized blocks; None where no statistics are needed.

    Args:
        worked: the last block.
        ids: [samples, tokens] that calibrate.
        head: its name in the skeleton.

    Raises:
        InputError: `activations-nonfinite`.
    """
    if not needs(steps) or worked.hidden is None or worked.calls is None:
        return None
    found = stream.answers_of(worked.calls, ids, worked.hidden)
    before: Answers | None = None
    if "original_inputs" in needs(steps) and worked.original is not None and worked.originals is not None:
        before = stream.answers_of(worked.originals, ids, worked.original)
    seen = InputStats(name=head)
    for index in range(len(ids)):
        seen.add(found.given(head, index)[None], None if before is None else before.given(head, index)[None])
    return moments_of_sums(seen, head)


def moments_of_sums(seen: InputStats, name: str = "") -> Moments:
    """Of one product's inputs, as its solver takes them; errors call it by its name."""
    hessian = seen.hessian.double()
    cross = None if seen.drift is None else (hessian + seen.drift.double())[None]
    return Moments(hessian[None], cross, tuple(half.double()[None] for half in seen.halves), name=name)


def quantize_head(
    stream: StreamedModel, layers: Layers, passes: Mapping[str, Any], moments: Moments | None = None
) -> tuple[QuantTensor, LayerEntry]:
    """Codes of the head `layers.head`, by its scheme there, and its entry in the manifest.

    The embedding that a head may share its weight with stays as it is; only the product that makes the logits uses the
    codes.

    Args:
        passes: of the recipe, name -> settings.
        moments: of its inputs.
    """
    assert layers.head is not None
    if stream.transforms:
        weight = weight_of(stream.rest().get_submodule(layers.head))
    else:
        # as stored: half the memory of float32 where it is large
        weight = stream.source.weights.read(stream.files[f"{layers.head}.weight"], stream.device)
    with torch.no_grad():
        tensor, error = in_pieces(weight, moments, layers.schemes[layers.head], passes)
    return tensor, layers.entry(layers.head, tensor, error)
