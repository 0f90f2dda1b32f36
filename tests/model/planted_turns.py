"""Rotations as dense matrices: the oracle, and what is planted as wrong; and blocks to turn."""

from __future__ import annotations

import torch
import zoo
from torch import Tensor, nn

from quantkit.model.streaming.calls import Call
from quantkit.model.streaming.stream import LoadedModel


class Matrix:
    """A dense matrix in the place of a rotation."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size = matrix.shape[0]

    def apply(self, rows: Tensor, gain: Tensor | None = None) -> Tensor:
        found: Tensor = (rows.double() if gain is None else rows.double() * gain) @ self.matrix
        return found.to(rows.dtype)


def orthogonal(size: int, seed: int = 0, *, keeping_means: bool = False) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    square = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    if keeping_means:
        # turn only what is at right angles to the mean
        basis = torch.linalg.qr(torch.cat([torch.ones(size, 1, dtype=torch.float64), square[:, 1:]], 1))[0]
        inner = torch.eye(size, dtype=torch.float64)
        inner[1:, 1:] = torch.linalg.qr(torch.randn(size - 1, size - 1, generator=generator, dtype=torch.float64))[0]
        square = basis @ inner @ basis.T
    return Matrix(square)


def block_of(name: str, index: int = 0) -> tuple[nn.Module, Call]:
    model = LoadedModel(zoo.tiny(name))
    calls = model.begin(zoo.ids(2, 10), 2)
    return model.load(index), calls.call(index)
