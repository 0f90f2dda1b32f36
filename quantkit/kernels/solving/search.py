"""Search of ranges in one launch: all groups of a weight, all grids to try, and scales fitted to their codes.

    cost(s) = sum over the group of  a_k (snap(w_k / s) s - w_k)²        or  e H_gg eᵀ with a block of the Hessian

A program owns some rows of one group and reads it in pieces, again for each grid, from the nearest cache. For integers
the ranges are computed here too. For other formats the caller passes the grids to try, gets back the best and the scale
that fits its codes, and calls once more. The kernel equals `_search` in `passes/solvers/ranges.py`.

A kernel rounds to a grid: integers between two ends, or a table of any values. A table is `values`, rising, and `edges`
between them: a number above the first i edges becomes `values[i]`. If the format rounds a tie up, the edge is the next
smaller number. Both are padded to a power of two, so that every search takes the same steps.

For integers, `spanned` equals `parameters` of `formats/base/integers.py`, and `kept` equals its `stored`, bit by bit:
storing a scale only bounds it and rounds its mantissa.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# rows per program: no spill on SM 8.0 and 9.0 with the tiles of `tile_of` (benchmarks/kernel_resources.py)
ROWS = 32


@triton.jit
def piece_of(target_ptr, at, length, start, N, rows, PIECE: tl.constexpr):
    """Load weights [PIECE, ROWS] of a group from its column `start`, and the mask of existing columns."""
    column = start + tl.arange(0, PIECE)
    there = column < length
    place = (at + column)[:, None] * N + rows[None, :]
    return tl.load(target_ptr + place, mask=there[:, None] & (rows < N)[None, :], other=0.0), there


@triton.jit
def measured(
    target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, scale, lowest, highest,
    BLOCKS: tl.constexpr, FIT: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the cost of a scale [ROWS]; with FIT also `sum c a w` and `sum c a c`, c the codes."""
    inverse = 1.0 / scale
    cost = tl.zeros((ROWS,), tl.float32)
    along = tl.zeros((ROWS,), tl.float32)
    across = tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, PIECE):
        w, there = piece_of(target_ptr, at, length, start, N, rows, PIECE)
        units = w * inverse[None, :]
        code = snapped(units, lowest[None, :], highest[None, :], values_ptr, edges_ptr, STEPS)
        error = code - units
        if BLOCKS:
            into = tl.zeros((PIECE, ROWS), tl.float32)
            into_w = tl.zeros((PIECE, ROWS), tl.float32)
            into_code = tl.zeros((PIECE, ROWS), tl.float32)
            for other in range(0, length, PIECE):
                v, beyond = piece_of(target_ptr, at, length, other, N, rows, PIECE)
                column = other + tl.arange(0, PIECE)
                row = tl.cast(g, tl.int64) * length + start + tl.arange(0, PIECE)
                hessian = tl.load(
                    importance_ptr + row[:, None] * length + column[None, :],
                    mask=there[:, None] & beyond[None, :],
                    other=0.0,
                )
                of = v * inverse[None, :]
                their = snapped(of, lowest[None, :], highest[None, :], values_ptr, edges_ptr, STEPS)
                if FIT:
                    into_w = tl.dot(hessian, v, into_w, input_precision=PRECISION)
                    into_code = tl.dot(hessian, their, into_code, input_precision=PRECISION)
                else:
                    into = tl.dot(hessian, their - of, into, input_precision=PRECISION)
            # past the end of the group the Hessian is zero
            if FIT:
                along += tl.sum(code * into_w, axis=0)
                across += tl.sum(code * into_code, axis=0)
            else:
                cost += tl.sum(error * into, axis=0)
        else:
            weight = tl.where(there, 1.0, 0.0)
            if importance_ptr is not None:
                weight = tl.load(importance_ptr + at + start + tl.arange(0, PIECE), mask=there, other=0.0)
            if FIT:
                along += tl.sum(code * weight[:, None] * w, axis=0)
                across += tl.sum(code * weight[:, None] * code, axis=0)
            else:
                cost += tl.sum(error * weight[:, None] * error, axis=0)
    return cost * scale * scale, along, across


