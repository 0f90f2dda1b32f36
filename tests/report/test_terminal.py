"""What is printed holds the figures it was given, fits the width, and takes nobody's text for markup."""

import io
from pathlib import Path

import planted
import pytest
from rich.text import Text

from quantkit.bundle import Check, Manifest, WeightsEntry
from quantkit.measurement.rows import Row
from quantkit.report import terminal
from quantkit.report.bundle import figures, usage
from quantkit.report.bundle.document import brief, card, document, took
from quantkit.report.kit.progress import Display
from quantkit.report.kit.screen import grid, indented, table
from report.shown import fits, page, printed
from report.timed import everything, exported_rows, judged, onnx_only, timed_rows

FORGED = "it is fine\n✓ all 10 checks hold\r\x1b[2K"


@pytest.mark.parametrize("width", [0, 1, 80])
def test_what_others_say_stays_in_its_line_on_a_screen_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    cells = table(["note"], [[FORGED], [Text(FORGED)]])
    shown = [Text(FORGED), cells, *indented(Text(FORGED)), grid([(Text("!"), Text(FORGED))])]
    text = printed(shown, monkeypatch, width)
    assert len(text.split()) > 30 and "\r" not in text
    assert width < 80 or not any(line.strip().startswith("✓") for line in text.splitlines())
    stream = io.StringIO()
    with Display(file=stream, live=False) as display:
        display.begin(FORGED)
        display.note(FORGED)
    assert all(line.startswith("it is fine␊✓") for line in stream.getvalue().splitlines())


def summary(monkeypatch: pytest.MonkeyPatch, width: int = 80, **changes: object) -> str:
    manifest, path = planted.manifest(**changes), Path("/somewhere/a bundle")
    return printed([document(manifest, planted.rows(), [planted.NOTE], path=path)], monkeypatch, width)


def shown(monkeypatch: pytest.MonkeyPatch, manifest: Manifest, rows: list[Row], width: int = 80) -> str:
    return printed([document(manifest, rows, path=Path("/somewhere/b"))], monkeypatch, width)


