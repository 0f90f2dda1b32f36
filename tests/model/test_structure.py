"""The structure of a block: which linears share an input, in which order they run."""

from __future__ import annotations

import pytest
import torch
import transformers
import zoo
from torch import nn

from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure.traced import is_linear, is_transposed, set_weight, trace, weight_of

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = [_QKV, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
SHARED = {
    "phi3": [("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)],
    "gpt2": [("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)],
    "opt": [_QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",)],
    "bert": [
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense",),
        ("intermediate.dense",),
        ("output.dense",),
    ],
}


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_shared_inputs_of_every_architecture(name: str) -> None:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(2, 8), 2)
    for index in (0, 2):
        found = trace(loaded.load(index), lambda index=index: calls.run(loaded.load(index), index, calls.hidden))
        assert [group.members for group in found.groups] == SHARED.get(name, _GATED)
        assert not found.idle
        wide = 256 if name == "gpt2" else 96
        assert [group.features for group in found.groups] == [64, 64, 64, wide]
        assert set(found.linears) <= set(found.order)
        for group in found.groups:
            for member in group.members:
                assert weight_of(loaded.load(index).get_submodule(member)).shape[1] == group.features
        # hooks are gone
        assert not any(module._forward_pre_hooks for module in loaded.load(index).modules())


class Tricky(nn.Module):
    """Equal values are not the same tensor; a tensor written to is not what it was; views of one tensor differ."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "copied", "changed", "sliced", "again", "unused", "never"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.a(x) + self.b(x)
        total = total + self.copied(x.clone())
        y = x.clone()
        total = total + self.again(y)
        y.add_(1.0)
        total = total + self.changed(y)
        total = total + self.sliced(x[:1])
        return total + self.a(total)


def test_sharing_means_the_very_same_tensor() -> None:
    found = trace(block := Tricky(), lambda: block(torch.ones(2, 4)))
    members = [group.members for group in found.groups]
    assert members == [("a", "b"), ("copied",), ("again",), ("changed",), ("sliced",)]
    assert found.idle == ("unused", "never")
    # a linear that runs twice is listed once, at its first input: its codes are assigned once
    assert found.linears.count("a") == 1
    assert found.order.index("a") < found.order.index("b") < found.order.index("sliced")
    assert "unused" not in found.order


def test_an_error_while_tracing_leaves_no_hooks() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        trace(block, lambda: block(torch.ones(1, 2)))
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_weights_read_and_written_as_outputs_by_inputs() -> None:
    conv = transformers.pytorch_utils.Conv1D(3, 5)  # 5 inputs, 3 outputs, stored [5, 3]
    assert is_linear(conv)
    assert is_transposed(conv)
    assert weight_of(conv).shape == (3, 5)
    new = torch.arange(15.0).reshape(3, 5)
    set_weight(conv, new)
    assert torch.equal(weight_of(conv), new)
    assert conv.weight.shape == (5, 3)
    assert conv.weight.is_contiguous()
    x = torch.randn(2, 5)
    assert torch.allclose(conv(x), x @ new.T + conv.bias)

    linear = nn.Linear(5, 3).to(torch.bfloat16)
    set_weight(linear, new)
    assert linear.weight.dtype == torch.bfloat16
    assert not linear.weight.requires_grad
    assert not is_transposed(linear)


@pytest.mark.parametrize("module", [nn.Embedding(4, 4), nn.LayerNorm(4), nn.Conv2d(2, 2, 1), nn.ReLU()])
def test_only_matrix_products_are_linears(module: nn.Module) -> None:
    assert not is_linear(module)
