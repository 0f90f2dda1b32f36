"""How far a command is, never running backwards; numbers as people read them."""

import doctest
import io
import random

import pytest

from quantkit.pipeline.progress import Overall
from quantkit.report.kit import words
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


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(words).failed == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (170e6, "170 MB"), (2e15, "2,000 TB")],
)
def test_a_size_in_words(value: float, text: str) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(3e11, "300 GB/s"), (1.21e14, "121 Tflop/s"), (12.0, "12.0 op/s")])
def test_a_rate_in_words(value: float, text: str) -> None:
    assert words.rate(value, text.split(" ")[1].lstrip("GT")) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.96, "10 s"), (59.6, "1 min"), (60, "1 min"), (3600, "1 h 00 min")])
def test_a_duration_in_words(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-0.5, "-0.5000"), (123456.0, "123,456"), (float("inf"), "inf"), (9.9996, "10.00")]
)
def test_a_figure_in_words(value: float, text: str) -> None:
    assert words.figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0113, "11.3 ms"), (2.5, "2.50 s"), (4.2e-5, "42.0 µs"), (-0.002, "-2.00 ms")]
)
def test_a_short_time_in_words(seconds: float, text: str) -> None:
    assert words.moment(seconds).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (" the\n", "·the⏎"),
        ("  ", "··"),
        ("a\tb", "a b"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("[bold]é🙂", "[bold]é🙂"),
    ],
)
def test_text_of_a_model_is_seen_and_does_nothing(text: str, seen: str) -> None:
    assert words.visible(text) == seen
