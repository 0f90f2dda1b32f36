"""AWQ: scale inputs so that important ones are rounded finely, then clip outliers that stretch the grid.

Dividing the inputs by `s` [K] and multiplying the columns of `W` by it changes nothing before rounding. After it, an
error on column k is divided by `s_k`:

    D(s) = decode(encode(W diag(s))) diag(s)⁻¹ - W        cost(s) = tr(D H Dᵀ)        s_k = m_k^α / normalisation

`m_k` is how large input k usually is, and α is searched on a grid in [0, 1]; α = 0 changes nothing, so the result is
never worse than plain rounding under this cost. One number is fitted for a group of linears, so it holds on other text.
(Lin et al., "AWQ", 2024, arXiv 2306.00978. There the cost is measured
on activations; `H` gives the same for all tokens at once, and becomes `diag(s)⁻¹ H diag(s)⁻¹` after scaling.)
On a device all α are tried at once, as far as memory allows, and the best is chosen there without a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantkit.formats.base.blocks import BlockFormat
from quantkit.formats.base.grid import load_grid
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.layout import groups_of
from quantkit.model.device import one_thread, spread
from quantkit.passes.solvers import Scaling, device, ranges
from quantkit.passes.solvers.factor import check_finite
from quantkit.scheme import WeightScheme

# elements in one piece of work, and in one that is held in floats
_CHUNK, _PIECE = 1 << 17, 1 << 23
# bytes of errors, and of their products with the Hessian, on a device at a time
_MEMORY = 3_000_000_000


def search_scales(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scheme: WeightScheme,
    *,
    grid: int = 20,
    producers: Tensor | None = None,
    channels: int | None = None,
    tied: bool = True,
    importance: Tensor | None = None,
    over: Callable[[Callable[[Tensor], float], Sequence[Tensor]], Iterable[float]] | None = None,
) -> Scaling:
    """Find the scales, among powers of the inputs' magnitude, with the least cost of rounding to nearest.

    Args:
        weights: weights [N_i, K], of any float dtype, with one input; never modified.
        hessian: [K, K] of that input; its diagonal [K] suffices beside `importance`.
        scheme: integer format, of any granularity and symmetry, or GGUF blocks.
        grid: number of α above 0, up to 1, to try.
        producers: [K] integers: channel of the module that absorbs the scale, for every input. Inputs from one channel
            (grouped heads repeat them) share a scale. None: every input has its own.
        channels: number of channels of that module; None takes the last one in `producers`.
        tied: whether any two inputs come from one channel; if not, a device skips sharing.
        importance: [K], `Factor.importance`, when GPTQ assigns the codes: the cost is then `sum_k a_k |d_k|²`, the
            error left after GPTQ has compensated it.
        over: as `map`, for the costs of what is tried, if several processes share them; None for threads.

    Returns:
        the scales, ones if none helps.

    Raises:
        InputError: `hessian-nonfinite` (on a CPU, without a wait), `group-indivisible`, `format-not-integer`.
    """
    if not device.launched(hessian):
        check_finite(hessian)
    squares = (hessian if hessian.dim() == 1 else hessian.diagonal()).float()
    with one_thread(hessian) as threads:
        costs = hessian.float() if importance is None else importance.float()
        if device.launched(hessian) and device.known(load_grid(scheme.format)):
            from quantkit.kernels.solving.losses import cheapest, powers, sizes

            powered = powers(squares if producers is None or not tied else sizes(squares, producers), grid + 1)
            target = torch.cat([weight.float().T for weight in weights], dim=1).contiguous()
            rows = [len(weight) for weight in weights]
            scales, figures = cheapest(_costs(target, rows, powered, costs, scheme), powered)
            return Scaling(scales, *figures.unbind())
        size = _shared(squares.clamp(min=0).sqrt(), producers, channels)
        exponents = torch.arange(grid + 1, dtype=torch.float64) / max(grid, 1)
        tried = [torch.ones_like(size), *(_power(size, alpha) for alpha in exponents[1:].tolist())]
        lost = torch.zeros(len(tried), dtype=torch.float64)
        for some in _pieces(weights, scheme):
            target, rows = torch.cat([part.float() for part in some]).T.contiguous(), [len(part) for part in some]
            cost = partial(_cost, target, rows, hessian=costs, scheme=scheme)
            paid = spread(cost, tried, threads) if over is None else over(cost, tried)
            lost += torch.tensor([*paid], dtype=torch.float64)
        best = int(lost.argmin())  # ties take the first
        return Scaling(tried[best], exponents[best], lost[best], lost[0])


def transformed(hessian: Tensor, scales: Tensor) -> Tensor:
    """Return the Hessian of inputs divided by `scales`: `diag(s)⁻¹ H diag(s)⁻¹`, [K, K] float32."""
    return hessian.float() / scales / scales.unsqueeze(1)


def clip(weight: Tensor, hessian: Tensor, scheme: WeightScheme, search: ranges.Search | None = None) -> Tensor:
    """Clip the weight [N, K] to the grid's ends with the least cost at the output, for every group.

    A group's cost is `d H_gg dᵀ` with its block of the Hessian, as if all other groups were exact. Rounding with
    min-max ranges then uses these grids. Raises InputError as `search_scales`.
    """
    form = ranges.integer_format(scheme)
    with one_thread(hessian) as threads:
        scale, zero = ranges.for_output(weight, scheme, hessian, search, threads)
    groups = scale.shape[1] if scheme.granularity != "tensor" else 1
    parts = weight.float().reshape(-1, groups, weight.shape[1] // groups_of(weight.shape[1], scheme))
    width = scale.float().unsqueeze(2)
    if zero is None:
        # min-max puts the ends of a symmetric grid half a step beyond the greatest code
        edge = width * (2 ** (form.bits - 1) - 0.5)
        cut = parts.clamp(-edge, edge)
    else:
        shift = zero.float().unsqueeze(2)
        cut = parts.clamp((form.low - shift) * width, (form.high - shift) * width)
    return cut.reshape(weight.shape)


def _pieces(weights: Sequence[Tensor], scheme: WeightScheme) -> Iterator[Sequence[Tensor]]:
    """Yield the rows [n, K] whose costs are added together: a thread holds a piece in floats several times."""
    columns = weights[0].shape[1]
    if not scheme.rows_apart or sum(len(weight) for weight in weights) * columns <= _PIECE:
        yield weights
    else:
        for weight in weights:
            yield from ([rows] for rows in weight.split(max(1, _PIECE // columns)))


def _power(size: Tensor, alpha: float) -> Tensor:
    """Return `m^α`, centred: the largest and the smallest scale are inverses; inputs never seen get 1."""
    seen = size > 0
    scales = size.clamp(min=1e-4 * float(size.max()) + 1e-30).pow(alpha)
    if not bool(seen.any()):
        return torch.ones_like(size)
    centre = (scales[seen].max() * scales[seen].min()).sqrt()
    return torch.where(seen, scales / centre, torch.ones_like(scales))


def _shared(size: Tensor, producers: Tensor | None, channels: int | None) -> Tensor:
    """Return the magnitude of every input's producer: the root mean square over its inputs."""
    if producers is None:
        return size.float()
    count = int(producers.max()) + 1 if channels is None else channels
    total = size.new_zeros(count).index_add_(0, producers, size.float().square())
    times = size.new_zeros(count).index_add_(0, producers, torch.ones_like(size))
    return (total / times.clamp(min=1)).sqrt()[producers]


