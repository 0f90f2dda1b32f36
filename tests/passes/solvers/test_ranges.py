import pytest
import torch

from quantkit import registry
from quantkit.passes.solvers.ranges import Search, minmax, searched
from quantkit.recipe import WeightScheme

INT4 = registry.load("formats", "int4")


def scheme(granularity="group", symmetric=False, group=16):
    return WeightScheme(
        format="int4", granularity=granularity, group=group if granularity == "group" else None, symmetric=symmetric
    )


def error(weight, scale, zero, importance=None):
    groups = scale.shape[1]
    length = weight.shape[1] // groups
    spread = scale.float().repeat_interleave(length, dim=1)
    shift = None if zero is None else zero.repeat_interleave(length, dim=1)
    squared = (INT4.decode(INT4.encode(weight, spread, shift), spread, shift) - weight).double().square()
    return squared if importance is None else squared * importance.double()


CASES = [scheme(g, s) for g in ("tensor", "channel", "group") for s in (True, False)]


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (129, 80)])
def test_minmax_is_what_the_format_does(choice, shape):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    expected = INT4.quantize(weight, choice)
    scale, zero = minmax(weight, choice)
    assert torch.equal(scale, expected.scale)
    assert (zero is None) == (expected.zero is None)
    assert zero is None or torch.equal(zero, expected.zero)


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("weighted", [False, True])
def test_searching_never_loses_to_minmax_and_gains_with_outliers(choice, weighted):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(37, 64, generator=generator)
    weight[:, 5] *= 6
    importance = torch.rand(64, generator=generator) + 0.01 if weighted else None
    plain, best = error(weight, *minmax(weight, choice), importance), None
    best = error(weight, *searched(weight, choice, importance), importance)
    rows = (lambda e: e.sum()) if choice.granularity == "tensor" else (lambda e: e.sum(dim=1))
    assert bool((rows(best) <= rows(plain) * (1 + 1e-5)).all())
    assert float(best.sum()) < 0.95 * float(plain.sum())


def test_importance_moves_the_grid_to_what_counts():
    weight = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    weight[:, 0] = 8.0
    importance = torch.ones(16)
    importance[0] = 1e-6
    choice = scheme(symmetric=True)
    careless, _ = searched(weight, choice, importance, Search(smallest=0.2, steps=16))
    careful, _ = searched(weight, choice, None, Search(smallest=0.2, steps=16))
    assert float(careless.float().mean()) < 0.7 * float(careful.float().mean())


def test_zeros_and_constants_are_harmless():
    for weight in (torch.zeros(3, 16), torch.full((3, 16), 0.5), torch.full((3, 16), -2.0)):
        for choice in CASES:
            scale, zero = searched(weight, choice, torch.zeros(16))
            assert bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
            # a symmetric grid cannot hold both ends of its range; with a zero point a constant
            # is met to the seven bits of a scale whose products with codes are exact in float16
            if not choice.symmetric:
                assert float(error(weight, scale, zero).max()) <= (2 * 2**-8) ** 2


def test_weights_are_not_modified():
    weight = torch.randn(8, 32)
    copy = weight.clone()
    searched(weight, scheme())
    assert torch.equal(weight, copy)
