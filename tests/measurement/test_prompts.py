"""What a verdict says of prompts, beside the steps that it rests on."""

from __future__ import annotations

import pytest

from quantkit.bundle import Verdict
from quantkit.measurement.rows import Baseline, Row
from quantkit.measurement.verdict import with_prompts

STEPS = Verdict(answer="ship_it", because=["batch 1: 2 times as fast"])


def prompt(tokens: int, ratio: float, *, batch: int = 1, width: float = 0.02, **settings: float) -> Row:
    interval = ratio / (1 + width), ratio * (1 + width)
    against = Baseline(subject="b", value=0.3, ratio=ratio, ratio_ci95=interval)
    shape = {"new_tokens": tokens, "context": 0}
    return Row(
        name="latency.prefill", value=0.3 / ratio, unit="s", subject="a", batch=batch, shape=shape, baseline=against,
        n=10, settings=settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "faster", "slower", "open_"),
    [
        ([prompt(64, 1.3), prompt(256, 1.0), prompt(1024, 0.8)], [64], [1024], [256]),
        ([prompt(1024, 2.0), prompt(256, 2.0)], [256, 1024], [], []),
        ([prompt(256, 1.1, width=0.2)], [], [], [256]),
        # the slowest batch decides a length
        ([prompt(256, 2.0), prompt(256, 0.7, batch=4)], [], [256], []),
        # more than bytes and operations allow is not believed
        ([prompt(256, 2.0, promised_most=1.2)], [], [], [256]),
    ],
)
def test_each_length_is_faster_slower_or_open(
    rows: list[Row], faster: list[int], slower: list[int], open_: list[int]
) -> None:
    found = with_prompts(STEPS, rows).prompts
    assert found is not None
    assert (found.faster, found.slower, found.open) == (faster, slower, open_)


def test_the_answer_is_that_of_the_steps_and_the_prompts_say_why() -> None:
    found = with_prompts(STEPS, [prompt(256, 0.8), prompt(1024, 0.5)])
    assert (found.answer, found.because[0]) == ("ship_it", STEPS.because[0])
    assert [each.partition(":")[0] for each in found.because[1:3]] == ["batch 1, 256 tokens", "batch 1, 1024 tokens"]
    assert found.because[3] == found.instead


def test_where_it_is_slower_something_else_is_named() -> None:
    slow = [prompt(256, 0.8)]
    assert with_prompts(STEPS, slow).instead == "for prompts of 256 tokens: use the float model (`--recipe float`)"
    found = with_prompts(Verdict(answer="ship_up_to", batch=4), slow, setting="onnx.prefill=int8").instead
    assert found.startswith("for batches above 4 and prompts of 256 tokens: compile with `--set onnx.prefill=int8`")


def test_a_setting_is_named_for_prompts_that_gain_nothing_too() -> None:
    level = [prompt(256, 1.0)]
    assert with_prompts(STEPS, level).instead == ""
    assert "prompts of 256 tokens" in with_prompts(STEPS, level, setting="onnx.prefill=int8").instead


def test_what_is_slower_nowhere_needs_nothing_instead() -> None:
    found = with_prompts(STEPS, [prompt(256, 1.5)], setting="onnx.prefill=int8")
    assert (found.instead, found.because[-1][:19]) == ("", "batch 1, 256 tokens")


def test_without_prompts_nothing_is_said_of_them() -> None:
    assert with_prompts(STEPS, []) == STEPS
