import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.kernels.cpu import columns as loops
from quantkit.passes.solvers.ranges import Search, for_output, minmax, searched, transposed
from quantkit.scheme import WeightScheme

INT4 = load_format("int4")


def scheme(granularity="group", symmetric=False, group=16):
    return WeightScheme(
        format="int4", granularity=granularity, group=group if granularity == "group" else None, symmetric=symmetric
    )


def error(weight, scale, zero, importance=None):
    groups = scale.shape[1]
    length = weight.shape[1] // groups
    spread = scale.float().repeat_interleave(length, dim=1)
    shift = None if zero is None else zero.repeat_interleave(length, dim=1)
    squared = (INT4.decode(INT4.encode(weight, spread, shift), spread, shift) - weight).double().square()
    return squared if importance is None else squared * importance.double()


CASES = [scheme(g, s) for g in ("tensor", "channel", "group") for s in (True, False)]


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (129, 80)])
def test_minmax_is_what_the_format_does(choice, shape):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    expected = INT4.quantize(weight, choice)
    scale, zero = minmax(weight, choice)
    assert torch.equal(scale, expected.scale)
    assert (zero is None) == (expected.zero is None)
    assert zero is None or torch.equal(zero, expected.zero)


@pytest.mark.parametrize("choice", CASES, ids=lambda s: f"{s.granularity}-{s.symmetric}")
@pytest.mark.parametrize("weighted", [False, True])
def test_searching_never_loses_to_minmax_and_gains_with_outliers(choice, weighted):
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(37, 64, generator=generator)
    weight[:, 5] *= 6
    before = weight.clone()
    importance = torch.rand(64, generator=generator) + 0.01 if weighted else None
    plain = error(weight, *minmax(weight, choice), importance)
    best = error(weight, *searched(weight, choice, importance), importance)
    assert torch.equal(weight, before)
    rows = (lambda e: e.sum()) if choice.granularity == "tensor" else (lambda e: e.sum(dim=1))
    assert bool((rows(best) <= rows(plain) * (1 + 1e-5)).all())
    assert float(best.sum()) < 0.95 * float(plain.sum())


def test_importance_moves_the_grid_to_what_counts():
    weight = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    weight[:, 0] = 8.0
    importance = torch.ones(16)
    importance[0] = 1e-6
    choice = scheme(symmetric=True)
    careless, _ = searched(weight, choice, importance, Search(smallest=0.2, steps=16))
    careful, _ = searched(weight, choice, None, Search(smallest=0.2, steps=16))
    assert float(careless.float().mean()) < 0.7 * float(careful.float().mean())


def test_zeros_and_constants_are_harmless():
    for weight in (torch.zeros(3, 16), torch.full((3, 16), 0.5), torch.full((3, 16), -2.0)):
        for choice in CASES:
            scale, zero = searched(weight, choice, torch.zeros(16))
            assert bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
            # a symmetric grid cannot hold both ends of its range; with a zero point a constant
            # is met to the seven bits of a scale whose products with codes are exact in float16
            if not choice.symmetric:
                assert float(error(weight, scale, zero).max()) <= (2 * 2**-8) ** 2


OTHERS = [
    WeightScheme.model_validate(fields)
    for fields in (
        {"format": "nf4", "group": 32},
        {"format": "nf4", "group": 32, "scale": "double"},
        {"format": "mxfp4"},
        {"format": "mxfp8"},
        {"format": "nvfp4"},
        {"format": "fp8_e4m3", "granularity": "tensor"},
        {"format": "fp8_e5m2", "granularity": "group", "group": 16},
        {"format": "fp8_e4m3", "granularity": "block", "group": 16},
    )
]


def cost(weight, tensor, importance=None):
    squared = (load_format(tensor.scheme.format).dequantize(tensor) - weight).double().square()
    return float((squared if importance is None else squared * importance.double()).sum())


@pytest.mark.parametrize("choice", OTHERS, ids=lambda s: f"{s.format}-{s.granularity}-{s.scale}")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (37, 96)])
def test_searching_works_for_every_grid(choice, weighted, shape):
    generator = torch.Generator().manual_seed(4)
    form, weight = load_format(choice.format), torch.randn(*shape, generator=generator)
    weight[:, 5] *= 3
    importance = torch.rand(shape[1], generator=generator) + 0.01 if weighted else None
    plain = form.quantize(weight, choice)
    assert torch.equal(form.nearest(weight, *minmax(weight, choice), choice).codes.float(), plain.codes.float())
    scale, zero = searched(weight, choice, importance)
    assert zero is None
    assert scale.shape == plain.scale.shape
    found = form.nearest(weight, scale, zero, choice)
    # scales are doubled after the search, which knows nothing of it
    slack = 1.02 if choice.scale == "double" else 1 + 1e-5
    assert cost(weight, found, importance) <= cost(weight, plain, importance) * slack
    if choice.format in ("nf4", "mxfp4", "nvfp4") and shape[0] > 1:
        assert cost(weight, found, importance) < cost(weight, plain, importance) * 0.97


def test_a_block_is_searched_as_one_range():
    """Each tile alone gives the scale that it has among the others; what fills up a tile counts for nothing."""
    choice = WeightScheme.model_validate({"format": "fp8_e4m3", "granularity": "block", "group": 16})
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(6))
    importance = torch.rand(50, generator=torch.Generator().manual_seed(7)) + 0.01
    scale, _ = searched(weight, choice, importance)
    assert scale.shape == (3, 4)
    for row in range(3):
        for column in range(4):
            rows, columns = slice(row * 16, row * 16 + 16), slice(column * 16, column * 16 + 16)
            alone, _ = searched(weight[rows, columns], choice, importance[columns])
            # sums of another length are rounded otherwise
            torch.testing.assert_close(alone, scale[row : row + 1, column : column + 1], rtol=1e-5, atol=0)


def test_the_hessian_ranges_every_grid():
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(8))
    inputs = torch.randn(200, 96, generator=torch.Generator().manual_seed(9))
    for choice in OTHERS:
        form = load_format(choice.format)
        scale, zero = for_output(weight, choice, inputs.T @ inputs)
        assert bool(torch.isfinite(form.dequantize(form.nearest(weight, scale, zero, choice))).all())


def test_a_format_without_scales_is_refused():
    with pytest.raises(InputError, match=r"\[format-without-scale\]"):
        minmax(torch.randn(2, 4), WeightScheme(format="float16"))


@pytest.mark.skipif(loops.ready() is None, reason="no C compiler is installed")
@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_loop_in_c_places_grids_as_torch_does(bits, symmetric, scale, monkeypatch):
    """Bit by bit where nothing is searched; a search may tip a tie."""
    choice = WeightScheme(format=f"int{bits}", granularity="group", group=32, symmetric=symmetric, scale=scale)
    weight = torch.randn(96, 70, generator=torch.Generator().manual_seed(bits))
    weight[:32, :2], weight[32:64, 3], weight[64:, 5] = 0.0, weight[32:64, 3].abs(), 1e-9
    costs = torch.rand(96, generator=torch.Generator().manual_seed(1))
    for search in (Search(steps=0, refinements=0), Search(), Search(refinements=3)):
        fast = transposed(weight, 32, choice, costs, search)
        with monkeypatch.context() as patch:
            patch.setattr(loops, "ready", lambda: None)
            slow = transposed(weight, 32, choice, costs, search)
        for mine, theirs in zip(fast, slow, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            if search.steps:  # float32 keeps the last bits of fitted scales
                assert float(torch.isclose(mine.float(), theirs.float(), rtol=1e-5).float().mean()) >= 0.98
            else:
                assert torch.equal(mine, theirs)
