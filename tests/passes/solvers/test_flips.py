"""Codes that are moved by one: each round lowers the modelled loss, and where nothing is coupled it finds the best."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.passes.solvers.flips import flipped

ROWS, COLUMNS = 24, 70


def loss(moved: Tensor, gradient: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """`<G, D> + ½ tr(Dᵀ F D H)`, in float64."""
    moved, gradient, outputs, inputs = (value.double() for value in (moved, gradient, outputs, inputs))
    return float((gradient * moved).sum() + 0.5 * torch.trace(moved.T @ outputs @ moved @ inputs))


def problem(seed: int, *, coupled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def curvature(size: int) -> Tensor:
        rows = torch.randn(2 * size, size, generator=generator) + (1.0 if coupled else 0.0)
        matrix = rows.T @ rows / len(rows)
        return matrix if coupled else torch.diag(matrix.diagonal())

    codes = torch.randint(-2, 2, (ROWS, COLUMNS), generator=generator).float()
    steps = 0.1 + 0.1 * torch.rand(ROWS, COLUMNS, generator=generator)
    gradient = 0.15 * torch.randn(ROWS, COLUMNS, generator=generator)
    return codes, steps, gradient, curvature(ROWS), curvature(COLUMNS)


@pytest.mark.parametrize("seed", range(3))
def test_the_modelled_loss_falls(seed: int) -> None:
    codes, steps, gradient, outputs, inputs = problem(seed, coupled=True)
    before = [codes.clone(), gradient.clone()]
    new = flipped(codes, steps, gradient, outputs, inputs, -2, 1)
    assert torch.equal(codes, before[0])
    assert torch.equal(gradient, before[1])
    assert float((new - codes).abs().max()) == 1
    assert -2 <= float(new.min()) <= float(new.max()) <= 1
    assert loss((new - codes) * steps, gradient, outputs, inputs) < 0
    assert torch.equal(new, slowly(codes, steps, gradient, outputs, inputs, -2, 1))


def slowly(
    codes: Tensor, steps: Tensor, gradient: Tensor, outputs: Tensor, inputs: Tensor, low: int, high: int
) -> Tensor:
    """One column after another, each with the whole gradient as it is then, in float64."""
    steps, gradient, outputs, inputs = (value.double() for value in (steps, gradient, outputs, inputs))
    new = codes.clone()
    for column in inputs.diagonal().argsort(descending=True).tolist():
        slope = (gradient + outputs @ ((new - codes) * steps) @ inputs)[:, column]
        step, curve = steps[:, column], float(inputs[column, column])
        rows = [
            row
            for row in range(ROWS)
            if low <= float(new[row, column] - slope[row].sign()) <= high
            and float(slope[row].abs()) > 0.5 * curve * float(outputs[row, row] * step[row])
        ]
        for _ in range(6):
            gains = [
                float(slope[row].abs()) - 0.5 * curve * float(outputs[row, rows].abs() @ step[rows]) for row in rows
            ]
            if all(gain > 0 for gain in gains):
                break
            least = min(sorted(gains)[(len(gains) - 1) // 2], 0.0)
            rows = [row for row, gain in zip(rows, gains, strict=True) if gain > least]
        else:
            rows = []
        new[rows, column] -= slope[rows].sign().float()
    return new


def test_without_coupling_every_code_moves_that_gains() -> None:
    codes, steps, gradient, outputs, inputs = problem(0, coupled=False)
    curve = outputs.diagonal()[:, None] * inputs.diagonal()
    way = -gradient.sign()
    gains = gradient.abs() * steps > 0.5 * curve * steps**2
    wanted = torch.where(gains & (codes + way >= -2) & (codes + way <= 1), codes + way, codes)
    assert 0.05 < float((wanted != codes).float().mean()) < 0.95
    assert torch.equal(flipped(codes, steps, gradient, outputs, inputs, -2, 1), wanted)
