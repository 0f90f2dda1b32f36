import pytest
import torch
from reference.gptq_oracle import cost, wanted

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.grid import GridFormat, load_grid
from quantkit.formats.base.integers import IntegerFormat
from quantkit.kernels.cpu import columns as loops
from quantkit.model.device import one_thread
from quantkit.passes.solvers import gptq as solver
from quantkit.passes.solvers.correction import corrected
from quantkit.passes.solvers.factor import factor, factorize
from quantkit.passes.solvers.gptq import gptq, gptq_shared
from quantkit.passes.solvers.gptq_rows import gptq_rows
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


@pytest.mark.parametrize("choice", [scheme(), scheme("channel", symmetric=True)], ids=["group", "channel"])
def test_rows_chosen_in_pieces_have_the_same_codes(choice, monkeypatch):
    first, hessian = problem(24, 64)
    second = torch.randn(17, 64, generator=torch.Generator().manual_seed(3))
    whole = gptq_shared([first, second], hessian, choice)
    monkeypatch.setattr(solver, "_PIECE", 5 * 64)
    for one, other in zip(whole, gptq_shared([first, second], hessian, choice), strict=True):
        assert torch.equal(one.tensor.codes, other.tensor.codes)
        assert torch.equal(one.tensor.scale, other.tensor.scale)
        assert torch.allclose(one.costs, other.costs, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 48, 1100], ids=str)
def test_a_factor_in_the_hessians_own_memory_is_the_same(columns):
    _, hessian = problem(1, columns, tokens=columns + 8)
    kept, given = factor(hessian), hessian.clone()
    lean = factor(given, own=True, whole=False)
    assert torch.equal(given, hessian), "no other copy is made"
    own = factor(given, own=True)
    for name in ("order", "unit", "pivots", "diagonal", "importance"):
        assert torch.equal(getattr(kept, name), getattr(lean, name)), name
        assert torch.equal(getattr(kept, name), getattr(own, name)), name
    assert torch.equal(kept.hessian, own.hessian) and lean.hessian.numel() == 0
    assert own.hessian.data_ptr() == given.data_ptr(), "it was overwritten"


def test_the_same_twice_and_on_any_number_of_threads():
    weight, hessian = problem(64, 128)
    copies = weight.clone(), hessian.clone()
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
    assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1]), "inputs are not modified"


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


NAN, INFINITE, NEGATIVE = torch.eye(32), torch.eye(32), torch.eye(32) - 1e6 * (torch.ones(32, 32) - torch.eye(32))
NAN[2, 2], INFINITE[2, 2] = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("hessian", "choice", "code"),
    [
        (NAN, scheme(), "hessian-nonfinite"),
        (INFINITE, scheme(), "hessian-nonfinite"),
        (NEGATIVE, scheme(), "hessian-not-positive"),
        (torch.eye(32), WeightScheme(format="float16"), "format-without-scale"),
    ],
    ids=["nan", "infinite", "negative", "float"],
)
def test_what_cannot_be_solved_is_refused(hessian, choice, code):
    with pytest.raises(InputError, match=rf"\[{code}\]"):
        gptq(torch.randn(4, 32), hessian, choice)


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


def hessian(columns, tokens=200, seed=0):
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 3, columns)
    return x.T @ x


@pytest.mark.parametrize("columns", [1, 3, 65])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shrink", [0.0, 0.4, 1.0])
def test_the_factor_is_one_of_the_shrunk_and_damped_hessian(columns, act_order, shrink):
    h = hessian(columns)
    solved = factor(h, damping=0.02, shrink=shrink, act_order=act_order)
    expected = (1 - shrink) * h + shrink * torch.diag(h.diagonal()) + 0.02 * h.diagonal().mean() * torch.eye(columns)
    assert float((solved.hessian - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    root = solved.unit * solved.pivots.sqrt()
    assert torch.equal(root, root.triu())
    assert torch.equal(solved.unit.diagonal(), torch.ones(columns))
    permuted = expected[solved.order][:, solved.order]
    assert float((root @ root.T - permuted).abs().max()) < 1e-5 * float(permuted.abs().max())
    assert (
        solved.order.tolist()
        == (h.diagonal().argsort(descending=True) if act_order else torch.arange(columns)).tolist()
    )
    assert torch.equal(solved.importance[solved.order], solved.pivots)
    assert (solved.damping, solved.raised) == (0.02, 0)


def test_what_is_left_of_an_error_is_what_a_least_squares_fit_leaves():
    """The pivot of a column: its energy less what the columns before it, which are chosen later, explain."""
    h = hessian(12).double()
    solved = factor(h.float(), damping=0.0, shrink=0.0, act_order=False)
    for column in range(12):
        later = slice(column + 1, 12)
        rest = h[column, column] - h[column, later] @ torch.linalg.solve(h[later, later], h[later, column])
        assert float(solved.pivots[column]) == pytest.approx(float(rest), rel=1e-3)


def rows_scheme(name: str) -> WeightScheme:
    return WeightScheme(format=name, granularity="channel", symmetric=True, scale="float32")


def rows_problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 4 * columns, columns, generator=generator)
    inputs = inputs * torch.rand(rows, 1, columns, generator=generator) + torch.rand(
        rows, 4 * columns, 1, generator=generator
    )
    return torch.randn(rows, columns, generator=generator), inputs.transpose(1, 2) @ inputs


@pytest.mark.parametrize("name", ["int8", "int7"])
def test_as_good_as_one_by_one(name: str) -> None:
    weight, hessian = rows_problem(24, 9)
    codes, scale = gptq_rows(weight, hessian, rows_scheme(name), shrink=0.5)
    assert codes.dtype == torch.int8

    def error(values: torch.Tensor) -> float:
        return float(torch.einsum("nk,nkl,nl->", values - weight, hessian, values - weight))

    ones = [
        gptq(row[None], own, rows_scheme(name), shrink=0.5).tensor for row, own in zip(weight, hessian, strict=True)
    ]
    alone = torch.cat([one.codes.float() * one.scale.float() for one in ones])
    nearest = torch.round(weight / scale[:, None]) * scale[:, None]
    assert error(codes.float() * scale[:, None]) < min(1.1 * error(alone), error(nearest))


def test_a_row_that_saw_nothing_is_rounded() -> None:
    weight, hessian = rows_problem(3, 4)
    hessian[1] = 0
    hessian[2, 3] = 0
    hessian[2, :, 3] = 0
    codes, scale = gptq_rows(weight, hessian, rows_scheme("int8"))
    assert bool(torch.isfinite(scale).all())
    assert codes[1].tolist() == torch.round(weight[1] / scale[1]).clamp(-128, 127).tolist()


@pytest.mark.parametrize(
    "choice",
    [scheme(), scheme("channel", symmetric=True), scheme(group=32, symmetric=True, name="nf4", scale="float32")],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (17, 96)])
