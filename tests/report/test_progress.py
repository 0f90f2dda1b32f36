"""How far a command is: measured and never foretold, and never running backwards."""

from __future__ import annotations

import io
import random

import pytest

from quantkit.pipeline.progress import Overall
from quantkit.report.kit.progress import Display, Passed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_that_of_the_stage_once_a_part_of_it_is_over() -> None:
    clock = Clock()
    passed = Passed(clock)
    passed.plan({"open": 1.0, "quantize": 4.0, "score": 5.0})
    passed.at("open", 0.0)
    clock.now += 60
    assert passed.left() is None and passed.share == 0.0
    passed.at("quantize", 0.0, "block 1 of 4")
    assert passed.left() is None
    clock.now += 10
    passed.at("quantize", 0.25)
    assert passed.left() == pytest.approx(30) and passed.share == pytest.approx(0.2)
    clock.now += 4
    assert passed.left() == pytest.approx(26), "it goes on between reports"
    clock.now += 36
    assert passed.left() == pytest.approx(10), "a part that takes longer than all were to: a quarter of it more"
    passed.at("score", 0.0)
    assert passed.left() is None


def test_what_an_earlier_run_did_says_nothing_about_the_pace() -> None:
    clock = Clock()
    passed = Passed(clock)
    passed.plan({"a": 100.0, "b": 20.0})
    passed.at("a", 0.9)
    assert passed.left() is None
    clock.now += 5
    passed.at("a", 0.95)
    assert passed.left() == pytest.approx(5)


@pytest.mark.parametrize("seed", range(8))
def test_it_never_runs_backwards(seed: int) -> None:
    """Whatever is told: stages twice, out of order, unknown, a new plan on the way."""
    luck, clock = random.Random(seed), Clock()
    display, stages = Display(io.StringIO(), live=False, clock=clock), ["open", "quantize", "score", "finish", "other"]
    display.begin("opening")
    outer = list[float]()
    overall = Overall(lambda share, _: outer.append(share))
    shown = list[float]()
    for step in range(60):
        if step % 20 == 3:
            plan = {name: float(luck.randint(1, 40)) for name in stages[:4]}
            display.plan(plan)
            overall.plan(plan)
        stage, done = luck.choice(stages), luck.random()
        clock.now += luck.random()
        for progress in (display, overall):
            progress.at(stage, done)
        shown += [float(display._line().partition("%")[0])] if "%" in display._line() else []
        assert "100%" not in display._line()
    assert len(shown) > 50 and shown == sorted(shown)
    assert outer == sorted(outer)


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Display(stream, live=False) as display:
        display.begin("opening a model")
        assert stream.getvalue() == "opening a model\n"
        display.plan({"quantize": 60.0, "score": 30.0})
        display.at("quantize", 0.0, "block 1 of 2")
        display.at("quantize", 0.5, "block 2 of 2")
        display.at("score", 0.0)
        display.note("a [red]note[/red]")
    lines = stream.getvalue().splitlines()
    # a line a stage, not one a block
    assert ["quantize" in line or "score" in line for line in lines] == [False, True, True, False]
    assert "block 1 of 2" in lines[1]
    assert lines[1].endswith("so far")
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
        display.begin("opening")
        display.plan({"quantize": 4.0})
        display.at("quantize", 0.0)
        display.at("quantize", 0.25, "block 2 of 4")
        display._bar.refresh()
        display._bar.console.print(display._bar.get_renderable())
    assert "quantize  block 2 of 4" in stream.getvalue() and "left of quantize" in stream.getvalue()
