"""Calls of a model whose forward cannot be cut into blocks beforehand: it runs as it is, suspended at each block.

Each sequence has a forward of its own, in a greenlet (a function that can be left in the middle and entered again). It
is left where it calls a block, and goes on with what the block has put out. So relative positions that one block makes
for all others, keys that several blocks share, or a convolution between two of them are what the model's class makes of
them. It costs what the recorded way does not: everything outside the blocks stays in memory, and a forward that was
left cannot be stored, so a compile that is killed begins with the first block again. What all forwards together hold in
their variables lies in files, from as many bytes on as hidden states do (`calls.Shelf`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantkit.model.streaming import calls
from quantkit.model.streaming.calls import (
    Call,
    Calls,
    Given,
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
    """Forwards that stand at the same call, one a sequence, which `batch` counts; the model is ours from here on."""

    live = True

    def __init__(
        self, model: nn.Module, path: str, visits: tuple[int, ...], ids: Tensor, batch: int = 0, runs: Any = None
    ) -> None:
        super().__init__(torch.empty(0), 1, [], device=ids.device)
        self.model, self.visits, self.batch = model, visits, batch
        stand_in(model, path, self._leave)
        # never put back: several of these may be open, and end in any order. The blocks' own configs may be a user's,
        # and are left alone: a block makes no cache, but writes to one that it is given
        without_cache(model)
        self._forwards = [greenlet(forward) for _ in ids]
        self._stands: list[tuple[int, Tensor, Given]] = []
        self._returned: list[Any] = [None] * len(ids)
        values = (*model.parameters(), *model.buffers(), ids)
        self._fixed = {value.untyped_storage().data_ptr() for value in values if not value.is_meta}
        self._on_disk, self._shelf = False, Shelf()
        for number, row in enumerate(ids.split(1)):
            self._stands.append(self._left(self._forwards[number].switch(runs or model, row), number, 0))
            self._put_away(number)
        self.hidden = self._gathered()

    @staticmethod
    def _leave(index: int, hidden: Tensor, given: Given) -> Any:
        """Called by the model instead of a block: leave the forward, and enter it with the block's output."""
        return greenlet.getcurrent().parent.switch((index, hidden, given))  # type: ignore[union-attr]

    def _left(self, found: Any, number: int, stage: int) -> tuple[int, Tensor, Given]:
        """Check that a forward was left at the call that is expected."""
        if self._forwards[number].dead or found[0] != self.visits[stage]:
            raise unsupported(type(self.model).__name__, _ORDER)
        return found  # type: ignore[no-any-return]

    def _gathered(self) -> Tensor:
        return gathered((hidden.movedim(self.batch, 0) for _, hidden, _ in self._stands), len(self._stands))

    def call(self, stage: int) -> Call:
        """Return the call that the first sequence's forward stands at."""
        return Call(*self._stands[0][1:])

    def forward(self, block: nn.Module, stage: int, hidden: Tensor, part: int = 0) -> Tensor:
        """Run a block on sequence number `part`; the last output is what its forward goes on with."""
        returned = self._stands[part][2].run(block, hidden.movedim(0, self.batch))
        self._returned[part] = _replaced(returned, torch.empty(0), self._kept)  # `_output` puts others there
        return primary(returned).movedim(self.batch, 0)

    def forward_row(self, block: nn.Module, stage: int, hidden: Tensor, row: int) -> Tensor:
        """Do the same: a chunk is one sequence."""
        return self.forward(block, stage, hidden, row)

    @torch.no_grad()
    def pass_on(self, stage: int, hidden: Tensor) -> Tensor:
        """Let the forwards go on to the next call; after the last, `finish` lets them end."""
        if stage + 1 == len(self.visits):
            self.hidden = hidden
            return hidden
        self._shelf = Shelf()  # what is put into it lives as long as what was, or shorter: its files go with it
        for number, part in enumerate(hidden.split(1)):
            found = self._forwards[number].switch(self._output(number, part))
            self._stands[number] = self._left(found, number, stage + 1)
            self._returned[number] = None
            del found
            self._put_away(number)
        return self._gathered()

    @torch.no_grad()
    def finish(self, number: int) -> Any:
        """Return what the model gives for one sequence. Once each."""
        try:
            found = self._forwards[number].switch(self._output(number, self.hidden[number : number + 1]))
        finally:
            # the variables went with the forward; what it stood at does not
            self._returned[number] = None
            self._stands[number] = (self.visits[-1], torch.empty(0), Given())
        if not self._forwards[number].dead:
            raise unsupported(type(self.model).__name__, _ORDER)
        return found

    def _kept(self, value: Any) -> Any:
        """Keep a value in a file, if everything is."""

        def copied(leaf: Any) -> Any:
            return self._shelf.copy(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

        return tree_map(copied, value) if self._on_disk else value

    def _put_away(self, number: int) -> None:
        """Move what one forward holds in its variables into files, if all of them together hold too much."""
        if number and not self._on_disk:
            return
        tensors = held(self._forwards[number].gr_frame)
        if number == 0:  # sequences are of one length
            self._on_disk = size(tensors, self._fixed) * len(self._forwards) >= calls.ON_DISK
        if self._on_disk:
            self._shelf.move(tensors, self._fixed)

    def _output(self, number: int, hidden: Tensor) -> Any:
        """Return what the block returned, with these hidden states in it."""
        return _replaced(self._returned[number], hidden.movedim(0, self.batch), lambda value: value)


def _replaced(returned: Any, hidden: Tensor, keep: Callable[[Any], Any]) -> Any:
    """Return what a block returned with other hidden states, the values behind them as `keep` has them."""
    if isinstance(returned, tuple | list):
        return type(returned)((hidden, *map(keep, returned[1:])))
    if isinstance(returned, dict):
        first, *others = returned
        return type(returned)({first: hidden, **{name: keep(returned[name]) for name in others}})
    return hidden
