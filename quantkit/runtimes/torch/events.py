"""Time on a GPU's own clock: between two events on its stream, not by when the host gets around to looking."""

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
