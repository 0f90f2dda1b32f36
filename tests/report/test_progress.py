"""The time left: there from the first second, corrected by what was seen, never counted for what others did."""

from __future__ import annotations

import io

import pytest

from quantkit.report.kit.progress import Display, TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_guess_stands_until_the_stages_are_known() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    assert estimate.left() is None
    estimate.guess(60.0)
    clock.now += 10
    assert estimate.left() == pytest.approx(50)
    estimate.plan({"a": 30.0, "b": 10.0})
    assert estimate.left() == pytest.approx(40)


def test_a_run_as_expected_counts_down_evenly() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.plan({"a": 30.0, "b": 10.0})
    for done in range(4):
        estimate.at("a", done / 3)
        assert estimate.left() == pytest.approx(40 - 10 * done, abs=0.01)
        clock.now += 10
    estimate.at("b", 0.0)
    assert estimate.left() == pytest.approx(10, rel=0.2)


def test_time_goes_on_between_reports_at_the_expense_of_the_stage_alone() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.plan({"a": 10.0, "b": 30.0})
    estimate.at("a", 0.0)
    clock.now += 4
    assert estimate.left() == pytest.approx(36)
    clock.now += 1000
    assert estimate.left() == pytest.approx(30)


def test_a_slow_stage_corrects_itself_fully_and_the_others_by_half() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.plan({"a": 100.0, "b": 100.0})
    estimate.at("a", 0.0)
    clock.now += 450  # nine times slower than expected
    estimate.at("a", 0.5)
    left = estimate.left()
    assert left is not None
    # the rest of a at nearly nine times (the prior holds on a little), b at nearly three
    assert 400 + 200 < left < 450 + 300


def test_what_an_earlier_run_did_says_nothing_about_the_pace() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.plan({"a": 100.0, "b": 20.0})
    estimate.at("a", 0.9)
    assert estimate.left() == pytest.approx(30, rel=0.25)
    clock.now += 5
    estimate.at("a", 0.95)
    assert estimate.left() == pytest.approx(25, rel=0.25)
    skipped = TimeLeft(clock)
    skipped.plan({"a": 1000.0, "b": 20.0})
    skipped.at("b", 0.0)
    assert skipped.left() == pytest.approx(20, rel=0.25)


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Display(stream, live=False) as display:
        display.begin("opening a model", 100.0)
        assert stream.getvalue() == "opening a model; about 1 min 40 s expected\n"
        display.plan({"quantize": 60.0, "score": 30.0})
        display.at("quantize", 0.0, "block 1 of 2")
        display.at("quantize", 0.5, "block 2 of 2")
        display.at("score", 0.0)
        display.note("a [red]note[/red]")
    lines = stream.getvalue().splitlines()
    # a line a stage, not one a block
    assert ["quantize" in line or "score" in line for line in lines] == [False, True, True, False]
    assert "block 1 of 2" in lines[1]
    assert lines[1].endswith("left")
    assert lines[-1] == "a [red]note[/red]"


def test_a_line_every_so_often_even_if_nothing_is_reported() -> None:
    import time

    stream = io.StringIO()
    with Display(stream, live=False, every=0.05) as display:
        display.begin("waiting")
        time.sleep(0.5)
    assert len(stream.getvalue().splitlines()) >= 3


def test_a_reader_that_went_away_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Display(Gone(), live=False) as display:
        display.begin("opening")
        display.at("quantize", 0.5)


def test_the_bar_shows_stage_and_time_left() -> None:
    stream = io.StringIO()
    with Display(stream, live=True) as display:
        display.begin("opening", 10.0)
        display.plan({"quantize": 60.0})
        display.at("quantize", 0.25, "block 2 of 4")
        display._bar.refresh()
        display._console.print(display._render())
    assert "quantize  block 2 of 4" in stream.getvalue()
    assert "left" in stream.getvalue()
