"""What is printed holds the figures it was given, fits the width, and takes nobody's text for markup."""

from __future__ import annotations

import io
from pathlib import Path

import planted
import pytest

from quantkit.bundle import Check
from quantkit.report import terminal


def printed(renderables: object, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    terminal.write(renderables, stream)  # type: ignore[arg-type]
    return stream.getvalue()


def summary(monkeypatch: pytest.MonkeyPatch, width: int = 80, **changes: object) -> str:
    found = terminal.summary(
        Path("/somewhere/a bundle"),
        planted.manifest(**changes),
        planted.rows(),
        [planted.NOTE],
        seconds={"total": 73.2, "quantize_cpu": 41.3},
        memory_peak_bytes=1_900_000_000,
    )
    return printed(found, monkeypatch, width)


@pytest.mark.parametrize(
    "figure",
    [
        *("538 MB", "170 MB", "3.16× smaller", "4.31", "16.92", "19.53", "1.154 times (1.142 to 1.167)", "0.143"),
        *("82.1 %", "81.0 % to 83.2 %", "43.1 %", "41.2 %", "−1.9 points", "6,132 positions of prose-en (eval)"),
        *("kl_max 0.143 ≤ 0.5", "reload.transformers 3e-07 ≤ 0.0001", "3 × damping-raised (gptq), first layers.0.mlp"),
        *("0.01 → 0.1; no factor", planted.NOTE, "latency has not been measured", "1 min 13 s in all", "1.90 GB"),
        *("a-model", "rtn-int4", "cpu-x86", "quantkit verify '/somewhere/a bundle'", "quantkit generate"),
    ],
)
def test_summary_shows_every_figure_of_its_rows(figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert figure in summary(monkeypatch, width=160)


def test_standard_error_is_that_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    # half of 0.016 over Student's t for 12 sequences, 2.201
    assert "± 0.0036 nats" in summary(monkeypatch)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_but_paths_and_commands_is_wider_than_the_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in summary(monkeypatch, width).splitlines():
        assert len(line) <= width or "/somewhere/a bundle" in line, line


def test_plain_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(monkeypatch)
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_failed_gate_is_said_at_the_top_and_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(monkeypatch, state="gate_failed", checks=[planted.FAILED_GATE])
    assert "✗ a-model" in text
    assert "a gate failed" in text
    assert "✗ top1_agreement_min 0.821 < 0.85" in text


def test_names_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted.manifest().model.model_copy(update={"name": "[red]a[/] :smile:"})
    assert "[red]a[/] :smile:" in summary(monkeypatch, model=model)


def test_a_verdict_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = {"answer": "ship_up_to", "batch": 8, "because": ["it is faster there"]}
    text = summary(monkeypatch, verdict=verdict)
    assert "ship it up to batch 8" in text
    assert "it is faster there" in text


def test_a_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check(name="files.sha256", value=2, limit=0, ok=False, where="model/config.json, x")
    text = printed(terminal.verified(Path("b"), planted.manifest(), [check], []), monkeypatch)
    assert "1 of 1 checks failed" in text
    assert "2 wrong" in text
    assert "model/config.json, x" in text
