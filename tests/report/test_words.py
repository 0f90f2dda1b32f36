"""Numbers as people read them."""

from __future__ import annotations

import doctest

import pytest

from quantkit.report.kit import words


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(words).failed == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (170e6, "170 MB"), (2e15, "2,000 TB")],
)
def test_sizes(value: float, text: str) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(3e11, "300 GB/s"), (1.21e14, "121 Tflop/s"), (12.0, "12.0 op/s")])
def test_rates(value: float, text: str) -> None:
    assert words.rate(value, text.split(" ")[1].lstrip("GT")) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.96, "10 s"), (59.6, "1 min"), (60, "1 min"), (3600, "1 h 00 min")])
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-0.5, "-0.5000"), (123456.0, "123,456"), (float("inf"), "inf"), (9.9996, "10.00")]
)
def test_figures(value: float, text: str) -> None:
    assert words.figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0113, "11.3 ms"), (2.5, "2.50 s"), (4.2e-5, "42.0 µs"), (-0.002, "-2.00 ms")]
)
def test_moment(seconds: float, text: str) -> None:
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
