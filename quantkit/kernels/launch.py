"""Programmatic dependent launch: a kernel is set up while the one before it still runs (SM 9.0 and later).

A decode step is hundreds of kernels of a few microseconds that need each other's results. One that was launched so may
take its place on a multiprocessor as soon as all programs of the one before have begun; it reads and writes nothing
before `begin` has waited for that one to end, memory and all. Whoever comes after it waits for it in turn, or is
launched as usual, after its end. (PTX ISA, `griddepcontrol`.)

Memory that a kernel with a split K needs beside its inputs: float32 sums, and counters that it leaves at zero.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.driver import driver

if TYPE_CHECKING:
    import torch


_FROM = 90


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """To be called before anything is read or written."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap() -> dict[str, bool]:
    """What a kernel whose first line is `begin(OVERLAP)` is launched with, on what Triton compiles for."""
    able = not interpreted() and driver.active.get_current_target().arch >= _FROM
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


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
