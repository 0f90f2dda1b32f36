"""GPTQ and coordinate descent in float64, one column at a time, and how near each row came to another code."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import load_format
from quantkit.formats.base.integers import IntegerFormat


def levels(name: str) -> Tensor:
    """All values of a format's grid, float64, rising; those of whole numbers before a zero point is taken off."""
    form = load_format(name)
    if isinstance(form, IntegerFormat):
        return torch.arange(form.low, form.high + 1, dtype=torch.float64)
    per = 8 // form.bits
    codes = form.unpack(torch.arange(256, dtype=torch.uint8)[None], 256 * per)
    values = form.decode(codes, torch.ones(()), None).double()
    return values[values.isfinite()].unique()


class Solve:
    """One weight on fixed scales.

    Args:
        weight: [N, K].
        hessian: [K, K], damped.
        scale, zero: [N, K], of each weight; zero points or 0.
        grid: `levels`.
    """

    def __init__(self, weight: Tensor, hessian: Tensor, scale: Tensor, zero: Tensor, grid: Tensor) -> None:
        self.weight, self.hessian = weight.double(), hessian.double()
        self.scale, self.zero, self.grid = scale.double(), zero.double(), grid
        self.values = torch.zeros_like(self.weight)
        # the least distance to where another value would be chosen, in units of the scale, over the size of the unit
        self.margin = torch.full((len(weight),), torch.inf, dtype=torch.float64)

    def _take(self, column: int, aim: Tensor) -> None:
        units = aim / self.scale[:, column]
        apart = (units[:, None] - (self.grid - self.zero[:, column, None])).abs()
        near = apart.topk(2, largest=False)
        self.margin = self.margin.minimum((near.values[:, 1] - near.values[:, 0]) / 2 / (1 + units.abs()))
        chosen = self.grid[near.indices[:, 0]] - self.zero[:, column]
        self.values[:, column] = chosen * self.scale[:, column]

    def columns(self, order: Tensor) -> Solve:
        """One pass: `U = chol(H^-1)` upper, as the paper has it (arXiv 2210.17323)."""
        w = self.weight.clone()
        upper = torch.linalg.cholesky(torch.linalg.inv(self.hessian[order][:, order])).T
        for i, column in enumerate(order.tolist()):
            self._take(column, w[:, column])
            error = (w[:, column] - self.values[:, column]) / upper[i, i]
            w[:, order[i + 1 :]] -= error[:, None] * upper[i, i + 1 :]
        return self

    def sweeps(self, times: int) -> Solve:
        """Each column anew, all others fixed: `d_j = -sum_{i != j} d_i H_ij / H_jj` is best."""
        for _ in range(times):
            for j in range(self.weight.shape[1]):
                pulled = (self.values - self.weight) @ self.hessian[:, j]
                own = (self.values[:, j] - self.weight[:, j]) * self.hessian[j, j]
                self._take(j, self.weight[:, j] - (pulled - own) / self.hessian[j, j])
        return self
