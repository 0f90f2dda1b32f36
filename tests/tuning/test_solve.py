"""The knapsack against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quantkit.tuning.front import choose, least, total


def tried(goal: np.ndarray, limits: list[tuple[np.ndarray, float]]) -> float | None:
    """The least goal of all assignments that keep to the limits."""
    best = None
    for choice in itertools.product(range(goal.shape[1]), repeat=goal.shape[0]):
        picked = np.array(choice)
        if np.isnan(goal[np.arange(len(picked)), picked]).any():
            continue
        if all(total(table, picked) <= most + 1e-9 for table, most in limits):
            value = total(goal, picked)
            best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    goal, first, second = (random.random((6, 3)) for _ in range(3))
    if seed % 3 == 0:
        goal[2, 1] = first[2, 1] = second[2, 1] = np.nan
    limits = [(first, float(random.uniform(1.2, 4.0))), (second, float(random.uniform(1.2, 4.0)))][: 1 + seed % 2]
    best, found = tried(goal, limits), choose(goal, limits)
    assert (best is None) == (found is None)
    if found is not None and best is not None:
        assert total(goal, found) == pytest.approx(best, rel=1e-4)
        assert all(total(table, found) <= most * (1 + 1e-6) for table, most in limits)


def test_harms_of_very_different_size_are_told_apart() -> None:
    harm = np.array([[1e-2, 1e-6], [1e-3, 1e-7], [1e-4, 1e-9]])
    bits = np.array([[4e6, 8e6]] * 3)
    found = choose(harm, [(bits, 16e6)])
    assert found is not None
    assert found.tolist() == [1, 0, 0]


def test_a_limit_that_is_met_exactly_is_met() -> None:
    bits = np.array([[4.25e6, 8.25e6]] * 40)
    assert choose(np.array([[1.0, 0.0]] * 40), [(bits, 40 * 4.25e6)]) is not None


def test_nothing_keeps_to_a_limit_below_the_least() -> None:
    table = np.array([[2.0, 3.0], [2.0, 5.0]])
    assert least(table).tolist() == [0, 0]
    assert choose(table, [(table, 3.9)]) is None
