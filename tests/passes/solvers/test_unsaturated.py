"""Codes whose neighbours never add up beyond 16 bits: no sum saturates, and it costs less than a bit."""

import pytest
import torch
from pydantic import ValidationError

from quantkit.formats import load_format
from quantkit.passes import load_pass
from quantkit.passes.solvers.gptq import gptq
from quantkit.passes.solvers.unsaturated import LIMIT, neighbours, scales
from quantkit.scheme import WeightScheme

INT8 = WeightScheme(format="int8", granularity="channel", symmetric=True, scale="float32")
INT7 = WeightScheme(format="int7", granularity="channel", symmetric=True, scale="float32")


def problem(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(8 * columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def largest_sum(codes: torch.Tensor) -> int:
    """Of x0 q0 + x1 q1, in size, over all x in 0..255: each row pairs up from the left."""
    padded = torch.nn.functional.pad(codes.int(), (0, codes.shape[1] % 2)).reshape(len(codes), -1, 2)
    ends = torch.tensor([[0, 0], [0, 255], [255, 0], [255, 255]])
    return int((padded[:, :, None] * ends).sum(-1).abs().max())


@pytest.mark.parametrize("columns", [1, 2, 9, 48, 63])
def test_no_pair_of_products_leaves_16_bits(columns: int) -> None:
    weight, hessian = problem(24, columns)
    weight[0] = weight[0].abs()  # all of one sign
    weight[1, :2] = 9.0  # two large ones side by side
    tensor = gptq(weight, hessian, INT8, neighbours=neighbours(columns)).tensor
    assert largest_sum(tensor.codes) <= 2**15 - 1
    plain = gptq(weight, hessian, INT8).tensor
    assert columns < 2 or largest_sum(plain.codes) > 2**15 - 1


def test_it_costs_far_less_than_the_eighth_bit() -> None:
    weight, hessian = problem(64, 96)

    def error(scheme: WeightScheme, other: torch.Tensor | None = None) -> float:
        found = load_format(scheme.format).dequantize(gptq(weight, hessian, scheme, neighbours=other).tensor)
        return float(((found - weight) @ hessian * (found - weight)).sum())

    eight, seven, bounded = error(INT8), error(INT7), error(INT8, neighbours(96))
    assert eight < bounded < 2 * eight < 3 * eight < seven


def test_neighbours_are_pairs_from_the_left() -> None:
    assert neighbours(5).tolist() == [1, 0, 3, 2, 4]


def test_a_row_without_large_neighbours_keeps_its_scale() -> None:
    target = torch.tensor([[1.0], [0.0], [-1.0], [0.0]])
    found = scales(target, neighbours(4), torch.ones(4))
    assert found == pytest.approx(1 / 127.5, rel=0.02)
    both = scales(torch.tensor([[1.0], [1.0]]), neighbours(2), torch.ones(2))
    assert float(both) * LIMIT / 2 == pytest.approx(1.0, rel=0.02), "each has half of the room"


def test_sweeps_would_undo_the_bounds() -> None:
    with pytest.raises(ValidationError, match="sweeps"):
        load_pass("gptq").Settings(unsaturated=True, sweeps=1)
