"""Place the grid of a GGUF block: its scale and offset, and their integers in super-blocks.

    minimise over s, m   sum_k a_k (s v_k + m - w_k)²        v_k the nearest value to (w_k - m) / s

Some scales are tried, of either sign if the grid is longer on one side. For the values under a scale, the best scale
and offset have a closed form: a weighted regression of the weights on the values (as in ggml's `make_qx_quants` and
`make_qkx3_quants`). Here `a_k` is the Hessian's diagonal; scale and offset are rounded as stored, values chosen
again, then fitted once more; a result with a higher cost is dropped. d and dmin of super-blocks likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from quantkit.formats import SuperBlocks
from quantkit.formats.base.blocks import SUPER_BLOCK, BlockFormat, BlockGrid, SuperBlockFormat, float16
from quantkit.formats.base.layout import extremes
from quantkit.scheme import WeightScheme

# elements in one piece of work: few calls, and the temporaries still fit into the last-level cache
_CHUNK = 1 << 18
# lengths of the grid to try, as shares of the one that just spans the weights
_SHARES = tuple(torch.linspace(0.65, 1.25, 25).tolist())
# d and dmin to try, as shares of those that map the largest scale to the largest integer
_STEPS = (1.0, 0.9, 0.94, 0.97, 1.03, 1.07)
_REFINEMENTS = 3


def placed(target: Tensor, form: BlockFormat, importance: Tensor | None = None) -> BlockGrid:
    """Return the grid with the least weighted squared rounding error among those tried.

    Args:
        target: [K, N] float32, the weights transposed.
        importance: [K], not negative: cost of an error of every input; None is 1 for all. Only costs within a block are
            compared, so they are divided by their mean and may have any magnitude.

    Returns:
        scale and offset [N, G], and their stored form.
    """
    length = form.rules.groups[0]
    unit = form.rules.multiple or length
    columns, rows = target.shape
    costs = target.new_ones(columns // unit, unit, dtype=torch.float64)
    if importance is not None:
        seen = importance.double().reshape(-1, unit)
        mean = seen.mean(1, keepdim=True)
        costs = torch.where(mean > 0, seen / mean, costs)
    # an input never seen in calibration may still occur: give its errors a small cost
    costs = (costs + 1e-3).float().flatten()
    step = max(unit, _CHUNK // rows // unit * unit)
    parts = zip(target.split(step), costs.split(step), strict=True)
    grouped = ((form.folded(w.unflatten(0, (-1, length)), 1), a.reshape(-1, length, 1)) for w, a in parts)
    pieces = [_placed(_Weights(form, *pair)) for pair in grouped]
    scale, offset, *stored = (torch.cat(part).T.contiguous() for part in zip(*pieces, strict=True))
    if not stored:
        return BlockGrid(scale, offset if form.has_offset else None)
    assert isinstance(form, SuperBlockFormat)
    d, dmin = (part.to(torch.float16) for part in stored[::2])
    sc, mn = (part.to(torch.int8) for part in stored[1::2])
    return form.grid(SuperBlocks(d, sc, dmin, mn) if form.has_offset else SuperBlocks(d, sc))


def spanning(target: Tensor, form: BlockFormat, scheme: WeightScheme) -> BlockGrid:
    """Return the grid from the smallest to the largest weight of every group; arguments as for `placed`."""
    return form.held(*form.parameters(*extremes(target.T, scheme), scheme))


def storable(scale: Tensor, place: int, coarse: Tensor | None, form: BlockFormat) -> Tensor:
    """Round scales [N] of group `place` to the nearest that fit `coarse`, the scales of super-blocks [N, S], if any."""
    if coarse is None or not isinstance(form, SuperBlockFormat):
        return float16(scale).float()
    step = coarse[:, place * form.group // SUPER_BLOCK].float()
    return step * form.whole(_quotient(scale, step))


def rescaled(grid: BlockGrid, form: BlockFormat, scale: Tensor) -> BlockGrid:
    """Return a grid with scales [G, N] that are `storable` in it."""
    stored = grid.super_blocks
    if stored is None or not isinstance(form, SuperBlockFormat):
        return replace(grid, scale=scale.T.contiguous())
    step = stored.d.float().repeat_interleave(SUPER_BLOCK // form.group, dim=1)
    return form.grid(replace(stored, sc=_quotient(scale.T, step).round().to(torch.int8).contiguous()))


@dataclass(frozen=True)
class _Weights:
    """Weights [G, L, N], `folded`, and the cost of an error of each [G, L, 1]; scales and offsets are [G, N]."""

    form: BlockFormat
    exact: Tensor
    costs: Tensor

    def total(self, values: Tensor) -> Tensor:
        """`sum_k a_k values_k`."""
        return (self.costs.transpose(1, 2) @ values).squeeze(1)

    def nearest(self, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the nearest values [G, L, N], in units of the scale."""
        shifted = self.exact - offset.unsqueeze(1) if self.form.has_offset else self.exact
        return self.form.near(shifted * _quotient(1.0, scale).unsqueeze(1), dim=1)

    def cost(self, values: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the cost of values under a scale and offset."""
        return self.total((values * scale.unsqueeze(1) + offset.unsqueeze(1)).sub_(self.exact).square_())

    @cached_property
    def around(self) -> tuple[Tensor, Tensor]:
        """Mean weight [G, N], and the weights minus it."""
        mean = self.total(self.exact) / self.costs.sum(1)
        return mean, self.exact - mean.unsqueeze(1)

    def fitted(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best scale and offset for values, and their gain over the best offset alone."""
        if not self.form.has_offset:
            products = self.total(values * self.exact)
            scale = _quotient(products, self.total(values.square()))
            return scale, torch.zeros_like(scale), scale * products
        # around their means: sums of squares minus squares of sums cancel if one input costs far more than the others
        (mean, exact), count = self.around, self.costs.sum(1)
        middle = self.total(values) / count
        apart = values - middle.unsqueeze(1)
        products, squares = self.total(apart * exact), self.total(apart.square())
        slope = _quotient(products, squares)
        offset, gain = mean - slope * middle, slope * products
        if isinstance(self.form, SuperBlockFormat):  # their offsets are not positive
            products = products + count * mean * middle
            alone = _quotient(products, squares + count * middle.square())
            above = offset > 0
            gain = torch.where(above, alone * products - count * mean.square(), gain)
            slope, offset = torch.where(above, alone, slope), offset.clamp(max=0)
        return slope, offset, gain


@dataclass
class _Best:
    """Best storable grids so far, their values and costs."""

    weights: _Weights
    together: int = 1
    grid: tuple[Tensor, ...] = ()
    values: Tensor = field(init=False)
    cost: Tensor = field(init=False)

    def offer(self, scale: Tensor, offset: Tensor, grid: tuple[Tensor, ...], *, apart: bool = True) -> None:
        """Take a stored grid if it costs less: by group (`apart`), or by super-block."""
        values = self.weights.nearest(scale, offset)
        cost = self.weights.cost(values, scale, offset)
        if not self.grid:
            self.grid, self.values, self.cost = grid, values, cost
            return
        wins = cost < self.cost
        if not apart:
            lost = (cost - self.cost).unflatten(0, (-1, self.together)).sum(1)
            wins = (lost < 0).repeat_interleave(self.together, dim=0)
        small = wins[:: self.together]
        self.grid = tuple(
            torch.where(small if len(new) == len(small) else wins, new, old)
            for new, old in zip(grid, self.grid, strict=True)
        )
        self.values = torch.where(wins.unsqueeze(1), values, self.values)
        self.cost = torch.where(wins, cost, self.cost)


def _placed(weights: _Weights) -> tuple[Tensor, ...]:
    """Return scale, offset [G, N], and d, sc, dmin, mn of super-blocks."""
    scale, offset = _free(weights)
    if isinstance(weights.form, SuperBlockFormat):
        return _super_blocks(weights, weights.form, scale, offset)
    best = _Best(weights)
    for _ in range(_REFINEMENTS + 1):
        grid = (float16(scale).float(), float16(offset).float())
        best.offer(*grid, grid)
        scale, offset, _ = weights.fitted(best.values)
    return best.grid


def _free(weights: _Weights) -> tuple[Tensor, Tensor]:
    """Return the best scale and offset of those tried, in float32."""
    form = weights.form
    low, high = weights.exact.amin(1), weights.exact.amax(1)
    if form.has_offset:
        low = low.clamp(max=0) if isinstance(form, SuperBlockFormat) else low
        ends = [(high - low) / form.high]
    else:
        largest, low = torch.where(-low >= high, low, high), torch.zeros_like(low)
        # a grid that is as long on both sides needs no negative scale
        ends = [largest.abs() / form.high] if form.low == -form.high else [largest / form.low, largest / form.high]
    best, least = (ends[0], low), torch.full_like(low, -torch.inf)
    for scale in (end * share for end in ends for share in _SHARES):
        *grid, gain = weights.fitted(weights.nearest(scale, low))
        wins = gain > least
        best = (torch.where(wins, grid[0], best[0]), torch.where(wins, grid[1], best[1]))
        least = torch.maximum(gain, least)
    return best


def _super_blocks(weights: _Weights, form: SuperBlockFormat, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
    """Round scales and offsets to integers times d and dmin; these are tried, then fitted in turns."""
    low, high = form.scales
    together = SUPER_BLOCK // form.group
    best = _Best(weights, together)

    def inside(values: Tensor) -> Tensor:
        grouped: Tensor = values.unflatten(0, (-1, together))
        return grouped

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(together, dim=0)

    def scales(wanted: Tensor, d: Tensor) -> Tensor:
        return form.whole(_quotient(wanted, spread(d)))

    def offsets(wanted: Tensor, dmin: Tensor) -> Tensor:
        return _quotient(wanted, spread(dmin)).round().clamp(0, high)

    def offer(d: Tensor, sc: Tensor, dmin: Tensor, mn: Tensor, *, apart: bool = False) -> None:
        best.offer(spread(d) * sc, -(spread(dmin) * mn), (d, sc, dmin, mn), apart=apart)

    largest = inside(scale).gather(1, inside(scale).abs().argmax(1, keepdim=True)).squeeze(1)
    deepest = inside(-offset).amax(1)
    for end in (low, high) if low < 0 else (high,):
        for share in _STEPS:
            d, dmin = float16(largest / end * share).float(), float16(deepest / high * share).float()
            offer(d, scales(scale, d), dmin, offsets(-offset, dmin))
    for _ in range(_REFINEMENTS):
        # the best integers of every group for its values
        d, _, dmin, _ = best.grid
        sc = scales(weights.fitted(best.values)[0], d)
        over = weights.total(best.values * (spread(d) * sc).unsqueeze(1) - weights.exact) / weights.costs.sum(1)
        offer(d, sc, dmin, offsets(over, dmin), apart=True)
        # the best d and dmin of every super-block for these: w = d u - dmin mn, u = sc v
        _, sc, _, mn = best.grid
        units = best.values * sc.unsqueeze(1)
        uu, uw = (inside(weights.total(units * term)).sum(1) for term in (units, weights.exact))
        um, wm = (inside(weights.total(term) * mn).sum(1) for term in (units, weights.exact))
        mm = inside(weights.costs.sum(1) * mn.square()).sum(1)
        rest = uu * mm - um.square()
        # only the scales are fitted if there is no offset, or if it is parallel to the scales
        alone = rest <= 1e-6 * uu * mm
        d = torch.where(alone, _quotient(uw + um * dmin, uu), _quotient(uw * mm - wm * um, rest))
        dmin = torch.where(alone, dmin, _quotient(uw * um - wm * uu, rest).clamp(min=0))
        offer(float16(d).float(), sc, float16(dmin).float(), mn)
    d, sc, dmin, mn = best.grid
    return spread(d) * sc, -(spread(dmin) * mn), d, sc, dmin, mn


def _quotient(over: Tensor | float, under: Tensor) -> Tensor:
    """Divide, with 0 for a division by zero."""
    return torch.where(under == 0, 0.0, over / under)
