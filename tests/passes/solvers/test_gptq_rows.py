"""Rows with Hessians of their own, solved at once, are as good as one by one."""

from __future__ import annotations

import pytest
import torch

from quantkit.passes.solvers.gptq import gptq, gptq_rows
from quantkit.scheme import WeightScheme


def scheme(name: str) -> WeightScheme:
    return WeightScheme(format=name, granularity="channel", symmetric=True, scale="float32")


def problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 4 * columns, columns, generator=generator)
    inputs = inputs * torch.rand(rows, 1, columns, generator=generator) + torch.rand(
        rows, 4 * columns, 1, generator=generator
    )
    return torch.randn(rows, columns, generator=generator), inputs.transpose(1, 2) @ inputs


@pytest.mark.parametrize("name", ["int8", "int7"])
def test_as_good_as_one_by_one(name: str) -> None:
    weight, hessian = problem(24, 9)
    codes, scale = gptq_rows(weight, hessian, scheme(name), shrink=0.5)
    assert codes.dtype == torch.int8

    def error(values: torch.Tensor) -> float:
        return float(torch.einsum("nk,nkl,nl->", values - weight, hessian, values - weight))

    ones = [gptq(row[None], own, scheme(name), shrink=0.5).tensor for row, own in zip(weight, hessian, strict=True)]
    alone = torch.cat([one.codes.float() * one.scale.float() for one in ones])
    nearest = torch.round(weight / scale[:, None]) * scale[:, None]
    assert error(codes.float() * scale[:, None]) < min(1.1 * error(alone), error(nearest))


def test_a_row_that_saw_nothing_is_rounded() -> None:
    weight, hessian = problem(3, 4)
    hessian[1] = 0
    hessian[2, 3] = 0
    hessian[2, :, 3] = 0
    codes, scale = gptq_rows(weight, hessian, scheme("int8"))
    assert bool(torch.isfinite(scale).all())
    assert codes[1].tolist() == torch.round(weight[1] / scale[1]).clamp(-128, 127).tolist()
