"""Calls of a model whose forward cannot be cut into blocks: it runs as it is, suspended at each block.

Each sequence has its own forward, in a greenlet (a function that can be left and resumed). It is left at each call of a
block, and resumes with the block's output. So relative positions from one block for all others, shared keys, or a
convolution between two blocks are computed by the model's own class. The costs, compared with recorded calls:
everything
outside of the blocks stays in memory, and a suspended forward cannot be stored, so a killed compile starts again with
the first block. The variables of all forwards are kept in files, from as many bytes on as hidden states are
(`calls.Shelf`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantkit.model.streaming import calls
from quantkit.model.streaming.calls import (
    NO_PICTURES,
    Call,
    Calls,
    Given,
    Pictures,
    Shelf,
    forward,
    gathered,
    held,
    primary,
    size,
    stand_in,
    unsupported,
    without_cache,
)

_ORDER = "calls its blocks in an order that depends on what they put out"


class LiveCalls(Calls):
    """Forwards suspended at the same call, one per sequence, in dimension `batch`; takes over the model."""

    live = True

    def __init__(
        self,
        model: nn.Module,
        paths: Sequence[str],
        visits: tuple[int, ...],
        ids: Tensor,
        batch: int = 0,
        runs: Any = None,
        pictures: Pictures = NO_PICTURES,
    ) -> None:
        super().__init__(torch.empty(0), 1, [], device=ids.device)
        self.model, self.visits, self.batch = model, visits, batch
        stand_in(model, paths, self._leave)
        # never restored: several of these may be open, and end in any order. The blocks' own configs may be a user's,
        # and are not changed: a block makes no cache, it only writes to the one in its arguments
        without_cache(model)
        self._forwards = [greenlet(forward) for _ in ids]
        self._stands: list[tuple[int, Tensor, Given]] = []
        self._returned: list[Any] = [None] * len(ids)
        values = (*model.parameters(), *model.buffers(), ids)
        self._fixed = {value.untyped_storage().data_ptr() for value in values if not value.is_meta}
        self._on_disk, self._shelf = False, Shelf()
        for number, row in enumerate(ids.split(1)):
            self._stands.append(self._left(self._forwards[number].switch(runs or model, row, pictures), number, 0))
            self._put_away(number)
        self.hidden = self._gathered()

    @staticmethod
    def _leave(index: int, hidden: Tensor, rest: Given) -> Any:
        """Suspend the forward at a call of a block, and resume it with the block's output."""
        return greenlet.getcurrent().parent.switch((index, hidden, rest))  # type: ignore[union-attr]

    def _left(self, stand: Any, number: int, stage: int) -> tuple[int, Tensor, Given]:
        """Check the position of a suspended forward."""
        if self._forwards[number].dead or stand[0] != self.visits[stage]:
            raise unsupported(type(self.model).__name__, _ORDER)
        return stand  # type: ignore[no-any-return]

    def _gathered(self) -> Tensor:
        return gathered((hidden.movedim(self.batch, 0) for _, hidden, _ in self._stands), len(self._stands))

    def call(self, stage: int) -> Call:
        """Return the present call of the first sequence's forward."""
        return Call(*self._stands[0][1:])

    def forward(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on sequence number `part`; its forward resumes with the last output."""
        returned = self._stands[part][2].run(block, hidden.movedim(0, self.batch))
        self._returned[part] = _replaced(returned, torch.empty(0), self._kept)  # `_output` inserts the hidden states
        return primary(returned).movedim(self.batch, 0)

    def forward_row(self, block: nn.Module, stage: int, hidden: Tensor, row: int) -> Tensor:
        """Run a block likewise: a chunk is one sequence."""
        return self.forward(block, stage, hidden, row)

    @torch.no_grad()
    def pass_on(self, stage: int, hidden: Tensor) -> Tensor:
        """Resume the forwards up to the next call; after the last one, `finish` ends them."""
        if stage + 1 == len(self.visits):
            self.hidden = hidden
            return hidden
        self._shelf = Shelf()  # tensors of one step end together, and so do their files
        for number, part in enumerate(hidden.split(1)):
            stand = self._forwards[number].switch(self._output(number, part))
            self._stands[number] = self._left(stand, number, stage + 1)
            self._returned[number] = None
            del stand
            self._put_away(number)
        return self._gathered()

    @torch.no_grad()
    def finish(self, number: int) -> Any:
        """Return the model's output for one sequence, once each."""
        try:
            output = self._forwards[number].switch(self._output(number, self.hidden[number : number + 1]))
        finally:
            # the forward's variables are gone; drop its last call too
            self._returned[number] = None
            self._stands[number] = (self.visits[-1], torch.empty(0), Given())
        if not self._forwards[number].dead:
            raise unsupported(type(self.model).__name__, _ORDER)
        return output

    def _kept(self, value: Any) -> Any:
        """Copy a value into a file, if variables are kept in files."""

        def copied(leaf: Any) -> Any:
            return self._shelf.copy(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

        return tree_map(copied, value) if self._on_disk else value

    def _put_away(self, number: int) -> None:
        """Move one forward's variables into files, if those of all forwards are too large."""
        if number and not self._on_disk:
            return
        tensors = held(self._forwards[number].gr_frame)
        if number == 0:  # sequences are of one length
            self._on_disk = size(tensors, self._fixed) * len(self._forwards) >= calls.ON_DISK
        if self._on_disk:
            self._shelf.move(tensors, self._fixed)

    def _output(self, number: int, hidden: Tensor) -> Any:
        """Return the block's output with these hidden states."""
        return _replaced(self._returned[number], hidden.movedim(0, self.batch), lambda value: value)


def _replaced(returned: Any, hidden: Tensor, keep: Callable[[Any], Any]) -> Any:
    """Return a block's output with other hidden states, and the other values after `keep`."""
    if isinstance(returned, tuple | list):
        return type(returned)((hidden, *map(keep, returned[1:])))
    if isinstance(returned, dict):
        first, *others = returned
        return type(returned)({first: hidden, **{name: keep(returned[name]) for name in others}})
    return hidden
