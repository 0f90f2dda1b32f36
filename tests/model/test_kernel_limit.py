"""What kernels of half precision leave of a right model, by a model whose every product is rounded as theirs are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from quantkit.model.kernel_limit import kernel_limit

pytestmark = pytest.mark.usefixtures("one_thread")
UNIT = 2.0**-8


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def as_a_kernel_does(model: nn.Module) -> None:
    """Inputs, scales of 32 weights, their codes' values, what the two make, and results are rounded; sums are not."""
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            groups = linear.weight.data.reshape(-1, 32)
            scale = groups.abs().amax(1, keepdim=True)
            linear.weight.data = rounded(rounded(groups / scale) * rounded(scale)).reshape(linear.weight.shape)
            linear.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
            linear.register_forward_hook(lambda _, given, found: rounded(found))


def departs(blocks: int) -> float:
    model: Any = zoo.tiny("llama", num_hidden_layers=blocks)
    model.eval()
    ids = zoo.ids(2, 24)
    with torch.no_grad():
        meant = model(ids).logits
        as_a_kernel_does(model.model)
        found = model(ids).logits
    return float((found - meant).abs().max() / meant.abs().max())


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_a_right_model_is_within_it(blocks: int) -> None:
    assert UNIT < departs(blocks) <= kernel_limit(blocks)


def test_a_fixed_limit_would_call_a_right_model_wrong() -> None:
    assert 2.0**-7 < departs(2) < 2.0**-6 < departs(8)


def test_two_blocks_may_be_off_by_four_units_and_more_blocks_by_their_root() -> None:
    assert kernel_limit(1) == kernel_limit(2) == 4 * UNIT
    assert kernel_limit(8) == 8 * UNIT
    # half as much again as five roundings a product and four products a block come to on average
    once = UNIT * (0.541 / 3) ** 0.5
    for blocks in (2, 30, 80):
        assert kernel_limit(blocks) == pytest.approx(1.5 * once * (5 * 4 * blocks) ** 0.5, rel=0.02)


def test_one_rounding_leaves_what_is_said_of_it() -> None:
    x = torch.exp2(torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    errors = rounded(x) / x - 1
    assert float(errors.abs().max()) <= UNIT
    assert float(errors.square().mean().sqrt()) == pytest.approx(UNIT * (0.541 / 3) ** 0.5, rel=0.01)
