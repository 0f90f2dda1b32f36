"""Turning: the plain product of matrices, and a wrong turn is seen by the proof."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from planted_turns import Matrix, block_of, orthogonal
from torch import nn

from quantkit.model.structure.fold import TOLERANCE
from quantkit.model.structure.residual import find, find_heads
from quantkit.model.structure.traced import weight_of
from quantkit.model.structure.turn import Heads, ModelPart, Residual, prove, turn


def test_a_turned_block_is_the_plain_product_of_matrices() -> None:
    block, call = block_of("llama")
    found, rotation = find(ModelPart.of_block(block, call)), orthogonal(64)
    plain = {
        name: weight_of(module).double() for name, module in block.named_modules() if isinstance(module, nn.Linear)
    }
    gain = block.get_parameter("input_layernorm.weight").double()
    turn(block, found, rotation)
    for name, expected in (
        ("self_attn.q_proj", plain["self_attn.q_proj"] @ torch.diag(gain) @ rotation.matrix),
        ("self_attn.o_proj", rotation.matrix.T @ plain["self_attn.o_proj"]),
    ):
        assert torch.allclose(weight_of(block.get_submodule(name)).double(), expected, atol=1e-6)
    assert bool((block.get_parameter("input_layernorm.weight") == 1).all())


def test_a_planted_wrong_turn_is_seen() -> None:
    block, call = block_of("qwen2")
    found = find(ModelPart.of_block(block, call))
    found = replace(found, heads=find_heads(block, call, found.writers, orthogonal))
    right = orthogonal(64)

    def error(planted: Residual = found, rotation: Matrix = right, heads=orthogonal) -> float:  # type: ignore[no-untyped-def]
        return prove(ModelPart.of_block(block, call), planted, rotation, heads)

    assert error() <= TOLERANCE
    stretched = right.matrix.clone()
    stretched[:, 3] *= 1 + 1e-6
    assert error(rotation=Matrix(stretched)) > TOLERANCE
    assert error(replace(found, writers=found.writers[:1])) > 1e-3
    first = found.norms[0]
    assert error(replace(found, norms=(replace(first, readers=first.readers[:2]), *found.norms[1:]))) > 1e-3
    assert error(replace(found, norms=(replace(first, form="one_plus_weight"), *found.norms[1:]))) > 1e-3
    gated = Heads("mlp.up_proj", ("mlp.down_proj",), torch.arange(96), 2)  # channels are multiplied by others
    assert error(replace(found, heads=(gated,))) > 1e-3
    assert error(heads=lambda size: Matrix(2 * orthogonal(size).matrix)) > 1e-3


def test_heads_turn_values_and_their_readers_in_place() -> None:
    block, call = block_of("qwen2")
    before = copy.deepcopy(block)
    path = find_heads(block, call, ("self_attn.o_proj",), orthogonal)
    assert [each.consumers for each in path] == [("self_attn.o_proj",)]
    turn(block, Residual(heads=path), orthogonal(64), orthogonal)
    matrix = orthogonal(16).matrix
    for name in ("weight", "bias"):
        old = before.get_parameter(f"self_attn.v_proj.{name}").double().reshape(2, 16, -1)
        new = block.get_parameter(f"self_attn.v_proj.{name}").double().reshape(2, 16, -1)
        assert torch.allclose(new, matrix.T @ old, atol=1e-6)
    old, new = (each.get_parameter("self_attn.o_proj.weight").double().reshape(64, 4, 16) for each in (before, block))
    assert torch.allclose(new, old @ matrix, atol=1e-6)
    assert isinstance(path[0], Heads)
