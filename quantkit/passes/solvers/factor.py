"""A Hessian `H = XᵀX`, shrunk, damped and factored in the order in which columns are chosen.

`H = M Mᵀ`, M upper triangular, from one Cholesky of the reversed matrix. `M_jj²` is what an error on input j costs at
the output once all inputs after it have made up for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError

# how often damping may be raised (tenfold each time) before the Hessian is given up
ATTEMPTS = 6


@dataclass(frozen=True)
class Factor:
    """A damped Hessian, and its factor in the order in which columns are chosen.

    Args:
        hessian: [K, K] float32, damped, in the order of the weights.
        order: [K], the columns in the order in which they are chosen.
        unit: [K, K] upper triangular with unit diagonal, `M_ij / M_jj` in that order.
        pivots: [K], `M_jj²`: what a squared error of column j costs once all later ones made up for it. On a device,
            which is not waited for, they are not finite if there is no factor.
        damping: the share of the mean diagonal that was added, and `raised` how often for the factor to exist.
        laid: on a device, where laying them is a launch: the Hessian's diagonal and `importance` without gaps.
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
        """Of the damped Hessian, [K] in the order of the weights."""
        return self.hessian.diagonal() if self.laid is None else self.laid[0]

    @property
    def importance(self) -> Tensor:
        """What a squared error of each column costs once later ones made up for it, [K] in the order of the weights.

        GPTQ's own measure for ranges and scales: the diagonal without the part that it takes back.
        """
        if self.laid is not None:
            return self.laid[1]
        spread = torch.empty_like(self.pivots)
        spread[self.order] = self.pivots
        return spread


def check_finite(hessian: Tensor, where: str = "") -> None:
    """Refuse a Hessian that holds NaN or infinity. Raises InputError (`hessian-nonfinite`)."""
    if not bool(torch.isfinite(hessian).all()):
        value = f"{int((~torch.isfinite(hessian)).sum())} of {hessian.numel()} entries are NaN or infinite"
        rule = "the activations of the calibration text have to be finite"
        remedy = "compute in float32, or leave this layer in high precision with an override"
        raise InputError("hessian-nonfinite", where, value, rule, remedy)


def raised_damping(damping: float, times: int) -> float:
    """Return the share that is added when a factor with `damping` did not exist so often."""
    for _ in range(times):
        damping = max(damping * 10, 1e-4)
    return damping


def no_factor(damping: str, where: str = "") -> InputError:
    """Return the error for a Hessian that has no factor, however much damping was added."""
    value, rule = f"no Cholesky factor with damping {damping}", "a Hessian is a sum of squares"
    remedy = "use more calibration text, or leave this layer in high precision with an override"
    return InputError("hessian-not-positive", where, value, rule, remedy)


def factor(
    hessian: Tensor,
    *,
    damping: float = 0.01,
    shrink: float | Tensor = 0.3,
    act_order: bool = True,
    raised: int = 0,
    where: str = "",
) -> Factor:
    """Shrink, damp and factor a Hessian; on a CPU damping is raised tenfold until that succeeds.

    On a GPU nothing is waited for: the caller looks at `Factor.pivots` when the device is done, and comes again with
    `raised`, until `ATTEMPTS`.

    Args:
        hessian: [K, K], symmetric, `Xᵀ X` of the inputs, in any scale. Inputs never seen (zero diagonal) are allowed.
        damping: share of the mean diagonal added to the diagonal.
        shrink: share taken off the entries beside the diagonal, 0 to 1: the correlations of a finite sample are too
            large. At 1 nothing is made up for: that is plain rounding.
        act_order: choose columns in order of falling diagonal (ties in order of index), else from left to right.
        where: whose inputs they are, for errors.

    Raises:
        InputError: on a CPU `hessian-nonfinite`; `hessian-not-positive` when no damping helps.
    """
    if hessian.is_cuda:
        return _unawaited(hessian, raised_damping(damping, raised), shrink, act_order, raised)
    check_finite(hessian, where)
    diagonal = hessian.diagonal().float()
    mean = float(diagonal.mean())
    if mean <= 0:  # no input was ever seen: plain rounding is the best there is, and what an identity yields
        hessian, diagonal, mean = torch.eye(len(diagonal)), torch.ones(len(diagonal)), 1.0
    whole = hessian.float() * (1 - shrink)
    whole.diagonal().copy_(diagonal)
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    backwards = order.flip(0)
    reordered = whole[backwards][:, backwards]
    for times in range(ATTEMPTS):
        share = raised_damping(damping, times)
        added = torch.zeros_like(diagonal)
        added += share * mean
        # a column without any input costs nothing; some cost keeps it at the nearest code
        added[diagonal <= 0] += mean
        reordered.diagonal().copy_((diagonal + added)[backwards])
        lower, info = torch.linalg.cholesky_ex(reordered)
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            upper = lower.flip(0, 1)
            pivots = upper.diagonal()
            whole.diagonal().add_(added)
            return Factor(whole, order, upper / pivots, pivots.square(), share, times)
    raise no_factor(f"up to {share:g}", where)


def awaited(hessian: Tensor, *, damping: float, shrink: float, act_order: bool, where: str = "") -> Factor:
    """`factor`, also of a GPU with damping raised until it succeeds; the GPU is waited for. Raises as `factor`."""
    for raised in range(ATTEMPTS):
        found = factor(hessian, damping=damping, shrink=shrink, act_order=act_order, raised=raised, where=where)
        if not hessian.is_cuda or bool(torch.isfinite(found.pivots).all()):
            return found
    raise no_factor(f"raised tenfold {ATTEMPTS - 1} times", where)


def _unawaited(hessian: Tensor, share: float, shrink: float | Tensor, act_order: bool, raised: int) -> Factor:
    """The same without a look at any value: an input that was never seen is an identity's, as are all if none was."""
    from quantkit.kernels.solving.gptq import damped, unit_of

    diagonal = hessian.diagonal().float()
    if act_order:
        diagonal, order = diagonal.sort(descending=True, stable=True)
        chosen: Tensor | None = order
    else:
        diagonal, chosen, order = diagonal.contiguous(), None, torch.arange(len(diagonal), device=diagonal.device)
    taken = (shrink, 0.0) if isinstance(shrink, torch.Tensor) else (None, float(shrink))
    whole, turned, costs = damped(hessian.float(), chosen, diagonal, *taken, share)
    lower, info = torch.linalg.cholesky_ex(turned)
    unit, pivots, importance = unit_of(lower, info, chosen)
    return Factor(whole, order, unit, pivots, share, raised, (costs, importance))
