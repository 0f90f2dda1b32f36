"""HQQ's grids: as good as the plain alternation finds, never worse than min-max under the norm, storable."""

import pytest
import torch
from reference import plain_hqq

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.passes.solvers import ranges
from quantkit.passes.solvers.hqq import half_quadratic
from quantkit.scheme import WeightScheme

SCHEMES = [
    WeightScheme(format="int4", granularity="group", group=16, symmetric=False),
    WeightScheme(format="int4", granularity="group", group=16, symmetric=True),
    WeightScheme(format="int8", granularity="channel", scale="float32"),
    WeightScheme(format="int4", granularity="tensor"),
]


def weights(rows: int = 6, columns: int = 48) -> torch.Tensor:
    """Normal, with an outlier in every row."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, columns, generator=generator)
    found[:, 5] *= 4
    return found


def costs(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: WeightScheme) -> torch.Tensor:
    """`sum |r|^0.7` of each group, in the order of the scales."""
    form = load_format(scheme.format)
    values = form.dequantize(form.nearest(weight, scale, zero, scheme))
    return (weight - values).abs().pow(0.7).reshape(scale.numel(), -1).sum(dim=1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_grids_cost_no_more_than_min_max_and_can_be_stored(scheme: WeightScheme) -> None:
    weight = weights()
    scale, zero = half_quadratic(weight, scheme)
    form = load_format(scheme.format)
    assert torch.equal(form.stored(scale.float(), scheme), scale)
    assert (zero is None) == scheme.symmetric
    found, plain = costs(weight, scale, zero, scheme), costs(weight, *ranges.minmax(weight, scheme), scheme)
    assert bool((found <= plain * (1 + 1e-5)).all())
    if scheme.format == "int4":
        assert float(found.sum()) < 0.97 * float(plain.sum())


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_it_finds_what_the_plain_alternation_finds(scheme: WeightScheme) -> None:
    weight = weights()
    found = costs(weight, *half_quadratic(weight, scheme, iterations=8), scheme)
    expected = [plain_hqq.best(row.tolist(), scheme, 0.7, 10.0, 1.01, 8) for row in weight.reshape(-1, 16)]
    # a code that lies between two may go either way in float32, and the turns after it with it
    near = torch.isclose(found, torch.tensor(expected), rtol=1e-3)
    assert float(near.float().mean()) > 0.85
    assert float(found.sum()) == pytest.approx(sum(expected), rel=0.01)


def test_no_turns_is_min_max_and_groups_of_zeros_stay_zero() -> None:
    weight = weights()
    weight[2, :16] = 0.0
    for turns in (0, 10):
        scale, zero = half_quadratic(weight, SCHEMES[0], iterations=turns)
        assert bool(torch.isfinite(scale).all())
        form = load_format("int4")
        assert not form.dequantize(form.nearest(weight, scale, zero, SCHEMES[0]))[2, :16].any()
    assert torch.equal(half_quadratic(weight, SCHEMES[0], iterations=0)[0], ranges.minmax(weight, SCHEMES[0])[0])


def test_what_has_no_integers_is_refused() -> None:
    with pytest.raises(InputError, match="format-not-integer"):
        half_quadratic(weights(), WeightScheme(format="float16"))
