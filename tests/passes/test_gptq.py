"""GPTQ in a block: better outputs than rounding, one factor a shared input, nothing done in silence."""

import pytest
import torch
import zoo
from planted_pass import GROUPED
from torch import Tensor, nn
from zoo import outputs

from quantkit import Pipeline
from quantkit.formats import load_format
from quantkit.passes import gptq
from quantkit.passes.solvers import factor as solver
from quantkit.passes.solvers.moments import filled


class Correlated(nn.Module):
    """Two linears on inputs that are far from independent, where making up for errors pays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


def correlated(samples: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 8, generator=generator) @ torch.randn(8, 32, generator=generator)


@pytest.mark.parametrize("weights", [GROUPED, {"format": "int4"}, {"format": "int4", "granularity": "tensor"}])
def test_outputs_are_closer_than_with_plain_rounding(weights: dict[str, object]) -> None:
    x = correlated()
    with torch.no_grad():
        expected = Correlated()(x)
        error = {}
        for step in ("rtn", {"gptq": {"shrink": 0.0}}):
            model = Pipeline([step], weights=weights).apply(Correlated(), x)
            error[str(step)] = float((model(x) - expected).square().mean())
    plain, better = error.values()
    assert better < 0.8 * plain


def test_a_whole_model_is_closer_too() -> None:
    ids = zoo.ids(8, 32)
    expected = outputs(zoo.tiny("llama"), ids)
    error = [
        float(
            (outputs(Pipeline([step], weights=GROUPED).apply(zoo.tiny("llama"), ids), ids) - expected).square().mean()
        )
        for step in ("rtn", "gptq")
    ]
    assert error[1] < error[0]


def test_one_factor_a_shared_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = solver.factor

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(kwargs)
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(solver, "factor", counted)
    Pipeline([{"gptq": {"damping": 0.02, "act_order": False, "shrink": 0.5}}], weights=GROUPED).apply(
        zoo.tiny("llama"), zoo.ids(2, 8)
    )
    assert len(calls) == 3 * 4
    where = "model.layers.0.self_attn.q_proj"
    how = {"together": 1, "raised": 0, "where": where, "own": True, "whole": False}
    assert calls[0] == {"damping": 0.02, "act_order": False, "shrink": 0.5, **how}


def test_members_of_one_input_may_have_schemes_of_their_own() -> None:
    eight = {"match": "*.k_proj", "weights": {"format": "int8", "granularity": "channel"}}
    pipeline = Pipeline(["gptq"], weights=GROUPED, overrides=[eight], keep=["*.v_proj"])
    original = zoo.tiny("llama")
    model = pipeline.apply(zoo.tiny("llama"), zoo.ids(4, 16))
    assert {name: tensor.scheme.format for name, tensor in pipeline.tensors.items() if ".0.self" in name} == {
        "model.layers.0.self_attn.q_proj": "int4",
        "model.layers.0.self_attn.k_proj": "int8",
        "model.layers.0.self_attn.o_proj": "int4",
    }
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(model.get_parameter(name), original.get_parameter(name))
    assert [each.code for each in pipeline.decisions] == ["kept-as-asked"] * 3


def test_damping_that_had_to_be_raised_is_recorded() -> None:
    """8 tokens say nothing of most of 32 directions: without damping there is no factor."""
    x = correlated(8)
    settings = {"damping": 0.0, "shrink": 0.0}
    pipeline = Pipeline([{"gptq": settings}], weights=GROUPED)
    model = pipeline.apply(Correlated(), x)
    raised = [each for each in pipeline.decisions if each.code == "damping-raised"]
    assert {each.where for each in raised} == {"up", "down"}
    for each in raised:
        assert each.pass_ == "gptq"
        assert each.from_ == 0.0
        assert each.to >= 1e-4
        assert "8 tokens" in each.reason
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    enough = Pipeline([{"gptq": {"damping": 0.01}}], weights=GROUPED)
    enough.apply(Correlated(), correlated(500))
    assert not enough.decisions


def test_padded_columns_are_zero_and_cost_nothing() -> None:
    hessian = torch.eye(3)
    assert filled(hessian, 3, 3) is hessian
    wide = filled(hessian, 5, 5)
    assert torch.equal(wide[:3, :3], hessian)
    assert not wide[3:].any()
    assert not wide[:, 3:].any()
    weights = {**GROUPED, "group": 24}
    pipeline = Pipeline(["gptq"], weights=weights, on_indivisible="pad")
    model = pipeline.apply(Correlated(), correlated())
    assert pipeline.tensors["up"].shape == (64, 48)
    assert pipeline.tensors["down"].shape == (32, 72)
    assert [each.code for each in pipeline.decisions] == ["padded", "padded"]
    values = load_format("int4").dequantize(pipeline.tensors["up"])
    assert not values[:, 32:].any()
    assert torch.equal(model.up.weight, values[:, :32])


def test_correcting_for_the_drift_of_inputs_brings_outputs_closer() -> None:
    ids = zoo.ids(16, 32)
    expected = outputs(zoo.tiny("llama"), ids)
    error = []
    for share in (0.0, 1.0):
        step = {"gptq": {"correction": share, "ridge": 0.0, "shrink": 0.0}}
        model = Pipeline([step], weights={"format": "int4"}).apply(zoo.tiny("llama"), ids)
        error.append(float((outputs(model, ids) - expected).square().mean()))
    assert error[1] < 0.9 * error[0]


def test_without_drift_there_is_nothing_to_correct() -> None:
    """The first linear of the first block sees what it always saw."""
    tensors = []
    for share in (0.0, 1.0):
        pipeline = Pipeline([{"gptq": {"correction": share}}], weights=GROUPED)
        pipeline.apply(Correlated(), correlated())
        tensors.append(pipeline.tensors)
    assert torch.equal(tensors[0]["up"].codes, tensors[1]["up"].codes)
    assert not torch.equal(tensors[0]["down"].codes, tensors[1]["down"].codes)


def test_the_original_stream_is_asked_for_only_to_correct() -> None:
    assert gptq.PASS.needs_with(gptq.PASS.Settings(correction=0.5)) == {"hessian", "original_inputs"}
    assert gptq.PASS.needs_with(gptq.PASS.Settings(correction=0)) == {"hessian"}
