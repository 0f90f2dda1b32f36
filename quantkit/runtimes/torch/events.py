"""What a GPU does by itself: time on its own clock, between two events on its stream, and a step as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Run it once; the seconds that it took on the GPU. None elsewhere: there whoever asks has a clock."""
    import torch

    if device.type != "cuda":
        run()
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def captured(run: Callable[[], object], undo: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    """A step as one CUDA graph; what is launched before it, to compile and to warm up, is undone."""
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
            undo()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
