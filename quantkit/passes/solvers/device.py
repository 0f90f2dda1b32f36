"""List the solvers that run as one kernel; give a format's grid in the form that kernels take.

Except on a CPU, a launch takes as long as a thousand additions, so a solver's loop is one kernel
(`quantkit/kernels/solving/`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.formats.base import grid
from quantkit.formats.base.integers import IntegerFormat, exact_bits
from quantkit.formats.base.scaled import ScaledFormat
from quantkit.model.structure.fold import Ways
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    from quantkit.formats.base.grid import GridFormat


def launched(tensor: Tensor) -> bool:
    """Tell whether work on this tensor should be a few launches without waiting for results."""
    return tensor.device.type != "cpu"


def precision() -> str:
    """Return the precision of products in kernels, as torch sets it for its own.

    float32, or sums of products of 10-bit mantissas: three of them (`high`, which loses nothing relevant here) or one.
    """
    return {"highest": "ieee", "high": "tf32x3"}.get(torch.get_float32_matmul_precision(), "tf32")


def known(form: GridFormat) -> bool:
    """Tell whether the kernels support a format's grid: integers, or scaled elements of up to eight bits."""
    return isinstance(form, IntegerFormat | ScaledFormat)


def folding(scales: Tensor) -> Ways | None:
    """Return kernels for folding scales on a device: a launch for every producer, and one for every reader."""
    if not launched(scales):
        return None
    from quantkit.kernels.solving.losses import absorbed_at_once, spread_at_once

    return Ways(spread_at_once, absorbed_at_once)


def table(form: GridFormat, where: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the values of a format's grid and the edges between them, for the kernels; None for integers."""
    if not isinstance(form, ScaledFormat):
        return None, None
    from quantkit.kernels.solving.search import tabled

    values = form.element.codebook()
    if values is None:  # the code is itself a number, of eight bits
        values = form.unpack(torch.arange(256).to(torch.uint8)[None], 256)[0]
    rising, edges = tabled(values.float(), form.snap)
    # asynchronous: no wait for the device
    return rising.to(where, non_blocking=True), edges.to(where, non_blocking=True)


def kept_by_bits(scheme: WeightScheme) -> tuple[torch.dtype, list[float], list[int]]:
    """Return storage of an integer format's scales: dtype, bounds, and bits of float32 to round off.

    The bits are given for rounding ties to even and for rounding ties away from zero.
    """
    dtype = grid.effective(scheme)
    limits, bits = torch.finfo(dtype), exact_bits(scheme)
    even = {torch.float16: 13, torch.bfloat16: 16}.get(dtype, 0)
    most, half = (limits.max, 0) if bits is None else (limits.max / 2, even + 11 - bits)
    return dtype, [limits.tiny, most], [even, half]
