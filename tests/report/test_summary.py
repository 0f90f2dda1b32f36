"""The ten lines that end a compile: what a newcomer reads of a bundle, at 80 columns."""

from typing import Any

import planted
import pytest

from quantkit.bundle import Verdict
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures, usage
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
    return printed(closing(manifest, rows, "./a-model", usage.Files()), monkeypatch, 80).splitlines()


def test_it_says_size_accuracy_speed_verdict_and_what_to_type_next(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, [*planted.rows(), *TIMES], verdict=VERDICT.model_dump(mode="json"))
    assert said == [
        "made      ./a-model (1 layer in int4)",
        "size      3.16× smaller: 538 MB → 170 MB",
        "accuracy  KL divergence 0.143 nats (0.135 to 0.151)",
        "          perplexity 16.9 → 19.5: 1.154 times (1.142 to 1.167)",
        "speed     batch 1: 12.6 → 5.10 ms a token, 2.47× faster (2.43 to 2.51)",
        "          128-token prompt: 171 → 190 ms, 1.11× slower (1.07 to 1.15)",
        "verdict   ship it at batch 1; batches 4 to 16 not timed yet",
        "",
        'quantkit generate ./a-model --prompt "The capital of France is"',
        "quantkit export ./a-model --to onnx",
        "quantkit measure ./a-model --runtime onnxruntime",
    ]


def test_no_command_for_text_where_there_is_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [each.model_dump() for each in planted.manifest().files if each.role == "weights"]
    said = "\n".join(lines(monkeypatch, planted.rows(), files=weights))
    assert "quantkit generate" not in said and "quantkit measure" in said
    code = [str(each.text) for each in usage.commands(planted.manifest(files=weights))]
    assert not any("okenizer" in each or "generate" in each for each in code)


def test_a_busy_machine_leaves_a_small_gain_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, [*planted.rows(), step(0.0110, 0.0126, spread=0.3)])
    assert "speed     batch 1: 12.6 → 11.0 ms a token, not decided: the machine was busy" in said


def test_what_noise_decided_not_is_said_with_the_interval_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*planted.rows(), step(0.012, 0.0126, spread=0.09)]
    said = lines(monkeypatch, rows, verdict={"answer": "inconclusive", "because": []})
    assert "speed     batch 1: 12.6 → 12.0 ms a token, not decided: noise (0.959 to 1.15)" in said
    assert "verdict   not decided: noise; batches 4 to 16 not timed yet" in said


def test_a_smaller_checkpoint_and_a_larger_graph_both_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(row for row in planted.rows() if row.name == "size.bytes")
    assert whole.baseline is not None
    sizes = []
    for export, count in (("model", 170e6), ("onnx", 600e6), ("engine", 180e6)):
        against = whole.baseline.model_copy(update={"ratio": 538e6 / count})
        change = {"value": count, "settings": {"export": export}, "baseline": against}
        sizes.append(whole.model_copy(update=change))
    said = lines(monkeypatch, [*(row for row in planted.rows() if row.name != "size.bytes"), *sizes])
    at = said.index("size      checkpoint 3.16× smaller: 538 MB → 170 MB")
    assert said[at + 1] == "          ONNX 1.12× larger: 538 MB → 600 MB"
    assert not any("engine" in line for line in said)


def test_on_a_target_without_the_runtime_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"name": "h100", "runtimes": ["torch", "vllm"]}
    said = lines(monkeypatch, planted.rows(), target=target)
    assert "vllm serve ./a-model/model" in said and not any("onnx" in line for line in said)
    layer = planted.manifest().layers[0].model_dump()
    layer["scheme"] = {"format": "fp8_e4m3", "granularity": "channel", "symmetric": True, "scale": "float32"}
    said = lines(monkeypatch, planted.rows(), layers=[layer])
    assert not any("onnx" in line for line in said), "no graph holds float codes"


def test_the_caption_counts_positions_by_runtime() -> None:
    here = [row for row in planted.rows() if row.name.startswith("accuracy.")]
    shape = {"sequences": 4}
    fewer = [row.model_copy(update={"data": row.data and row.data.model_copy(update={"items": 2044}), "shape": shape})
             for row in here]  # fmt: skip
    there = [row.model_copy(update={"runtime": "onnxruntime"}) for row in here]
    said = figures.scored([*fewer, *there])
    assert said.startswith("2,044 positions in torch, 6,132 positions in onnxruntime, all of prose-en (eval); ")
    assert figures.scored(here).startswith("6,132 positions of prose-en (eval) in 12 sequences; ")


def test_what_was_not_timed_is_said_and_what_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, planted.rows())
    assert "speed     not timed" in said
    assert said[-1].startswith("quantkit measure ./a-model")


def test_a_baseline_has_no_speed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines(monkeypatch, planted.rows(), layers=[])
    assert not [line for line in said if line.startswith("speed")]
    assert said[-1] == "quantkit verify ./a-model"


def test_a_recipe_to_try_instead_comes_first_where_the_model_is_not_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "quantkit recommend hf:org/a-model@main --target cpu-x86"
    assert first not in lines(monkeypatch, [*planted.rows(), *TIMES], verdict=VERDICT.model_dump(mode="json"))
    for changes in ({"verdict": {"answer": "do_not_quantize", "because": ["it is slow"]}}, {"state": "gate_failed"}):
        said = lines(monkeypatch, [*planted.rows(), *TIMES], **changes)
        assert said[said.index("") + 1] == first
