"""GPTQ as the paper writes it, in float64, one column at a time: slow, plain, obviously right."""

import torch


def wanted(weight: torch.Tensor, chosen: torch.Tensor, hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """What each column asked for when its turn came, given the values that were chosen before it.

    Algorithm 1 of arXiv 2210.17323 with the chosen values forced: `U = chol(H^-1)` upper,
    `e = (w_i - q_i) / U_ii`, `w_j -= e U_ij` for the columns j that follow.

    Args:
        weight, chosen: [N, K]; hessian: [K, K], damped; order: [K].

    Returns:
        [N, K] float64 in the order of the weights.
    """
    w, q = weight.double()[:, order].clone(), chosen.double()[:, order]
    inverse = torch.linalg.inv(hessian.double()[order][:, order])
    upper = torch.linalg.cholesky(inverse).T
    asked = torch.zeros_like(w)
    for i in range(w.shape[1]):
        asked[:, i] = w[:, i]
        error = (w[:, i] - q[:, i]) / upper[i, i]
        for j in range(i + 1, w.shape[1]):
            w[:, j] -= error * upper[i, j]
    back = torch.empty_like(asked)
    back[:, order] = asked
    return back


def cost(weight: torch.Tensor, chosen: torch.Tensor, hessian: torch.Tensor) -> float:
    """`tr(D H D^T)` in float64."""
    error = chosen.double() - weight.double()
    return float((error @ hessian.double() * error).sum())


def aimed(
    weight: torch.Tensor,
    seen: torch.Tensor,
    original: torch.Tensor,
    hessian: torch.Tensor,
    lag: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """The weights [N, K] that put out on `seen` [T, K] what `weight` does on `original` [T, K], as nearly as can be.

    And `lag` [T, N] more. Plain float64, with the inverse of a damped `hessian` [K, K] in place of `seen^T seen`.
    """
    w, x, before = weight.double(), seen.double(), original.double()
    missing = (before - x) @ w.T + lag
    return w + missing.T @ x @ torch.linalg.inv(hessian.double())
