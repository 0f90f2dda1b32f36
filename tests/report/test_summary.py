"""The ten lines that end a compile: what a newcomer reads of a bundle, at 80 columns."""

from __future__ import annotations

from typing import Any

import planted
import pytest

from quantkit.bundle import Verdict
from quantkit.measurement.rows import Row
from quantkit.report.bundle.summary import closing
from report.shown import printed

VERDICT = Verdict(answer="ship_up_to", batch=1, because=["as it is"])


def step(value: float, before: float, spread: float = 0.01, name: str = "decode_step", **sizes: int) -> Row:
    ratio = before / value
    return Row.seconds(
        f"latency.{name}",
        value,
        baseline={"subject": "b" * 64, "value": before, "ratio": ratio, "ratio_ci95": (ratio - 0.03, ratio + 0.03)},
        subject=planted.CONTENT,
        batch=1,
        shape={"new_tokens": 1, "context": 128, **sizes},
        runtime="onnxruntime",
        aa_spread=spread,
        n=120,
        flags=["noisy"] if spread > 0.1 else [],
    )


TIMES = [step(0.0051, 0.0126), step(0.19, 0.171, name="prefill", new_tokens=128, context=0)]


def lines(monkeypatch: pytest.MonkeyPatch, rows: list[Row], **changes: Any) -> list[str]:
    manifest = planted.manifest(**changes)
    manifest.target["batches"] = [1, 4, 16, 128]
    return printed(closing(manifest, rows, "./a-model"), monkeypatch, 80).splitlines()


def test_it_says_size_accuracy_speed_verdict_and_what_to_type_next(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, [*planted.rows(), *TIMES], verdict=VERDICT.model_dump(mode="json"))
    assert said == [
        "made      ./a-model (1 layer in int4)",
        "size      3.16× smaller: 538 MB → 170 MB",
        "accuracy  KL divergence 0.143 nats (0.135 to 0.151); the original has 0",
        "          perplexity 16.9 → 19.5: 1.154 times (1.142 to 1.167)",
        "speed     batch 1: 12.6 → 5.10 ms a token, 2.47× faster (2.44 to 2.50)",
        "          128-token prompt: 171 → 190 ms, 1.11× slower (1.08 to 1.15)",
        "verdict   ship it at batch 1 (batches up to 16 are not timed yet)",
        "",
        'quantkit generate ./a-model --prompt "The capital of France is"',
        "quantkit export ./a-model --to onnx",
        "quantkit measure ./a-model --runtime onnxruntime",
    ]


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, [*planted.rows(), step(0.0051, 0.0126, spread=0.3)])
    assert "speed     batch 1: 12.6 → 5.10 ms a token, not decided: the machine was busy" in said


def test_what_was_not_timed_is_said_and_what_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, planted.rows())
    assert "speed     not timed" in said
    assert said[-1].startswith("quantkit measure ./a-model")


def test_a_baseline_has_no_speed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, planted.rows(), layers=[])
    assert not [line for line in said if line.startswith("speed")]
    assert said[-1] == "quantkit verify ./a-model"
