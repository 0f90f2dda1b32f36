"""What kernels of half precision leave of a right model, by a model whose every product is rounded as theirs are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import shrink

from quantkit.model.streaming.transforms import DEPARTURES, departure, rounding

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


def one_group_is_doubled(model: nn.Module) -> None:
    as_a_kernel_does(model)
    next(linear for linear in model.modules() if isinstance(linear, nn.Linear)).weight.data[:4, :32] *= 2


def one_bias_is_lost(model: nn.Module) -> None:
    as_a_kernel_does(model)
    next(module for name, module in model.named_modules() if name.endswith("norm")).weight.data[:8] = 1  # type: ignore[operator, union-attr, index]


def departures(model: Any, change: Callable[[nn.Module], None]) -> tuple[float, float]:
    """Of a changed model, and of the same with its products rounded as the limit is computed."""
    ids, changed, other = shrink.ids(2, 24), copy.deepcopy(model), copy.deepcopy(model)
    change(changed.base_model)
    linears = [name for name, module in other.base_model.named_modules() if isinstance(module, nn.Linear)]
    rounding(other.base_model, linears)
    with torch.no_grad():
        meant, found, limit = (each(ids).logits for each in (model, changed, other))
    return departure(found, meant), departure(limit, meant)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("blocks", [1, 4, 8])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_a_right_model_is_within_it(name: str, blocks: int, spread: float) -> None:
    """Depth, and sharper attention, make a model depart further, by how much differs; the limit goes with it."""
    model = shrink.tiny(name, num_hidden_layers=blocks, seed=blocks)
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.weight.data *= spread**0.5
    off, once = departures(model, as_a_kernel_does)
    assert UNIT / 2 < off <= DEPARTURES * once


@pytest.mark.parametrize("fault", [one_group_is_doubled, one_bias_is_lost])
def test_a_wrong_model_is_not(fault: Callable[[nn.Module], None]) -> None:
    off, once = departures(shrink.tiny("LlamaForCausalLM", num_hidden_layers=4), fault)
    assert off > DEPARTURES * once


def test_one_rounding_leaves_what_is_said_of_it() -> None:
    """Five of them for three are √(5/3) of it: errors that are independent add as their squares do."""
    x = torch.exp2(torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    errors = rounded(x) / x - 1
    assert float(errors.abs().max()) <= UNIT
    assert float(errors.square().mean().sqrt()) == pytest.approx(UNIT * (0.541 / 3) ** 0.5, rel=0.01)
