import pytest
import torch
from reference.gptq_oracle import cost

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.layout import extremes
from quantkit.kernels.cpu import columns as loops
from quantkit.passes.solvers import awq as solver
from quantkit.passes.solvers.awq import clip, search_scales, transformed
from quantkit.passes.solvers.factor import factor
from quantkit.passes.solvers.gptq import gptq
from quantkit.scheme import WeightScheme

INT4 = load_format("int4")


def scheme(granularity="group", symmetric=False, group=16):
    return WeightScheme(
        format="int4", granularity=granularity, group=group if granularity == "group" else None, symmetric=symmetric
    )


def problem(rows=24, columns=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(512, columns, generator=generator)
    inputs[:, ::9] *= 30
    return torch.randn(rows, columns, generator=generator), inputs


def rounded(weight, choice):
    return INT4.dequantize(INT4.quantize(weight, choice))


CASES = [scheme(g, s) for g in ("tensor", "channel", "group") for s in (True, False)]


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
def test_the_cost_is_the_outputs_squared_error_and_falls(choice):
    weight, inputs = problem()
    other = torch.randn(7, 64, generator=torch.Generator().manual_seed(5))
    found = search_scales([weight, other], inputs.T @ inputs, choice, grid=8)
    assert found.alpha > 0
    assert found.cost < 0.8 * found.plain
    plain, scaled = 0.0, 0.0
    for part in (weight, other):
        exact = inputs.double() @ part.double().T
        plain += float((inputs.double() @ rounded(part, choice).double().T - exact).square().sum())
        served = (inputs / found.scales).double() @ rounded(part * found.scales, choice).double().T
        scaled += float((served - exact).square().sum())
    assert float(found.plain) == pytest.approx(plain, rel=1e-3)
    assert float(found.cost) == pytest.approx(scaled, rel=1e-3)


@pytest.mark.parametrize("name", ["q4_0", "iq4_nl", "q4_1", "q4_k"])
def test_blocks_of_gguf_are_scaled_too(name):
    """Their scales are not rounded while they are searched, which changes the cost a little."""
    form, choice = load_format(name), WeightScheme(format=name)
    weight, inputs = problem(columns=256)
    found = search_scales([weight], inputs.T @ inputs, choice, grid=4)
    assert found.alpha > 0 and found.cost < 0.8 * found.plain
    ends = extremes(weight, choice)
    values = form.dequantize(form.nearest(weight, *form.parameters(*ends, choice), choice))
    plain = float((inputs.double() @ (values - weight).double().T).square().sum())
    assert float(found.plain) == pytest.approx(plain, rel=0.05)


def test_nothing_to_gain_leaves_ones():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    found = search_scales([weight], torch.eye(64), scheme())
    assert found.alpha == 0
    assert torch.equal(found.scales, torch.ones(64))
    assert found.cost == found.plain


def test_tied_inputs_share_a_scale_and_dead_ones_are_left_alone():
    weight, inputs = problem()
    producers = torch.arange(64) // 4
    found = search_scales([weight], inputs.T @ inputs, scheme(), producers=producers)
    tied = found.scales.reshape(16, 4)
    assert found.alpha > 0
    assert torch.equal(tied, tied[:, :1].expand(16, 4))
    inputs[:, 7] = 0
    found = search_scales([weight], inputs.T @ inputs, scheme())
    assert float(found.scales[7]) == 1
    assert bool((found.scales > 0).all()) and bool(torch.isfinite(found.scales).all())


def test_the_hessian_of_scaled_inputs():
    _, inputs = problem()
    scales = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    divided = inputs / scales
    torch.testing.assert_close(transformed(inputs.T @ inputs, scales), divided.T @ divided, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
def test_clipping_lowers_the_error_at_the_output(choice):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 64, generator=generator)
    weight[:, 5] *= 8
    inputs = torch.randn(512, 64, generator=generator)
    inputs[:, 5] *= 0.05
    hessian = inputs.T @ inputs
    cut = clip(weight, hessian, choice)
    assert float((cut.abs() - weight.abs()).max()) <= 1e-6
    assert cost(weight, rounded(cut, choice), hessian) < 0.9 * cost(weight, rounded(weight, choice), hessian)


def test_scales_serve_the_other_assigner_too():
    weight, inputs = problem()
    hessian = inputs.T @ inputs
    found = search_scales([weight], hessian, scheme())
    scaled = gptq(weight * found.scales, transformed(hessian, found.scales), scheme())
    served = INT4.dequantize(scaled.tensor) / found.scales
    assert cost(weight, served, hessian) < 0.9 * found.cost


def test_a_hessian_that_is_not_finite_is_an_error():
    weight, inputs = problem()
    hessian = inputs.T @ inputs
    hessian[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"\[hessian-nonfinite\]"):
        search_scales([weight], hessian, scheme())


def test_scales_chosen_for_gptq_serve_it_better_than_none():
    generator = torch.Generator().manual_seed(6)
    mix = torch.eye(64) + 0.2 * torch.randn(64, 64, generator=generator)
    inputs = torch.randn(2048, 64, generator=generator) @ mix
    inputs[:, ::9] *= 10
    hessian, weight = inputs.T @ inputs, torch.randn(48, 64, generator=generator)
    found = search_scales([weight], hessian, scheme(), grid=10, importance=factor(hessian, shrink=0).importance)
    assert found.alpha > 0
    assert found.cost < found.plain
    plain = cost(weight, INT4.dequantize(gptq(weight, hessian, scheme(), range="minmax").tensor), hessian)
    scaled = gptq(weight * found.scales, transformed(hessian, found.scales), scheme(), range="minmax")
    assert cost(weight, INT4.dequantize(scaled.tensor) / found.scales, hessian) < 0.9 * plain


def test_importance_is_the_diagonal_when_nothing_can_be_made_up_for():
    _, inputs = problem()
    diagonal = (inputs.T @ inputs).diagonal()
    torch.testing.assert_close(factor(torch.diag(diagonal), damping=0).importance, diagonal)
    assert bool((factor(inputs.T @ inputs, damping=0, shrink=0).importance <= diagonal * (1 + 1e-5)).all())


@pytest.mark.parametrize("by_input", [True, False], ids=["importance", "Hessian"])
@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
def test_the_cost_does_not_depend_on_pieces_or_a_compiler(choice, by_input, monkeypatch):
    weight, inputs = problem()
    hessian = inputs.T @ inputs
    given = {"grid": 4, "importance": hessian.diagonal() if by_input else None}
    whole = search_scales([weight, weight[:7]], hessian.diagonal() if by_input else hessian, choice, **given)
    monkeypatch.setattr(solver, "_CHUNK", 64 * 5)
    monkeypatch.setattr(solver, "_PIECE", 64 * 5)
    monkeypatch.setattr(loops, "ready", lambda: None)
    parts = search_scales([weight, weight[:7]], hessian, choice, **given)
    assert parts.alpha == whole.alpha
    assert float(parts.cost) == pytest.approx(float(whole.cost), rel=1e-5)
