"""Whether a kernel whose programs share sums can be caught reading what another has not written yet.

A launch that is repeated on the same input finds the last launch's sums in its workspace: what it reads too early is
then what it would have read in time, and every result looks right. So

- inputs vary from launch to launch, and each has its own expected bits;
- the workspace is filled with NaN before each launch, the result after it has been read: a sum that was not written by
  this launch, or a place of the result that nobody wrote, is NaN;
- the counters are zero after each launch, or the next one takes its own programs for the last;
- 1,000 launches, replays of a CUDA graph, are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.kernels.matmul import Workspace

# x, the workspace -> y
Product = Callable[[torch.Tensor, Workspace], torch.Tensor]
LAUNCHES = 1000


def raced(product: Product, inputs: Sequence[torch.Tensor], launches: int) -> dict[str, Any]:
    """How many of so many launches differ from the first on the same input, or leave a counter behind.

    Args:
        product: of x and a workspace that is its own, one launch that shares sums.
        inputs: x [M, K], all of one shape; each is launched in turn.
        launches: in all.

    Returns:
        `{"launches", "differing", "counters_left", "first": the results}`, `first` [inputs, M, N].
    """
    memory, x = Workspace(), inputs[0].clone()
    y = product(x, memory)
    # what the launch has grown it to; asking for less gives all of it
    sums, counts = memory.of(1, 1, x.device)
    step = _graphed(product, x, memory, sums) if x.is_cuda else _eager(product, x, memory, sums)
    first: list[torch.Tensor] = []
    differing = torch.zeros((), dtype=torch.int64, device=x.device)
    left = torch.zeros_like(differing)
    for number in range(launches):
        which = number % len(inputs)
        x.copy_(inputs[which])
        y = step()
        if number < len(inputs):
            first.append(y.clone())
        differing += (_bits(y) != _bits(first[which])).any() | y.isnan().any()
        left += counts.ne(0).any()
        y.fill_(float("nan"))
    return {
        **{"launches": launches, "differing": int(differing), "counters_left": int(left)},
        "first": torch.stack(first),
    }


def _eager(product: Product, x: torch.Tensor, memory: Workspace, sums: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        sums.fill_(float("nan"))
        return product(x, memory)

    return step


def _graphed(product: Product, x: torch.Tensor, memory: Workspace, sums: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The same as one CUDA graph: its result stands at one place."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.fill_(float("nan"))
        y = product(x, memory)

    def step() -> torch.Tensor:
        graph.replay()
        return y

    return step


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int16)
