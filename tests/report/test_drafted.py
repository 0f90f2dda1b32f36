"""The report of a draft: the verdict, both acceptances, and the gain by drafted tokens."""

from dataclasses import replace

import numpy as np
import pytest

from quantkit.measurement.accuracy.drafts import Acceptance, Drafted, DraftTimes, gains
from quantkit.report.drafted import document
from quantkit.report.kit import html, markdown

PROMPTS = np.repeat(np.arange(16), 127)


def judged(share: float, cost: float) -> Drafted:
    right = np.random.default_rng(0).random(PROMPTS.size) < share
    seen = Acceptance(PROMPTS, right, np.full(PROMPTS.size, share))
    times = DraftTimes(
        cost, 0.01, dict.fromkeys(range(1, 10), 0.01), "measured", "decode steps in onnxruntime on a CPU"
    )
    sides = ({"name": "./small", "content_sha256": "a" * 64}, {"name": "./large", "content_sha256": "b" * 64})
    return Drafted(
        *sides, "2,032 positions of prose-en (eval), 16 prompts", seen, times, gains(seen, times, 8), ["text"]
    )


@pytest.mark.parametrize(
    ("share", "cost", "answer"),
    [(0.8, 0.001, "expected "), (0.2, 0.01, "do not draft here"), (0.5, 0.005, "a gain is not decided")],
)
def test_the_verdict_is_on_the_interval_of_the_gain(share: float, cost: float, answer: str) -> None:
    shown = markdown.document(document(judged(share, cost), "1.0"))
    assert answer in shown.splitlines()[0] or answer in shown
    assert "greedy decoding" in shown and "sampling at temperature 1" in shown
    assert "2,032 positions" in shown and "measured: decode steps in onnxruntime" in shown


def test_a_page_has_the_curve_and_every_prompt() -> None:
    page = html.page(document(judged(0.8, 0.001)))
    assert "Expected speed, by drafted tokens" in page and "./small as the draft of ./large" in page
    assert page.count("<td") > 16 * 2


def test_without_times_the_acceptance_stands_alone() -> None:
    shown = markdown.document(document(replace(judged(0.8, 0.001), times=None, gains=[])))
    assert "the acceptance alone: no times are known" in shown
    assert "Expected gain" not in shown


def test_bounds_decide_no_gain() -> None:
    data = judged(0.8, 0.001)
    assert data.times is not None
    shown = markdown.document(document(replace(data, times=replace(data.times, source="bound"))))
    assert "a gain is not decided: " in shown and "if both ran at their bounds" in shown
    assert "bounds that no device reaches: decode steps" in shown and "expected " not in shown.splitlines()[0]
