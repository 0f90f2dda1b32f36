"""A model in memory as a stream of blocks: transformers of every kind, and modules that are one block."""

from __future__ import annotations

import torch
import zoo
from torch import Tensor, nn

from quantkit.model.streaming.stream import LoadedModel


class Stack(nn.Module):
    """A list of like layers that takes no token ids: no transformer, so the whole of it is one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_transformer_is_its_layers() -> None:
    model = zoo.tiny("llama")
    model.train()
    loaded = LoadedModel(model)
    assert loaded.block_names == [f"model.layers.{index}" for index in range(3)]
    assert loaded.load(2) is model.get_submodule("model.layers.2")
    assert not model.training


def test_a_module_without_token_ids_is_one_block() -> None:
    for module in (Stack(), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(6, 3)):
        loaded = LoadedModel(module)
        assert loaded.block_names == [""]
        assert loaded.load(0) is module
        x = torch.randn(5, 6)
        calls = loaded.begin(x, 2)
        assert torch.equal(calls.hidden, x)
        alone = calls.forward_row(module, 0, x[3:4], 3)
        assert torch.allclose(alone, module(x[3:4]), atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(calls.run_all(module, 0, calls.hidden), module(x), atol=1e-6)
