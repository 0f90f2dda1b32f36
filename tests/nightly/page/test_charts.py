"""The drawings of the site."""

import math
import re

import numpy as np
import pytest

from quantkit.nightly.page import charts
from quantkit.nightly.page.charts import Label
from quantkit.nightly.page.data import FAILED, NONE, SAME, WORSE
from quantkit.stats.changes import changes

DAYS = [f"2026-01-{day:02d} 03:00" for day in range(1, 31)]


def paths(svg: str) -> dict[str, str]:
    return dict(re.findall(r'<path class="([^"]+)" d="([^"]+)"', svg))


def numbers(d: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.?\d*", d)]


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ((-0.01, 0.0, 0.01, 0.02), {"zero", "interval apart", "point"}),
        ((math.nan, 0.1, math.inf, math.nan), {"zero", "point"}),
        ((None, 0.1, None, None), {"zero", "point"}),
    ],
)
def test_an_interval_in_a_table(given: tuple[float | None, ...], drawn: set[str]) -> None:
    svg = charts.between(*given)
    assert svg and set(paths(svg)) == drawn and "nan" not in svg
    assert "inf" not in svg
    assert all(0 <= each <= 100 for d in paths(svg).values() for each in numbers(d))


def test_nothing_known_is_no_drawing() -> None:
    assert charts.between(math.nan, None, None, 0.02) is None


def test_a_respect_with_a_change_a_gap_and_an_update() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(0, 0.002, 30)
    values[20:] += 0.08
    values[5] = math.nan
    codes = np.array([SAME] * 20 + [WORSE] * 10)
    codes[5] = NONE
    found = changes(1 + values)
    found = [type(each)(each.index, each.before - 1, each.after - 1, each.p) for each in found]
    drawn = charts.respect("latency", DAYS, codes, values, values - 0.01, values + 0.01, 0.02, found, [12], 3)
    shapes = paths(drawn.svg)
    assert [(mark.text, round(mark.left, 1)) for mark in drawn.marks] == [("3", 66.7)]
    assert shapes["step"].startswith("M20 ")
    assert shapes["update"].startswith("M12 ")
    assert shapes["line"].count("M") == 2
    assert shapes["point p-worse"].count("M") == 10
    assert "nan" not in drawn.svg
    told = drawn.readout["rows"][0][1]
    assert told[5] == "not decided, –"
    assert told[-1].startswith("worse, +")
    assert len(told) == 30


def test_lanes_are_as_tall_as_their_most() -> None:
    drawn = charts.lanes(DAYS, {"worse": np.arange(30), "failed": np.zeros(30, int)}, "alt")
    heights = [float(each) for each in re.findall(r"v-([\d.]+)h1", paths(drawn.svg)["a-worse"])]
    assert (len(heights), max(heights), heights[-1]) == (29, 15, 15)
    assert "a-failed" not in paths(drawn.svg)
    assert [(tick.text, tick.kind) for tick in drawn.ticks] == [("worse", "29"), ("failed", "0")]


def test_a_spark_shows_the_last_quarter_within_its_margin() -> None:
    values = np.concatenate([np.full(100, 9.0), np.zeros(90)])
    svg = charts.spark(values, np.full(190, SAME), 0.02)
    assert 'viewBox="0 0 90 34"' in svg
    assert numbers(paths(svg)["line"])[1] == 12  # in the middle
    empty = charts.spark(np.full(3, math.nan), np.full(3, NONE), 0.02)
    assert "line" not in paths(empty)


def test_times_far_above_stand_at_the_edge_and_are_counted() -> None:
    seconds = np.full(200, 0.02) + np.linspace(0, 1e-3, 200)
    seconds[7] = 3.0
    drawn = charts.raw({"candidate": (np.arange(200), seconds)}, [0, 100], 200)
    assert "1 above 21.1" in drawn.alt.replace("\u00a0", " ")
    assert [label.text for label in drawn.below] == ["1", "2"]
    assert "M7.5 0h0" in drawn.svg


def test_a_line_has_a_gap_where_nothing_is_known() -> None:
    d = charts.line([0.5, 1.5, 2.5, 3.5], [1.0, 2.04, math.nan, 3.0])
    assert d == "M0.5 1h0L1.5 2M3.5 3h0"


def test_a_strip_joins_nights_that_are_alike() -> None:
    text = charts.strip(np.array([SAME, SAME, NONE, WORSE, FAILED]), 10, 10)
    assert 'class="a-same" d="M0 10v-1.2h2v1.2z"' in text and 'class="a-worse" d="M3 10v-10h1v10z"' in text
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
