"""Rounding to nearest, through the pipeline: codes are the format's own, or better."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo

from quantkit import Pipeline
from quantkit.formats import load_format
from quantkit.model.structure.traced import weight_of
from quantkit.passes import load_pass
from quantkit.passes.solvers.hqq import half_quadratic
from quantkit.scheme import WeightScheme

GROUPED = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("weights", [GROUPED, {"format": "int8"}, {"format": "int4", "granularity": "tensor"}])
def test_minmax_is_the_formats_own_rounding(name: str, weights: dict[str, object]) -> None:
    original = zoo.tiny(name)
    pipeline = Pipeline([{"rtn": {"range": "minmax"}}], weights=weights)
    model = pipeline.apply(zoo.tiny(name), zoo.ids(2, 8))
    scheme = WeightScheme.model_validate(weights)
    form = load_format(scheme.format)
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
    found = load_pass("rtn")
    step = found.Settings
    assert found.needs_with(step(range="importance")) == {"mean_square"}
    assert not found.needs_with(step(range="mse"))


def test_what_no_token_reaches_is_rounded_all_the_same() -> None:
    from quantkit.calibrate.statistics.collected import Stats

    class Nothing(Stats):
        def staged(self, visit, **_):  # type: ignore[no-untyped-def]
            """As if no token reached anything."""

    import quantkit.pipeline.blocks.work as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Stats", Nothing)
        pipeline = Pipeline([{"rtn": {"range": "importance"}}], weights=GROUPED)
        pipeline.apply(zoo.tiny("llama", num_hidden_layers=1), zoo.ids(2, 8))
    assert len(pipeline.tensors) == 7
    assert {each.code for each in pipeline.decisions} == {"no-importance"}


ASSIGNERS = [{"rtn": {"range": "minmax"}}, {"rtn": {"range": "importance"}}, "gptq"]
ONE_NUMBER = [{"format": "nvfp4"}, {"format": "fp8_e4m3", "granularity": "tensor", "scale": "float32"}]


@pytest.mark.parametrize("assigner", ASSIGNERS, ids=str)
@pytest.mark.parametrize("weights", ONE_NUMBER, ids=lambda fields: fields["format"])
def test_linears_of_one_input_have_in_common_what_is_one_number_for_a_matrix(
    assigner: object, weights: dict[str, object]
) -> None:
    """Runtimes that fuse them keep one of these; of nvfp4 it has to reach over the largest weight of all."""
    original, pipeline = zoo.tiny("llama"), Pipeline([assigner], weights=weights)
    pipeline.apply(zoo.tiny("llama"), zoo.ids(4, 16))
    numbers = {
        name: float(tensor.scale if tensor.global_scale is None else tensor.global_scale)
        for name, tensor in pipeline.tensors.items()
    }
    fused = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    groups = [
        [name for name in numbers if f"layers.{at}." in name and name.endswith(parts)]
        for at in range(3)
        for parts in fused
    ]
    assert sorted(len(group) for group in groups) == [1] * 6 + [2] * 3 + [3] * 3
    assert all(len({numbers[name] for name in group}) == 1 for group in groups)
    assert len(set(numbers.values())) == len(groups)
    for group in groups if weights["format"] == "nvfp4" else ():
        largest = max(float(weight_of(original.get_submodule(name)).abs().max()) for name in group)
        assert numbers[group[0]] == pytest.approx(largest / (448 * 6), rel=1e-6)


def test_integers_keep_a_scale_for_each_linear() -> None:
    """They are read with one for each row, and would pay for having one in common."""
    pipeline = Pipeline(["rtn"], weights={"format": "int8", "granularity": "tensor", "scale": "float32"})
    pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 8))
    assert len({float(tensor.scale) for tensor in pipeline.tensors.values()}) == 21


def test_codes_lie_on_the_fitted_grids() -> None:
    original = zoo.tiny("llama")
    pipeline = Pipeline([{"hqq": {"iterations": 4, "norm": 0.8}}], weights=GROUPED)
    model = pipeline.apply(zoo.tiny("llama"), zoo.ids(2, 8))
    scheme = WeightScheme.model_validate(GROUPED)
    form = load_format("int4")
    assert len(pipeline.tensors) == 21
    for linear, tensor in pipeline.tensors.items():
        weight = weight_of(original.get_submodule(linear))
        scale, zero = half_quadratic(weight, scheme, iterations=4, norm=0.8)
        assert torch.equal(tensor.scale, scale)
        assert torch.equal(tensor.codes, form.nearest(weight, scale, zero, scheme).codes)
        assert torch.equal(weight_of(model.get_submodule(linear)), form.dequantize(tensor))
    assert not pipeline.decisions
    assert not load_pass("hqq").needs


MIXED = load_pass("mixed")


def test_a_transformers_block_is_declined() -> None:
    block: Any = SimpleNamespace(name="model.layers.0")
    outcome = MIXED.run(block, None, MIXED.Settings())
    assert not outcome.changed
    (decision,) = outcome.decisions
    assert (decision.code, decision.where) == ("nothing-to-do", "model.layers.0")
    assert "quantkit tune" in decision.reason
