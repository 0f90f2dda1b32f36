"""Memory in which the programs of one product meet: partial sums of a split K, and counters of programs that are done.

A product with K split over programs leaves float32 sums in a buffer. An integer counter for each tile of y tells the
last program to add them (`matmul.finish`). Counters are zero before and after a product, so products that run one
after the other share them without a reset. Two products that run at once must not: each would count the other's
programs, take its sums before they are written, and leave counters that no later product can use. So

- **every stream has its own workspace** (`present`): products on one stream never overlap in their sums, since each
  waits for the end of the one before;
- **every captured CUDA graph has its own** (`one_graph`), in the graph's memory and zeroed by the graph itself: a
  replay runs on any stream, beside any other graph, and a replay that was cut short spoils nothing after it;
- a product captured outside of `one_graph`, by somebody else's code, zeroes counters for itself alone: right, but one
  more node of the graph for every product.

Importing this module needs neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Workspace:
    """Sums and counters, as large as the largest call so far needs; for one stream or one graph.

    Smaller buffers are kept: kernels that were launched or captured earlier still write there.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []

    def of(self, sums: int, counts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return at least `sums` float32 elements, and at least `counts` int32 zeros."""
        import torch

        if self._sums is None or self._sums.numel() < sums:
            self._outgrown += [self._sums] if self._sums is not None else []
            self._sums = torch.empty(sums, dtype=torch.float32, device=device)
        if self._counts is None or self._counts.numel() < counts:
            self._outgrown += [self._counts] if self._counts is not None else []
            self._counts = torch.zeros(counts, dtype=torch.int32, device=device)
        return self._sums, self._counts


# (device, handle of the stream) -> its workspace
_STREAMS: dict[tuple[str, int], Workspace] = {}
_GRAPH: ContextVar[Workspace | None] = ContextVar("workspace of a graph", default=None)


@contextmanager
def one_graph() -> Iterator[Workspace]:
    """Give the products in the body a workspace of their own; enter it inside `torch.cuda.graph`.

    What the body allocates is then memory of the graph, which outlives the body, and the zeros are one of its nodes.
    """
    memory = Workspace()
    token = _GRAPH.set(memory)
    try:
        yield memory
    finally:
        _GRAPH.reset(token)


def present(device: torch.device) -> Workspace:
    """Return the workspace of the graph that is captured, else of the present stream."""
    import torch

    own = _GRAPH.get()
    if own is not None:
        return own
    if device.type != "cuda":
        return _STREAMS.setdefault((str(device), 0), Workspace())
    if torch.cuda.is_current_stream_capturing():
        return Workspace()
    return _STREAMS.setdefault((str(device), torch.cuda.current_stream(device).cuda_stream), Workspace())
