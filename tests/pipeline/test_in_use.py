"""What a bundle was calibrated and scored on begins as prompts do, and it says so: held against plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import recipe  # type: ignore[import-not-found]

from quantkit.calibrate.tokens.ids import load_tokens
from quantkit.measurement.rows import Row
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.compile import Compiled
from quantkit.pipeline.measure import measure_bundle

BOS, LENGTH, SAMPLES = 256, 64, 2
FIXED = {"format": "int8", "granularity": "tensor", "dynamic": False, "symmetric": True, "range": "minmax"}
SCHEME = {
    "weights": {"format": "int8", "granularity": "channel", "scale": "float32"},
    "activations": FIXED,
    "kv_cache": {"format": "fp8_e4m3", "granularity": "tensor"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    """A tiny llama to whose first token nothing compares: one channel of it alone is large."""
    folder = tmp_path_factory.mktemp("source") / "llama.tiny"
    made: Any = zoo.tiny("llama", vocab_size=258, num_hidden_layers=1, max_position_embeddings=LENGTH)
    with torch.no_grad():
        made.get_input_embeddings().weight[BOS] = 0.0
        made.get_input_embeddings().weight[BOS, 3] = 1e3
    made.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, few_scored: None) -> None:
    monkeypatch.setattr("quantkit.measurement.accuracy.score.SAMPLES", 1)


def compiled(model: Path, out: Path, template: str | None = None) -> Compiled:
    calibration = {"set": "prose-en", "samples": SAMPLES, "tokens": LENGTH, "template": template}
    made = recipe(scheme=SCHEME, export=[{"checkpoint": {"layout": "int-quantized"}}], calibration=calibration)
    return compile_model(Request.of(str(model), recipe=made, out=out, speed=False))


def seen(tokenizer: Any, split: Any, samples: int, **text: Any) -> torch.Tensor:
    asked = {"samples": samples, "tokens": LENGTH, "seed": 0, "vocab_size": 258, **text}
    return load_tokens("prose-en", split, tokenizer=tokenizer, **asked).ids


def kl(result: Compiled) -> Row:
    return next(row for row in result.rows if row.name == "accuracy.kl" and "kv_cache" not in row.settings)


@torch.no_grad()
def test_fixed_scales_have_seen_the_first_token_and_scores_are_of_text_after_it(
    model: Path, tmp_path: Path, chat_tokenizer: Any
) -> None:
    from transformers import AutoModelForCausalLM

    result = compiled(model, tmp_path / "out")
    manifest, plain = result.bundle.manifest, AutoModelForCausalLM.from_pretrained(model).eval()
    largest: dict[str, float] = {}
    q_proj = plain.model.layers[0].self_attn.q_proj
    q_proj.register_forward_pre_hook(lambda _, args: largest.__setitem__("q", float(args[0].abs().max())))
    plain(input_ids=seen(chat_tokenizer, "calib", SAMPLES))
    layer = next(each for each in manifest.layers if each.name.endswith("q_proj"))
    # 8 bits, symmetric: 127.5 steps to the largest value, which is of the first token
    assert layer.input_scale == pytest.approx(largest["q"] / 127.5, rel=1e-3)
    plain(input_ids=seen(chat_tokenizer, "calib", SAMPLES)[:, 1:])
    assert layer.input_scale > 1.2 * largest["q"] / 127.5
    # perplexity by transformers' own loss
    row = next(row for row in result.rows if row.name == "accuracy.perplexity")
    assert row.data is not None
    ids = seen(chat_tokenizer, "eval", row.data.items // (LENGTH - 1))
    assert (ids[:, 0] == BOS).all()
    assert row.baseline is not None
    assert row.baseline.value == pytest.approx(float(plain(input_ids=ids, labels=ids).loss.exp()), rel=1e-4)
    # and who reads of it is told what it is of
    assert manifest.calibration is not None
    assert manifest.calibration.begins == row.data.begins == "<s>"
    caches = [row for row in result.rows if row.name == "accuracy.kl" and "kv_cache" in row.settings]
    assert {row.data.begins for row in caches if row.data is not None} == {"<s>"}
    assert "each beginning with &lt;s&gt;" in (tmp_path / "out" / "README.md").read_text()
    assert "beginning with &lt;s&gt;" in (tmp_path / "out" / "report.html").read_text()


def test_the_template_that_calibrates_scores_and_measures_again(
    model: Path, tmp_path: Path, chat_tokenizer: Any
) -> None:
    result = compiled(model, tmp_path / "out", template="chat")
    manifest, found = result.bundle.manifest, kl(result)
    assert manifest.recipe["calibration"]["template"] == "chat"
    assert any("chat template" in each.reason for each in manifest.decisions)
    assert found.data is not None
    ids = seen(chat_tokenizer, "eval", found.data.items // (LENGTH - 1), template="chat")
    assert chat_tokenizer.decode(ids[0]).startswith("<s>[user]")
    rows = measure_bundle(result.bundle, str(model), runtime="torch")
    again = next(row for row in rows if row.name == "accuracy.kl")
    assert again.data == found.data
    assert again.value == pytest.approx(found.value)
