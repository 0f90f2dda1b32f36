"""The rows of latency as curves, and the few columns that a terminal has room for."""

from __future__ import annotations

from typing import Any

import planted
import pytest

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import curves
from report.timed import judged, timed_rows


def encoder() -> Manifest:
    return judged(model=planted.manifest().model.model_copy(update={"kind": "encoder"}))


def passed(batch: int, tokens: int, **changes: Any) -> Row:
    base = {"subject": "f" * 64, "value": 0.02 * batch, "ratio": 2.0, "ratio_ci95": (1.9, 2.1)}
    shape = {"new_tokens": tokens, "context": 0}
    data = {"value": 0.01 * batch, "unit": "s", "batch": batch, "shape": shape, "baseline": base, **changes}
    return Row(name="latency.prefill", subject=planted.CONTENT, runtime="onnxruntime", **data)


def test_a_decoder_has_its_steps_over_the_batch_and_its_prompts_over_the_length() -> None:
    found = curves.series(judged(), timed_rows())
    assert [(curve.over, [cell.x for cell in curve.cells]) for curve in found] == [
        ("batch", [1, 2, 4, 8, 16, 32]),
        ("batch", [1, 2, 4, 8, 16, 32]),
        ("tokens", [64, 256, 1024]),
    ]
    assert [cell.x for cell in found[2].skipped] == [4096]


def test_a_model_that_does_not_decode_has_its_passes_over_the_batch() -> None:
    rows = [passed(batch, tokens) for tokens in (64, 256) for batch in (8, 1)]
    even = {"over": "batch", "ideal": 12.0}
    rows.append(
        Row(
            name="tax.break_even",
            value=4.0,
            unit="1",
            subject=planted.CONTENT,
            runtime="onnxruntime",
            shape={"new_tokens": 256, "context": 0},
            settings=even,
        )
    )
    first, second = curves.series(encoder(), rows)
    assert (first.title, [cell.x for cell in first.cells]) == ("Forward pass of 64 tokens", [1, 8])
    assert curves.break_even(first) == ""
    assert curves.break_even(second) == "Break-even at batch 4.0 (ideal 12)."


def test_levels_are_curves_of_their_own() -> None:
    rows = [passed(1, 64, settings={"accuracy_level": level}) for level in (0, 4)]
    titles = [curve.title for curve in curves.series(judged(), rows)]
    assert titles == ["Prefill at batch 1, onnxruntime, level 0", "Prefill at batch 1, onnxruntime, level 4"]


def test_a_brief_line_has_both_sides_in_one_unit() -> None:
    head, body = curves.brief(curves.series(judged(), timed_rows())[0])
    assert head == ["batch", "p50, ms", "speed-up", "95 %", "p99, ms", "token/s", "of read"]
    assert body[0] == ["1", "31.2 → 13.0", "2.40×", "2.33 to 2.47", "35.9 → 15.6", "76.8", "52 %"]


def test_without_a_ceiling_there_is_no_share_of_it() -> None:
    rows = [row for row in timed_rows() if row.name.startswith("latency.")]
    head, _ = curves.brief(curves.series(judged(), rows)[0])
    assert "of read" not in head


@pytest.mark.parametrize("flag", ["noisy", "aa-exceeds-effect"])
def test_noise_is_marked_and_explained(flag: str) -> None:
    rows = [row.model_copy(update={"flags": [flag]}) if row.batch == 4 else row for row in timed_rows()]
    curve = curves.series(judged(), rows)[0]
    _, body = curves.brief(curve)
    assert [line[2].startswith("~") for line in body] == [False, False, True, False, False, False]
    assert "~ is noise" in curves.how(curve)
    assert curves.cautions(curve)[0].startswith("at batch 4: ")


@pytest.mark.parametrize(("dtype", "name"), [("float32", "float32"), ("bfloat16", "original")])
def test_the_float_side_is_called_what_it_computes_in(dtype: str, name: str) -> None:
    model = planted.manifest().model
    source = model.source.model_copy(update={"dtype": dtype})
    assert curves.names(judged(model=model.model_copy(update={"source": source}))) == ("int4", name)


def test_a_prompt_that_is_too_long_says_so() -> None:
    rows = [passed(1, 64), passed(1, 4096, value=None, flags=["prompt-too-long"], baseline=None)]
    (curve,) = curves.series(judged(), rows)
    assert curves.skipped(curve) == ["4,096 tokens: longer than the model's context."]
