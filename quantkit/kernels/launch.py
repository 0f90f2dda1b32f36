"""Programmatic dependent launch: a kernel is set up while the one before it still runs (SM 9.0 and later).

A decode step is hundreds of kernels of a few microseconds that need each other's results. One that was launched so may
take its place on a multiprocessor as soon as all programs of the one before have begun; it reads and writes nothing
before `begin` has waited for that one to end, memory and all. Whoever comes after it waits for it in turn, or is
launched as usual, after its end. (PTX ISA, `griddepcontrol`.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.driver import driver

from quantkit.kernels.workspace import interpreted

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
