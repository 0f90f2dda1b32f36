"""A block as passes see it: names, groups, padding, assignment, folds."""

from __future__ import annotations

import pytest
import torch
import zoo
from transformers.pytorch_utils import Conv1D

from quantkit.formats import load_format
from quantkit.model.streaming.calls import Call
from quantkit.model.streaming.stream import LoadedModel
from quantkit.model.structure import fold
from quantkit.model.structure.block import Block
from quantkit.model.structure.traced import Structure, trace
from quantkit.scheme import WeightScheme

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
