"""Learned rounding: starts where it is told to, goes where autograd would, ends on what can be stored."""

import pytest
import torch
from reference import plain_round

from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.passes.solvers.round import LearnedRounding
from quantkit.scheme import WeightScheme

SCHEMES = [
    WeightScheme(format="int4", granularity="group", group=8, symmetric=False),
    WeightScheme(format="int4", granularity="group", group=8, symmetric=True),
    WeightScheme(format="int8", granularity="channel", scale="float32"),
    WeightScheme(format="int4", granularity="tensor"),
]


def planted(scheme: WeightScheme, moved: bool, seed: int = 0) -> tuple[torch.Tensor, QuantTensor]:
    """A weight [5, 24] with min-max codes; `moved`: a third of them by one, as another pass might."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 24, generator=generator)
    form = load_format(scheme.format)
    tensor = form.quantize(weight, scheme)
    if moved:
        by = torch.randint(-1, 2, weight.shape, generator=generator, dtype=torch.int8)
        tensor = tensor.replace(codes=(tensor.codes + by).clamp(form.low, form.high))
    return weight, tensor


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_starts_at_the_given_codes(scheme: WeightScheme, moved: bool) -> None:
    weight, start = planted(scheme, moved)
    learned = LearnedRounding(weight, start)
    assert torch.equal(learned.tensor().codes, start.codes)
    assert torch.equal(learned.tensor().scale, start.scale)
    form = load_format(scheme.format)
    assert torch.equal(learned.values(), form.dequantize(start))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_steps_go_against_the_sign_that_autograd_finds(scheme: WeightScheme, moved: bool) -> None:
    weight, start = planted(scheme, moved)
    learned = LearnedRounding(weight, start)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        before = learned.offset.reshape(weight.shape).clone(), learned.factor.squeeze(2).clone()
        gradient = torch.randn(weight.shape, generator=generator)
        values, by_offset, by_factor = plain_round.slopes(weight, start, *before, gradient)
        assert torch.allclose(learned.values(), values, atol=1e-6)
        learned.step(gradient, 0.11, 0.013)
        expected = (before[0] - 0.11 * by_offset.sign()).clamp(-0.5, 0.5)
        assert torch.allclose(learned.offset.reshape(weight.shape), expected)
        # a sum next to zero may come out with either sign
        clear = by_factor.abs() > 1e-4
        expected = (before[1] - 0.013 * by_factor.sign()).clamp(0.8, 1.2)
        assert torch.allclose(learned.factor.squeeze(2)[clear], expected[clear])
        assert bool(clear.any())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_reached_can_be_stored(scheme: WeightScheme) -> None:
    weight, start = planted(scheme, False)
    form = load_format(scheme.format)
    learned = LearnedRounding(weight, start)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        learned.step(torch.randn(weight.shape, generator=generator), 0.2, 0.05)
    found = learned.tensor()
    assert float(learned.offset.abs().max()) <= 0.5
    assert found.scale.dtype == start.scale.dtype
    assert torch.equal(form.stored(found.scale.float(), scheme), found.scale)
    assert form.low <= int(found.codes.min())
    assert int(found.codes.max()) <= form.high
    assert torch.equal(form.dequantize(found), learned.values())
    assert not torch.equal(found.codes, start.codes)


def test_a_rate_of_zero_leaves_what_it_is_for() -> None:
    weight, start = planted(SCHEMES[0], False)
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    scales, codes = LearnedRounding(weight, start), LearnedRounding(weight, start)
    for _ in range(20):
        scales.step(gradient, 0.0, 0.02)
        codes.step(gradient, 0.1, 0.0)
    assert not scales.offset.any()
    assert not torch.equal(scales.tensor().scale, start.scale)
    assert torch.equal(codes.tensor().scale, start.scale)


def test_a_format_without_integers_is_refused() -> None:
    weight, start = planted(SCHEMES[0], False)
    floats = start.replace(scheme=start.scheme.model_copy(update={"format": "float16"}))
    with pytest.raises(InputError, match="format-not-integer"):
        LearnedRounding(weight, floats)
