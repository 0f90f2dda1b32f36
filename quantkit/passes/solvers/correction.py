"""Correct weights for the drift of their inputs before codes are chosen.

Inputs X differ from the original X + Δ, since earlier layers are quantized. On X the matrix `W + W ΔᵀX H⁻¹` comes
closest to `W (X + Δ)ᵀ` (Li et al., "GPTAQ", 2025, arXiv 2504.02692). If the output is added to a stream that differs
from the original by R, `W + (W ΔᵀX + RᵀX) H⁻¹` compensates that too; then one sum `(Δ Wᵀ + R)ᵀX` [N, K] is enough. The
regression is a ridge, `(H + λ D)⁻¹` with D the diagonal of H: a drift in many tokens is corrected fully, in few hardly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.model.device import one_thread, spread
from quantkit.passes.solvers import device
from quantkit.passes.solvers.factor import Factor, factor

if TYPE_CHECKING:
    from quantkit.passes.solvers.moments import Moments

# rows that are corrected at a time
_SOLVED = 256


def ridged(hessian: Tensor, *, ridge: float = 2.0, damping: float = 0.01) -> Factor:
    """Factor the ridged Hessian of `corrected`, over 1 + ridge. Raises InputError as `factor`."""
    # (H + ridge D) = (1 + ridge) times H with a share ridge / (1 + ridge) of its off-diagonal entries taken off
    return factor(hessian, damping=damping, shrink=ridge / (1 + ridge), act_order=False, whole=False)


def corrected(
    weights: Sequence[Tensor],
    hessian: Tensor | Factor,
    drift: Tensor | None,
    lags: Sequence[Tensor | None] | None = None,
    *,
    ridge: float = 2.0,
    share: float = 1.0,
    damping: float = 0.01,
) -> list[Tensor]:
    """Return weights, corrected for the drift of their inputs: `W + share (W ΔᵀX + RᵀX) (H + ridge D)⁻¹`, [N_i, K].

    Args:
        weights: weights with one input; never modified.
        hessian: [K, K] of it, `XᵀX` in any scale, or what `ridged` makes of it. Inputs never seen (zero diagonal) are
            allowed.
        drift: [K, K], `ΔᵀX` in that scale, Δ the original inputs minus the present ones; None if `lags` hold `W ΔᵀX`.
        lags: for every weight [N_i, K], `RᵀX` in that scale, R the original stream minus the present one, to which its
            output is added; None if it is added to nothing.
        share: share of the correction, 0 to 1.
        damping: share of the ridged Hessian's mean diagonal that is added to it as well; raised if necessary.

    Raises:
        InputError: `drift-nonfinite`, `hessian-nonfinite`, `hessian-not-positive`.
    """
    for sums in (drift, *(lags or ())):
        if sums is not None and not device.launched(sums) and not bool(torch.isfinite(sums).all()):
            value = f"{int((~torch.isfinite(sums)).sum())} of {sums.numel()} entries are NaN or infinite"
            rule = "the original activations of the calibration text have to be finite"
            remedy = "use another text, or --set gptq.correction=0"
            raise InputError("drift-nonfinite", value=value, rule=rule, remedy=remedy)
    solved = hessian if isinstance(hessian, Factor) else ridged(hessian, ridge=ridge, damping=damping)
    with one_thread(solved.pivots) as threads:
        rows = [weight.shape[0] for weight in weights]
        whole = torch.cat([weight.float() for weight in weights])
        pairs = zip(weights, lags or [None] * len(rows), strict=True)
        apiece = [torch.zeros_like(weight).float() if lag is None else lag for weight, lag in pairs]
        behind = apiece[0] if len(apiece) == 1 else torch.cat(apiece)
        sides = {"left": False, "unitriangular": True}

        def solve(rows: slice) -> None:
            part = behind[rows] if drift is None else torch.addmm(behind[rows], whole[rows], drift)
            # H = unit pivots unitᵀ
            part = torch.linalg.solve_triangular(solved.unit.T, part, upper=False, **sides).div_(solved.pivots)
            part = torch.linalg.solve_triangular(solved.unit, part, upper=True, **sides)
            whole[rows].add_(part, alpha=share / (1 + ridge))

        step = len(whole) if device.launched(whole) else _SOLVED
        spread(solve, [slice(start, start + step) for start in range(0, len(whole), step)], threads)
        return list(whole.split(rows))


def corrected_by_moments(parts: Tensor, moments: Moments, *, ridge: float, share: float) -> Tensor:
    """Return parts [G, N, K] of a graph's weight, corrected where the products with original inputs are known."""
    if (cross := moments.cross) is None:
        return parts

    def held() -> tuple[Tensor, Tensor]:
        size = moments.hessian.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
        unit = torch.eye(parts.shape[2], dtype=torch.float64, device=size.device)
        lower, pivots = torch.linalg.lu_factor(moments.hessian + ridge * size[:, None, None] * unit)
        return lower, pivots

    # W' − W = W (E[x x̂ᵀ] − E[x̂ x̂ᵀ]) (E[x̂ x̂ᵀ] + λ)⁻¹: a large λ leads back to W, not to zero
    lost = (parts.double() @ (cross - moments.hessian)).transpose(1, 2)
    moved: Tensor = torch.linalg.lu_solve(*moments.once(("held", ridge), held), lost).transpose(1, 2)
    return parts.double() + share * moved
