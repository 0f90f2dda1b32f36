"""One bundle as the draft of another: what is accepted, at which times, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from conftest import CHANGES, recipe  # type: ignore[import-not-found]

import quantkit
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.accuracy.drafts import Acceptance
from quantkit.measurement.rows import Row
from quantkit.pipeline import drafts
from quantkit.pipeline.drafts import concluded, forecast, judge_draft, measured
from quantkit.target import Target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> tuple[Path, Path]:
    """A float bundle and one of int4, of one tiny model."""
    place = tmp_path_factory.mktemp("pair")
    zoo.save(place / "tiny", byte_tokenizer, "llama", **CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        for name, chosen in (("int4", recipe("checkpoint")), ("float", recipe("checkpoint", passes=()))):
            quantkit.compile(place / "tiny", chosen, out=place / name, speed=False, vllm=False)
    return place / "int4", place / "float"


def row(bundle: Bundle, batch: int, seconds: float, context: int = 128) -> dict[str, Any]:
    device = {"id": "d", "kind": "cpu", "name": "a processor"}
    return Row.seconds(
        "latency.decode_step",
        seconds,
        subject=bundle.manifest.content_sha256,
        batch=batch,
        shape={"new_tokens": 1, "context": context},
        runtime="onnxruntime",
        device=device,
    ).as_dict()


class Timed:
    """A bundle with other measurements."""

    def __init__(self, bundle: Bundle, times: dict[int, float]) -> None:
        self.manifest, self.path = bundle.manifest, bundle.path
        self.measurements = [row(bundle, batch, seconds) for batch, seconds in times.items()]


def test_a_draft_is_judged_by_the_share_of_its_tokens_that_is_accepted(pair: tuple[Path, Path]) -> None:
    draft, target = pair
    judged = judge_draft(draft, target)
    same = judge_draft(target, target)
    assert same.seen.mean("greedy").value == 1.0
    assert same.seen.mean("sampling").value == pytest.approx(1.0)
    for way in ("greedy", "sampling"):
        mean = judged.seen.mean(way)
        assert 0.3 < mean.value < 1.0 and mean.ci95 is not None
        assert 0 <= mean.ci95[0] < mean.value < mean.ci95[1] <= 1
    result = json.loads(json.dumps(judged.as_dict()))
    assert result["acceptance"]["sampling"]["n"] == judged.seen.greedy.size
    assert len(result["prompts"]) == result["acceptance"]["greedy"]["prompts"]
    # plain transformers, on the first prompt
    folders = [path / "model" for path in pair]
    ids = drafts._text(folders, "prose-en").ids[:1]
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    with torch.no_grad():
        q, p = (model(ids).logits[0, :-1].softmax(-1) for model in models)
    assert result["prompts"][0]["sampling"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-4)
    assert result["prompts"][0]["greedy"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_times_of_one_place_are_taken_and_a_pass_is_a_step_of_as_many_rows(pair: tuple[Path, Path]) -> None:
    draft, target = (Bundle.load(path) for path in pair)
    ours: Any = Timed(draft, {1: 0.001})
    theirs: Any = Timed(target, {1: 0.010, 4: 0.013, 16: 0.025})
    times, note = measured(ours, theirs)
    assert times is not None and note == ""
    assert (times.draft, times.step, times.source) == (0.001, 0.010, "measured")
    assert times.passes[3] == pytest.approx(0.012) and times.passes[4] == 0.013 and times.passes[8] == 0.017
    theirs = Timed(target, {1: 0.010})
    times, note = measured(ours, theirs)
    assert times is not None and set(times.passes.values()) == {0.010} and "as long" in note
    theirs.measurements = [row(target, 1, 0.010, context=4096)]
    assert measured(ours, theirs)[0] is None
    seen = Acceptance(np.repeat(np.arange(16), 10), np.ones(160, dtype=bool), np.ones(160))
    judged = concluded(ours, theirs, seen, "text")
    assert judged.times is None or judged.times.source in ("forecast", "bound")
    assert any("no decode step of both" in note for note in judged.notes)


def test_without_recorded_steps_the_plan_is_asked(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target = (Bundle.load(path) for path in pair)
    monkeypatch.setattr(drafts, "target_of", lambda _: Target.load("h100"))
    times, why = forecast(draft, target)
    assert times is not None and times.source == "bound" and "h100" in times.about and "bounds by bytes" in why
    assert times.draft > 0 and times.passes[1] == times.step
    assert all(times.passes[k] >= times.step for k in times.passes)
    other, _ = forecast(draft, target, Target.load("l4"))
    assert other is not None and "l4" in other.about and other.step > times.step
    monkeypatch.setattr(drafts, "planned_steps", lambda *_: ([None] * 9, "torch"))
    times, why = forecast(draft, target)
    assert times is None and why.startswith("no times")


def test_another_vocabulary_and_what_does_not_decode_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft, target = pair
    shutil.copytree(draft, tmp_path / "other")
    other = tmp_path / "other" / "model" / "tokenizer.json"
    stated = json.loads(other.read_text())
    vocabulary = stated["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other.write_text(json.dumps(stated))
    with pytest.raises(InputError, match="vocabulary-differs") as refused:
        judge_draft(tmp_path / "other", target)
    shutil.copy(draft / "model" / "tokenizer.json", other)
    with (tmp_path / "other" / "model" / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(InputError, match="hash-mismatch"):
        judge_draft(tmp_path / "other", target)
    assert "2 tokens differ" in refused.value.line() and "\n" not in refused.value.line()
