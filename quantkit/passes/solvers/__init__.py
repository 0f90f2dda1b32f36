"""Solvers: functions of tensors (weight, Hessian, scheme), free of models, files and progress bars.

Throughout, a linear computes `y = W x` with `W` [N, K]; `X` [T, K] holds the inputs of T calibration tokens and
`H = Xᵀ X` [K, K] is its Hessian: a weight error `D` [N, K] costs `tr(D H Dᵀ) = ||X Dᵀ||²` at the output.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
V = TypeVar("V")


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


@contextmanager
def one_thread(of: Tensor | None = None) -> Iterator[int]:
    """Run torch's kernels in the body on one thread; does nothing if `of` is on a device.

    Vectors are too short for several threads, and on one thread sums and Cholesky factors are equal on every machine.

    Yields: number of threads for `spread`, those that there were.
    """
    if of is not None and of.device.type != "cpu":
        yield 1
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def spread(work: Callable[[T], V], parts: Iterable[T], threads: int) -> list[V]:
    """Work on each part, on so many threads with one of torch's each; the parts, and so the bits, do not depend on
    them."""
    if threads == 1:
        return [work(part) for part in parts]
    return list(_workers(threads, os.getpid()).map(work, parts))


@functools.cache
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Make lasting threads: to start them takes longer than a part does. A forked process has none of its
    parent's."""
    return ThreadPoolExecutor(threads, f"solver-{process}", torch.set_num_threads, (1,))
