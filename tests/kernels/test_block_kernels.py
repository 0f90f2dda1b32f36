"""Statistics, factors and codes of a device, in Triton's interpreter, against the lines of the CPU and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")  # Linux alone has it

from quantkit.calibrate.statistics import sums
from quantkit.calibrate.statistics.sums import InputStats
from quantkit.formats import load_format
from quantkit.kernels.solving.gptq import damped, unit_of
from quantkit.kernels.solving.losses import absorbed_at_once, cheapest, powers, sizes, spread_at_once
from quantkit.kernels.solving.statistics import quotient
from quantkit.kernels.solving.stored import integers
from quantkit.model.structure.block import Block
from quantkit.model.structure.fold import absorbed, spread
from quantkit.model.structure.traced import Structure
from quantkit.passes.assign import assign
from quantkit.passes.solvers import awq, device
from quantkit.passes.solvers.factor import factor
from quantkit.scheme import WeightScheme


def inputs(sequences: int, tokens: int, width: int = 70) -> Tensor:
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) * 0.2 + torch.eye(width)
    x = torch.randn(sequences, tokens, width, generator=torch.Generator().manual_seed(0)) @ mix
    x[..., 3] = 0  # an input that nothing ever reaches
    x[..., 5] *= 30
    return x


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would be done on a device is done in the interpreter, when it is called."""

    def switch() -> None:
        monkeypatch.setattr(sums, "on_device", lambda tensor: True)
        monkeypatch.setattr(device, "launched", lambda tensor: True)

    return switch


def summed(x: Tensor, cuts: Sequence[int], stream: Tensor | None, noise: bool = True) -> InputStats:
    found, start = InputStats(noise=noise), 0
    for length in cuts:
        part = slice(start, start + length)
        found.add(x[part], stream=None if stream is None else stream[part])
        start += length
    return found


@pytest.mark.parametrize(
    ("cuts", "tokens", "weighed"), [((4, 2), 45, False), ((3, 1, 2), 45, True), ((5,), 7, False), ((0, 2), 1, True)]
)
def test_sums_are_those_of_the_cpu(cuts: tuple[int, ...], tokens: int, weighed: bool, on_device: Any) -> None:
    """Even and odd numbers of sequences, of which the next begins in the other half; 0 of them; ragged tiles."""
    x = inputs(sum(cuts), tokens)
    stream = x[..., :8] + 1 if weighed else None
    expected = summed(x, cuts, stream)
    on_device()
    found = summed(x, cuts, stream)
    assert torch.equal(found.low, expected.low) and torch.equal(found.high, expected.high)
    assert torch.equal(found.sample, expected.sample)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.mean_square, expected.mean_square, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.hessian, expected.hessian, rtol=1e-5, atol=1e-5)
    assert found.noise.dtype == torch.float64
    torch.testing.assert_close(found.noise, expected.noise, rtol=1e-5, atol=0)
    whole = summed(x, cuts, stream, noise=False)
    torch.testing.assert_close(whole.hessian, expected.hessian, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole.checked, whole.hessian.diagonal())