def test_summary_shows_every_figure_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(monkeypatch, width=160)
    for figure in (
        *("538 MB", "170 MB", "3.16× smaller", "4.31", "16.92", "19.53", "1.154 times (1.142 to 1.167)", "0.143"),
        *("82.1 %", "81.0 % to 83.2 %", "43.1 %", "41.2 %", "−1.9 points", "6,132 positions of prose-en (eval)"),
        *("gate kl_max", "0.143 ≤ 0.5", "check reload.transformers", "3e-07 ≤ 0.0001", "damping-raised (gptq)"),
        *("layers.0.mlp", "0.01 → 0.1", "no factor", planted.NOTE, "ot measured yet: nothing says"),
        *("a-model", "rtn-int4", "cpu-x86", "quantkit measure '/somewhere/a bundle'"),
        "quantkit generate",
        "0.135 to 0.151 nats",
    ):
        assert figure in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_but_paths_and_commands_is_wider_than_the_screen(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fits(summary(monkeypatch, width), width, "/somewhere/a bundle")
    fits(shown(monkeypatch, judged(), everything(), width), width, "/somewhere/b")


def finished(monkeypatch: pytest.MonkeyPatch, width: int = 80, **changes: object) -> str:
    text = took({"total": 73.2, "quantize_cpu": 41.3}, 1_900_000_000)
    manifest, path = planted.manifest(**changes), Path("/somewhere/a bundle")
    notes, files = [planted.NOTE], usage.Files()
    shown = brief(manifest, planted.rows(), notes, path=path, files=files, took=text)
    return printed([shown], monkeypatch, width)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screen_of_a_compile_is_short_and_points_to_the_tables(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = finished(monkeypatch, width)
    fits(text, width, "/somewhere/a bundle")
    flat = " ".join(text.split())
    assert width < 80 or len(text.splitlines()) <= 30
    assert "What it costs" not in text and "holds" not in text
    assert planted.NOTE in flat and "1 min 13 s in all" in flat and "1.90 GB" in flat
    assert "all figures and checks: quantkit show '/somewhere/a bundle'\n" in text
    assert "! damping-raised (gptq) at layers.0.mlp and 2 more: 0.01 → 0.1; no factor" in flat
    assert "✗" not in text and "  verdict" in text


def test_the_screen_of_a_compile_names_every_failed_check_and_what_to_use_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Check(name="onnx.valid", value=None, limit=None, ok=False, where="onnx/model.onnx")
    judgement = {
        "answer": "ship_it",
        "because": ["as it is"],
        "instead": "for long prompts: use the float model",
    }
    text = finished(monkeypatch, state="gate_failed", checks=[planted.FAILED_GATE, check], verdict=judgement)
    assert "  ✗ gate top1_agreement_min failed: 0.821 < 0.85\n  ✗ check onnx.valid failed: onnx/model.onnx\n" in text
    assert "            for long prompts: use the float model\n" in text


def test_a_note_that_tells_a_decision_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = planted.manifest().decisions[0].model_copy(update={"reason": planted.NOTE})
    assert finished(monkeypatch, 200, decisions=[taken]).count(planted.NOTE) == 1
    shown = finished(monkeypatch, 200, decisions=[planted.manifest().decisions[0]] * 3)
    assert "! damping-raised (gptq) at layers.0.mlp and 2 more: " in shown


def test_decisions_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "model.layers.0.mlp.experts.gate_up_proj.a_long_name.of_a_layer"
    taken = planted.manifest().decisions[0].model_copy(update={"where": where, "reason": "undeniable circumstances"})
    text = shown(monkeypatch, planted.manifest(decisions=[taken]), planted.rows())
    assert all(word in text.split() for word in (where, "undeniable", "circumstances", "damping-raised"))
    fits(text, 80, "/somewhere/b")


def test_commands_name_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    because = ["batches above 1: not timed; `quantkit measure BUNDLE` times them"]
    manifest = judged(verdict={"answer": "ship_up_to", "batch": 1, "because": because})
    assert "`quantkit measure /somewhere/b` times them" in shown(monkeypatch, manifest, everything(), 120)
    assert "<code>quantkit measure .</code> times them" in page(manifest, everything(), [])
    assert "BUNDLE" not in card(manifest, everything(), [])


def busy(row: Row) -> Row:
    return row.model_copy(update={"flags": ["noisy"]}) if row.name == "latency.prefill" else row


def test_prompts_that_a_busy_machine_leaves_open_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = {"answer": "ship_it", "prompts": {"faster": [1024], "open": [64, 256]}}
    rows = [busy(row) if (row.shape or {}).get("new_tokens") == 64 else row for row in everything()]
    text = " ".join(shown(monkeypatch, judged(verdict=verdict), rows, 120).split())
    why = "of 256 tokens do not differ beyond noise, of 64 tokens are not decided: the machine was busy"
    assert f"ship it; prompts of 1,024 tokens are faster, {why}" in text
    assert "At 64 tokens nothing is decided: the machine was busy." in text


def test_failed_gate_is_said_at_the_top_and_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(monkeypatch, state="gate_failed", checks=[planted.FAILED_GATE])
    assert "✗ a-model" in text and "A gate failed." in text
    assert "top1_agreement_min 0.821 < 0.85" in " ".join(text.split())
    judgement = {"answer": "do_not_quantize", "because": ["int4 failed gate.kl_max: 0.3 against a limit of 0.25"]}
    checks = [{"name": "gate.onnxruntime.kl_max", "value": 0.3, "limit": 0.25, "ok": False}]
    text = shown(monkeypatch, judged(verdict=judgement, checks=checks, state="gate_failed"), exported_rows())
    assert "kl_max in onnxruntime" in text and "0.300 > 0.25" in text, "a verdict without latency"
    assert "its speed is not measured yet" in text
    assert "which recipe to try instead:\n    quantkit recommend hf:org/a-model@main --target cpu-x86\n" in text
    assert "quantkit recommend" not in shown(monkeypatch, judged(), exported_rows())


def test_where_no_gate_was_judged_nothing_is_said_to_be_good(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check for check in planted.manifest().checks if not check.name.startswith("gate.")]
    changes = {"checks": checks, "recipe": {**planted.manifest().recipe, "gates": {"agreement_min": 0.9}}}
    text = summary(monkeypatch, **changes)
    assert "– a-model" in text and "✓ a-model" not in text
    assert "gate agreement_min" in text and "– not judged" in text and "check reload.transformers" in text
    manifest = planted.manifest(**changes)
    assert r"| gate agreement\_min | – not judged | |" in card(manifest, planted.rows(), [])
    assert " not judged</td>" in page(manifest, planted.rows(), [])


def test_names_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted.manifest().model.model_copy(update={"name": "[red]a[/] :smile:"})
    assert "[red]a[/] :smile:" in summary(monkeypatch, model=model)


def test_a_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check(name="files.sha256", value=2, limit=0, ok=False, where="model/config.json, x")
    text = printed(terminal.verified(Path("b"), planted.manifest(), [check], []), monkeypatch)
    assert all(said in text for said in ("1 of 1 checks failed", "2 wrong", "model/config.json, x"))


def test_the_verdict_stands_first_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, judged(), everything()).splitlines()
    first = lines[:7].index("  verdict: ship it up to batch 8")
    assert lines[first + 1] == "    · 2.40× the speed of float32 at batch 1 (2.33 to 2.47)"


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ({"answer": "ship_it"}, "ship it"),
        ({"answer": "intervals", "because": ["wins at batch 2 to 8"]}, "ship it at some batches only"),
        ({"answer": "do_not_quantize"}, "do not quantize here"),
        ({"answer": "use_instead", "format": "int8", "batch": 4}, "use int8 instead, up to batch 4"),
        ({"answer": "inconclusive"}, "not decided: noise"),
        (
            {"answer": "inconclusive", "prompts": {"open": [64]}},
            "not decided, for steps and prompts: noise",
        ),
        (
            {"answer": "inconclusive", "prompts": {"slower": [64]}},
            "not decided: noise; prompts of 64 tokens are slower",
        ),
        ({"answer": "ship_it", "forecast": True}, "forecast: ship it"),
        (
            {"answer": "ship_it", "prompts": {"faster": [64], "slower": [1024]}},
            "ship it; prompts of 64 tokens are faster, of 1,024 tokens are slower",
        ),
        (
            {"answer": "ship_it", "prompts": {"open": [256]}},
            "ship it; prompts of 256 tokens do not differ beyond noise",
        ),
    ],
)
def test_every_verdict_is_a_sentence(verdict: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"  verdict: {said}\n" in shown(monkeypatch, judged(verdict=verdict), everything())


def test_speed_is_a_line_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(shown(monkeypatch, judged(), everything()).split())
    assert "1 31.2 → 13.0 2.40× 2.32 to 2.48 35.9 → 15.6 76.8 52 %" in text
    assert "Break-even at batch 10 (95 % 9.6 to 11, ideal 19)" in text
    assert all(said in text for said in ("A/A spread 1.3 %", "peak memory", "23.1 GB/s"))
    assert "quantkit measure" not in text


def test_without_latency_it_says_what_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, judged(verdict=None), [*planted.rows(), *exported_rows()])
    assert "ot measured yet: nothing says" in text
    assert "\n    quantkit measure /somewhere/b --runtime onnxruntime\n" in text
    assert "quantkit export" not in text
    assert "quantkit export /somewhere/b --to onnx" in shown(monkeypatch, planted.manifest(), planted.rows())
    baseline = shown(monkeypatch, planted.manifest(layers=[]), planted.rows())
    assert "the baseline of quantized bundles" in baseline and "quantkit measure" not in baseline


