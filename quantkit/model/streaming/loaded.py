"""A model that is in memory already, seen as a stream of blocks: what `Pipeline.apply` works on."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.streaming.calls import Calls, Given
from quantkit.model.streaming.stream import Transform, find_blocks, record
from quantkit.model.structure.flow import Flow, learn


class LoadedModel:
    """An `nn.Module` with its weights. A transformer's stack of like layers is the blocks; all else is one block.

    Args:
        model: quantized in place by whoever works on its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.path = ""
        # how a transformer hands hidden states from layer to layer is known; what another module does is not
        if "input_ids" in inspect.signature(model.forward).parameters:
            try:
                self.path = find_blocks(model)
            except InputError:
                self.path = ""
        self._blocks = list(self.model.get_submodule(self.path).children()) if self.path else [self.model]
        self.block_names = [f"{self.path}.{index}" for index in range(len(self._blocks))] if self.path else [""]
        self.flow = Flow(tuple(range(len(self._blocks))), False)

    @property
    def visits(self) -> tuple[int, ...]:
        """The number of the block that each call is to, in order; known once a forward has begun."""
        return self.flow.visits

    def load(self, index: int) -> nn.Module:
        """The block itself, not a copy."""
        return self._blocks[index]

    def rest(self) -> nn.Module:
        """A copy of what lies outside the blocks."""
        blocks = self.model.get_submodule(self.path)
        return copy.deepcopy(self.model, {id(blocks): blocks})

    def apply(self, transform: Transform) -> None:
        """Transform every part, in place."""
        for index in range(len(self.block_names)):
            transform.block(index, self.load(index))
        transform.rest(self.model)

    @torch.no_grad()
    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """Hidden states before block 0 for token `ids` [samples, tokens]; for a single block, `ids` is its input."""
        if not self.path:
            nothing = [Given()]
            return Calls(ids, chunk, [nothing for _ in ids.split(chunk)], nothing)
        self.flow = learn(self.model, self.path, self.load, ids)
        if self.flow.live:
            from quantkit.model.streaming.live import LiveCalls

            return LiveCalls(self.rest(), self.path, self.flow.visits, ids, self.flow.batch)
        return record(self.model, self.path, self.flow, ids, chunk)
