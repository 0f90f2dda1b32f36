"""Loops of solvers over columns, compiled by the machine's own C compiler: `columns.c`.

In torch each column is ten operations of a few microseconds, most of which is not arithmetic. Here a weight's choice
or a block's descent is one call, without Python's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.cpu import library

# `TILE` of columns.c
_TILE = 8


@cache
def ready() -> ctypes.CDLL | None:
    """Return the library, compiled at the first use; None where nothing compiles it."""
    try:
        return ctypes.CDLL(str(library.library()))
    except InputError:
        return None


def language() -> str:
    """Name the language of the loops: `C` or `torch`. Of two codes that are as good, they may choose another."""
    return "torch" if ready() is None else "C"


def laid(unit: Tensor) -> Tensor:
    """Lay a factor [K, K] out as `choose` reads it: by row, with zeros up to whole tiles of columns."""
    missing = -len(unit) % _TILE
    return (torch.nn.functional.pad(unit, (0, missing)) if missing else unit).contiguous()


def choose(
    unit: Tensor, order: Tensor, group: int, costs: Tensor, tables: Sequence[Tensor], wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Round each column to its grid, after those before it; returns values in units of the scale, errors and costs.

    Args:
        unit: `M_ij / M_jj` in the order in which columns are rounded, `laid`.
        order: [K] int64, columns in that order.
        group: number of columns that share a scale.
        costs: [K], pivots, in that order.
        tables: scales, their inverses, and both ends in units of the scale, [G, N] each.
        wanted: [K, N], weights.

    Returns:
        Values [K, N], errors [K, N], and the cost of every row [N].
    """
    columns, rows = wanted.shape
    written = torch.empty_like(wanted), torch.empty_like(wanted), wanted.new_empty(rows)
    _call("quantkit_choose", (columns, rows, unit.shape[1], group), (unit, order, costs, *tables, wanted), written)
    return written


def ranges(
    weights: Tensor,
    costs: Tensor,
    groups: int,
    bounds: Sequence[float],
    dropped: Sequence[int],
    *,
    symmetric: bool,
    shares: Sequence[float] = (1.0,),
    refinements: int = 0,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best grid of whole numbers for each group of columns and each row, as described in `ranges.py`.

    Args:
        weights: [K, N], in groups of as many columns.
        costs: [K], of an error in a column.
        bounds: smallest and largest scale, smallest and largest code.
        dropped: bits of a scale's mantissa to round off: with ties to even, then with ties away from zero.
        symmetric: True without zero points.
        shares: shares of the whole range to try, the first one first.
        refinements: number of times that the scale is fitted to the codes.
        factors: [K], of each column; None for 1.

    Returns:
        Scale, zero point, and cost of the errors, [groups, N] float32 each.
    """
    columns, rows = weights.shape
    times = weights.new_ones(columns) if factors is None else factors
    written = tuple(weights.new_empty(groups, rows) for _ in range(3))
    sizes = (groups, columns // groups, rows, len(shares), refinements, symmetric, *dropped)
    read = (weights, times, costs, weights.new_tensor(shares), weights.new_tensor(bounds))
    _call("quantkit_ranges", sizes, read, written)
    return written[0], written[1], written[2]


def solve(
    weights: Tensor,
    unit: Tensor,
    order: Tensor,
    costs: Tensor,
    dear: Tensor,
    group: int,
    bounds: Sequence[float],
    dropped: Sequence[int],
    *,
    symmetric: bool,
    shares: Sequence[float],
    refinements: int,
) -> tuple[Tensor, ...]:
    """Choose codes as `choose` does, on grids as of `ranges`, whose arguments these are.

    Args:
        weights: [N, K].
        dear: [K], costs of the search for grids, in the order of the weights.

    Returns:
        Codes [N, K] int8, scales and zero points [N, K / group] float32, and the cost of every row [N].
    """
    rows, columns = weights.shape
    written = (
        weights.new_empty(rows, columns, dtype=torch.int8),
        *(weights.new_empty(rows, *more) for more in ((columns // group,), (columns // group,), ())),
    )
    sizes = (columns, rows, unit.shape[1], group, len(shares), refinements, symmetric, *dropped)
    read = (weights, unit, order, costs, dear, weights.new_tensor(shares), weights.new_tensor(bounds))
    _call("quantkit_solve", sizes, read, written)
    return written


def descend(
    inside: Tensor, tables: Sequence[Tensor], target: Tensor, wish: Tensor, codes: Tensor, errors: Tensor
) -> None:
    """Move each column of a block to the best place on its grid; its change moves the wishes of the later ones.

    Args:
        inside: [L, L], `H_ij / H_jj` of the block.
        tables: scales, their inverses, and both ends in units of the scale, [N] each.
        target, wish: [L, N], the weights, and gradients over curvature; wishes are changed.
        codes, errors: [L, N], values in units of the scale and what they miss; changed.
    """
    _call("quantkit_descend", tuple(codes.shape), (inside, *tables, target), (wish, codes, errors))


def _call(name: str, sizes: Sequence[int], read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Call a function on float32 (orders: int64, codes: int8) tensors; those that it writes are contiguous.

    Raises MemoryError.
    """
    loaded = ready()
    assert loaded is not None and all(tensor.is_contiguous() for tensor in written)
    tensors = [*(tensor.contiguous() for tensor in read), *written]
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    if getattr(loaded, name)(*map(ctypes.c_long, sizes), *pointers):
        raise MemoryError
