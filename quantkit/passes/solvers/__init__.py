"""Solvers: functions of tensors (weight, Hessian, scheme) that know no model, file or progress bar.

Throughout, a linear computes `y = W x` with `W` [N, K]; `X` [T, K] holds the inputs of T calibration tokens and
`H = Xᵀ X` [K, K] is its Hessian: a weight error `D` [N, K] costs `tr(D H Dᵀ) = ||X Dᵀ||²` at the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """What a search for scales of a shared input yields.

    Args:
        scales: [K] float32, positive: multiply the columns of weights, divide inputs; ones where nothing is gained.
        alpha: the exponent that won, and the costs with these scales and (`plain`) without, [] float64.
    """

    scales: Tensor
    alpha: Tensor
    cost: Tensor
    plain: Tensor


@contextmanager
def one_thread(of: Tensor | None = None) -> Iterator[None]:
    """Run torch's kernels on one thread, and on as many as before afterwards; nothing where `of` is on a device.

    Vectors are too short to share out here, and one thread makes sums and Cholesky factors the same on every machine.
    """
    if of is not None and of.device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
