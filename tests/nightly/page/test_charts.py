"""The drawings of the site."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from quantkit.nightly.page import charts
from quantkit.nightly.page.data import NONE, SAME, WORSE
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
    assert svg
    assert set(paths(svg)) == drawn
    assert "nan" not in svg
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
