"""How far a right model's outputs may depart where a library multiplies in kernels of its own, of half precision.

Such a kernel sums in float32, but what it multiplies, and the result, have 8 significant bits on some processors,
whatever the model's dtype. Where that ends depends on the model: how deep it is, how sharp its attention, how wide its
logits spread. So it is not forecast: the expected model runs once more with the same products rounded (`rounding`), and
departs from itself by some d. The library's outputs are the same sum of roundings, drawn another time:

    d       = √(Σ (rounded - expected)² / Σ expected²)   over all outputs: of the largest alone, chance decides
    √(5/3) d   where the library rounds the scale and the code's value as well: five roundings for three
    2 d        is allowed, half as much again, besides what float32 may be off

Of random Llamas, GPT-NeoX and Gemma 3, 2 to 8 blocks deep, models whose products are rounded five times depart by 0.97
to 1.49 d, 1.27 d on average (`tests/model/test_kernel_limit.py`). What this lets through is found elsewhere: stored
tensors are compared one by one, to 1e-4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.model.structure.traced import set_parameter

DEPARTURES = 2.0


def departure(found: Tensor, expected: Tensor) -> float:
    """Return how far outputs are from others, of the size of those: by their norms."""
    if found.shape != expected.shape:
        return float("inf")
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def rounding(model: nn.Module, linears: Iterable[str]) -> nn.Module:
    """Have linears of a model round their inputs, weights and results to bfloat16; what they sum is not rounded."""
    for name in linears:
        linear = model.get_submodule(name)
        set_parameter(linear, "weight", _rounded(linear.weight.detach()))  # type: ignore[operator, union-attr]
        linear.register_forward_pre_hook(lambda _, given: (_rounded(given[0]), *given[1:]))
        linear.register_forward_hook(lambda _, given, result: _rounded(result))
    return model


@dataclass(frozen=True)
class RoundedProducts:
    """A `Transform` of a streamed model: linears of its blocks, by their full names, round their products."""

    block_names: Sequence[str]
    linears: Collection[str]

    def block(self, index: int, block: nn.Module) -> None:
        """Attach hooks."""
        prefix = f"{self.block_names[index]}."
        rounding(block, [name.removeprefix(prefix) for name in self.linears if name.startswith(prefix)])

    def rest(self, model: nn.Module) -> None:
        """Nothing: what lies outside the blocks is not packed for such a library."""


def _rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)
