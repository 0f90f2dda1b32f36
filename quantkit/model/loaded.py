"""A model that is in memory already, seen as a stream of blocks: what `Pipeline.apply` works on."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.stream import Calls, Transform, find_blocks, record_calls, returns_tuple


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
        count = len(self.model.get_submodule(self.path)) if self.path else 1  # type: ignore[arg-type]
        self.block_names = [f"{self.path}.{index}" for index in range(count)] if self.path else [""]

    def load(self, index: int) -> nn.Module:
        """The block itself, not a copy."""
        return self.model.get_submodule(self.block_names[index])

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
        calls = Calls(hidden=torch.empty(0), chunk=chunk)
        if not self.path:
            calls.hidden = ids
            calls.arguments = {size: [((), {})] for size in (1, *(part.shape[0] for part in ids.split(chunk)))}
            return calls
        as_tuple = returns_tuple(self.model, self.path, self.load(0), ids)
        parts = []
        for part in ids.split(chunk):
            hidden, arguments = record_calls(self.model, self.path, part, as_tuple=as_tuple)
            parts.append(hidden)
            calls.arguments.setdefault(part.shape[0], arguments)
        calls.hidden = torch.cat(parts)
        if 1 not in calls.arguments:
            calls.arguments[1] = record_calls(self.model, self.path, ids[:1], as_tuple=as_tuple)[1]
        return calls