@triton.jit
def fitted_to(along, across, scale):
    """Return the scale with the least error for codes; a group of zeros keeps its own."""
    fitted = tl.math.div_rn(along, across)
    return tl.where((fitted > 0.0) & (fitted < float("inf")), fitted, scale)


@triton.jit
def search_ranges(
    target_ptr,  # [K, N] float32
    importance_ptr,  # [K] float32, [K / length, length, length], or None
    given_ptr,  # [GIVEN, K / length, N] float32: grids to try; None for integers
    scale_ptr,  # [K / length, N]: the best
    zero_ptr,  # the same, or None
    fitted_ptr,  # the same, float32: the scale that fits the codes of the best; None for integers
    values_ptr, edges_ptr, low, high,
    least,  # bounds of a scale
    most, N, length,
    GIVEN: tl.constexpr,
    TRIES: tl.constexpr,  # shares of the whole range from SMALLEST up to, but without, 1
    SMALLEST: tl.constexpr, REST: tl.constexpr, REFINEMENTS: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr,
    BLOCKS: tl.constexpr, STEPS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Search the ranges of some rows and groups, as described in the module."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1)
    inside = rows < N
    at = tl.cast(g, tl.int64) * length
    place = tl.cast(g, tl.int64) * N + rows
    SYMMETRIC: tl.constexpr = zero_ptr is None
    zero = tl.zeros((ROWS,), tl.float32)
    bottom = tl.zeros((ROWS,), tl.float32)
    top = tl.zeros((ROWS,), tl.float32)
    if GIVEN > 0:
        scale = tl.load(given_ptr + place, mask=inside, other=1.0)
    else:
        for start in range(0, length, PIECE):
            w, _ = piece_of(target_ptr, at, length, start, N, rows, PIECE)
            bottom = tl.minimum(bottom, tl.min(w, axis=0))
            top = tl.maximum(top, tl.max(w, axis=0))
        scale, zero = spanned(bottom, top, low, high, least, most, SYMMETRIC, EVEN, HALF)
    if GIVEN > 1 or TRIES > 0 or REFINEMENTS > 0:
        cost, _, _ = measured(
            target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, scale, low - zero, high - zero,
            BLOCKS, False, STEPS, PIECE, ROWS, PRECISION,
        )  # fmt: skip
        TRIED: tl.constexpr = GIVEN - 1 if GIVEN > 0 else TRIES
        for number in range(TRIED):
            if GIVEN > 0:
                grid_at = given_ptr + tl.cast(number + 1, tl.int64) * tl.num_programs(1) * N
                tried = tl.load(grid_at + place, mask=inside, other=1.0)
                shift = zero
            else:
                # in float64, as in Python
                share = tl.full((), SMALLEST, tl.float64) + REST * tl.cast(number, tl.float64) / TRIES
                share = share.to(tl.float32)
                tried, shift = spanned(bottom * share, top * share, low, high, least, most, SYMMETRIC, EVEN, HALF)
            paid, _, _ = measured(
                target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, tried, low - shift,
                high - shift, BLOCKS, False, STEPS, PIECE, ROWS, PRECISION,
            )  # fmt: skip
            wins = paid < cost
            scale, zero, cost = tl.where(wins, tried, scale), tl.where(wins, shift, zero), tl.where(wins, paid, cost)
        if fitted_ptr is not None:
            _, along, across = measured(
                target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, scale, low - zero,
                high - zero, BLOCKS, True, STEPS, PIECE, ROWS, PRECISION,
            )  # fmt: skip
            tl.store(fitted_ptr + place, fitted_to(along, across, scale), mask=inside)
        else:
            for _ in range(REFINEMENTS):
                _, along, across = measured(
                    target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, scale, low - zero,
                    high - zero, BLOCKS, True, STEPS, PIECE, ROWS, PRECISION,
                )  # fmt: skip
                tried = kept(fitted_to(along, across, scale), least, most, EVEN, HALF)
                paid, _, _ = measured(
                    target_ptr, importance_ptr, values_ptr, edges_ptr, at, g, length, N, rows, tried, low - zero,
                    high - zero, BLOCKS, False, STEPS, PIECE, ROWS, PRECISION,
                )  # fmt: skip
                wins = paid < cost
                scale, cost = tl.where(wins, tried, scale), tl.where(wins, paid, cost)
    tl.store(scale_ptr + place, scale.to(scale_ptr.dtype.element_ty), mask=inside)
    if zero_ptr is not None:
        tl.store(zero_ptr + place, zero.to(zero_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("quantkit::search_integers", mutates_args=())
def search_integers(
    target: Tensor, importance: Tensor | None, length: int, low: float, high: float, symmetric: bool,
    scale: torch.dtype, zero: torch.dtype, bounds: list[float], dropped: list[int], smallest: float, tries: int,
    refinements: int, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scale and zero point [K / length, N] (of symmetric grids [0]) of integers from `low` to `high`.

    Args:
        target: [K, N] float32.
        importance: [K] or [K / length, length, length] float32, or None.
        length: weights of a column that share a scale.
        low, high: smallest and largest code.
        symmetric: True without zero points.
        scale, zero: dtypes of the results.
        bounds, dropped: smallest and largest scale, and bits of the float32 mantissa to drop: with ties to even, then
            with ties away from zero.
        smallest, tries, refinements: settings of the `Search`.
        precision: precision of the products with a Hessian's blocks: `ieee`, `tf32x3` or `tf32`.
    """
    scales, zeros = _integers(target, length, symmetric, scale, zero)
    options = {"REFINEMENTS": refinements, "TRIES": tries, "SMALLEST": smallest, "REST": 1 - smallest, "GIVEN": 0}
    _launch(
        target, importance, None, scales, None if symmetric else zeros, None, None, None,
        (low, high, *bounds), length, precision, EVEN=dropped[0], HALF=dropped[1], **options,
    )  # fmt: skip
    return scales, zeros


@search_integers.register_fake
def _(target, importance, length, low, high, symmetric, scale, zero, *_):
    return _integers(target, length, symmetric, scale, zero)


@torch.library.custom_op("quantkit::best_grids", mutates_args=())
def best_grids(
    target: Tensor, importance: Tensor | None, length: int, grids: Tensor, values: Tensor, edges: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the best of some scales, ties taking the first, and the scale that fits its codes, [K / length, N]
    float32.

    Args:
        target, importance, length, precision: as for `search_integers`.
        grids: [grids, K / length, N] float32.
        values, edges: table of the format.
    """
    best, fitted = torch.empty_like(grids[0]), torch.empty_like(grids[0])
    options = {"REFINEMENTS": 0, "TRIES": 0, "SMALLEST": 1.0, "REST": 0.0, "GIVEN": len(grids), "EVEN": 0, "HALF": 0}
    bounds = (0.0, 0.0, 0.0, 0.0)
    _launch(target, importance, grids, best, None, fitted, values, edges, bounds, length, precision, **options)
    return best, fitted


@best_grids.register_fake
def _(target, importance, length, grids, *_):
    return grids.new_empty(grids.shape[1:]), grids.new_empty(grids.shape[1:])


def _integers(
    target: Tensor, length: int, symmetric: bool, scale: torch.dtype, zero: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (target.shape[0] // length, target.shape[1])
    return target.new_empty(shape, dtype=scale), target.new_empty((0,) if symmetric else shape, dtype=zero)


def tile_of(length: int, *, blocks: bool) -> tuple[int, int]:
    """Return the columns of a piece, and the warps; products with blocks of a Hessian need a smaller piece."""
    return (16, 8) if blocks else (max(32, min(64, int(triton.next_power_of_2(length)))), 4)


def _launch(target, importance, grids, scale, zero, fitted, values, edges, bounds, length, precision, **options):
    require_contiguous(target, importance, grids)
    rows = target.shape[1]
    blocks = importance is not None and importance.dim() == 3
    piece, warps = tile_of(length, blocks=blocks)
    search_ranges[(triton.cdiv(rows, ROWS), target.shape[0] // length)](
        target, importance, grids, scale, zero, fitted, values, edges, *bounds, rows, length,
        **options, BLOCKS=blocks, STEPS=search_steps(values), PIECE=piece, ROWS=ROWS, PRECISION=precision,
        num_warps=warps,
    )  # fmt: skip


# fit by turns: rows per program, columns at a time, warps
FIT_ROWS, FIT_PIECE, FIT_WARPS = 16, 64, 8


@triton.jit
def fit_by_turns(
    weight_ptr,  # [n, L] float32
    scale_ptr,  # [n]: initial scale
    zero_ptr,  # [n] int8, or None
    best_ptr,  # [n], as `scale_ptr`
    shift_ptr,  # [n] int8, or None
    low, high, least, most, norm, beta, growth, turns, n, L,
    EVEN: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Fit scales and zero points as `_fit` in `passes/solvers/hqq.py`; each turn passes over the weights of some
    groups.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    now = tl.load(scale_ptr + rows, mask=rows < n, other=1.0).to(tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    if zero_ptr is not None:
        shift = tl.load(zero_ptr + rows, mask=rows < n, other=0).to(tl.float32)
    bend = tl.exp2((2.0 - norm) * tl.log2(now))
    best, best_shift, paid = now, shift, tl.full((ROWS,), float("inf"), tl.float32)
    for _ in range(turns + 1):
        cost = tl.zeros((ROWS,), tl.float32)
        codes_sum = tl.zeros((ROWS,), tl.float32)
        aims = tl.zeros((ROWS,), tl.float32)
        both = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for start in range(0, L, PIECE):
            columns = start + tl.arange(0, PIECE)
            there = (rows < n)[:, None] & (columns < L)[None, :]
            w = tl.load(weight_ptr + rows.to(tl.int64)[:, None] * L + columns[None, :], mask=there, other=0.0)
            units = tl.math.div_rn(w, tl.zeros_like(w) + now[:, None])
            codes = whole(tl.minimum(tl.maximum(units, (low - shift)[:, None]), (high - shift)[:, None]))
            rest = w - codes * now[:, None]
            size = tl.abs(rest)
            safe = tl.maximum(size, 1e-12)
            bent = tl.exp2(norm * tl.log2(safe))
            forgiven = tl.maximum(size - bent / safe * (bend / beta)[:, None], 0.0)
            aim = tl.where(there, w - tl.where(rest < 0.0, -forgiven, forgiven), 0.0)
            raw = tl.where(there, codes + shift[:, None], 0.0)
            cost += tl.sum(tl.where(there, bent, 0.0), axis=1)
            codes_sum += tl.sum(raw, axis=1)
            aims += tl.sum(aim, axis=1)
            both += tl.sum(raw * aim, axis=1)
            squares += tl.sum(raw * raw, axis=1)
        wins = cost < paid
        best, best_shift, paid = tl.where(wins, now, best), tl.where(wins, shift, best_shift), tl.minimum(cost, paid)
        beta *= growth
        if zero_ptr is not None:
            slope = (both - codes_sum * aims / L) / (squares - codes_sum * codes_sum / L)
            shift = (codes_sum - aims / slope) / L
            shift = whole(tl.minimum(tl.maximum(tl.where((shift <= 0.0) | (shift > 0.0), shift, 0.0), low), high))
        along, across = both - shift * aims, squares - 2.0 * shift * codes_sum + shift * shift * L
        wanted = along / across
        fits = (wanted > 0.0) & (wanted < float("inf"))
        now = kept(tl.where(fits, wanted, now), least, most, EVEN, HALF)
    tl.store(best_ptr + rows, best.to(best_ptr.dtype.element_ty), mask=rows < n)
    if shift_ptr is not None:
        tl.store(shift_ptr + rows, best_shift.to(tl.int8), mask=rows < n)


@torch.library.custom_op("quantkit::fitted_by_turns", mutates_args=())
def fitted_by_turns(
    weight: Tensor, scale: Tensor, zero: Tensor | None, ends: list[float], bounds: list[float], dropped: list[int],
    norm: float, beta: float, growth: float, turns: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scale [n] and zero point [n] int8 (of symmetric grids [0]) of groups, by half-quadratic splitting.

    Args:
        weight: [n, L] float32.
        scale, zero: initial values; zero is int8 or None.
        ends: smallest and largest code.
        bounds, dropped: as for `search_integers`.
        norm, beta, growth, turns: as for `half_quadratic`.
    """
    require_contiguous(weight, scale, zero)
    best, shift = torch.empty_like(scale), scale.new_empty(0 if zero is None else zero.shape, dtype=torch.int8)
    number, length = weight.shape
    fit_by_turns[(triton.cdiv(number, FIT_ROWS),)](
        weight, scale, zero, best, None if zero is None else shift, *ends, *bounds, norm, beta, growth, turns,
        number, length, EVEN=dropped[0], HALF=dropped[1], ROWS=FIT_ROWS, PIECE=FIT_PIECE, num_warps=FIT_WARPS,
    )  # fmt: skip
    return best, shift


@fitted_by_turns.register_fake
def _(weight, scale, zero, *_):
    return torch.empty_like(scale), scale.new_empty(0 if zero is None else zero.shape, dtype=torch.int8)


def search_steps(values: Tensor | None) -> int:
    """Return the number of comparisons that find one of these values; 0 for integers."""
    return 0 if values is None else (values.numel() - 1).bit_length()


def require_contiguous(*tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not contiguous."""
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        raise ValueError("kernels read contiguous tensors")


def tabled(values: Tensor, snap: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return `values` and `edges` of the grid that `snap` rounds to.

    Args:
        values: all values of the grid, in any order, with repetitions; infinities and NaN are ignored.
        snap: function from float32 to the nearest of them.
    """
    finite = values.float().isfinite()
    # codes of positive numbers come first: reversed, minus zero comes before zero
    turned = torch.where(finite, values, torch.where(finite, values, -torch.inf).max()).float().flip(0)
    rising = turned.sort(stable=True).values
    size = 1 << (len(rising) - 1).bit_length()
    rising = torch.cat([rising, rising[-1:].expand(size - len(rising))])
    middles = (rising[1:] + rising[:-1]) / 2
    edges = torch.where(snap(middles) == rising[1:], middles.nextafter(torch.full_like(middles, -torch.inf)), middles)
    return rising, edges


@triton.jit
def whole(units):
    """Round to integers, ties to even; exact below 2^22 in size, where the sum has no bits for fractions."""
    return (units + 12582912.0) - 12582912.0


@triton.jit
def snapped(units, low, high, values_ptr, edges_ptr, STEPS: tl.constexpr):
    """Return the values of the grid nearest to `units`, float32; `low` and `high` are the ends for integers."""
    if STEPS == 0:
        return whole(tl.minimum(tl.maximum(units, low), high))
    else:
        place = tl.zeros(units.shape, tl.int32)
        for i in tl.static_range(STEPS):
            edge = tl.load(edges_ptr + place + ((1 << (STEPS - 1 - i)) - 1))
            place += tl.where(units > edge, 1 << (STEPS - 1 - i), 0)
        return tl.load(values_ptr + place)


@triton.jit
def kept(scale, least, most, EVEN: tl.constexpr, HALF: tl.constexpr):
    """Round scales, float32, as they are stored.

    They are bounded, then EVEN bits of the mantissa are rounded away, ties to even, then HALF bits, ties away from
    zero.
    """
    bits = tl.minimum(tl.maximum(scale, least), most).to(tl.int32, bitcast=True)
    if EVEN > 0:
        bits = (bits + ((1 << (EVEN - 1)) - 1) + ((bits >> EVEN) & 1)) & -(1 << EVEN)
    if HALF > 0:
        bits = (bits + (1 << (HALF - 1))) & -(1 << HALF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def spanned(bottom, top, low, high, least, most, SYMMETRIC: tl.constexpr, EVEN: tl.constexpr, HALF: tl.constexpr):
    """Return scale and zero point, float32, of integers from `low` to `high` over values between `bottom` and `top`."""
    if SYMMETRIC:
        scale = kept(tl.math.div_rn(tl.maximum(-bottom, top), high + 0.5), least, most, EVEN, HALF)
        return scale, tl.zeros_like(scale)
    else:
        bottom, top = tl.minimum(bottom, 0.0), tl.maximum(top, 0.0)
        scale = kept(tl.math.div_rn(top - bottom, high - low), least, most, EVEN, HALF)
        return scale, whole(tl.minimum(tl.maximum(low - tl.math.div_rn(bottom, scale), low), high))
