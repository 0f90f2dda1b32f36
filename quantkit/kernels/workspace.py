"""Memory of products: partial sums of a split K, counters of programs that are done, and expanded rows of a weight.

A product with K split over programs leaves float32 sums in a buffer. An integer counter for each tile of y tells the
last program to add them (`matmul.finish`). Counters are zero before and after a product, so products that run one
after the other share them without a reset. Two products that run at once must not: each would count the other's
programs, take its sums before they are written, and leave counters that no later product can use. So

- **a device's default stream has a workspace** (`present`): products on one stream never overlap in their sums, since
  each waits for the end of the one before. On any other stream a product has one for itself alone: torch.compile with
  `reduce-overhead`, which transformers asks for with a static cache, first runs on a stream of its own, in memory that
  it takes back, and ends with an error where a part of it is held;
- **every captured CUDA graph has its own** (`one_graph`), in the graph's memory and zeroed by the graph itself: a
  replay runs on any stream, beside any other graph, and a replay that was cut short spoils nothing after it;
- a product captured outside of `one_graph`, by somebody else's code, zeroes counters for itself alone: right, but one
  more node of the graph for every product.

Expanded rows (`matmul.by_slabs`, at most half of the second-level cache) need no more: on one stream, a slab is
multiplied before the next is written.

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
    """Sums, counters and expanded rows, as large as the largest call so far needs; for one stream or one graph.

    Smaller buffers are kept: kernels that were launched or captured earlier still write there.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def of(self, sums: int, counts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return at least `sums` float32 elements, and at least `counts` int32 zeros."""
        import torch

        return self._grown("sums", sums, torch.float32, device), self._grown("counts", counts, torch.int32, device)

    def floats(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for [rows, columns] of a dtype of 16 bits."""
        import torch

        held = self._grown("floats", rows * columns, torch.int16, device)
        return held[: rows * columns].view(dtype).view(rows, columns)

    def _grown(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch

        held = self._held.get(name)
        if held is None or held.numel() < count:
            self._outgrown += [held] if held is not None else []
            make = torch.zeros if name == "counts" else torch.empty
            held = self._held[name] = make(count, dtype=dtype, device=device)
        return held


# device -> workspace of its default stream
_DEFAULT: dict[str, Workspace] = {}
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
    """Return the workspace of the graph that is captured, else of the default stream, else a new one."""
    import torch

    own = _GRAPH.get()
    if own is not None:
        return own
    # 0 is the default stream, which is never captured
    if device.type == "cuda" and torch.cuda.current_stream(device).cuda_stream:
        return Workspace()
    return _DEFAULT.setdefault(str(device), Workspace())
