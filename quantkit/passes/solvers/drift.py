"""Weights that make up for what the quantized layers before them get wrong.

The inputs X that a linear receives are not the originals X + Δ: what comes before it is quantized already. It should
put out `W (X + Δ)ᵀ`, and on X the matrix `W + W ΔᵀX H⁻¹` comes closest to that, with `H = XᵀX`; it is quantized in
place of W (Li et al., "GPTAQ", 2025, arXiv 2504.02692). Where the output is added to something that lags behind the
original by R, as the residual stream does, `W + (W ΔᵀX + RᵀX) H⁻¹` makes up for that too.

A few thousand tokens overstate how well Δ and R can be foretold from X, so the regression is a ridge: `(H + λ D)⁻¹` in
place of `H⁻¹`, D the diagonal of H. What many tokens say is corrected whole, what rests on few hardly at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quantkit.errors import InputError
from quantkit.passes.solvers import one_thread
from quantkit.passes.solvers.factor import factor

if TYPE_CHECKING:
    from torch import Tensor


def corrected(
    weights: Sequence[Tensor],
    hessian: Tensor,
    drift: Tensor,
    lags: Sequence[Tensor | None] | None = None,
    *,
    ridge: float = 2.0,
    share: float = 1.0,
    damping: float = 0.01,
) -> list[Tensor]:
    """Weights that make up for the drift of their inputs: `W + share (W ΔᵀX + RᵀX) (H + ridge D)⁻¹`, each [N_i, K].

    Args:
        weights: that receive the same input; never modified.
        hessian: [K, K] of it, `XᵀX` in any scale. Inputs never seen (zero diagonal) are allowed.
        drift: [K, K], `ΔᵀX` in that scale, Δ the original inputs less those that are received.
        lags: for each weight [N_i, K], `RᵀX` in that scale, R what its output is added to in the original less what it
            is added to; None where that is nothing.
        ridge: share of the Hessian's diagonal D that is added to it.
        share: of the correction, 0 to 1.
        damping: added to the ridged Hessian's diagonal as well, as a share of its mean; raised if it has to be.

    Raises:
        InputError: `drift-nonfinite`, `hessian-nonfinite`, `hessian-not-positive`.
    """
    if not bool(torch.isfinite(drift).all()):
        raise InputError(
            "drift-nonfinite",
            value=f"{int((~torch.isfinite(drift)).sum())} of {drift.numel()} entries are NaN or infinite",
            rule="the original activations of the calibration text have to be finite",
            remedy="compute in float32, or set correction: 0",
        )
    with one_thread():
        # (H + ridge D) = (1 + ridge) times H with ridge / (1 + ridge) of its entries beside the diagonal taken off
        solved = factor(hessian, damping=damping, shrink=ridge / (1 + ridge), act_order=False)
        rows = [weight.shape[0] for weight in weights]
        whole = torch.cat([weight.float() for weight in weights])
        added = whole @ drift
        for part, lag in zip(added.split(rows), lags or [None] * len(rows), strict=True):
            if lag is not None:
                part.add_(lag)
        root = solved.unit * solved.pivots.sqrt()  # H = root rootᵀ
        added = torch.linalg.solve_triangular(root.T, added, upper=False, left=False)
        added = torch.linalg.solve_triangular(root, added, upper=True, left=False)
        return list(whole.add_(added, alpha=share / (1 + ridge)).split(rows))
