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
from contextlib import nullcontext
from typing import Any

import torch

from quantkit.kernels.workspace import Workspace, one_graph

# x, the workspace (None: that of the present stream or graph) -> y
Product = Callable[[torch.Tensor, Workspace | None], torch.Tensor]
LAUNCHES = 1000
# products of each graph that is replayed beside another
_IN_A_ROW = 16


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


def beside(product: Product, inputs: Sequence[torch.Tensor], launches: int) -> dict[str, Any]:
    """Replay two CUDA graphs of the same product at once, each on its own stream and input; on a CPU, in turns.

    Args:
        product: of x and None.
        inputs: two x [M, K].
        launches: replays of each graph.

    Returns:
        `{"launches", "differing", "counters_left", "first": the results}`, `first` [2, M, N].
    """
    at = inputs[0].device
    streams = [torch.cuda.Stream() for _ in inputs] if at.type == "cuda" else [None, None]
    graphs = [_on_stream(product, x, stream) for x, stream in zip(inputs, streams, strict=True)]
    first = []
    for step, y, _ in graphs:
        step()
        if at.type == "cuda":
            torch.cuda.synchronize()
        first.append(y[0].clone())
    differing = [torch.zeros((), dtype=torch.int64, device=at) for _ in graphs]
    for _ in range(launches):
        for number, ((step, y, _), stream) in enumerate(zip(graphs, streams, strict=True)):
            step()
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                differing[number] += (_bits(y) != _bits(first[number])).any() | y.isnan().any()
                y.fill_(float("nan"))
    if at.type == "cuda":
        torch.cuda.synchronize()
    left = sum(int(memory.of(1, 1, at)[1].ne(0).any()) for *_, memory in graphs)
    wrong = sum(int(count) for count in differing)
    return {"launches": 2 * launches, "differing": wrong, "counters_left": left, "first": torch.stack(first)}


def _on_stream(product: Product, x: torch.Tensor, stream: Any) -> tuple[Callable[[], None], torch.Tensor, Workspace]:
    """Return (replay, results [products, M, N], workspace) of one graph of several products."""
    if stream is None:
        with one_graph() as memory:
            ys = product(x, None)[None].clone()

        def again() -> None:
            ys.copy_(product(x, memory)[None])

        return again, ys, memory
    product(x, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), one_graph() as memory:
        ys = torch.stack([product(x, None) for _ in range(_IN_A_ROW)])

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay, ys, memory


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
