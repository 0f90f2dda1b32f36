"""Points of several weights: against a search of all of them, one unit and one row at a time."""

import pytest
import torch
from torch import Tensor

from quantkit.formats import load_format
from quantkit.formats.base.lattice import LatticeFormat
from quantkit.passes.solvers import lattice
from quantkit.passes.solvers.blocks import placed
from quantkit.passes.solvers.factor import factor
from quantkit.passes.solvers.gptq import gptq
from quantkit.scheme import WeightScheme


def form_of(name: str) -> LatticeFormat:
    found = load_format(name)
    assert isinstance(found, LatticeFormat)
    return found


def problem(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights [N, 256], and the Hessian of inputs that go together."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(600, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    return torch.randn(rows, 256, generator=generator) * 0.05, inputs.T @ inputs


@pytest.mark.parametrize("name", ["iq3_s", "iq2_s"])
def test_units_are_chosen_as_by_trying_every_point(name: str) -> None:
    """In float64, by Schur complements: no factor, no feedback. What later columns can compensate costs nothing."""
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, hessian = problem(3)
    solved = factor(hessian, shrink=0.3, together=form.unit)
    whole, exact = solved.hessian.double(), weight.double()
    scale = placed(weight.T.contiguous(), form, solved.diagonal).scale.double()
    values, errors = torch.zeros_like(exact), torch.zeros_like(exact)
    points = form.points().double()
    for number, unit in enumerate(solved.order.view(-1, form.unit)):
        assert bool((unit.diff() == 1).all()) and int(unit[0]) % form.unit == 0
        done, later = solved.order[: number * form.unit], solved.order[(number + 1) * form.unit :]
        seen = torch.cat((done, unit))
        inside = whole[seen][:, seen]
        across = whole[seen][:, later]
        left = inside - across @ torch.linalg.solve(whole[later][:, later], across.T)
        own, fed = left[len(done) :, len(done) :], left[len(done) :, : len(done)]
        for row in range(3):
            best = exact[row, unit] - torch.linalg.solve(own, fed @ errors[row, done])
            step = scale[row, int(unit[0]) // form.group]
            tried = points * best.sign() * step - best
            values[row, unit] = points[((tried @ own) * tried).sum(1).argmin()] * best.sign() * step
        errors[:, unit] = values[:, unit] - exact[:, unit]
    found = gptq(weight, solved, scheme).tensor.dense().double()
    # a tie, or nearly one, changes all that follows in its row
    alike = (found - values).abs().amax(1) < 1e-6
    assert int(alike.sum()) >= 2
    wanted = ((errors @ whole) * errors).sum()
    assert float((((found - exact) @ whole) * (found - exact)).sum()) == pytest.approx(float(wanted), rel=0.02)


@pytest.mark.parametrize("name", ["iq3_s", "iq3_xxs"])
def test_little_is_lost_by_fixing_the_signs_first(name: str) -> None:
    """Of four weights, against all points with all signs."""
    form, generator = form_of(name), torch.Generator().manual_seed(1)
    root = torch.randn(4, 4, generator=generator)
    curve, best = root @ root.T + torch.eye(4), torch.randn(4, 200, generator=generator) * 5
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    tried = (form.points()[:, None] * every).view(-1, 4)
    odd = torch.randint(0, 2, (200,), generator=generator) if form.even else None
    found = lattice.points(form, curve, curve @ best, best, torch.ones(200), odd)
    if odd is not None:
        assert torch.equal((found < 0).sum(0) % 2, odd)

    def cost(values: Tensor) -> Tensor:
        return ((values - best) * (curve @ (values - best))).sum(0)

    wrong = [cost(one[:, None].expand(4, 200)) for one in tried]
    possible = torch.stack(wrong)
    if odd is not None:
        possible[((tried < 0).sum(1) % 2)[:, None] != odd] = torch.inf
    assert float(cost(found).sum()) < 1.15 * float(possible.amin(0).sum())


@pytest.mark.parametrize("name", ["iq3_s", "iq3_xxs", "iq2_s"])
def test_rows_compensate_as_columns_do(name: str) -> None:
    """A factor of outputs without correlations changes nothing; with them, the cost of both falls."""
    form, scheme = form_of(name), WeightScheme(format=name)
    weight, hessian = problem(40, 1)
    solved = factor(hessian, shrink=0.3, together=form.unit)
    alone, plain = gptq(weight, solved, scheme).tensor.dense(), factor(torch.eye(40), damping=0.0, shrink=0.0)
    apart = gptq(weight, solved, scheme, outputs=[lambda: plain]).tensor.dense()
    assert float((apart == alone).float().mean()) > 0.98
    mixed = torch.randn(400, 40, generator=torch.Generator().manual_seed(2)) @ problem(40, 3)[0][:, :40]
    outputs = factor(mixed.T @ mixed, shrink=0.0)
    both = gptq(weight, solved, scheme, outputs=[lambda: outputs]).tensor.dense()

    def cost(values: Tensor) -> float:
        lost = values - weight
        return float(((outputs.hessian @ lost @ solved.hessian) * lost).sum())

    assert cost(both) < 0.9 * cost(alone)
