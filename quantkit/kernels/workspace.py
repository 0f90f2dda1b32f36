"""Memory that a kernel with a split K needs beside its inputs: float32 sums, and counters that it leaves at zero."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Workspace:
    """Sums and counters, grown to the largest call so far. For one stream at a time: calls in it follow each other.

    What was outgrown is kept: a CUDA graph that was captured before still writes there.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []

    def of(self, sums: int, counts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """At least `sums` float32 and `counts` int32 zeros."""
        import torch

        if self._sums is None or self._sums.numel() < sums:
            self._outgrown += [self._sums] if self._sums is not None else []
            self._sums = torch.empty(sums, dtype=torch.float32, device=device)
        if self._counts is None or self._counts.numel() < counts:
            self._outgrown += [self._counts] if self._counts is not None else []
            self._counts = torch.zeros(counts, dtype=torch.int32, device=device)
        return self._sums, self._counts


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: TRITON_INTERPRET=1, set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
