"""What lies before and behind a model's blocks, in float64 and cut to a few rows of its tables.

Each row of an embedding or of a head is treated like every other, so what is proved on some holds for all; a vocabulary
of 100,000 rows is not copied for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.model.streaming.stream import Head, Whole, record
from quantkit.model.structure.flow import learn
from quantkit.model.structure.fold import InDouble
from quantkit.model.structure.traced import hooked, is_linear, set_parameter, set_weight, weight_of

# rows of an embedding or head that are kept; more than there are positions in a probe
ROWS = 256


class Ends:
    """A model without its blocks.

    Args:
        ids: [samples, tokens], each below `ROWS`.
    """

    def __init__(self, stream: Whole, ids: Tensor) -> None:
        self.path, self.ids = stream.path, ids
        self.model = stream.rest()
        self.flow = learn(self.model, self.path, stream.load, ids)
        self._head = Head(self.model, self.path, self.flow)
        # in the place of the blocks stands what holds no weights
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.weight.shape[0] > ROWS:
                set_parameter(module, "weight", module.weight.detach()[:ROWS].clone())
                module.padding_idx = None
            elif is_linear(module) and weight_of(module).shape[0] > ROWS:
                set_weight(module, weight_of(module)[:ROWS].clone())
                if getattr(module, "bias", None) is not None:
                    set_parameter(module, "bias", module.bias.detach()[:ROWS].clone())  # type: ignore[union-attr, operator]
        self.model = self.model.double()

    @torch.no_grad()
    def start(self) -> tuple[Tensor, list[Tensor]]:
        """The hidden states before block 0, and the other tensors that blocks are given."""
        with InDouble():  # type: ignore[no-untyped-call]
            calls = record(self.model, self.path, self.flow, self.ids, len(self.ids))
        return calls.hidden, calls.tensors()

    def finish(self, hidden: Tensor) -> Tensor:
        """Logits, or an encoder's last hidden states, for the last block's output."""
        return self._head(hidden, self.ids)

    @torch.no_grad()
    def embeddings(self, width: int) -> tuple[str, ...]:
        """The tables with rows of that width which are read before block 0."""
        read: list[str] = []
        tables = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and module.weight.shape[1] == width
        }
        with hooked(
            table.register_forward_pre_hook(lambda _, __, name=name: read.append(name))  # type: ignore[misc]
            for name, table in tables.items()
        ):
            self.start()
        return tuple(dict.fromkeys(read))