def test_moments_of_many_parts_are_those_of_float64(on_device: Any) -> None:
    """More tokens than parts have in one step; the squares of a chunk are weighed."""
    x = torch.randn(1, 5000, 3, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 100.0, 1e-3])
    on_device()
    found = summed(x, (1,), None)
    torch.testing.assert_close(found.squares, x[0].double().square().sum(0), rtol=1e-6, atol=0)
    assert torch.equal(found.high, x[0].amax(0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_in_the_squares(value: float, on_device: Any) -> None:
    x = inputs(2, 40)
    x[1, 39, 69] = value
    on_device()
    assert torch.isfinite(summed(x, (2,), None).squares).tolist() == [True] * 69 + [False]


def test_sizes_and_their_powers_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(5)
    squares, producers = torch.rand(70, 70, generator=generator), torch.randint(0, 40, (70,), generator=generator)
    squares[producers == producers[3]] = 0  # a channel that nothing ever reached
    for seen in (squares, torch.zeros(70, 70)):
        mean = [float(seen.diagonal()[producers == each].double().mean()) for each in producers]
        shared = sizes(seen.diagonal(), producers)
        torch.testing.assert_close(shared.double(), torch.tensor(mean, dtype=torch.float64), rtol=1e-6, atol=0)
        for squares in (shared, seen.diagonal()):
            for number, found in enumerate(powers(squares, 5)):
                torch.testing.assert_close(found, awq._power(squares.sqrt(), number / 4), rtol=1e-5, atol=0)


def test_the_first_of_the_least_is_taken() -> None:
    parts = torch.full((4, 5000), 0.25)
    parts[1:3, 7] = 0
    scales, found = cheapest(parts, tried := torch.rand(4, 70, generator=torch.Generator().manual_seed(6)))
    assert torch.equal(scales, tried[1])
    assert found.tolist() == [1 / 3, 4999 / 4, 1250]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_absorbs_scales_as_on_the_cpu(dtype: torch.dtype | None, offset: float) -> None:
    """More inputs than channels, and a channel that none comes from."""
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(1, 70, (300,), generator=generator)
    scales = torch.exp2(torch.rand(70, generator=generator) * 4 - 2)
    scales[5:9] = 1
    weight = torch.randn(70, generator=generator)
    weight[11] = -offset  # nothing of it is left, whatever the scale
    expected = absorbed(weight, scales[index], index, offset, dtype)
    for ours, theirs in zip(absorbed_at_once(weight, scales[index], index, offset, dtype), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(spread_at_once(scales[index], index, 70), spread(scales[index], index, 70))


@pytest.mark.parametrize("act_order", [True, False])
def test_a_factor_is_that_of_the_cpu(act_order: bool) -> None:
    hessian = InputStats(inputs(4, 50)).hessian
    expected = factor(hessian, shrink=0.25, act_order=act_order)
    order, diagonal = expected.order, hessian.diagonal().contiguous()
    chosen = order if act_order else None
    whole, turned, costs = damped(hessian, chosen, diagonal, torch.tensor(0.25, dtype=torch.float64), 0.0, 0.01)
    assert torch.equal(costs, whole.diagonal())
    # the same share as a number
    assert torch.equal(damped(hessian, chosen, diagonal, None, 0.25, 0.01)[0], whole)
    torch.testing.assert_close(whole, expected.hessian, rtol=1e-6, atol=0)
    # as a GPU has it, columns lie one behind the other
    lower, info = torch.linalg.cholesky_ex(turned)
    unit, pivots, importance = unit_of(lower.T.contiguous().T, info, chosen)
    assert torch.equal(importance[order], pivots)
    torch.testing.assert_close(unit, expected.unit, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(pivots, expected.pivots, rtol=1e-5, atol=0)
    # H = M Mᵀ in the order of choice
    made = (unit * pivots.sqrt()).double()
    torch.testing.assert_close(made @ made.T, whole[order][:, order].double(), rtol=1e-5, atol=1e-4)


def test_what_no_input_reached_is_an_identity_and_what_has_no_factor_is_told() -> None:
    zeros = torch.zeros(5, 5)
    whole, turned, _ = damped(zeros, torch.arange(5), torch.zeros(5), None, 0.3, 0.01)
    torch.testing.assert_close(whole, torch.eye(5) * 1.01)
    assert torch.equal(turned, whole)
    unit, pivots, _ = unit_of(*torch.linalg.cholesky_ex(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), None)
    assert unit.shape == (2, 2)
    assert torch.isnan(pivots).all()


@pytest.mark.parametrize(("group", "columns"), [(32, 96), (48, 144), (200, 200)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_in_units_of_their_scale_are_stored(group: int, columns: int, symmetric: bool) -> None:
    generator, groups = torch.Generator().manual_seed(3), columns // group
    scale = torch.rand(groups, 21, generator=generator).half().float()
    zero = None if symmetric else torch.randint(-8, 8, (groups, 21), generator=generator).float()
    codes = torch.randint(-8, 8, (columns, 21), generator=generator).float()
    units = codes if zero is None else codes - zero.repeat_interleave(group, 0)
    made = integers(units, scale, zero, torch.float16, group)
    assert torch.equal(made[0], codes.T.to(torch.int8)) and made[0].is_contiguous()
    assert torch.equal(made[1], scale.T.half())
    assert made[2].numel() == 0 if zero is None else torch.equal(made[2], zero.T.to(torch.int8))


@pytest.mark.parametrize(
    "words",
    [
        {"format": "int4", "granularity": "group", "group": 32, "symmetric": False},
        {"format": "int8", "granularity": "channel", "scale": "bfloat16"},
        {"format": "nf4", "granularity": "group", "group": 64, "scale": "float32"},
    ],
    ids=lambda words: words["format"],
)
def test_what_codes_stand_for_and_what_they_lost(words: dict[str, Any], on_device: Any) -> None:
    """The last group filled up; a row of zeros."""
    scheme = WeightScheme(**words)
    module = nn.ModuleDict({"one": nn.Linear(150, 19, bias=False)})
    weight = torch.randn(19, 150, generator=torch.Generator().manual_seed(4))
    weight[2] = 0
    block = Block("", 0, module, Structure(()), {}, {}, {"one": scheme}, torch.float32)
    block.replace("one", weight)
    form = load_format(scheme.format)
    tensor = form.quantize(block.weight("one"), scheme)
    on_device()
    error = assign(block, "one", tensor)
    values = form.dequantize(tensor)[:, :150]
    assert torch.equal(module["one"].weight, values)
    exact = (weight - values).double().square().sum() / weight.double().square().sum()
    torch.testing.assert_close(error, exact, rtol=1e-6, atol=0)
    assert block.tensors["one"] is tensor


def test_a_quotient_of_sums() -> None:
    parts = torch.rand(2, 2500, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    top, bottom = parts.sum(1)
    torch.testing.assert_close(quotient(parts, False), top / bottom)
    assert quotient(torch.tensor([[3.0], [2.0]], dtype=torch.float64), True) == 1
    assert quotient(torch.zeros(2, 3, dtype=torch.float64), True) == 1
    assert quotient(torch.tensor([[3.0], [0.0]], dtype=torch.float64), False) == 3
