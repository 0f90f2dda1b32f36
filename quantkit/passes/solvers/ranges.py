"""Place the grid: scale and zero point of every group, from its extremes or by searching for the least error.

    min-max:  the grid spans the smallest to the largest weight
    searched: minimise over p of  sum_k a_k (decode(encode(w_k; p)) - w_k)²
              with the grid spanning p * min to p * max, p in a few steps from 1 down,
              then alternately the best scale for the codes (closed form) and the best codes for the scale

`a_k` is the importance of input k: 1, or the diagonal of the Hessian. A few outliers stretch a min-max grid;
clipping them a little costs less than it gains (Nagel et al., "A White Paper on Neural Network Quantization", 2021,
section 3.1). Any format with scales will do; scales here are effective, global scale included. On a device whole
numbers are one launch, other formats a few (`kernels/solving/search.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.grid import GridFormat, effective, load_grid
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.layout import groups_of, tiles
from quantkit.kernels.cpu import columns as loops
from quantkit.model.device import spread
from quantkit.passes.solvers import device
from quantkit.scheme import WeightScheme

# elements in one piece of work: few calls, and the temporaries still fit into the last-level cache
_CHUNK = 1 << 17
# elements in one call of the loops in C
_LOOPED = 1 << 20
# a program of the kernel takes a whole group: longer groups leave too few programs, and H is a matrix product then
LONGEST, _LONGEST_BLOCK = 1 << 15, 512


@dataclass(frozen=True)
class Search:
    """Extent of a range search: `steps` lengths of the grid from `smallest`, a share of min-max, up to min-max itself.

    Min-max is always tried. Then scale and codes are fitted to each other so many times.
    """

    smallest: float = 0.7
    steps: int = 5
    refinements: int = 1

    @property
    def shares(self) -> list[float]:
        """Shares of the whole range to try, the whole one first."""
        return [1.0, *(self.smallest + (1 - self.smallest) * number / self.steps for number in range(self.steps))]


def integer_format(scheme: WeightScheme) -> IntegerFormat:
    """Return the scheme's format if it is a uniform integer one. Raises InputError (`format-not-integer`)."""
    form = load_format(scheme.format)
    if isinstance(form, IntegerFormat):
        return form
    rule, remedy = "this solver assigns codes of uniform integer formats", "use an int format, or another assigner"
    raise InputError("format-not-integer", value=f"format {scheme.format}", rule=rule, remedy=remedy)


def minmax(weight: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor | None]:
    """Return ranges from the smallest to the largest weight of every group; results and errors as of `searched`."""
    return searched(weight, scheme, None, Search(steps=0, refinements=0))


