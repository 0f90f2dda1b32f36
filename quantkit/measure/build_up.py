"""How the error of a quantized model builds up: the hidden states after each block, set against the original's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.stream import StreamedModel

# tokens that both models run on: enough for a curve
_TOKENS = 256


def build_up(original: StreamedModel, candidate: StreamedModel, ids: Tensor) -> list[tuple[str, float]]:
    """(block, ‖h' − h‖ / ‖h‖) after each block, both models fed the same tokens; two blocks are in memory.

    Args:
        original, candidate: of one class.
        ids: [samples, tokens]; the beginning of the first sample is used.
    """
    few = ids[:1, :_TOKENS]
    calls = [model.begin(few, 1) for model in (original, candidate)]
    before, after = (call.hidden for call in calls)
    found = []
    for index, name in enumerate(original.block_names):
        before = calls[0].run_all(original.load(index), index, before)
        after = calls[1].run_all(candidate.load(index), index, after)
        found.append((name, float((after - before).norm() / before.norm())))
    return found
