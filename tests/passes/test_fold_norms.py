"""Norms folded into the linears behind them: exact, and left alone where they cannot be."""

import pytest
import torch
import zoo
from planted_pass import run

from quantkit.model.structure.traced import weight_of
from quantkit.passes import load_pass

FOLD = load_pass("fold_norms")


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", ["input_layernorm", "post_attention_layernorm"]),
        ("gemma3", ["input_layernorm", "pre_feedforward_layernorm"]),
        ("phi3", ["input_layernorm", "post_attention_layernorm"]),
        ("gpt2", ["ln_1", "ln_2"]),
        ("opt", ["self_attn_layer_norm", "final_layer_norm"]),
    ],
)
def test_norms_become_one_and_outputs_stay(name: str, norms: list[str]) -> None:
    model, ids = zoo.tiny(name), zoo.ids(2, 12)
    with torch.no_grad():
        before = model(input_ids=ids)[0]
    blocks, outcomes = run(model, ids, FOLD)
    assert [outcome.changed for outcome in outcomes] == [True] * 3
    assert not [each for outcome in outcomes for each in outcome.decisions]
    for block in blocks:
        for norm in norms:
            weight = block.module.get_submodule(norm).weight
            assert torch.equal(weight, torch.zeros(64) if name == "gemma3" else torch.ones(64))
    with torch.no_grad():
        after = model(input_ids=ids)[0]
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max())


def test_the_columns_take_what_the_norm_gives_up() -> None:
    original, model = zoo.tiny("llama"), zoo.tiny("llama")
    run(model, zoo.ids(2, 12), FOLD)
    for layer in range(3):
        norm = original.get_parameter(f"model.layers.{layer}.input_layernorm.weight")
        for linear in ("q_proj", "k_proj", "v_proj"):
            name = f"model.layers.{layer}.self_attn.{linear}"
            expected = weight_of(original.get_submodule(name)) * norm
            assert torch.allclose(weight_of(model.get_submodule(name)), expected, rtol=1e-6)
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert torch.equal(model.get_parameter(name), original.get_parameter(name)), "no norm stands before it"


def test_a_weight_next_to_zero_keeps_its_norm_and_says_so() -> None:
    model = zoo.tiny("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.input_layernorm.weight")[3] = 1e-6
    kept = model.get_parameter("model.layers.1.input_layernorm.weight").clone()
    _, outcomes = run(model, zoo.ids(2, 12), FOLD)
    assert [[each.code for each in outcome.decisions] for outcome in outcomes] == [[], ["norm-kept"], []]
    assert outcomes[1].decisions[0].where == "model.layers.1.input_layernorm"
    assert torch.equal(model.get_parameter("model.layers.1.input_layernorm.weight"), kept)
    assert outcomes[1].changed, "its other norm was folded"


def test_negative_weights_fold_as_well() -> None:
    model, ids = zoo.tiny("llama"), zoo.ids(2, 12)
    with torch.no_grad():
        model.get_parameter("model.layers.0.input_layernorm.weight")[::2] *= -1
        before = model(input_ids=ids)[0]
        run(model, ids, FOLD)
        after = model(input_ids=ids)[0]
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max())


def test_a_post_norm_encoder_declines_with_a_reason() -> None:
    _, outcomes = run(zoo.tiny("bert"), zoo.ids(2, 12), FOLD)
    for index, outcome in enumerate(outcomes):
        assert not outcome.changed
        (only,) = outcome.decisions
        assert (only.pass_, only.code, only.where) == ("fold_norms", "nothing-to-do", f"encoder.layer.{index}")
        assert "no norm" in only.reason