def test_each_row_makes_up_for_those_before_it_as_each_column_does(choice, shape, monkeypatch):
    monkeypatch.setattr(solver, "_BANDS", 1000)
    weight, hessian = problem(*shape)
    solved, outputs = factor(hessian, damping=0.02), factor(problem(4, shape[0], seed=1, outlier=False)[1])
    result = gptq_shared([weight], solved, choice, outputs=[lambda: outputs])[0]
    given = read(result)
    rows = wanted(weight.T, given.T, outputs.hessian, outputs.order).T  # the paper's update, of rows
    asked = wanted(rows, given, solved.hessian, solved.order)
    form = load_grid(choice.format)
    step = result.tensor.scale.double().repeat_interleave(shape[1] // result.tensor.scale.shape[1], dim=1)
    zero = None if result.tensor.zero is None else result.tensor.zero.repeat_interleave(choice.group, dim=1).float()
    nearest = form.snap((asked / step).float(), zero).double()
    assert float(((given.double() - asked) / step).abs().sub((nearest - asked / step).abs()).max()) <= 1e-3
    assert float(result.error) == pytest.approx(cost(weight, given, solved.hessian), rel=1e-3)


def later(factors):
    return [lambda one=one: one for one in factors]


@pytest.mark.parametrize("rows", [5, 33, 64])
def test_rows_that_make_up_for_each_other_cost_the_loss_less(rows):
    weights, hessian = [problem(rows, 96)[0], problem(7, 96, seed=3)[0]], problem(4, 96)[1]
    curved = [problem(4, len(weight), seed=5, outlier=False)[1] for weight in weights]
    solved, outputs = factor(hessian), [factor(one) for one in curved]
    plain, fed = (gptq_shared(weights, solved, scheme(), outputs=given) for given in (None, later(outputs)))
    for weight, curve, before, after in zip(weights, outputs, plain, fed, strict=True):
        errors = [(read(one) - weight).double() for one in (before, after)]
        costs = [float(((curve.hessian.double() @ e) * (e @ solved.hessian.double())).sum()) for e in errors]
        assert costs[1] < 0.9 * costs[0]
        assert torch.equal(before.tensor.scale, after.tensor.scale)


@pytest.mark.parametrize("sweeps", [0, 1])
def test_a_weight_without_gradients_is_solved_as_before_beside_one_with_them(sweeps):
    weights, hessian = [problem(rows, 64, seed=rows)[0] for rows in (12, 7)], problem(4, 64)[1]
    outputs = factor(problem(4, 7, seed=5, outlier=False)[1])
    alone = gptq_shared(weights, factor(hessian), scheme(), sweeps=sweeps)[0]
    beside = gptq_shared(weights, factor(hessian), scheme(), sweeps=sweeps, outputs=[lambda: None, lambda: outputs])
    assert torch.equal(beside[0].tensor.codes, alone.tensor.codes)
    assert torch.equal(beside[0].tensor.scale, alone.tensor.scale)
    lone = gptq_shared(weights[1:], factor(hessian), scheme(), sweeps=sweeps, outputs=[lambda: outputs])[0]
    assert torch.equal(beside[1].tensor.codes, lone.tensor.codes)


def test_after_sweeps_no_code_alone_lowers_the_loss():
    weight, hessian = problem(9, 32)
    solved, outputs = factor(hessian), factor(problem(4, 9, seed=5, outlier=False)[1], shrink=0.6)
    found = gptq_shared([weight], solved, scheme(), outputs=[lambda: outputs], sweeps=30, refit=False)[0]
    error = (read(found) - weight).double()
    force, tensor = outputs.hessian.double() @ error @ solved.hessian.double(), found.tensor
    curve = outputs.hessian.double().diagonal()[:, None] * solved.hessian.double().diagonal()
    step, form = tensor.scale.double().repeat_interleave(16, dim=1), load_grid("int4")
    for way in (-1, 1):
        inside = (tensor.codes + way >= form.low) & (tensor.codes + way <= form.high)
        gained = (2 * way * step * force + step.square() * curve)[inside]
        assert float((gained / (step.square() * curve)[inside]).min()) > -1e-3


@pytest.mark.parametrize("choice", [scheme(), scheme("group", 32, True, "q4_0"), scheme(name="int2")], ids=str)
@pytest.mark.parametrize("common", [0.0, 5.0])
def test_sweeps_of_rows_that_answer_for_each_other_cost_the_loss_less(choice, common):
    """Also where all rows' gradients are nearly one, so that they would overshoot together."""
    weights, hessian = [problem(rows, 64)[0] for rows in (33, 12)], problem(4, 64)[1]
    generator = torch.Generator().manual_seed(3)
    seen = [
        torch.randn(400, len(weight), generator=generator) + common * torch.randn(400, 1, generator=generator)
        for weight in weights
    ]
    solved, outputs = factor(hessian), [factor(one.T @ one, shrink=0.1) for one in seen]
    before, after = (gptq_shared(weights, solved, choice, outputs=later(outputs), sweeps=sweeps) for sweeps in (0, 2))
    for weight, curve, *both in zip(weights, outputs, before, after, strict=True):
        errors = [(read(one) - weight).double() for one in both]
        costs = [float(((curve.hessian.double() @ e) * (e @ solved.hessian.double())).sum()) for e in errors]
        assert costs[1] < (1 if common else 0.99) * costs[0]
        assert float(both[1].error) == pytest.approx(
            float(((errors[1] @ solved.hessian.double()) * errors[1]).sum()), rel=1e-3
        )


@pytest.mark.skipif(loops.ready() is None, reason="no C compiler is installed")
@pytest.mark.parametrize("name", ["int4", "int8", "q4_0"])
@pytest.mark.parametrize("shape", [(1, 32), (17, 96), (70, 160)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_compiled_loops_choose_as_torch_does(name, shape, by_rows, monkeypatch):
    choice = scheme("group", 32, name == "q4_0", name)
    weight, hessian = problem(*shape)
    outputs = later([factor(problem(4, shape[0], seed=5, outlier=False)[1])]) if by_rows else None
    for sweeps in (0, 2):
        fast = gptq_shared([weight], factor(hessian), choice, outputs=outputs, sweeps=sweeps)[0]
        with monkeypatch.context() as patch:
            patch.setattr(loops, "ready", lambda: None)
            slow = gptq_shared([weight], factor(hessian), choice, outputs=outputs, sweeps=sweeps)[0]
        assert float((read(fast) == read(slow)).float().mean()) > 0.99, "but for ties and for what follows them"
        assert float(fast.error) == pytest.approx(float(slow.error), rel=0.01)


@pytest.mark.skipif(loops.ready() is None, reason="no C compiler is installed")
def test_compiled_loops_keep_what_is_not_a_number():
    weight, hessian = problem(5, 32)
    weight[3, 4] = float("nan")
    assert not gptq(weight, factor(hessian), scheme()).costs[3].isfinite()


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("name", ["int4", "nf4", "q4_0"])
def test_threads_change_no_bit(name, sweeps, by_rows):
    nf4 = WeightScheme(format="nf4", granularity="group", group=32, symmetric=True, scale="float32")
    choice = nf4 if name == "nf4" else scheme("group", 32, name == "q4_0", name)
    weights, hessian = [problem(rows, 160, seed=rows)[0] for rows in (300, 70)], problem(4, 160)[1]
    drift, outputs = 0.01 * problem(160, 160, seed=9)[0], None
    if by_rows:
        outputs = later([factor(problem(4, rows, seed=5, outlier=False)[1]) for rows in (300, 70)])
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            moved = corrected(weights, hessian, drift)
            found.append(gptq_shared(moved, factor(hessian), choice, sweeps=sweeps, outputs=outputs))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.tensor.codes, other.tensor.codes)
            assert torch.equal(one.tensor.scale, other.tensor.scale) and torch.equal(one.costs, other.costs)


def test_threads_change_no_bit_of_a_large_factor():
    matrix = problem(4, 1100)[1]
    matrix = matrix / matrix.diagonal().mean() + 0.01 * torch.eye(1100)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(matrix.clone())
            assert not factorize(found[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert torch.allclose(found[0], torch.linalg.cholesky(matrix), atol=1e-4)
    matrix[700, 700] = -1.0
    assert factorize(matrix) > 0
