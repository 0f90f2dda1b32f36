"""One sum over another, of what the programs of a launch have found: added up in a fixed order, in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# parts at a time, warps
PARTS, WARPS = 1024, 4


@triton.jit
def quotient_of_sums(
    parts_ptr,  # [2, parts] float64
    found_ptr,  # [] float64
    number,
    CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """See the module."""
    above = tl.zeros((PARTS,), tl.float64)
    below = tl.zeros((PARTS,), tl.float64)
    for start in range(0, number, PARTS):
        part = start + tl.arange(0, PARTS)
        above += tl.load(parts_ptr + part, mask=part < number, other=0.0)
        below += tl.load(parts_ptr + number + part, mask=part < number, other=0.0)
    top, bottom = tl.sum(above, axis=0), tl.sum(below, axis=0)
    there = bottom > 0.0
    found = top / tl.where(there, bottom, 1.0)
    if CAPPED:
        found = tl.where(there, tl.minimum(found, 1.0), 1.0)
    tl.store(found_ptr, found)


@torch.library.custom_op("quantkit::quotient", mutates_args=())
def quotient(parts: Tensor, capped: bool) -> Tensor:
    """The first sum by the second, [] float64.

    Args:
        parts: [2, parts] float64, to be added up.
        capped: at most 1, and 1 where the second sum is not positive; else the first is then taken as it is.
    """
    found = parts.new_empty(())
    quotient_of_sums[(1,)](parts, found, parts.shape[1], CAPPED=capped, PARTS=PARTS, num_warps=WARPS)
    return found


@quotient.register_fake
def _(parts, capped):
    return parts.new_empty(())
