"""SmoothQuant's scales, against one channel at a time, and its search against the error written out."""

import pytest
import torch
from torch import Tensor

from quantkit.passes.solvers import smoothquant


def spiky(tokens: int = 40, width: int = 12) -> Tensor:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= 60
    return x


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 12, generator=generator) for rows in (5, 7)]


def eight(x: Tensor) -> Tensor:
    """Each row on a grid of 255 values of its own."""
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_scales_one_channel_at_a_time(alpha: float) -> None:
    x, weights = spiky(), matrices()
    found = smoothquant.scales(x.abs().amax(0), weights, alpha)
    for channel in range(12):
        wide = max(float(row[channel].abs()) for weight in weights for row in weight)
        reach = max(float(row[channel].abs()) for row in x)
        assert float(found[channel]) == pytest.approx(reach**alpha / wide ** (1 - alpha), rel=1e-5)


def test_inputs_from_one_channel_share_the_scale_of_the_largest() -> None:
    producers = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])
    x, weights = spiky(), matrices()
    found = smoothquant.scales(x.abs().amax(0), weights, 0.5, producers)
    for one, other in ((0, 3), (1, 4), (8, 11)):
        assert found[one] == found[other]
    reach = float(x[:, [0, 3]].abs().max())
    wide = max(float(weight[:, [0, 3]].abs().max()) for weight in weights)
    assert float(found[0]) == pytest.approx((reach / wide) ** 0.5, rel=1e-5)


def test_dead_channels_stay_as_they_are() -> None:
    x, weights = spiky(), matrices()
    x[:, 1] = 0
    for weight in weights:
        weight[:, 2] = 0
    found = smoothquant.scales(x.abs().amax(0), weights, 0.5)
    assert found[1] == found[2] == 1
    assert bool(torch.isfinite(found).all())


def test_the_search_takes_the_least_error_at_the_output() -> None:
    x, weights = spiky(), matrices()
    reach = x.abs().amax(0)
    found = smoothquant.search(x, reach, weights, [eight, eight], [eight, eight], grid=4)

    def error(scales: Tensor) -> float:
        return sum(float((eight(x / scales) @ eight(w * scales).T - x @ w.T).square().sum()) for w in weights)

    tried = {alpha: error(smoothquant.scales(reach, weights, alpha)) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert float(found.plain) == pytest.approx(error(torch.ones(12)), rel=1e-4)
    assert float(found.alpha) == min(tried, key=lambda alpha: tried[alpha])
    assert float(found.cost) == pytest.approx(min(tried.values()), rel=1e-4)
    assert found.cost < found.plain / 2, "one channel had made every grid sixty times too wide"


def test_where_nothing_is_gained_nothing_is_scaled() -> None:
    x, weights = torch.ones(4, 12), [torch.ones(3, 12)]
    found = smoothquant.search(x, x.abs().amax(0), weights, [eight], [eight])
    assert bool(found.alpha.isnan())
    assert found.scales.tolist() == [1.0] * 12
