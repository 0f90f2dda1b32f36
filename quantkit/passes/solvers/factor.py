"""Factor a Hessian `H = XᵀX`, shrunk and damped, in the order in which columns are chosen.

`H = M Mᵀ`, M upper triangular, from one Cholesky of the reversed matrix. `M_jj²` is the cost of an error on
input j at the output after all later inputs have compensated it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.model.device import one_thread, spread

# number of times that damping is raised tenfold before the Hessian is refused
ATTEMPTS = 6
# rows and columns of a block of a large matrix
_PANEL = 512
# rows below a block that a thread takes, and rows that it brings in order at a time
_ROWS, _TURNED = 256, 64
T = TypeVar("T")


@dataclass(frozen=True)
class Factor:
    """A damped Hessian, and its factor in the order in which columns are chosen.

    Args:
        hessian: [K, K] float32, damped, in the order of the weights; [0, 0] where only its diagonal was asked for.
        order: [K], columns in the order in which they are chosen.
        unit: [K, K] upper triangular with unit diagonal, `M_ij / M_jj` in that order.
        pivots: [K], `M_jj²`: cost of a squared error of column j after all later ones have compensated it. On a device,
            without a wait, they are not finite if there is no factor.
        damping: share of the mean diagonal that was added; `raised` is how often it was raised.
        laid: the Hessian's diagonal and `importance` as contiguous tensors: on a device, or without the Hessian.
    """

    hessian: Tensor
    order: Tensor
    unit: Tensor
    pivots: Tensor
    damping: float
    raised: int
    laid: tuple[Tensor, Tensor] | None = None

    @property
    def diagonal(self) -> Tensor:
        """Diagonal of the damped Hessian, [K] in the order of the weights."""
        return self.hessian.diagonal() if self.laid is None else self.laid[0]

    @property
    def importance(self) -> Tensor:
        """Cost of a squared error of every column after later ones have compensated it, [K] in the weights' order.

        GPTQ's own measure for ranges and scales: the diagonal without the part that GPTQ recovers.
        """
        if self.laid is not None:
            return self.laid[1]
        spread = torch.empty_like(self.pivots)
        spread[self.order] = self.pivots
        return spread


def check_finite(hessian: Tensor, where: str = "") -> None:
    """Refuse a Hessian with NaN or infinity. Raises InputError (`hessian-nonfinite`)."""
    # one sum tells in an eighth of the time, unless it overflows
    if not bool(torch.isfinite(hessian.sum())) and not all(
        bool(torch.isfinite(rows).all()) for rows in hessian.split(_PANEL)
    ):
        value = f"{int((~torch.isfinite(hessian)).sum())} of {hessian.numel()} entries are NaN or infinite"
        rule = "the activations of the calibration text have to be finite"
        remedy = "compute in float32, or leave this layer in high precision with an override"
        raise InputError("hessian-nonfinite", where, value, rule, remedy)


def raised_damping(damping: float, times: int) -> float:
    """Return `damping` raised tenfold so many times."""
    for _ in range(times):
        damping = max(damping * 10, 1e-4)
    return damping


def no_factor(damping: str, where: str = "") -> InputError:
    """Make the error for a Hessian without a factor at any damping."""
    value, rule = f"no Cholesky factor with damping {damping}", "a Hessian is a sum of squares"
    remedy = "use more calibration text, or leave this layer in high precision with an override"
    return InputError("hessian-not-positive", where, value, rule, remedy)


def factor(
    hessian: Tensor,
    *,
    damping: float = 0.01,
    shrink: float | Tensor = 0.3,
    act_order: bool = True,
    together: int = 1,
    raised: int = 0,
    where: str = "",
    own: bool = False,
    whole: bool = True,
) -> Factor:
    """Shrink, damp and factor a Hessian; on a CPU damping is raised tenfold until that succeeds.

    On a GPU there is no wait: the caller checks `Factor.pivots` later, and calls again with a larger `raised`, up to
    `ATTEMPTS`.

    Args:
        hessian: [K, K], symmetric, `Xᵀ X` of the inputs, in any scale. Inputs never seen (zero diagonal) are allowed.
        damping: share of the mean diagonal added to the diagonal.
        shrink: share taken off the off-diagonal entries, 0 to 1: the correlations of a finite sample are too large.
            At 1 nothing is compensated: that is plain rounding.
        act_order: whether to choose columns in order of falling diagonal (ties by index), else from left to right.
        together: number of neighbouring columns, which stay so: their order is that of their sums.
        where: name of the linear, for errors.
        own: True for a Hessian that nobody else needs: on a CPU, if `whole`, it is overwritten.
        whole: False to keep only the damped Hessian's diagonal, for solvers that do not sweep.

    Raises:
        InputError: on a CPU `hessian-nonfinite`; `hessian-not-positive` when no damping helps.
    """
    if hessian.is_cuda:
        return _unawaited(hessian, raised_damping(damping, raised), shrink, act_order, together, raised)
    check_finite(hessian, where)
    diagonal = hessian.diagonal().float()
    mean = float(diagonal.mean())
    if mean <= 0:  # no input was ever seen: an identity gives plain rounding, the best choice
        hessian, diagonal, mean = torch.eye(len(diagonal)), torch.ones(len(diagonal)), 1.0
    diagonal, damped = diagonal.clone(), hessian.float()
    if whole:
        damped = damped.mul_(1 - shrink) if own else damped * (1 - shrink)
    del hessian
    order = _falling(diagonal, together) if act_order else torch.arange(len(diagonal))
    backwards = order.flip(0)
    turned = torch.empty_like(damped, memory_format=torch.contiguous_format)
    for times in range(ATTEMPTS):
        _turn(damped, backwards, turned, 1.0 if whole else 1 - shrink)
        share = raised_damping(damping, times)
        added = torch.zeros_like(diagonal)
        added += share * mean
        # a column without input costs nothing; a small cost keeps it at the nearest code
        added[diagonal <= 0] += mean
        turned.diagonal().copy_((diagonal + added)[backwards])
        if not factorize(turned) and bool(torch.isfinite(turned.diagonal()).all()):
            _reverse(turned.view(-1))
            pivots = turned.diagonal().clone()
            unit, costs = turned.div_(pivots), diagonal + added
            if whole:
                damped.diagonal().copy_(costs)
                return Factor(damped, order, unit, pivots.square(), share, times)
            solved = Factor(damped.new_empty(0, 0), order, unit, pivots.square(), share, times)
            return replace(solved, laid=(costs, solved.importance))
    raise no_factor(f"up to {share:g}", where)


def factorize(matrix: Tensor) -> int:
    """Replace a matrix [K, K] by its lower factor; returns 0 if there is one, else what LAPACK says.

    A large one is done block by block, each by one thread, so their number changes no bit.
    """
    info = torch.empty((), dtype=torch.int32)
    with one_thread() as threads:
        if len(matrix) <= 2 * _PANEL:
            by_row = matrix.is_contiguous()  # in place by column, where that is the upper factor
            place = matrix.mT if by_row else matrix
            torch.linalg.cholesky_ex(place, upper=by_row, out=(place, info))
            return int(info)
        for start in range(0, len(matrix), _PANEL):
            own = slice(start, start + _PANEL)
            corner, info = torch.linalg.cholesky_ex(matrix[own, own])
            if int(info):
                break
            matrix[own, own] = corner
            matrix[own, own.stop :] = 0
            below = [slice(at, min(at + _ROWS, len(matrix))) for at in range(own.stop, len(matrix), _ROWS)]

            def solve(rows: slice, own: slice = own, corner: Tensor = corner) -> None:
                matrix[rows, own] = torch.linalg.solve_triangular(corner.T, matrix[rows, own], upper=True, left=False)

            def update(rows: slice, own: slice = own) -> None:
                columns = slice(own.stop, rows.stop)
                matrix[rows, columns].addmm_(matrix[rows, own], matrix[columns, own].T, alpha=-1)

            spread(solve, below, threads)
            spread(update, below[::-1], threads)  # the longest first
    return int(info)


def _turn(matrix: Tensor, order: Tensor, turned: Tensor, share: float | Tensor) -> None:
    """Write a share of a symmetric matrix [K, K] into another, rows and columns in an order."""

    def panel(pair: tuple[Tensor, Tensor]) -> None:
        rows, place = pair
        torch.index_select(matrix.index_select(0, rows), 1, order, out=place)
        if not isinstance(share, float) or share != 1:
            place.mul_(share)

    _apart(panel, [*zip(order.split(_TURNED), turned.split(_TURNED), strict=True)], matrix)


def _reverse(values: Tensor) -> None:
    """Reverse values [n] in place: both axes of a matrix at once."""
    count, step = len(values), _PANEL << 9

    def pair(start: int) -> None:
        stop = min(start + step, count // 2)
        front, back = values[start:stop], values[count - stop : count - start]
        kept = front.flip(0)
        front.copy_(back.flip(0))
        back.copy_(kept)

    _apart(pair, range(0, count // 2, step), values)


def _apart(work: Callable[[T], None], parts: Sequence[T], of: Tensor) -> None:
    """Work on parts of a matrix that share nothing, on all threads."""
    with one_thread(of) as threads:
        spread(work, parts, threads)


def _falling(diagonal: Tensor, together: int) -> Tensor:
    """Return the order of falling diagonal."""
    if together == 1:
        return diagonal.argsort(descending=True, stable=True)
    first = diagonal.view(-1, together).sum(1).argsort(descending=True, stable=True) * together
    return (first[:, None] + torch.arange(together, device=first.device)).flatten()


def awaited(
    hessian: Tensor,
    *,
    damping: float,
    shrink: float | Tensor,
    act_order: bool,
    together: int = 1,
    where: str = "",
    own: bool = False,
    whole: bool = True,
) -> Factor:
    """Call `factor` and wait for a GPU, raising the damping until it succeeds. Raises as `factor`."""
    for raised in range(ATTEMPTS):
        how: dict[str, Any] = {"act_order": act_order, "together": together, "own": own, "whole": whole}
        solved = factor(hessian, damping=damping, shrink=shrink, **how, raised=raised, where=where)
        if not hessian.is_cuda or bool(torch.isfinite(solved.pivots).all()):
            return solved
    raise no_factor(f"raised tenfold {ATTEMPTS - 1} times", where)


def _unawaited(
    hessian: Tensor, share: float, shrink: float | Tensor, act_order: bool, together: int, raised: int
) -> Factor:
    """Factor without reading any value: a column or Hessian that was never seen becomes an identity's."""
    from quantkit.kernels.solving.gptq import damped, unit_of

    diagonal = hessian.diagonal().float()
    if act_order and together == 1:
        diagonal, order = diagonal.sort(descending=True, stable=True)
        chosen: Tensor | None = order
    elif act_order:
        order = _falling(diagonal, together)
        diagonal, chosen = diagonal[order], order
    else:
        diagonal, chosen, order = diagonal.contiguous(), None, torch.arange(len(diagonal), device=diagonal.device)
    taken = (shrink, 0.0) if isinstance(shrink, torch.Tensor) else (None, float(shrink))
    whole, turned, costs = damped(hessian.float(), chosen, diagonal, *taken, share)
    lower, info = torch.linalg.cholesky_ex(turned)
    unit, pivots, importance = unit_of(lower, info, chosen)
    return Factor(whole, order, unit, pivots, share, raised, (costs, importance))
