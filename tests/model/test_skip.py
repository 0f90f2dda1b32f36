"""Skips: found in every architecture that has them, and only where the sum is one."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor, nn

from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure.residual import skips

LLAMA = {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"}


def of(name: str, index: int = 1) -> dict[str, str]:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(2, 12), 2)
    return dict(skips(loaded.load(index), lambda block: calls.run(block, index, calls.hidden)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", LLAMA),
        ("qwen3", LLAMA),
        ("phi3", LLAMA),
        ("gpt2", {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"}),
        ("opt", {"self_attn.out_proj": "self_attn_layer_norm", "fc2": "final_layer_norm"}),
        ("bert", {"attention.output.dense": "attention.self.query", "output.dense": "intermediate.dense"}),
        # norms come between the linears and the sums
        ("gemma2", {}),
    ],
)
def test_what_outputs_are_added_to(name: str, expected: dict[str, str]) -> None:
    assert of(name) == expected


class Block(nn.Module):
    """`x + scale * linear(norm(x))`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.scale * self.linear(self.norm(x))
        return found


@pytest.mark.parametrize(("scale", "expected"), [(1.0, {"linear": "norm"}), (0.9999, {}), (0.0, {})])
def test_a_sum_is_exact_or_none(scale: float, expected: dict[str, str]) -> None:
    block, x = Block(scale), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert skips(block, lambda module: module(x)) == expected
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in block.modules()), "hooks are gone"


def test_inputs_that_are_written_to_are_told_apart() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.norm(x))
            return x.mul_(2.0) + y  # no longer what the norm read

    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert skips(InPlace(1.0), lambda module: module(x.clone())) == {}
