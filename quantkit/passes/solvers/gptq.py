"""GPTQ: choose codes one input at a time; every choice compensates the errors of those before it.

The output error of codes `Q` against weights `W` [N, K] on inputs with Hessian `H = Xᵀ X` is `tr(D H Dᵀ)`, `D = Q - W`.
With `H = M Mᵀ`, M upper triangular, it is `||D M||²`, and column j of `D M` holds only d_0 … d_j:

    (D M)_j = M_jj (d_j + sum_{i<j} d_i M_ij / M_jj)        so        q_j = round(w_j - sum_{i<j} d_i M_ij / M_jj)

This is the update of the paper (Frantar et al., "GPTQ", 2023, arXiv 2210.17323) without its inverse: there
`U = chol(H⁻¹)`, here `M = U⁻¹`, one Cholesky of the reversed matrix. It is Babai's nearest plane for the lattice of
codes (Chen et al., "The Geometry of LLM Quantization", 2025).

- Columns go in order of falling `H_jj` (activation order): the most important ones are rounded while most columns are
  left to compensate. Ranges are fixed before (static groups), so codes stay in the order of the weights.
- Columns of a block are chosen one by one for all rows at once; the errors of earlier blocks arrive by one matrix
  product a block. On a device all of it is one launch (`kernels/solving/gptq.py`).
- Where neighbours are coded by one point (`lattice.py`), they are chosen at once; their errors are fed back as before.
- Sweeps of coordinate descent follow: with all other codes fixed, the best q_j is `round(w_j + d_j - (D H)_j / H_jj)`,
  and the best scale of a group has a closed form (Behdin et al., "QuantEase", 2023, arXiv 2309.01885).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats import QuantTensor, joined
from quantkit.formats import apart as split_rows
from quantkit.formats.base.blocks import BlockFormat, BlockGrid
from quantkit.formats.base.grid import GridFormat, effective, load_grid
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.formats.base.layout import groups_of
from quantkit.kernels.cpu import columns as loops
from quantkit.model.device import one_thread, spread
from quantkit.passes.solvers import blocks, device, lattice, ranges, unsaturated
from quantkit.passes.solvers.factor import Factor, factor
from quantkit.passes.solvers.gptq_grid import CodeGrid, Range, inverted, placed
from quantkit.scheme import WeightScheme

# columns chosen one by one before the others are updated; small enough that a block stays in the cache
_BLOCK = 32
# rows of a weight that a thread chooses together; elements, where each is held seven times in float32; such threads
_SOME, _PIECE, _PIECES = 256, 1 << 21, 8
# bytes of weights whose outputs have curvatures, solved at once on a CPU; columns whose errors are fed back together,
# and rows whose costs are found together
_AT_ONCE, _FED, _COSTED = 4 << 30, 2048, 256
# rows that the loops in C take at a time: `ROWS` of columns.c
_ROWS = 32
# bands of rows that compensate one another, and columns that a band is ahead of the next
_BANDS, _STEP = 32, 16
# bands of rows that descend in turns: the first number in which rows of a band are coupled by no more than this (the
# largest eigenvalue of their correlations, after steps of the power method; 1: not at all)
_TURNS, _COUPLED, _POWERS = (1, 2, 4, 8), 1.6, 8


@dataclass(frozen=True)
class GptqResult:
    """Result of a solve.

    Args:
        damping: share of the Hessian's mean diagonal that was added to it; `raised` is how often it was raised.
        costs: [N] float32, `(D H Dᵀ)_nn` of every row with the damped Hessian: its squared output error over the
            tokens.
    """

    tensor: QuantTensor
    damping: float
    raised: int
    costs: Tensor

    @property
    def error(self) -> Tensor:
        """`tr(D H Dᵀ)`, [] float64."""
        return self.costs.double().sum()


def gptq(weight: Tensor, hessian: Tensor | Factor, scheme: WeightScheme, **settings: Any) -> GptqResult:
    """Choose the codes of one weight [N, K]; settings are those of `gptq_shared`."""
    return gptq_shared([weight], hessian, scheme, **settings)[0]


def gptq_shared(
    weights: Sequence[Tensor],
    hessian: Tensor | Factor,
    scheme: WeightScheme,
    *,
    damping: float = 0.01,
    shrink: float = 0.3,
    act_order: bool = True,
    range: Range = "hessian",  # noqa: A002
    sweeps: int = 0,
    refit: bool = True,
    neighbours: Tensor | None = None,
    outputs: Sequence[Callable[[], Factor | None]] | None = None,
) -> list[GptqResult]:
    """Choose the codes of weights with one input, by one factor of their Hessian.

    Args:
        weights: weights [N_i, K], of any float dtype; never modified.
        hessian: [K, K] of their input, or its `Factor` (which has its own `damping`, `shrink` and `act_order`), in
            whose order neighbours that are chosen `together` follow each other.
        scheme: scheme of all weights. They share the numbers that exist once for a whole matrix, if the format says so.
        range: placement of a group's grid: `minmax`, `mse` (searched) or `hessian` (searched, weighted by diag H).
        sweeps: rounds of coordinate descent on the codes afterwards.
        refit: whether to refit the scales in these rounds; for integer formats and GGUF blocks, in groups up to 64,
            whose columns are visited together.
        neighbours: [K], column that each is added to in 16 bits (`unsaturated`). For int8, a scale a channel, no zero
            points or sweeps.
        outputs: function of each weight that factors `E[g gᵀ]` [N_i, N_i], g the gradient of its output; None from it
            if outputs are equally dear. Called one at a time and thread, since each is as large as a Hessian.

    Raises:
        InputError: `hessian-nonfinite`, `hessian-not-positive`, `group-indivisible`, `format-without-scale`.
    """
    form = load_grid(scheme.format)
    if not isinstance(hessian, Factor):
        hessian = factor(hessian, damping=damping, shrink=shrink, act_order=act_order, together=together(form))
    solved, rows, columns = hessian, [weight.shape[0] for weight in weights], weights[0].shape[1]
    if scheme.rows_apart and isinstance(form, IntegerFormat) and outputs is None and not device.launched(weights[0]):
        length = columns // groups_of(columns, scheme)
        if not sweeps and neighbours is None and length <= ranges.LONGEST and loops.ready() is not None:
            solve = partial(_at_once, solved=solved, unit=loops.laid(solved.unit), form=form, scheme=scheme, kind=range)
            return _in_pieces(weights, solve)
        if len(rows) > 1 or _step(rows[0], columns, _PIECE) < rows[0]:
            how: dict[str, Any] = {"range": range, "sweeps": sweeps, "refit": refit, "neighbours": neighbours}
            return _in_pieces(weights, lambda piece: gptq(piece, solved, scheme, **how), _PIECE)
    largest = max(8 * count**2 + 20 * count * columns for count in rows) if outputs is not None else 0
    if outputs is not None and len(rows) > 1 and scheme.rows_apart and 2 * largest > _AT_ONCE:
        # curvatures fill the memory, so one weight is solved after another
        how = {"range": range, "sweeps": sweeps, "refit": refit}
        pairs = zip(weights, outputs, strict=True)
        return [gptq_shared([weight], solved, scheme, outputs=[by], **how)[0] for weight, by in pairs]
    with one_thread(weights[0]) as threads:
        group = (scheme.group or columns) if scheme.granularity == "block" else columns // groups_of(columns, scheme)
        # transposed, so that work on a column of all weights is one vector operation
        if device.launched(weights[0]):
            target = torch.cat([weight.float().T for weight in weights], dim=1).contiguous()
        else:
            target = (torch.cat([*weights]) if len(weights) > 1 else weights[0]).float().T.contiguous()
        whole = None if isinstance(form, IntegerFormat) else form.global_scale(target.abs().amax(), scheme)
        scale: Tensor
        zero: Tensor | None = None
        block: BlockGrid | None = None
        if isinstance(form, BlockFormat):
            costs = solved.diagonal if range == "hessian" else None
            spans = range == "minmax"
            block = blocks.spanning(target, form, scheme) if spans else blocks.placed(target, form, costs)
            scale = block.scale.T.contiguous()
            if block.offset is not None:  # weights minus the offset lie on a grid that begins at zero
                target = target - block.offset.T.repeat_interleave(group, dim=0)
        elif neighbours is None:
            lots = [sum(rows)] if form.shares_scale(scheme) else rows
            scale, zero = placed(target, lots, group, scheme, solved, range, threads)
        else:
            scale = unsaturated.scales(target, neighbours, solved.diagonal)[None]
        coarse = None if block is None or block.super_blocks is None else block.super_blocks.d
        grid = CodeGrid(form, scheme, group, scale, zero, coarse)
        refit = refit and isinstance(form, IntegerFormat | BlockFormat) and group <= 64
        refit = refit and scheme.granularity in ("group", "channel")
        if outputs is not None:
            own = [slice(end - count, end) for end, count in zip(accumulate(rows), rows, strict=True)]

            at_once = threads if len(rows) > 1 and threads * largest <= _AT_ONCE else 1

            def apart_of(pair: tuple[slice, Callable[[], Factor | None]]) -> tuple[Tensor, Tensor]:
                one, by = pair
                return _by_outputs(target[:, one], solved, grid.of(one), sweeps, refit, by, threads // at_once)

            apiece = spread(apart_of, zip(own, outputs, strict=True), at_once)
            codes, errors = (torch.cat(parts, dim=-1) for parts in zip(*apiece, strict=True))
        else:
            codes, errors = _by_inputs(target, solved, grid, neighbours, sweeps, refit, threads)
        if isinstance(form, BlockFormat) and block is not None:
            block = blocks.rescaled(block, form, scale)
            tensors = split_rows(form.on(form.coded(codes.T.contiguous()), block, scheme), rows)
        elif scheme.rows_apart:
            tensors = split_rows(grid.tensor(codes, whole), rows)
        else:
            shifts = [None] * len(rows) if zero is None else zero.split(rows, dim=1)
            parts = zip(codes.split(rows, dim=1), scale.split(rows, dim=1), shifts, strict=True)
            tensors = [replace(grid, scale=own, zero=shift).tensor(part, whole) for part, own, shift in parts]
        results = zip(tensors, errors.split(rows), strict=True)
        return [GptqResult(tensor, solved.damping, solved.raised, costs) for tensor, costs in results]


def _step(rows: int, columns: int, most: int | None) -> int:
    """Return the rows of a piece: whole vectors, at most so many elements, and pieces of a weight about as large."""
    count = max(1, -(-rows // _SOME), 1 if most is None else -(-rows * columns // most))
    return max(_ROWS, -(-rows // (count * _ROWS)) * _ROWS)


def _in_pieces(
    weights: Sequence[Tensor], solve: Callable[[Tensor], GptqResult], most: int | None = None
) -> list[GptqResult]:
    """Choose the codes of weights [N, K] whose rows are independent, some rows at a time and a thread.

    Args:
        most: elements of a piece, for `solve` that holds it several times: it then runs on few threads.
    """
    cut, whole = [weight.split(_step(weight.shape[0], weight.shape[1], most)) for weight in weights], []
    with one_thread(weights[0]) as threads:
        at_once = threads if most is None else min(threads, _PIECES)
        results = iter(spread(solve, [piece for parts in cut for piece in parts], at_once))
    for parts in cut:
        own = [*islice(results, len(parts))]
        costs = torch.cat([part.costs for part in own])
        whole.append(replace(own[0], tensor=joined([part.tensor for part in own]), costs=costs))
    return whole


def _at_once(
    weight: Tensor, solved: Factor, unit: Tensor, form: IntegerFormat, scheme: WeightScheme, kind: Range
) -> GptqResult:
    """Choose whole numbers of independent rows by one call in C, grids included."""
    columns = weight.shape[1]
    search = ranges.Search(steps=0, refinements=0) if kind == "minmax" else ranges.Search()
    dear = solved.diagonal if kind == "hessian" else torch.ones(columns)
    solver = (unit, solved.order, solved.pivots, dear, columns // groups_of(columns, scheme))
    how: dict[str, Any] = {"symmetric": scheme.symmetric, "shares": search.shares, "refinements": search.refinements}
    codes, scale, zero, costs = loops.solve(weight.float(), *solver, *ranges.bounds(form, scheme), **how)
    tensor = QuantTensor(codes, scale.to(effective(scheme)), None if scheme.symmetric else zero.to(torch.int8), scheme)
    return GptqResult(tensor, solved.damping, solved.raised, costs)


def together(form: GridFormat) -> int:
    """Return the number of neighbouring columns that a factor has to keep together."""
    return form.unit if isinstance(form, LatticeFormat) else 1


def _choose(
    target: Tensor, solved: Factor, grid: CodeGrid, neighbours: Tensor | None, threads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values in units of the scale [K, N], the cost of every row [N], and `D` [K, N], in the weights' order."""
    columns, rows = target.shape
    if neighbours is None and grid.compiled(target):
        codes, delta, cost = _looped(loops.laid(solved.unit), solved, grid.group, grid.tables(), target, threads)
        return codes, cost, delta
    if device.launched(target) and device.known(grid.form) and neighbours is None:
        from quantkit.kernels.solving.gptq import choose

        factored = (solved.unit.contiguous(), solved.pivots, solved.order)
        codes, delta, cost = choose(target, *factored, *grid.launch(target), grid.group, device.precision())
        return codes, cost, delta
    ordered = target[solved.order]
    back = torch.empty_like(solved.order)
    back[solved.order] = torch.arange(columns, device=target.device)
    columnwise = solved.unit.mT.contiguous().mT
    beside = None if neighbours is None else back[neighbours[solved.order]].tolist()
    groups = (solved.order // grid.group).tolist()
    inverse, steps = inverted(grid.scale).unbind(0), grid.scale.unbind(0)
    snap, ends = grid.snap(), [*zip(*grid.ends(), strict=True)] or [()] * len(steps)
    form = grid.points
    codes, delta = torch.empty_like(ordered), torch.empty_like(ordered)
    code_rows, delta_rows, wanted = codes.unbind(0), delta.unbind(0), ordered.unbind(0)
    cost = target.new_zeros(rows)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        pending = torch.addmm(ordered[start:stop], columnwise[:start, start:stop].T, delta[:start], alpha=-1)
        within = columnwise[start:stop, start:stop]
        if form is not None:
            for offset in range(0, stop - start, form.unit):
                own, column = slice(offset, offset + form.unit), start + offset
                part, place, after = slice(column, column + form.unit), groups[column], within[own]
                costs, scales = solved.pivots[part, None], (steps[place], inverse[place])
                codes[part] = lattice.unit(form, pending[own], ordered[part], after[:, own], costs, scales)
                torch.mul(codes[part], steps[place], out=delta[part]).sub_(ordered[part])
                pending[offset:].addmm_(after[:, offset:].triu(1).T, delta[part], alpha=-1)
        for offset, aim in enumerate(pending.unbind(0) if form is None else ()):
            column = start + offset
            place = groups[column]
            code, error = code_rows[column], delta_rows[column]
            snap(torch.mul(aim, inverse[place], out=code), code, *ends[place])
            if beside is not None and beside[column] < column:
                unsaturated.hold(code, code_rows[beside[column]])
            torch.mul(code, steps[place], out=error).sub_(wanted[column])
            if column + 1 < stop:
                pending[offset + 1 :].addr_(within[offset, offset + 1 :], error, alpha=-1)
        missed = ordered[start:stop].add(delta[start:stop]).sub_(pending).square_()
        cost += solved.pivots[start:stop] @ missed
    return codes[back], cost, delta[back]


def _looped(
    unit: Tensor, solved: Factor, group: int, tables: Sequence[Tensor], wanted: Tensor, threads: int
) -> tuple[Tensor, ...]:
    """Return values, `D` and the cost of every row from compiled loops, whose rows share nothing, on all threads."""
    rows = wanted.shape[1]
    step = max(_ROWS, -(-rows // (threads * _ROWS)) * _ROWS)

    def some(start: int) -> tuple[Tensor, ...]:
        own = slice(start, start + step)
        return loops.choose(
            unit, solved.order, group, solved.pivots, [table[:, own] for table in tables], wanted[:, own]
        )

    parts = spread(some, range(0, rows, step), threads)
    return parts[0] if len(parts) == 1 else tuple(torch.cat(part, dim=-1) for part in zip(*parts, strict=True))


def _by_inputs(
    target: Tensor,
    solved: Factor,
    grid: CodeGrid,
    neighbours: Tensor | None,
    sweeps: int,
    refit: bool,
    threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return values in units of the scale [K, N], and the cost of every row [N], after sweeps."""
    codes, errors, delta = _choose(target, solved, grid, neighbours, threads)
    return codes, _descend(target, codes, delta, solved.hessian, grid, sweeps, refit) if sweeps else errors


def _by_outputs(
    target: Tensor,
    solved: Factor,
    grid: CodeGrid,
    sweeps: int,
    refit: bool,
    by: Callable[[], Factor | None],
    threads: int,
) -> tuple[Tensor, Tensor]:
    """Return the same for one weight, whose errors cost what its outputs' do."""
    outputs = by()
    if outputs is None:
        own = replace(grid, scale=grid.scale.contiguous())
        codes, errors = _by_inputs(target.contiguous(), solved, own, None, sweeps, refit, threads)
        grid.scale.copy_(own.scale)
        return codes, errors
    codes, delta = _choose_by_rows(target, solved, grid, outputs, threads)
    curve = outputs.hessian
    del outputs  # its factor is not needed again
    if sweeps:
        _descend_by_rows(target, codes, delta, solved.hessian, grid, sweeps, refit, curve)
        return codes, (solved.hessian @ delta).mul_(delta).sum(dim=0)

    def cost(some: Tensor) -> Tensor:
        return solved.pivots @ (solved.unit.T @ some[solved.order]).square_()

    return codes, torch.cat(spread(cost, delta.split(_COSTED, dim=1), threads))


def _choose_by_rows(
    target: Tensor, solved: Factor, grid: CodeGrid, outputs: Factor, threads: int
) -> tuple[Tensor, Tensor]:
    """Return values and `D` as `_choose`, of one weight; a band of rows also compensates errors of those before it.

    Where the loops over columns are compiled, bands choose one after another. Else band b is b steps of columns behind
    the first, so that all choose at once, each in columns of its own.
    """
    columns, rows = target.shape
    size = -(-rows // _BANDS)
    turned_back = outputs.order.argsort()
    if grid.compiled(target):
        wanted, laid = target[:, outputs.order], loops.laid(solved.unit)
        codes, delta = torch.empty_like(wanted), torch.empty_like(wanted)
        turned = [table[:, outputs.order] for table in grid.tables()]
        for start in range(0, rows, size):
            some = slice(start, start + size)
            before = outputs.unit[:start, some]
            parts = spread(lambda errors, by=before: errors[:, : len(by)] @ by, delta.split(_FED), threads)  # type: ignore[misc]
            asks = wanted[:, some] - torch.cat(parts)
            on = [table[:, some] for table in turned]
            codes[:, some], off, _ = _looped(laid, solved, grid.group, on, asks, threads)
            delta[:, some] = off.add_(asks).sub_(wanted[:, some])
        del wanted
        codes = codes[:, turned_back]
        return codes, delta[:, turned_back]
    bands, strides = -(-rows // size), -(-columns // _STEP)
    # the last band is filled up with the last row; the last step with columns of no cost
    there = target.device
    position = torch.arange(bands * size, device=there).clamp(max=rows - 1)
    row, fed = outputs.order[position].view(bands, size), outputs.unit[:, position]
    more = strides * _STEP - columns
    unit = pad(solved.unit, (0, more, 0, more))
    order = torch.cat((solved.order, solved.order[-1:].expand(more)))
    group, wanted = order // grid.group, target[order][:, row]
    codes, delta, missed = (torch.empty_like(wanted) for _ in range(3))  # `missed`: of what is asked of a column
    tables, snap = grid.tables(), grid.snap()
    form = grid.points
    for step in range(strides + bands - 1):
        running = range(max(0, step - strides + 1), min(bands, step + 1))
        active = torch.arange(running.start, running.stop, device=there)
        column = (step - active) * _STEP + torch.arange(_STEP, device=there)[:, None]
        asked = wanted[column, active]
        own = [(band, slice((step - band) * _STEP, (step - band + 1) * _STEP)) for band in running]
        for aim, (band, part) in zip(asked.unbind(1), own, strict=True):
            aim.addmm_(delta[part, :band].flatten(1), fed[: band * size, band * size : (band + 1) * size], alpha=-1)
        aims = asked.clone()
        for aim, (band, part) in zip(aims.unbind(1), own, strict=True):
            aim.addmm_(unit[: part.start, part].T, missed[: part.start, band], alpha=-1)
        within = unit[column.T[:, :, None], column.T[:, None]].permute(1, 2, 0)[..., None]
        steps, inverse, *ends = (table[group[column][..., None], row[active]].flatten(1) for table in tables)
        chosen, errors = torch.empty_like(steps), torch.empty_like(asked)
        if form is not None:
            for offset in range(0, _STEP, form.unit):
                these = slice(offset, offset + form.unit)
                across = within[these].expand(-1, -1, -1, size)
                costs = solved.pivots[column[these]].repeat_interleave(size, dim=1)
                wish, want = aims[these].flatten(1), asked[these].flatten(1)
                scales = (steps[offset], inverse[offset])
                chosen[these] = lattice.unit(form, wish, want, across[:, these].flatten(2), costs, scales)
                errors[these] = (chosen[these] * steps[offset] - want).view_as(errors[these])
                aims[offset + form.unit :] -= (across[:, offset + form.unit :] * errors[these][:, None]).sum(0)
        for offset, (aim, code, error) in enumerate(zip(aims, chosen, errors, strict=True) if form is None else ()):
            snap(torch.mul(aim.view(-1), inverse[offset], out=code), code, *(end[offset] for end in ends))
            torch.mul(code, steps[offset], out=error.view(-1)).sub_(asked[offset].view(-1))
            if offset + 1 < _STEP:
                aims[offset + 1 :].addcmul_(within[offset, offset + 1 :], error, value=-1)
        codes[column, active], missed[column, active] = chosen.view_as(asked), errors
        delta[column, active] = errors + asked - wanted[column, active]
    back = solved.order.argsort()[:, None], turned_back
    codes, delta = codes.flatten(1)[back], delta.flatten(1)[back]
    return codes, delta


def _descend(
    target: Tensor, codes: Tensor, delta: Tensor, hessian: Tensor, grid: CodeGrid, sweeps: int, refit: bool
) -> Tensor:
    """Run coordinate descent on codes, and on scales if `refit`, in place; returns the cost of every row [N]."""
    if device.launched(target) and device.known(grid.form):
        from quantkit.kernels.solving.gptq import descend

        _, bounds, dropped = device.kept_by_bits(grid.scheme) if refit else (None, [0.0, 0.0], [0, 0])
        how = (bounds, dropped, grid.group, sweeps, refit, device.precision())
        descend(target, codes, delta, hessian.contiguous(), *grid.launch(target), *how)
        return (hessian @ delta).mul_(delta).sum(dim=0)
    scale, form, columns = grid.scale, grid.form, target.shape[0]
    points, gradient = grid.points, hessian @ delta
    pull = (hessian / hessian.diagonal()).contiguous()  # pull[i, j] = H_ij / H_jj
    snap, ends = grid.snap(), [*zip(*grid.ends(), strict=True)] or [()] * len(scale)
    free, compiled = target.new_empty(target.shape[1]), grid.compiled(target)
    # a block has one scale, so it ends at the end of a group
    length = max(size for size in range(1, 65) if grid.group % size == 0)
    for _ in range(sweeps):
        for start in range(0, columns, length):
            stop = start + length
            place = start // grid.group
            block, local = slice(start, stop), gradient[start:stop]
            before = delta[block].clone()
            if refit:
                bent = hessian[block, block] @ codes[block]
                along = (codes[block] * local).sum(dim=0)
                step = scale[place] - along / (codes[block] * bent).sum(dim=0)
                fits = torch.isfinite(step) & (step * scale[place] > 0)
                step = torch.where(fits, step, scale[place])
                if isinstance(form, BlockFormat):
                    step = blocks.storable(step, place, grid.coarse, form)
                else:
                    step = torch.where(fits, form.stored(step, grid.scheme).float(), scale[place])
                change = step - scale[place]
                local = torch.addcmul(local, change, bent)
                delta[block].addcmul_(change, codes[block])
                scale[place] = step
            # the best change of every column's error: -gradient / curvature
            wish = local / hessian.diagonal()[block].unsqueeze(1)
            inside = pull[block, block]
            inverse = inverted(scale[place])
            size = 1 if points is None else points.length
            if points is not None:
                for offset in range(0, length, size):
                    part, own = slice(start + offset, start + offset + size), slice(offset, offset + size)
                    curve, scales = hessian[part, part], (scale[place], inverse)
                    slope = curve @ (target[part] + delta[part]) - wish[own] * curve.diagonal()[:, None]
                    best = torch.linalg.solve(curve, slope)
                    codes[part] = lattice.descended(points, curve, slope, best, codes[part], scales)
                    moved = codes[part] * scale[place] - target[part] - delta[part]
                    delta[part] += moved
                    wish[offset + size :].addmm_(inside[own, offset + size :].T, moved)
            if compiled:
                tables = (scale[place], inverse, *ends[place])
                loops.descend(inside, tables, target[block], wish, codes[block], delta[block])
            for offset, slope in enumerate(wish.unbind(0) if size == 1 and not compiled else ()):
                column = start + offset
                code, error = codes[column], delta[column]
                snap(torch.add(target[column], error, out=free).sub_(slope).mul_(inverse), code, *ends[place])
                torch.mul(code, scale[place], out=free).sub_(target[column])
                moved = free - error
                error.copy_(free)
                if column + 1 < stop:
                    wish[offset + 1 :].addr_(inside[offset, offset + 1 :], moved)
            gradient.addmm_(hessian[:, block], delta[block] - before)
    return (gradient * delta).sum(dim=0)


def _descend_by_rows(
    target: Tensor,
    codes: Tensor,
    delta: Tensor,
    hessian: Tensor,
    grid: CodeGrid,
    sweeps: int,
    refit: bool,
    curve: Tensor,
) -> None:
    """Run `_descend` on bands of rows in turns, in place; a band answers for the errors of all rows.

    With S the curvature of the outputs, the cost `tr(S D H Dᵀ)` is, for row n with the others fixed, that of the error
    `(S D)_n / S_nn` alone. Rows of one band move at once, so their curvature is raised as far as they are coupled.
    """
    bands, coupled = _bands(curve)
    pull = curve / (max(1.0, coupled / _COUPLED) * curve.diagonal())
    for number in [*range(bands)] * sweeps:
        band = slice(number, None, bands)
        felt, chosen, part = delta @ pull[:, band], codes[:, band].contiguous(), grid.of(band)
        part, moved = replace(part, scale=part.scale.contiguous()), target[:, band] + delta[:, band]
        moved -= felt
        _descend(moved, chosen, felt, hessian, part, 1, refit)
        codes[:, band], grid.scale[:, band] = chosen, part.scale
        delta[:, band] = felt.add_(moved).sub_(target[:, band])


def _bands(curve: Tensor) -> tuple[int, float]:
    """Return a number of bands of every n-th row, and how rows of one band are coupled by their curvature [N, N]."""
    for bands in _TURNS:
        coupled = 1.0
        for number in range(bands):
            inside = curve[number::bands, number::bands]
            shape, size = torch.ones(len(inside), device=curve.device), torch.ones((), device=curve.device)
            for _ in range(_POWERS):
                shape = inside @ (shape / size / inside.diagonal())
                size = shape.norm()
            coupled = max(coupled, float(size))
        if coupled <= _COUPLED:
            break
    return bands, coupled
