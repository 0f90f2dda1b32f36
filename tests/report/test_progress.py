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


def test_time_goes_on_between_reports_and_a_stage_that_overruns_tells_so() -> None:
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.plan({"a": 10.0, "b": 30.0})
    estimate.at("a", 0.0)
    clock.now += 4
    assert estimate.left() == pytest.approx(36)
    clock.now += 6
    assert estimate.left() == pytest.approx(30, rel=0.2)
    clock.now += 190
    # 200 s instead of 10: a quarter more of them, and b at the root of nearly twenty times as long
    assert 50 + 30 * 3.5 < (estimate.left() or 0) < 50 + 30 * 4.5
    assert estimate.share() < 0.65


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


# what a tiny model was forecast to take and took on a busy machine: its opening six times as long, all else more
FORECAST = {"open": 3.9, "prove": 0.45, "quantize": 0.2, "export": 0.05, "check": 0.05, "score": 1.2, "finish": 0.3}
TAKEN = {"open": 25.9, "prove": 2.5, "quantize": 1.9, "export": 0.1, "check": 1.2, "score": 5.4, "finish": 1.6}


def shown(forecast: dict[str, float], taken: dict[str, float]) -> list[tuple[str, float, float, float]]:
    """(stage, the share that a bar shows, the seconds that it says are left, those that are), each half second."""
    clock, found = Clock(), []
    display = Display(io.StringIO(), live=False, estimate=TimeLeft(clock))
    display.begin("opening", forecast)
    end = clock.now + sum(taken.values())
    for number, (stage, seconds) in enumerate(taken.items()):
        if number == 1:
            display.plan(forecast)
        if number:
            display.at(stage, 0.0)
        for _ in range(round(seconds * 2)):
            clock.now += seconds / round(seconds * 2)
            _, _, left, share = display._now()
            assert left is not None
            found.append((stage, share, left, end - clock.now))
            assert "100%" not in display._line()
    return found


def test_a_tiny_model_does_not_stand_before_its_end() -> None:
    found = shown(FORECAST, TAKEN)
    first = next(each for each in found if each[0] == "prove")
    assert first[1] < 0.85 and first[2] > first[3] / 3, "half of what the opening overran is expected of the rest"
    assert [each for each in found if each[0] == "open"][-1][1] < 0.85
    shares = [round(share, 2) for _, share, _, _ in found]
    standing = max(shares.count(share) for share in set(shares))
    assert standing < len(shares) / 4 and max(shares) <= 0.99


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 30.0])
@pytest.mark.parametrize("slow", ["open", "quantize", "score"])
def test_a_bar_is_never_full_while_much_is_left(factor: float, slow: str) -> None:
    forecast = {"open": 5.0, "quantize": 60.0, "score": 60.0, "finish": 3.0}
    found = shown(forecast, {**forecast, slow: forecast[slow] * factor})
    total = len(found)
    wrong = [share for number, (_, share, _, _) in enumerate(found) if share > 0.95 and number < total / 2]
    assert not wrong
    assert found[-1][1] > 0.8, "and near its end it is nearly full"


def test_a_bar_goes_back_where_much_more_is_left() -> None:
    clock = Clock()
    display = Display(io.StringIO(), live=False, estimate=TimeLeft(clock))
    display.begin("opening", {"open": 10.0})
    clock.now += 9
    before = display._now()[-1]
    display.plan({"open": 10.0, "score": 90.0})
    assert before > 0.7 and display._now()[-1] < 0.2


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
