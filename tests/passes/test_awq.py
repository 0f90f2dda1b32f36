"""AWQ in a block: exact before rounding, better after it, and a reason wherever it does nothing."""

import pytest
import torch
import zoo
from planted_pass import GROUPED, run
from torch import nn
from zoo import outputs

from quantkit import Pipeline
from quantkit.passes import load_pass

AWQ = load_pass("awq")


def spiky(name: str) -> nn.Module:
    return zoo.spiky(name, 12, 3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt2", "opt", "bert"])
def test_scales_change_no_output_before_rounding(name: str) -> None:
    model, ids = spiky(name), zoo.ids(4, 16)
    before = outputs(model, ids)
    weights = {key: value.clone() for key, value in model.named_parameters()}
    blocks, outcomes = run(model, ids, AWQ, settings={"grid": 4})
    assert any(outcome.changed for outcome in outcomes)
    assert any(not torch.equal(value, weights[key]) for key, value in model.named_parameters())
    after = outputs(model, ids)
    assert float((after - before).abs().max()) <= 2e-5 * float(before.abs().max())
    assert not blocks[0].tensors, "codes are assigned by the pass that follows"


def test_heads_that_share_values_share_their_scales() -> None:
    """Scales of o's inputs come from 32 channels of v, each read by two heads."""
    original, model = spiky("llama"), spiky("llama")
    run(model, zoo.ids(4, 16), AWQ, settings={"grid": 4})
    name = "model.layers.0.self_attn"
    gain = model.get_parameter(f"{name}.o_proj.weight") / original.get_parameter(f"{name}.o_proj.weight")
    heads = gain.detach().mean(0).reshape(2, 2, 16)  # [key/value head, heads that share it, channel]
    assert torch.allclose(heads[:, 0], heads[:, 1], rtol=1e-4)
    assert float(heads.std()) > 1e-3


@pytest.mark.parametrize("assigner", ["rtn", "gptq"])
def test_rounding_costs_less_with_it(assigner: str) -> None:
    ids = zoo.ids(8, 32)
    expected = outputs(spiky("llama"), ids)
    error = {}
    for passes in (
        [{"rtn": {"range": "minmax"}}],
        [{"awq": {"grid": 8}}, {"rtn": {"range": "minmax"}}],
        ["awq", assigner],
    ):
        found = Pipeline(passes, weights=GROUPED).apply(spiky("llama"), ids)
        error[str(passes)] = float((outputs(found, ids) - expected).square().mean())
    plain, scaled, both = error.values()
    assert scaled < plain
    assert both < plain


def test_where_it_does_nothing_it_says_why() -> None:
    _, outcomes = run(zoo.tiny("bert"), zoo.ids(4, 16), AWQ, settings={"grid": 2})
    for index, outcome in enumerate(outcomes):
        reasons = {each.where.removeprefix(f"encoder.layer.{index}."): each.reason for each in outcome.decisions}
        assert {each.code for each in outcome.decisions} == {"not-scaled"}
        assert reasons.keys() == {"attention.self.query", "intermediate.dense", "output.dense"}
        assert "own input" in reasons["attention.self.query"]
        assert "outputs would differ" in reasons["intermediate.dense"]


def test_padded_inputs_are_not_scaled_and_recorded() -> None:
    pipeline = Pipeline(["awq", "rtn"], weights={**GROUPED, "group": 40}, on_indivisible="pad")
    pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 12))
    codes = [each.code for each in pipeline.decisions]
    assert codes.count("padded") == 21
    assert codes.count("not-scaled") == 12
    assert {each.reason for each in pipeline.decisions if each.code == "not-scaled"} == {"its last group is padded"}


def test_clipping_cuts_weights_and_a_grid_of_nothing_scales_nothing() -> None:
    original, model = spiky("llama"), spiky("llama")
    _, outcomes = run(model, zoo.ids(4, 16), AWQ, settings={"grid": 0, "clip": True})
    assert all(outcome.changed for outcome in outcomes)
    for key, value in original.named_parameters():
        now = model.get_parameter(key)
        if key.startswith("model.layers") and now.dim() == 2:
            assert bool((now.abs() <= value.abs() * (1 + 1e-6)).all())
        else:
            assert torch.equal(now, value)
    assert any(not torch.equal(model.get_parameter(key), value) for key, value in original.named_parameters())
    _, outcomes = run(spiky("llama"), zoo.ids(2, 12), AWQ, settings={"grid": 0})
    assert not any(outcome.changed for outcome in outcomes)


def test_kept_members_take_the_scales_too() -> None:
    """k stays in high precision but reads the same norm."""
    model, ids = spiky("llama"), zoo.ids(4, 16)
    before, weight = outputs(model, ids), model.get_parameter("model.layers.0.self_attn.k_proj.weight").clone()
    run(model, ids, AWQ, settings={"grid": 4}, keep=("*.k_proj",))
    assert not torch.equal(model.get_parameter("model.layers.0.self_attn.k_proj.weight"), weight)
    assert float((outputs(model, ids) - before).abs().max()) <= 2e-5 * float(before.abs().max())


def test_a_bfloat16_models_norms_are_scaled_to_what_they_can_store() -> None:
    model, ids = spiky("llama").to(torch.bfloat16).float(), zoo.ids(4, 16)
    before = outputs(model, ids)
    blocks, _ = run(model, ids, AWQ, settings={"grid": 4}, dtype=torch.bfloat16)
    for block in blocks:
        weight = block.module.get_parameter("input_layernorm.weight")
        assert torch.equal(weight, weight.to(torch.bfloat16).float())
    assert float((outputs(model, ids) - before).abs().max()) <= 2e-5 * float(before.abs().max())


def test_the_search_reads_the_first_sequences_alone() -> None:
    ids = zoo.ids(6, 16)
    models = []
    for tokens, sequences in ((ids, 2), (ids[:2], 0), (ids, 0)):
        models.append(spiky("llama"))
        run(models[-1], tokens, AWQ, settings={"grid": 6, "sequences": sequences})
    few, alone, whole = (dict(model.get_submodule("model.layers.0").named_parameters()) for model in models)
    assert all(torch.equal(few[name], alone[name]) for name in few)
    assert any(not torch.equal(few[name], whole[name]) for name in few)
