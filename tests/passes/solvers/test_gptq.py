import pytest
import torch
from reference.gptq_oracle import cost, wanted

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.grid import GridFormat
from quantkit.formats.base.integers import IntegerFormat
from quantkit.passes.solvers import gptq as solver
from quantkit.passes.solvers import one_thread
from quantkit.passes.solvers.factor import factor
from quantkit.passes.solvers.gptq import gptq, gptq_shared
from quantkit.scheme import WeightScheme

INT4 = load_format("int4")


def scheme(granularity="group", group=16, symmetric=False, name="int4", scale="float16"):
    return WeightScheme(
        format=name,
        granularity=granularity,
        group=group if granularity == "group" else None,
        symmetric=symmetric,
        scale=scale,
    )


def problem(rows, columns, tokens=256, seed=0, outlier=True):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(tokens, columns, generator=generator) @ mix
    if outlier:
        inputs[:, columns // 3] *= 20
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def read(result):
    return load_format(result.tensor.scheme.format).dequantize(result.tensor)


SCHEMES = [
    scheme(),
    scheme(symmetric=True),
    scheme("channel"),
    scheme("channel", symmetric=True),
    scheme("tensor"),
    scheme("tensor", symmetric=True, scale="float32"),
    scheme(name="int8"),
]


@pytest.mark.parametrize("choice", SCHEMES, ids=lambda s: f"{s.format}-{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (17, 80)])
def test_each_code_is_the_nearest_to_what_its_column_asked_for(choice, act_order, shape):
    weight, hessian = problem(*shape)
    solved = factor(hessian, damping=0.02, act_order=act_order)
    result = gptq(weight, solved, choice)
    asked = wanted(weight, read(result), solved.hessian, solved.order)
    form = load_format(choice.format)
    groups = result.tensor.scale.shape[1]
    step = result.tensor.scale.double().repeat_interleave(shape[1] // groups, dim=1)
    zero = 0 if result.tensor.zero is None else result.tensor.zero.double().repeat_interleave(shape[1] // groups, dim=1)
    ideal = (asked / step + zero).clamp(form.low, form.high)
    assert result.tensor.codes.dtype == torch.int8
    assert float((result.tensor.codes.double() - ideal).abs().max()) <= 0.5 + 1e-3
    assert float(result.error) == pytest.approx(cost(weight, read(result), solved.hessian), rel=1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_any_width_stays_in_its_range(bits, monkeypatch):
    monkeypatch.setattr(solver, "load_grid", lambda _: IntegerFormat("any", bits))
    weight, hessian = problem(5, 32)
    for symmetric in (True, False):
        codes = gptq(weight, hessian, scheme(symmetric=symmetric)).tensor.codes
        assert int(codes.min()) >= -(2 ** (bits - 1))
        assert int(codes.max()) <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("choice", [scheme(), scheme("channel", symmetric=True), scheme("tensor")], ids=str)
def test_beats_rounding_to_nearest_with_the_same_ranges(choice):
    weight, hessian = problem(24, 96)
    nearest = cost(weight, INT4.dequantize(INT4.quantize(weight, choice)), hessian)
    assert cost(weight, read(gptq(weight, hessian, choice, range="minmax")), hessian) < 0.7 * nearest


def test_activation_order_and_blocks_of_any_size_agree(monkeypatch):
    weight, hessian = problem(9, 100)
    whole = gptq(weight, hessian, scheme(group=20))
    monkeypatch.setattr(solver, "_BLOCK", 7)
    parts = gptq(weight, hessian, scheme(group=20))
    # sums in another order may tip a tie, and a tipped tie changes what follows: the cost stays
    assert float(parts.error) == pytest.approx(float(whole.error), rel=0.02)
    assert (parts.tensor.codes != whole.tensor.codes).float().mean() < 0.05


def test_weights_that_share_an_input_are_solved_as_if_alone():
    first, hessian = problem(8, 64)
    second = torch.randn(5, 64, generator=torch.Generator().manual_seed(9)) * 3
    for choice in (scheme(), scheme("tensor"), scheme("channel", symmetric=True)):
        together = gptq_shared([first, second], hessian, choice)
        for weight, result in zip((first, second), together, strict=True):
            alone = gptq(weight, hessian, choice)
            assert torch.equal(alone.tensor.scale, result.tensor.scale)
            assert (alone.tensor.codes != result.tensor.codes).float().mean() < 0.02
            assert float(alone.error) == pytest.approx(float(result.error), rel=0.01)


def test_the_same_twice_and_on_any_number_of_threads():
    weight, hessian = problem(64, 128)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gptq(weight, hessian, scheme()))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].tensor.codes, results[1].tensor.codes)
    assert results[0].error == results[1].error


def test_inputs_are_not_modified():
    weight, hessian = problem(6, 32)
    copies = weight.clone(), hessian.clone()
    gptq(weight, hessian, scheme())
    assert torch.equal(weight, copies[0])
    assert torch.equal(hessian, copies[1])


def test_dead_inputs_keep_their_nearest_code():
    weight, hessian = problem(6, 32, outlier=False)
    dead = [3, 17]
    hessian[dead] = 0
    hessian[:, dead] = 0
    result = gptq(weight, hessian, scheme(), range="minmax")
    nearest = INT4.quantize(weight, scheme())
    assert torch.equal(result.tensor.codes[:, dead], nearest.codes[:, dead])
    empty = gptq(weight, torch.zeros(32, 32), scheme(), range="minmax")
    assert torch.equal(empty.tensor.codes, nearest.codes)


def test_damping_is_raised_and_said_when_the_factor_fails():
    weight, _ = problem(4, 32)
    indefinite = torch.eye(32)
    indefinite[0, 1] = indefinite[1, 0] = 1.05
    result = gptq(weight, indefinite, scheme(), damping=0.001, shrink=0)
    assert result.raised > 0
    assert result.damping == pytest.approx(0.1)
    assert gptq(weight, torch.eye(32), scheme(), damping=0.001).raised == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_is_an_error(bad):
    weight, hessian = problem(4, 32)
    hessian[2, 2] = bad
    with pytest.raises(InputError) as caught:
        gptq(weight, hessian, scheme())
    assert caught.value.code == "hessian-nonfinite"


def test_a_hessian_that_no_damping_saves_is_an_error():
    with pytest.raises(InputError) as caught:
        gptq(torch.randn(4, 32), torch.eye(32) - 1e6 * (torch.ones(32, 32) - torch.eye(32)), scheme())
    assert caught.value.code == "hessian-not-positive"


def test_formats_without_a_scale_are_refused():
    with pytest.raises(InputError) as caught:
        gptq(torch.randn(4, 32), torch.eye(32), WeightScheme(format="float16"))
    assert caught.value.code == "format-without-scale"


def test_one_thread_restores_the_count_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        _ = 1 / 0
    assert torch.get_num_threads() == before


def test_full_shrinking_is_plain_rounding_and_less_lies_between():
    weight, hessian = problem(12, 64)
    nearest = INT4.quantize(weight, scheme())
    alone = gptq(weight, hessian, scheme(), shrink=1, range="minmax")
    assert torch.equal(alone.tensor.codes, nearest.codes)
    costs = [
        cost(weight, read(gptq(weight, hessian, scheme(), shrink=s, range="minmax")), hessian) for s in (0, 0.5, 1)
    ]
    assert costs[0] < costs[1] < costs[2]


def test_shrinking_serves_text_that_was_not_seen():
    # few tokens for many inputs: what a sample says about correlations is mostly chance
    generator = torch.Generator().manual_seed(4)
    mix = torch.eye(96) + 0.1 * torch.randn(96, 96, generator=generator)
    seen, unseen = (torch.randn(tokens, 96, generator=generator) @ mix for tokens in (128, 4096))
    weight = torch.randn(32, 96, generator=generator)
    costs = [cost(weight, read(gptq(weight, seen.T @ seen, scheme(), shrink=s)), unseen.T @ unseen) for s in (0, 0.25)]
    assert costs[1] < costs[0]


@pytest.mark.parametrize("choice", SCHEMES, ids=lambda s: f"{s.format}-{s.granularity}-{s.symmetric}")
def test_sweeps_lower_the_cost_and_say_what_it_is(choice):
    weight, hessian = problem(9, 80)
    solved = factor(hessian)
    errors = []
    for sweeps, refit in ((0, False), (1, False), (3, False), (3, True)):
        result = gptq(weight, solved, choice, sweeps=sweeps, refit=refit)
        assert float(result.error) == pytest.approx(cost(weight, read(result), solved.hessian), rel=1e-3)
        errors.append(float(result.error))
    assert errors[2] <= errors[1] * (1 + 1e-6) <= errors[0] * (1 + 2e-6)
    if choice.granularity == "group":
        assert errors[3] < errors[2]


@pytest.mark.parametrize("group", [80, 96, 160, 480])
def test_sweeps_never_mix_the_scales_of_two_groups(group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 480, generator=generator)
    inputs = torch.randn(600, 480, generator=generator) @ torch.randn(480, 480, generator=generator) * 0.05
    scheme = WeightScheme(format="int4", granularity="group", group=group, symmetric=False)
    solved = factor(inputs.T @ inputs, shrink=0.3)
    results = [gptq(weight, solved, scheme, sweeps=sweeps) for sweeps in (0, 2)]
    true = []
    for result in results:
        error = (INT4.dequantize(result.tensor) - weight).double()
        true.append(float((error @ solved.hessian.double() * error).sum()))
        assert float(result.error) == pytest.approx(true[-1], rel=1e-3), "what it says is what it is"
    assert true[1] <= true[0] * 1.001, "sweeps do no harm"


class Uniform(GridFormat):
    """int4 as a format that solvers know nothing of but how it snaps, with scales for square tiles as well."""

    rules = INT4.rules
    whole = None

    def __getattribute__(self, name):
        own = ("name", "bits", "rules", "stretches", "nearest", "dequantize", "kept", "__dict__", "__class__", "whole")
        return object.__getattribute__(self, name) if name in own else getattr(INT4, name)


@pytest.mark.parametrize("choice", SCHEMES[:6], ids=lambda s: f"{s.format}-{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("sweeps", [0, 2])
def test_a_format_known_by_its_grid_alone_gets_the_codes_of_an_integer_one(choice, sweeps, monkeypatch):
    weight, hessian = problem(12, 48)
    expected = gptq_shared([weight, weight * 2], hessian, choice, sweeps=sweeps, refit=False)
    monkeypatch.setattr(solver, "load_grid", lambda _: Uniform("uniform", 4))
    found = gptq_shared([weight, weight * 2], hessian, choice, sweeps=sweeps, refit=False)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.tensor.codes, other.tensor.codes)
        assert torch.equal(one.tensor.scale, other.tensor.scale)
        assert float(one.error) == pytest.approx(float(other.error))


SCALED = {
    "nf4": {"granularity": "group", "group": 64, "scale": "float32"},
    "mxfp4": {"granularity": "group", "group": 32, "scale": "e8m0"},
    "nvfp4": {"granularity": "group", "group": 16, "scale": "fp8_e4m3"},
    "fp8_e4m3": {"granularity": "channel", "scale": "float32"},
    "fp8_e5m2": {"granularity": "block", "group": 128, "scale": "float32"},
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("sweeps", [0, 1])
def test_any_grid_makes_up_for_errors(name, sweeps):
    choice = WeightScheme(format=name, symmetric=True, **SCALED[name])
    form = load_format(name)
    weight, hessian = problem(20, 192)
    other = 5 * weight[:7].flip(0)
    other[:, :64] = 0  # groups without a range
    for one, result in zip((weight, other), gptq_shared([weight, other], hessian, choice, sweeps=sweeps), strict=True):
        values = read(result)
        assert torch.isfinite(values).all()
        nearest = form.dequantize(form.quantize(one, choice))
        assert cost(one, values, hessian) < 0.7 * cost(one, nearest, hessian)
        # and what is stored is on the grid of its scale
        again = form.nearest(values, effective_scale(result.tensor), None, choice, result.tensor.global_scale)
        assert torch.equal(form.dequantize(again), values)
        if not sweeps:
            solved = factor(hessian)
            asked = wanted(one, values, solved.hessian, solved.order).float()
            best = form.dequantize(
                form.nearest(asked, effective_scale(result.tensor), None, choice, result.tensor.global_scale)
            )
            assert ((best - asked).abs() >= (values - asked).abs() - 1e-4 * asked.abs()).float().mean() > 0.999


def effective_scale(tensor):
    return tensor.scale.float() if tensor.global_scale is None else tensor.scale.float() * tensor.global_scale
