"""The structure of a block: which linears share an input, in which order they run."""

import pytest
import torch
import transformers
import zoo
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantkit.formats import load_format
from quantkit.model.streaming.calls import Call
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure import fold
from quantkit.model.structure.block import Block
from quantkit.model.structure.traced import Structure, is_linear, is_transposed, set_weight, trace, weight_of
from quantkit.scheme import WeightScheme

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


INT4 = WeightScheme(format="int4", granularity="group", group=32, symmetric=False)
INT8 = WeightScheme(format="int8")


def make(name: str = "llama", **schemes: WeightScheme | None) -> tuple[Block, Call]:
    loaded = LoadedModel(zoo.tiny(name))
    calls = loaded.begin(zoo.ids(2, 12), 2)
    module, call = loaded.load(0), calls.call(0)
    structure = trace(module, lambda: call(module))
    folds, declined = fold.find(module, structure, call)
    chosen = {linear: schemes.get(linear.rpartition(".")[2], INT4) for linear in structure.linears}
    return Block("model.layers.0", 0, module, structure, folds, declined, chosen, torch.float32), call


def test_only_what_is_to_be_quantized_is_listed() -> None:
    block, _ = make(k_proj=None, o_proj=None)
    assert block.full_name("mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert "self_attn.k_proj" not in block.linears()
    assert [group.members for group in block.groups()] == [
        ("self_attn.q_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]
    assert block.scheme("mlp.up_proj") == INT4
    with pytest.raises(AssertionError):
        block.scheme("self_attn.k_proj")


def test_a_whole_model_as_block_has_plain_names() -> None:
    block = Block("", 0, torch.nn.Linear(2, 2), Structure(()), {}, {}, {}, torch.float32)
    assert block.full_name("fc") == "fc"


def test_a_group_goes_by_the_name_it_was_traced_under() -> None:
    block, _ = make(q_proj=None)
    group = block.groups()[0]
    assert group.members == ("self_attn.k_proj", "self_attn.v_proj")
    assert block.group_name(group) == "self_attn.q_proj"


def test_assigned_codes_are_what_the_block_computes_with() -> None:
    block, call = make()
    weight = block.weight("mlp.up_proj").clone()
    form = load_format("int4")
    tensor = form.quantize(weight, INT4)
    before = call(block.module)
    error = block.assign("mlp.up_proj", tensor)
    values = form.dequantize(tensor)
    assert error == pytest.approx(float((weight - values).double().square().sum() / weight.double().square().sum()))
    assert torch.equal(block.module.get_parameter("mlp.up_proj.weight"), values)
    assert block.tensors["mlp.up_proj"] is tensor
    assert not torch.equal(call(block.module), before)


def test_zero_weights_have_no_error() -> None:
    block, _ = make()
    block.replace("mlp.up_proj", torch.zeros(96, 64))
    tensor = load_format("int4").quantize(block.weight("mlp.up_proj"), INT4)
    assert block.assign("mlp.up_proj", tensor) == 0.0


def test_padding_is_seen_by_the_solver_and_by_nobody_else() -> None:
    wide = WeightScheme(format="int4", granularity="group", group=40)
    block, _ = make(up_proj=wide)
    weight = block.weight("mlp.up_proj")
    assert weight.shape == (96, 80)
    assert not weight[:, 64:].any()
    tensor = load_format("int4").quantize(weight, wide)
    block.assign("mlp.up_proj", tensor)
    assert tensor.shape == (96, 80)
    assert block.module.get_parameter("mlp.up_proj.weight").shape == (96, 64)
    # padded columns are stored as exact zeros
    assert not load_format("int4").dequantize(tensor)[:, 64:].any()


def test_transposed_linears_are_assigned_as_outputs_by_inputs() -> None:
    block, _ = make("gpt2")
    assert isinstance(block.module.get_submodule("attn.c_attn"), Conv1D)
    weight = block.weight("attn.c_attn")
    assert weight.shape == (192, 64)
    tensor = load_format("int8").quantize(weight, INT8)
    block.assign("attn.c_attn", tensor)
    values = load_format("int8").dequantize(tensor)
    assert torch.equal(block.module.get_parameter("attn.c_attn.weight"), values.T)


def test_a_fold_reaches_members_that_stay_in_high_precision() -> None:
    """q is kept, k and v are quantized: all three read the norm, so all three have to take the scales."""
    block, call = make(q_proj=None)
    before = call(block.module)
    group = block.groups()[0]
    scales = torch.linspace(0.5, 2.0, 64)
    assert torch.allclose(block.fold(group, scales), scales)
    after = call(block.module)
    assert torch.allclose(after, before, rtol=0, atol=1e-5 * before.detach().abs().max().item())
