"""Orthogonal matrices: Hadamard of every order that is claimed, products applied in factors, means kept."""

import pytest
import torch
from torch import Tensor

from quantkit.passes.solvers import rotate


def dense(rotation: rotate.Rotation) -> Tensor:
    """The oracle: the product of all it is made of, written out."""
    factors = torch.ones(1, 1, dtype=torch.float64)
    for factor in rotation.factors:
        factors = torch.kron(factors, factor)
    matrix = torch.diag(rotation.signs) @ factors
    if rotation.mirror is not None:
        matrix = matrix @ (torch.eye(rotation.size) - 2 * torch.outer(rotation.mirror, rotation.mirror))
    return matrix


@pytest.mark.parametrize("order", [1, 2, 4, 8, 64, 12, 20, 24, 28, 36, 44, 60, 76, 84, 108])
def test_a_hadamard_matrix_has_ones_and_orthogonal_rows(order: int) -> None:
    found = rotate.hadamard(order)
    assert set(found.unique().tolist()) <= {1.0, -1.0}
    assert torch.equal(found @ found.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [6, 52, 92, 100])
def test_an_order_without_a_construction_is_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"order {order}"):
        rotate.hadamard(order)


@pytest.mark.parametrize(
    ("size", "orders"),
    [
        (576, (12, 12, 4)),
        (768, (12, 64)),
        (896, (28, 32)),
        (2048, (64, 32)),
        (2304, (12, 12, 16)),
        (2560, (20, 64, 2)),
        (2880, (12, 12, 20)),
        (3584, (28, 64, 2)),
        (4096, (64, 64)),
        (5120, (20, 64, 4)),
        (100, None),
        (577, None),
        (6, None),
    ],
)
def test_orders_of_real_widths(size: int, orders: tuple[int, ...] | None) -> None:
    assert rotate.hadamard_orders(size) == orders
    assert rotate.is_hadamard(size) is (orders is not None)


@pytest.mark.parametrize("size", [1, 2, 6, 17, 36, 48, 96, 100, 240])
@pytest.mark.parametrize("make", [rotate.hadamard_rotation, rotate.random_rotation])
@pytest.mark.parametrize("keeping", [False, True])
def test_a_rotation_is_orthogonal_and_applied_as_written_out(size: int, make, keeping: bool) -> None:  # type: ignore[no-untyped-def]
    found = make(size, 5)
    if keeping:
        found = found.keeping_means()
    matrix = dense(found)
    assert float((matrix @ matrix.T - torch.eye(size)).abs().max()) < 1e-12
    rows = torch.randn(3, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(found.apply(rows), rows @ matrix, atol=1e-12, rtol=0)
    gain = torch.rand(size, dtype=torch.float64)
    assert torch.allclose(found.apply(rows, gain), (rows * gain) @ matrix, atol=1e-12, rtol=0)
    if keeping:
        assert torch.allclose(matrix.sum(1), torch.ones(size, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(matrix.sum(0), torch.ones(size, dtype=torch.float64), atol=1e-12)


def test_every_channel_of_a_hadamard_rotation_weighs_the_same() -> None:
    matrix = dense(rotate.hadamard_rotation(576, 0))
    assert torch.allclose(matrix.abs(), torch.full((), 576**-0.5, dtype=torch.float64))
    # where the order is not known, the power of two in it still spreads: 100 = 4 x 25
    assert float(dense(rotate.hadamard_rotation(100, 0)).abs().max()) < 1 / 2


def test_an_outlier_is_spread_over_all_channels() -> None:
    rows = torch.zeros(1, 576)
    rows[0, 7] = 100.0
    assert float(rotate.hadamard_rotation(576, 0).apply(rows).abs().max()) == pytest.approx(100 / 24)


def test_seeds_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (rotate.hadamard_rotation, rotate.random_rotation):
        assert torch.equal(dense(make(12, 1)), dense(make(12, 1)))
        assert not torch.equal(dense(make(12, 1)), dense(make(12, 2)))
    rows = torch.randn(7, 12)
    before = rows.clone()
    turned = rotate.hadamard_rotation(12, 0).apply(rows)
    assert turned.dtype == torch.float32
    assert torch.equal(rows, before)
    # in pieces, nothing changes
    monkeypatch.setattr(rotate, "_PIECE", 24)
    assert torch.equal(rotate.hadamard_rotation(12, 0).apply(rows), turned)