def test_every_export_has_its_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, judged(), [*planted.rows(), *exported_rows()])
    parts = [text.index(f"\n    {name}\n") for name in ("torch", "onnxruntime, level 0", "onnxruntime, level 4")]
    assert parts == sorted(parts)
    assert "19.53" in text[parts[0] : parts[1]] and "0.0979" in text[parts[1] : parts[2]]
    assert "0.109" in text[parts[2] :]


def test_a_bundle_of_onnx_alone_offers_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, onnx_only(), [*exported_rows(), *timed_rows()])
    assert "from_pretrained" not in text
    assert 'quantkit generate /somewhere/b --runtime onnxruntime --prompt "' in text


def test_measured_says_verdict_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed([document(judged(), everything(), [planted.NOTE], path=Path("/b"), whole=False)], monkeypatch)
    assert "  verdict: ship it up to batch 8" in text.splitlines()
    assert "Decode with 128 tokens of context, float32 → int4" in text and planted.NOTE in text


@pytest.mark.parametrize(("left", "said"), [(920, "; 8% of the linear weights are quantized"), (50, ""), (0, "")])
@pytest.mark.parametrize("asked", [True, False])
def test_the_headline_says_how_little_is_quantized(
    left: int, said: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it: the name of a recipe speaks of all of a model."""
    one = {"reason": "", "tensors": 1, "example": "a", "linear": True}
    weights = [
        WeightsEntry(state="quantized", asked=True, elements=1000 - left, **one),
        WeightsEntry(state="carried", asked=asked, elements=left, **one),
        WeightsEntry(state="carried", asked=True, elements=10**6, **{**one, "linear": False}),
    ]
    manifest, rows = planted.manifest(weights=weights), planted.rows()
    answer, _ = figures.verdict(manifest, rows)
    assert answer == f"not measured yet: nothing says whether it is faster{said}"
    assert f"**Verdict:** {answer}." in card(manifest, rows, [])
    assert answer in " ".join(summary(monkeypatch, width=160, weights=weights).split())
