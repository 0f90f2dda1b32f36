"""Axes hold their values between few round labels."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from quantkit.report.kit import charts


@pytest.mark.parametrize("low", [3e-7, 0.0113, 0.93, 1.0, 47.0, 612.0])
@pytest.mark.parametrize("factor", [1.0, 1.07, 2.5, 30.0, 5e3, 1e6])
def test_a_log_axis_holds_its_values_between_few_round_labels(low: float, factor: float) -> None:
    axis = charts.log_axis("s", [low, low * factor])
    assert axis.range[0] < low <= low * factor < axis.range[1]
    assert axis.range[1] / axis.range[0] >= 2  # noise is not blown up to fill a figure
    assert 3 <= len(axis.ticks) <= 9
    assert len(set(axis.texts)) == len(axis.ticks)
    assert all(axis.range[0] <= tick <= axis.range[1] for tick in axis.ticks)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.088, 0.25), (-3.0, 912.0), (5.0, 5.0), (0.0, 0.0), (0.7, 1.0)])
def test_a_straight_axis_holds_its_values(ends: tuple[float, float]) -> None:
    axis = charts.straight_axis("nats", ends)
    assert axis.range[0] <= ends[0] <= ends[1] < axis.range[1]
    assert 1 <= len(axis.ticks) <= 7
    steps = [b - a for a, b in pairwise(axis.ticks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)


def test_a_share_is_along_the_axis_as_it_is_drawn() -> None:
    log = charts.Axis("", [], [], (1.0, 100.0))
    assert (log.share(1.0), log.share(10.0), log.share(100.0)) == (0.0, pytest.approx(0.5), 1.0)
    assert log.place(100.0) == pytest.approx(2.0)
    straight = charts.Axis("", [], [], (0.0, 4.0), log=False)
    assert (straight.share(1.0), straight.place(3.0)) == (0.25, 3.0)


@pytest.mark.parametrize("batches", [[4], [1, 2, 4], [1, 2, 4, 8, 16, 32, 60, 64, 75, 128, 256], range(1, 100)])
def test_labels_of_points_stand_apart(batches: list[int]) -> None:
    axis = charts.points_axis("batch", batches)
    places = [axis.share(tick) for tick in axis.ticks]
    assert all(right - left > 0.09 for left, right in pairwise(places))
    assert set(axis.ticks) <= set(batches)
    assert axis.ticks[0] == min(batches)
    assert len(batches) > 3 or list(axis.ticks) == batches
