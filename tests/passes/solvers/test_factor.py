import pytest
import torch

from quantkit.passes.solvers.factor import factor


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
