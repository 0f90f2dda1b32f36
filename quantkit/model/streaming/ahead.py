"""Blocks that are read, widened and moved to a device while the block before them is worked on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor, nn

from quantkit.model.device import Lane

if TYPE_CHECKING:
    from quantkit.model.streaming.calls import Calls
    from quantkit.model.streaming.stream import BlockStream


class ReadAhead:
    """A stream whose next block is on its way when one is asked for; two blocks are on the device at a time.

    Args:
        stream: whose blocks.
        lane: reads and copies.
    """

    def __init__(self, stream: BlockStream, lane: Lane) -> None:
        self.block_names = stream.block_names
        self._stream, self._lane = stream, lane
        self._coming: tuple[int, Future[nn.Module]] | None = None

    @property
    def visits(self) -> tuple[int, ...]:
        """As of the stream."""
        return self._stream.visits

    def load(self, index: int) -> nn.Module:
        """Block `index`; from here on the one after it is on its way, or still is, where a block is done again."""
        coming, self._coming = self._coming, None
        here = coming is not None and coming[0] == index
        block = (coming[1] if coming and here else self._lane.submit(self._stream.load, index)).result()
        self._lane.taken([*block.parameters(), *block.buffers()])
        if coming is not None and coming[0] == index + 1:
            self._coming = coming
        elif index + 1 < len(self.block_names):
            self._coming = index + 1, self._lane.submit(self._stream.load, index + 1)
        return block

    def begin(self, ids: Tensor, chunk: int) -> Calls:
        """As of the stream."""
        return self._stream.begin(ids, chunk)
