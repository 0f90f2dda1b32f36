"""Grids of GGUF's blocks: against trying everything, and never worse than what only spans the weights."""

import pytest
import torch
from reference import plain_blocks

from quantkit.formats import load_format
from quantkit.formats.base.blocks import BlockFormat, SuperBlockFormat
from quantkit.formats.base.layout import extremes
from quantkit.passes.solvers.blocks import placed
from quantkit.passes.solvers.factor import factor
from quantkit.passes.solvers.gptq import gptq, gptq_shared, together
from quantkit.scheme import WeightScheme

NAMES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s"),
)


def form_of(name: str) -> BlockFormat:
    found = load_format(name)
    assert isinstance(found, BlockFormat)
    return found


def drawn(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K] with a few large ones, and what errors cost [K]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    weight[:, ::29] *= 3
    return weight, torch.rand(columns, generator=generator).square() + 0.01


def cost(name: str, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """Of every block [N, G], on the grid that is found."""
    form, scheme = form_of(name), WeightScheme(format=name)
    grid = placed(weight.T.contiguous(), form, importance)
    error = form.dequantize(form.laid(weight, grid, scheme)) - weight
    return (importance * error.square()).unflatten(1, (-1, scheme.group or 0)).sum(2)


@pytest.mark.parametrize("name", ["q4_0", "iq4_nl", "q4_1", "q3_k", "q4_k"])
def test_little_is_left_of_what_trying_everything_finds(name: str) -> None:
    """Of single blocks; those of super-blocks have scales that are rounded."""
    form = form_of(name)
    rows = 1 if form.has_offset else 3
    weight, importance = drawn(rows, 256)
    found = cost(name, weight, importance)
    length = form.rules.groups[0]
    book = form.codebook()
    values = list(range(int(form.low), int(form.high) + 1)) if book is None else book.tolist()
    least = torch.tensor(
        [
            [
                plain_blocks.least_cost(
                    weight[row, at : at + length].tolist(),
                    importance[at : at + length].tolist(),
                    values,
                    form.has_offset,
                    below=isinstance(form, SuperBlockFormat),
                    steps=50 if form.has_offset else 400,
                )
                for at in range(0, 256, length)
            ]
            for row in range(rows)
        ]
    )
    assert float(found.sum()) < 1.1 * float(least.sum())


@pytest.mark.parametrize("name", NAMES)
def test_it_is_better_than_what_spans_the_weights(name: str) -> None:
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, importance = drawn(37, 512, 1)
    before = weight.clone()
    found = cost(name, weight, importance).sum()
    assert torch.equal(weight, before)
    spanned = form.dequantize(form.quantize(weight, scheme))
    assert float(found) < float((importance * (spanned - weight).square()).sum())
    # what is weighed counts
    alike = placed(weight.T.contiguous(), form)
    error = form.dequantize(form.laid(weight, alike, scheme)) - weight
    assert float(found) < float((importance * error.square()).sum())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_what_was_never_seen_stay_finite(name: str) -> None:
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, importance = drawn(3, 512)
    weight[0], weight[1, :64], importance[:256] = 0.0, 0.0, 0.0
    tensor = form.laid(weight, placed(weight.T.contiguous(), form, importance), scheme)
    values = tensor.dense()
    # no point has a zero, and no scale is one unless all of its super-block are
    least = 0 if form.unit == 1 or tensor.super_blocks is None else tensor.super_blocks.d[1, 0].float()
    assert not values[0].any() and bool((values[1, :64].abs() <= least).all())
    assert bool(values.isfinite().all())
    assert float((values - weight).square().mean()) < 0.2 * float(weight.square().mean())


@pytest.mark.parametrize("name", NAMES)
def test_importances_count_relative_to_those_of_their_block_alone(name: str) -> None:
    """None, zeros, what is below float32's normal numbers and what is near its end weigh alike; so does any factor."""
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, importance = drawn(5, 512, 4)

    def codes(costs: torch.Tensor | None) -> torch.Tensor:
        return form.dequantize(form.laid(weight, placed(weight.T.contiguous(), form, costs), scheme))

    alike, weighed = codes(None), codes(importance)
    for value in (0.0, 1e-42, 1e-25, 1.0, 1e30, 3e38):
        assert torch.equal(codes(torch.full((512,), value)), alike), value
    # powers of two, so that no importance is rounded
    for times in (2.0**-90, 2.0**100):
        assert torch.equal(codes(importance * times), weighed), times
    dead = importance.clone()
    dead[:256] = 0
    assert torch.equal(codes(dead)[:, :256], alike[:, :256])
    assert torch.equal(codes(dead)[:, 256:], weighed[:, 256:])


@pytest.mark.parametrize("name", [name for name in NAMES if form_of(name).has_offset])
def test_one_input_that_is_all_of_its_block_does_not_spoil_the_others(name: str) -> None:
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, _ = drawn(16, 512, 5)
    alone = torch.full((512,), 1e-25)
    alone[::32] = 1.0

    def lost(costs: torch.Tensor | None) -> float:
        found = form.dequantize(form.laid(weight, placed(weight.T.contiguous(), form, costs), scheme))
        return float((found - weight).norm() / weight.norm())

    # the line that values are read by is drawn through this input's weight instead of through the mean: its own
    # rounding error, which is about that of the others, is added to theirs
    assert lost(alone) < 2**0.5 * lost(None)


@pytest.mark.parametrize("name", NAMES)
def test_solved_codes_cost_less_than_nearest_ones(name: str) -> None:
    """What the solver counts is `tr(D H Dᵀ)` of what is read back, and it is less than rounding on the same grid."""
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, _ = drawn(24, 256, 2)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(600, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    solved = factor(inputs.T @ inputs, shrink=0.0, together=together(form))
    found = gptq(weight, solved, scheme)
    lost = form.dequantize(found.tensor) - weight
    assert ((lost @ solved.hessian) * lost).sum(1) == pytest.approx(found.costs, rel=2e-3)
    plain = form.dequantize(form.laid(weight, placed(weight.T.contiguous(), form, solved.diagonal), scheme)) - weight
    assert float(found.error) < 0.7 * float(((plain @ solved.hessian) * plain).sum())
    for refit in (False, True):
        swept = gptq(weight, solved, scheme, sweeps=2, refit=refit)
        assert float(swept.error) < float(found.error)
        lost = form.dequantize(swept.tensor) - weight
        assert ((lost @ solved.hessian) * lost).sum(1) == pytest.approx(swept.costs, rel=2e-3)
    spanned = gptq(weight, solved, scheme, range="minmax").tensor
    own = form.nearest(weight, *form.parameters(*extremes(weight, scheme), scheme), scheme)
    assert torch.equal(spanned.scale, own.scale)
    # two weights that share an input, each as if it were alone
    both = gptq_shared([weight[:7], weight[7:]], solved, scheme)
    values = torch.cat([form.dequantize(each.tensor) for each in both])
    assert torch.equal(values, form.dequantize(found.tensor))
