"""Rounding to nearest, through the pipeline: codes are the format's own, or better."""

from __future__ import annotations

import pytest
import torch
import zoo

from quantkit import Pipeline, registry
from quantkit.model.structure import weight_of
from quantkit.scheme import WeightScheme

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("weights", [GROUPED, {"format": "int8"}, {"format": "int4", "granularity": "tensor"}])
def test_minmax_is_the_formats_own_rounding(name: str, weights: dict[str, object]) -> None:
    original = zoo.tiny(name)
    pipeline = Pipeline([{"rtn": {"range": "minmax"}}], weights=weights)
    model = pipeline.apply(zoo.tiny(name), zoo.ids(2, 8))
    scheme = WeightScheme.model_validate(weights)
    form = registry.load("formats", scheme.format)
    assert len(pipeline.tensors) == (12 if name == "gpt2" else 21)
    for linear, tensor in pipeline.tensors.items():
        expected = form.quantize(weight_of(original.get_submodule(linear)), scheme)
        assert torch.equal(tensor.codes, expected.codes)
        assert torch.equal(tensor.scale, expected.scale)
        assert torch.equal(weight_of(model.get_submodule(linear)), form.dequantize(tensor))
    assert not pipeline.decisions
    # nothing outside the blocks was touched
    for key, value in original.named_parameters():
        if not any(key.startswith(linear) for linear in pipeline.tensors):
            assert torch.equal(value, model.get_parameter(key))


def test_the_searched_range_costs_no_more_than_minmax() -> None:
    errors = {}
    for kind in ("minmax", "mse"):
        pipeline = Pipeline([{"rtn": {"range": kind}}], weights=GROUPED)
        original, model = zoo.tiny("llama"), pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 8))
        errors[kind] = {
            linear: float((weight_of(model.get_submodule(linear)) - weight_of(original.get_submodule(linear))).norm())
            for linear in pipeline.tensors
        }
    assert all(errors["mse"][linear] <= errors["minmax"][linear] * (1 + 1e-6) for linear in errors["mse"])
    assert sum(errors["mse"].values()) < 0.99 * sum(errors["minmax"].values())


def test_importance_spends_the_grid_where_inputs_are_large() -> None:
    """Weighted by the mean square of the inputs of the unquantized block, which is what the first shared input sees."""
    ids, linear = zoo.ids(4, 24), "model.layers.0.self_attn.q_proj"

    def uneven() -> torch.nn.Module:
        model = zoo.tiny("llama", num_hidden_layers=1)
        with torch.no_grad():
            model.get_parameter("model.layers.0.input_layernorm.weight")[::7] *= 8
        return model

    original = uneven()
    seen: list[torch.Tensor] = []
    original.get_submodule(linear).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    original(input_ids=ids)
    power = seen[0].flatten(0, 1).square().mean(dim=0)
    costs = {}
    for kind in ("mse", "importance"):
        model = Pipeline([{"rtn": {"range": kind}}], weights=GROUPED).apply(uneven(), ids)
        error = weight_of(model.get_submodule(linear)) - weight_of(original.get_submodule(linear))
        costs[kind] = float((error.square() @ power).sum())
    assert costs["importance"] < 0.9 * costs["mse"]
    step = registry.load("passes", "rtn").Settings
    assert step(range="importance").needs == {"mean_square"}
    assert not step(range="mse").needs


def test_what_no_token_reaches_is_rounded_all_the_same() -> None:
    from quantkit.calibrate.statistics import Stats

    class Nothing(Stats):
        def staged(self, visit, **_):  # type: ignore[no-untyped-def]
            """As if no token reached anything."""

    import quantkit.pipeline.work as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Stats", Nothing)
        pipeline = Pipeline([{"rtn": {"range": "importance"}}], weights=GROUPED)
        pipeline.apply(zoo.tiny("llama", num_hidden_layers=1), zoo.ids(2, 8))
    assert len(pipeline.tensors) == 7
    assert {each.code for each in pipeline.decisions} == {"no-importance"}