def _costs(target: Tensor, rows: list[int], powers: Tensor, hessian: Tensor, scheme: WeightScheme) -> Tensor:
    """Return `_cost` of scalings [A, K], in as few launches as memory allows: [A, parts], to be summed."""
    from quantkit.kernels.solving.losses import losses

    form, columns = ranges.integer_format(scheme), target.shape[0]
    _, bounds, dropped = device.kept_by_bits(scheme)
    grid = (columns // groups_of(columns, scheme), form.low, form.high, scheme.symmetric, bounds, dropped)
    whole = scheme.granularity == "tensor"
    lost = []
    for part in torch.split(target, rows, dim=1) if whole else [target]:
        part, ends = part.contiguous(), None  # noqa: PLW2901
        if whole:
            # positive scales keep the order, so the smallest and largest weight of an input suffice
            low, high = ((powers * end).aminmax(dim=1) for end in (part.amin(dim=1), part.amax(dim=1)))
            scale, zero = form.parameters(low.min, high.max, scheme)
            ends = torch.stack([scale.float(), torch.zeros_like(low.min) if zero is None else zero.float()], dim=1)
        if hessian.dim() == 1:
            lost.append(losses(part, powers, hessian.contiguous(), ends, *grid))
            continue
        # three arrays: the errors, their product with the Hessian, and a copy
        paid, step = [], max(1, _MEMORY // (3 * part.numel() * part.element_size()))
        starts = range(0, len(powers), step)
        for start, some in zip(starts, powers.split(step), strict=True):
            error = losses(part, some, None, None if ends is None else ends[start : start + step], *grid)
            flat = error.flatten(1)
            paid.append((hessian @ flat).mul_(flat).view_as(error).sum(dim=(0, 2), dtype=torch.float64))
        lost.append(torch.cat(paid).unsqueeze(1))
    return lost[0] if len(lost) == 1 else torch.cat(lost, dim=1)


def _cost(target: Tensor, rows: list[int], scales: Tensor, hessian: Tensor, scheme: WeightScheme) -> float:
    """Return `tr(D H Dᵀ)` for rounding the scaled target [K, N] to nearest."""
    columns = target.shape[0]
    plain = ranges.Search(steps=0, refinements=0)
    form = load_grid(scheme.format)
    if not isinstance(form, BlockFormat):
        form = ranges.integer_format(scheme)
    if scheme.rows_apart and isinstance(form, IntegerFormat):
        groups = groups_of(columns, scheme)
        if ranges.compiled(form, hessian, columns // groups, target):
            costs = hessian / scales.square()
            return float(ranges.looped(target, costs, groups, form, scheme, factors=scales)[2].double().sum())
    scaled, total = target * scales.unsqueeze(1), 0.0
    for part, original in zip(torch.split(scaled, rows, dim=1), torch.split(target, rows, dim=1), strict=True):
        if scheme.granularity == "tensor":
            scale, zero = ranges.transposed(part.reshape(-1, 1), part.numel(), scheme, None, plain)
        else:
            length = columns // groups_of(columns, scheme)
            scale, zero = ranges.transposed(part, length, scheme, None, plain)
        # as many columns at a time as a cache holds, so that intermediate results stay in it
        for piece in torch.arange(part.shape[1]).split(max(1, _CHUNK // columns)):
            at = slice(int(piece[0]), int(piece[-1]) + 1)
            grid = slice(None) if scale.shape[1] == 1 else at
            width, shift = scale[:, grid].unsqueeze(1), None if zero is None else zero[:, grid].unsqueeze(1)
            grouped = part[:, at].reshape(scale.shape[0], -1, piece.numel())
            error = form.decode(form.encode(grouped, width, shift), width, shift).reshape(columns, -1)
            error.div_(scales.unsqueeze(1)).sub_(original[:, at])
            if hessian.dim() == 1:
                total += float((hessian @ error.square_()).double().sum())
            else:
                total += float(torch.linalg.vecdot(error, hessian @ error, dim=0).double().sum())
    return total
