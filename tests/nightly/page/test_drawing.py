"""Paths and axes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.nightly.page import charts
from quantkit.nightly.page.charts import Label
from quantkit.nightly.page.data import FAILED, NONE, SAME, WORSE


def test_a_line_has_a_gap_where_nothing_is_known() -> None:
    d = charts.line([0.5, 1.5, 2.5, 3.5], [1.0, 2.04, math.nan, 3.0])
    assert d == "M0.5 1h0L1.5 2M3.5 3h0"


def test_a_strip_joins_nights_that_are_alike() -> None:
    text = charts.strip(np.array([SAME, SAME, NONE, WORSE, FAILED]), 10, 10)
    assert 'class="a-same" d="M0 10v-1.2h2v1.2z"' in text
    assert 'class="a-worse" d="M3 10v-10h1v10z"' in text
    assert text.count("<path") == 3


@pytest.mark.parametrize("ends", [(-0.043, 0.046), (-0.011, 0.012), (0.0, 1.0), (47.3, 50.1), (-1e-7, 3e-7)])
def test_an_axis_has_three_round_ticks_or_more(ends: tuple[float, float]) -> None:
    found = charts.ticks(*ends)
    assert 3 <= len(found) <= 11
    assert all(ends[0] <= tick <= ends[1] for tick in found)
    step = (found[1] - found[0]) / 10 ** math.floor(math.log10(found[1] - found[0]))
    assert any(step == pytest.approx(round_) for round_ in (1, 2, 5, 10))


def test_one_value_far_away_does_not_flatten_the_rest_but_the_last_night_is_seen() -> None:
    values = np.random.default_rng(0).normal(0, 0.01, 365)
    low, high = charts.reach([values], 0.02)
    far = values.copy()
    far[100] = 50.0
    assert charts.reach([far], 0.02) == pytest.approx((low, high), rel=0.05)
    far[100], far[-1] = 0.0, 0.12
    assert charts.reach([far], 0.02)[1] > 0.12
    assert charts.reach([np.full(3, np.nan)], 0.0) == (-1.0, 1.0)


def test_labels_that_would_stand_on_each_other_are_one() -> None:
    found = charts.merged([Label("1", 10), Label("2", 11), Label("3", 40)], apart=3)
    assert [each.text for each in found] == ["1, 2", "3"]


def test_months_of_a_year_and_days_of_a_week() -> None:
    year = [f"{2025 + (m > 12)}-{(m - 1) % 12 + 1:02d}-{d:02d} 03:00" for m in range(1, 15) for d in range(1, 29)]
    found = charts.months(year)
    assert 4 <= len(found) <= 8
    assert found[0].text == "2025-02"
    assert [each.text for each in charts.months(year[:3])] == ["01-01", "01-02", "01-03"]
