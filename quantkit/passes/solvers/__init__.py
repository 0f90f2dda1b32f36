"""Solvers: functions of tensors (weight, Hessian, scheme), free of models, files and progress bars.

Throughout, a linear computes `y = W x` with `W` [N, K]; `X` [T, K] holds the inputs of T calibration tokens and
`H = Xᵀ X` [K, K] is its Hessian: a weight error `D` [N, K] costs `tr(D H Dᵀ) = ||X Dᵀ||²` at the output.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scaling(NamedTuple):
    """Result of a search for scales of a shared input.

    Args:
        scales: [K] float32, positive: factors of columns of weights, divisors of inputs; ones without a gain.
        alpha: best exponent; `cost` and `plain` are the costs with these scales and without, [] float64.
    """

    scales: Tensor
    alpha: Tensor
    cost: Tensor
    plain: Tensor