def searched(
    weight: Tensor, scheme: WeightScheme, importance: Tensor | None = None, search: Search | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the ranges with the least (weighted) squared rounding error of those tried; never worse than min-max.

    Args:
        weight: [N, K] of any float dtype.
        importance: [K], not negative: cost of an error of every input; None is 1 for all.

    Returns:
        effective scale [N, G] ([1, 1] per tensor, [⌈N/b⌉, ⌈K/b⌉] in blocks) and zero of that shape, int8, or None.

    Raises:
        InputError: `group-indivisible`, `format-without-scale`.
    """
    target, costs = weight.float(), None if importance is None else importance.float()
    if scheme.granularity == "block":
        # tiles over the same inputs side by side, each as one column; padding zeros cost nothing
        size = scheme.group or max(weight.shape)
        if costs is not None:
            costs = torch.nn.functional.pad(costs, (0, -len(costs) % size)).reshape(-1, size).repeat(1, size).flatten()
        target, length = tiles(target, scheme).permute(2, 1, 3, 0).flatten(0, 2), size * size
    elif scheme.granularity == "tensor":  # one long column
        target, length = target.T.reshape(-1, 1), weight.numel()
        costs = None if costs is None else costs.repeat_interleave(weight.shape[0])
    else:
        target, length = target.T, weight.shape[1] // groups_of(weight.shape[1], scheme)
    scale, zero = transposed(target, length, scheme, costs, search or Search())
    return scale.T.contiguous(), None if zero is None else zero.T.contiguous()


def for_output(
    weight: Tensor, scheme: WeightScheme, hessian: Tensor, search: Search | None = None, threads: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Search ranges as `searched`, with a group's error measured at the output: `d H_gg dᵀ`, other groups exact.

    Per tensor and in blocks only the diagonal of the Hessian [K, K] is used. Raises as `searched`.
    """
    if scheme.granularity in ("tensor", "block"):
        return searched(weight, scheme, hessian.diagonal(), search)
    length = weight.shape[1] // groups_of(weight.shape[1], scheme)
    target, costs = weight.float().T.contiguous(), blocks(hessian, length)
    scale, zero = transposed(target, length, scheme, costs, search or Search(), threads=threads)
    return scale.T.contiguous(), None if zero is None else zero.T.contiguous()


def blocks(hessian: Tensor, length: int) -> Tensor:
    """Return the blocks on the diagonal of [K, K]: [K / length, length, length] float32."""
    return torch.stack(
        [hessian[at : at + length, at : at + length].float() for at in range(0, hessian.shape[0], length)]
    )


def transposed(
    target: Tensor,
    length: int,
    scheme: WeightScheme,
    importance: Tensor | None,
    search: Search,
    wide: bool = False,
    threads: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Search ranges as `searched` for transposed weights, as solvers hold them: every step is one vector operation.

    Args:
        target: [K, N] float32.
        length: weights of a column that share a scale; divides K.
        importance: [K] float32, or the blocks of a Hessian [K / length, length, length], or None.
        wide: whether both results are wanted in float32; a kernel then returns them so.
        threads: number of threads, under `one_thread`.

    Returns:
        effective scale [K / length, N], and zero of that shape, int8, None if symmetric.
    """
    form = load_grid(scheme.format)
    groups, columns = target.shape[0] // length, target.shape[1]
    longest = _LONGEST_BLOCK if importance is not None and importance.dim() == 3 else LONGEST
    at_once = device.launched(target) and device.known(form) and length <= longest
    if at_once:
        target, importance = target.contiguous(), None if importance is None else importance.contiguous()
    if at_once and isinstance(form, IntegerFormat):
        from quantkit.kernels.solving.search import search_integers

        dtype, *stored = device.kept_by_bits(scheme)
        types = (torch.float32, torch.float32) if wide else (dtype, torch.int8)
        ends = (form.low, form.high, scheme.symmetric, *types, *stored)
        tries = (search.smallest, search.steps, search.refinements)
        scale, zeros = search_integers(target, importance, length, *ends, *tries, device.precision())
        return scale, None if scheme.symmetric else zeros
    if compiled(form, importance, length, target) and (search.steps or search.refinements):
        assert isinstance(form, IntegerFormat)

        def loop(rows: Tensor) -> tuple[Tensor, Tensor | None]:
            how = {"shares": search.shares, "refinements": search.refinements}
            scale, zero, _ = looped(rows, importance, groups, form, scheme, **how)
            if wide:
                return scale, zero
            return scale.to(effective(scheme)), None if zero is None else zero.to(torch.int8)

        some = target.split(min(-(-columns // threads), max(1, _LOOPED // len(target))), dim=1)
        parts = spread(loop, some, threads) if threads > 1 else map(loop, some)
        scales, zeros = zip(*parts, strict=True)
        return torch.cat(scales, dim=1), None if scheme.symmetric else torch.cat(zeros, dim=1)
    whole = None if isinstance(form, IntegerFormat) else form.global_scale(target.abs().amax(), scheme)
    parts = target.unflatten(0, (groups, length))
    low, high = parts.amin(dim=1), parts.amax(dim=1)
    scale, zero = form.parameters(low, high, scheme, whole)
    if search.steps == search.refinements == 0:
        return scale, zero
    # all groups and grids at once: vectors of one group are so short that calls would take longer than computing
    share = torch.tensor([*search.shares, *form.stretches]).to(target.device, non_blocking=True)[:, None, None]
    grids, shifts = form.parameters(low * share, high * share, scheme, whole)
    if at_once:  # one launch, then one launch a refinement
        from quantkit.kernels.solving.search import best_grids

        book = (*device.table(form, target.device), device.precision())
        best, fitted = best_grids(target, importance, length, grids.float(), *book)
        for _ in range(search.refinements):
            tried = form.stored(fitted, scheme, whole).float()
            best, fitted = best_grids(target, importance, length, torch.stack([best, tried]), *book)
        return best.to(grids.dtype), None
    step = columns if device.launched(target) else max(1, _CHUNK // length)
    for group in range(groups):
        costs = None
        if importance is not None:
            costs = importance[group] if importance.dim() == 3 else importance[group * length : (group + 1) * length]
        for start in range(0, columns, step):
            at = (group, slice(start, start + step))
            zeros = [None] * len(grids) if shifts is None else [shift[at] for shift in shifts]
            chosen = [*zip((tried[at] for tried in grids), zeros, strict=True)]
            best, moved = _search(parts[group, :, at[1]].contiguous(), costs, scheme, form, search, chosen, whole)
            scale[at] = best
            if zero is not None and moved is not None:
                zero[at] = moved
    return scale, zero


def compiled(form: GridFormat, importance: Tensor | None, length: int, target: Tensor) -> bool:
    """Tell whether the grids of whole numbers are compared in C: where errors of a group of [K, N] cost by column."""
    by_column = isinstance(form, IntegerFormat) and (importance is None or importance.dim() == 1)
    return by_column and length <= LONGEST and not device.launched(target) and loops.ready() is not None


def looped(
    target: Tensor, costs: Tensor | None, groups: int, form: IntegerFormat, scheme: WeightScheme, **how: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return scale, zero point and cost [G, N] of groups of [K, N] from the loop in C, in float32; `how` as there."""
    dear = target.new_ones(len(target)) if costs is None else costs
    scale, zero, cost = loops.ranges(target, dear, groups, *bounds(form, scheme), symmetric=scheme.symmetric, **how)
    return scale, None if scheme.symmetric else zero, cost


def bounds(form: IntegerFormat, scheme: WeightScheme) -> tuple[list[float], list[int]]:
    """Return the ends of scales and codes, and the bits of a scale to round off, as the loops in C take them."""
    _, ends, dropped = device.kept_by_bits(scheme)
    return [*ends, *form.ends], dropped


def _search(
    part: Tensor,
    costs: Tensor | None,
    scheme: WeightScheme,
    form: GridFormat,
    search: Search,
    grids: list[tuple[Tensor, Tensor | None]],
    whole: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the best of some grids, [n] each, for columns [L, n] of one group that fit a cache; scale and zero [n]."""
    exact, codes, error = torch.empty_like(part), torch.empty_like(part), torch.empty_like(part)
    weights = part.new_ones(part.shape[0]) if costs is None else costs

    def total(left: Tensor, right: Tensor) -> Tensor:
        """Return the sums of left * costs * right, [n]; overwrites left."""
        if weights.dim() == 2:
            return left.mul_(weights @ right).sum(dim=0)
        return weights @ left.mul_(right)

    def measure(step: Tensor, shift: Tensor | None) -> Tensor:
        """Write values in units of the scale into `codes`; returns the cost of every column [n]."""
        width = step.float()
        torch.mul(part, width.reciprocal(), out=exact)
        if not isinstance(form, IntegerFormat):
            codes.copy_(form.snap(exact, shift))
        elif shift is None:  # `snap` of integers, without a temporary
            torch.clamp(exact, form.low, form.high, out=codes).round_()
        else:
            torch.clamp(exact, form.low - shift.float(), form.high - shift.float(), out=codes).round_()
        torch.sub(codes, exact, out=error)
        return total(error, error) * width.square()

    scale, zero = grids[0]
    least = measure(scale, zero)

    def offer(tried: Tensor, shift: Tensor | None) -> None:
        nonlocal scale, zero, least
        cost = measure(tried, shift)
        wins = cost < least
        scale, least = torch.where(wins, tried, scale), torch.where(wins, cost, least)
        zero = torch.where(wins, shift, zero) if zero is not None and shift is not None else zero

    for grid in grids[1:]:
        offer(*grid)
    for _ in range(search.refinements):
        measure(scale, zero)
        # the best scale for these codes; a group of zeros keeps its scale
        fitted = total(error.copy_(codes), part) / total(exact.copy_(codes), codes)
        fitted = torch.where(torch.isfinite(fitted) & (fitted > 0), fitted, scale.float())
        offer(form.stored(fitted, scheme, whole), zero)
    return scale, zero
