"""The residual stream: what reads it and writes to it is found, turned exactly, and a wrong turn is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_turns import block_of, orthogonal
from torch import Tensor, nn

from quantkit.model.streaming.calls import Call
from quantkit.model.structure.fold import TOLERANCE
from quantkit.model.structure.residual import Unturnable, find, find_heads
from quantkit.model.structure.turn import ModelPart, prove

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize(
    ("name", "norms", "writers", "heads", "form", "centres"),
    [
        (
            "llama",
            {"input_layernorm": ATTENTION, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
            ("self_attn.o_proj", "mlp.down_proj"),
            ("self_attn.v_proj", 16),
            "weight",
            False,
        ),
        (
            "gemma",
            {"input_layernorm": ATTENTION, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
            ("self_attn.o_proj", "mlp.down_proj"),
            ("self_attn.v_proj", 16),
            "one_plus_weight",
            False,
        ),
        (
            "phi3",
            {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
            ("self_attn.o_proj", "mlp.down_proj"),
            ("self_attn.qkv_proj", 16),
            "weight",
            False,
        ),
        (
            "gpt2",
            {"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
            ("attn.c_proj", "mlp.c_proj"),
            ("attn.c_attn", 16),
            "weight",
            True,
        ),
        (
            "olmo",
            {"input_layernorm": ATTENTION, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")},
            ("self_attn.o_proj", "mlp.down_proj"),
            ("self_attn.v_proj", 16),
            "none",
            True,
        ),
    ],
)
def test_what_touches_the_stream_is_found_and_turns(
    name: str,
    norms: dict[str, tuple[str, ...]],
    writers: tuple[str, ...],
    heads: tuple[str, int],
    form: str,
    centres: bool,
) -> None:
    block, call = block_of(name)
    before = {key: value.clone() for key, value in block.named_parameters()}
    found = find(ModelPart.of_block(block, call))
    assert {norm.name: norm.readers for norm in found.norms} == norms
    assert {norm.form for norm in found.norms} == {form}
    assert found.centres is centres
    assert found.writers == writers
    paths = find_heads(block, call, found.writers, orthogonal)
    assert [(path.producer, path.size) for path in paths] == [heads], "gate times up is no value path"
    found = replace(found, heads=paths)
    rotation = orthogonal(64, keeping_means=centres)
    assert prove(ModelPart.of_block(block, call), found, rotation, orthogonal) <= TOLERANCE
    if centres:
        assert prove(ModelPart.of_block(block, call), found, orthogonal(64), orthogonal) > 1e-3
    assert all(torch.equal(value, before[key]) for key, value in block.named_parameters()), "a copy was turned"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2", "self_attn.o_proj reaches the residual stream through post_attention_layernorm"),
        ("gemma3", "self_attn.o_proj reaches the residual stream through post_attention_layernorm"),
        ("bert", "the residual stream itself passes through output.LayerNorm"),
    ],
)
def test_norms_behind_linears_do_not_turn(name: str, reason: str) -> None:
    with pytest.raises(Unturnable, match=reason):
        find(ModelPart.of_block(*block_of(name)))


class Gated(nn.Module):
    """A block with a branch that no token takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.used, self.idle = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.used(self.norm(hidden))
        return out


def test_what_never_ran_is_not_guessed() -> None:
    with pytest.raises(Unturnable, match="no token reached idle"):
        find(ModelPart.of_block(Gated(), Call(torch.randn(2, 3, 8))))


def test_a_bias_behind_a_weight_of_zero_is_not_divided() -> None:
    block = Gated()
    del block.idle
    found = find(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))))
    assert (found.norms[0].readers, found.writers) == (("used",), ("used",))
    assert (
        prove(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))), found, orthogonal(8, keeping_means=True)) < 1e-12
    )
    with torch.no_grad():
        block.norm.weight[2] = 0
    with pytest.raises(Unturnable, match="too close to zero"):
        find(ModelPart.of_block(block, Call(torch.randn(2, 3, 8))))


class Routed(nn.Module):
    """Each expert is given some rows of what the norm returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).reshape(-1, 8)
        return hidden + torch.cat([self.first(rows[::2]), self.second(rows[1::2])]).reshape(hidden.shape)


def test_rows_that_are_handed_on_are_followed() -> None:
    block = Routed()
    with torch.no_grad():
        block.norm.weight[2] = 0  # without a bias, nothing is divided by it
    found = find(ModelPart.of_block(block, Call(torch.randn(2, 4, 8))))
    assert found.norms[0].readers == ("first", "second")
