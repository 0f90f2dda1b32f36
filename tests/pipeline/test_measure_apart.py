"""A checkpoint in a server's engine: against the float model there, beside torch, and the noise floor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from standin_vllm import python, stood_in

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement.accuracy.positions import Accuracy
from quantkit.measurement.rows import Row
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.measure import measure_bundle, original_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.sides import common_runtime, open_sides
from quantkit.runtimes import apart
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.runtimes.vllm import OWN

RECIPE = """schema: 1
summary: int8 by channel
calibration: {tokens: 32}
scheme: {weights: {format: int8, granularity: channel, symmetric: true, scale: float32}}
passes: [rtn]
export: [{checkpoint: {layout: int-quantized}}]
gates: {kl_max: 50}
"""


class Notes(Progress):
    """What was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.words: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def at(self, stage: str, share: float, words: str = "") -> None:
        self.words.append(words)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    home = tmp_path_factory.mktemp("served")
    model: Any = zoo.tiny("llama", vocab_size=len(byte_tokenizer), num_hidden_layers=1)
    model.save_pretrained(home / "model")
    byte_tokenizer.save_pretrained(home / "model")
    (home / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
        how: dict[str, Any] = {"recipe": str(home / "recipe.yaml"), "out": home / "b", "speed": False}
        compile_model(Request.of(str(home / "model"), **how))
    return home


@pytest.fixture
def bundle(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    apart.add(OWN, python(tmp_path / "p", "0.32.0"))
    shutil.copytree(compiled / "b", tmp_path / "b")
    return Bundle.load(tmp_path / "b")


def kl(ids: torch.Tensor, before: Any, after: Any) -> tuple[float, float]:
    """Mean KL, and the share of equal most likely tokens."""
    accuracy = Accuracy()
    for row, one, other in zip(ids, before, after, strict=True):
        accuracy.add(row, one, other)
    items = accuracy.items()
    return float(items.kl.mean()), float(items.agree.mean())


def of(rows: list[Row], name: str, **settings: Any) -> Row:
    (row,) = [
        row for row in rows if row.name == name and all(row.settings.get(key) == settings[key] for key in settings)
    ]
    return row


def test_three_comparisons_on_the_positions_of_every_runtime(bundle: Bundle, compiled: Path) -> None:
    source = str(compiled / "model")
    ids = original_of(bundle, source, None).tokens.ids  # type: ignore[union-attr]
    in_torch = TORCH.stream(bundle.model_folder).answers(ids).all()
    floats = original_of(bundle, source, None).stream.answers(ids).all()  # type: ignore[union-attr]
    there = stood_in(bundle.model_folder, ids)
    told = Notes()
    rows = measure_bundle(bundle, source, told, runtime="vllm")
    sha, original = bundle.manifest.content_sha256, bundle.manifest.model.source.sha256
    # the float model and the bundle have the same table and head
    main = of(rows, "accuracy.kl")
    assert (main.value, main.subject, main.baseline.subject) == (0.0, sha, original)  # type: ignore[union-attr]
    assert main.settings["baseline_runtime"] == "vllm" and main.versions["vllm"] == "0.32.0"
    assert {"accuracy.perplexity", "accuracy.top1_agreement", "accuracy.next_word"} <= {row.name for row in rows}
    for name, place in (("across.kl", 0), ("across.top1_agreement", 1)):
        beside, floor = of(rows, name, floor=None), of(rows, name, floor=True)
        assert beside.value == pytest.approx(kl(ids, in_torch, there)[place], rel=1e-6)
        assert floor.value == pytest.approx(kl(ids, floats, there)[place], rel=1e-6)
        assert (beside.subject, floor.subject) == (sha, original)
    assert any(words.startswith("the bundle: ") for words in told.words)
    assert any("under load" in line for line in told.lines)
    kept = [Row.model_validate(row) for row in Bundle.load(bundle.path).measurements]
    assert len([row for row in kept if row.runtime == "vllm" and row.name == "across.kl"]) == 2
    card = (bundle.path / "README.md").read_text()
    assert "KL divergence of the original from itself in torch" in card
    # a second time they replace the first
    measure_bundle(Bundle.load(bundle.path), source, runtime="vllm")
    assert len(Bundle.load(bundle.path).measurements) == len(kept)


def test_gates_and_comparisons_read_the_divergence_from_the_original_alone(bundle: Bundle, compiled: Path) -> None:
    source = str(compiled / "model")
    measure_bundle(bundle, source, runtime="vllm", speed=False)
    after = Bundle.load(bundle.path)
    gates = {check.name: check.value for check in after.manifest.checks if check.name.startswith("gate.")}
    assert gates["gate.vllm.kl_max"] == 0.0
    a, b = open_sides(bundle.path, bundle.path)
    assert common_runtime(a, b, "vllm")[0] == "vllm"
    assert {row.name for row in a.accuracy("vllm")} == {
        f"accuracy.{name}" for name in ("perplexity", "kl", "top1_agreement", "next_word")
    }
    assert float(a.read("vllm").kl.max()) == 0.0


def test_without_the_original_a_checkpoint_is_still_held_against_torch(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.model.source.merged.open_again", lambda sha256: None)
    told = Notes()
    rows = measure_bundle(bundle, progress=told, runtime="vllm", speed=False)
    assert {row.name for row in rows if row.runtime == "vllm"} == {"across.kl", "across.top1_agreement"}
    assert any(line.startswith("compared with torch alone: ") for line in told.lines)


def test_what_vllm_refuses_leaves_nothing_behind(bundle: Bundle, compiled: Path, tmp_path: Path) -> None:
    refuses = "SamplingParams = None\nclass LLM:\n    def __init__(self, **_):\n        raise ValueError('no kernel')\n"
    apart.add(OWN, python(tmp_path / "q", "0.32.0", refuses))
    before = (bundle.path / "measurements.jsonl").read_bytes()
    with pytest.raises(InputError) as caught:
        measure_bundle(bundle, str(compiled / "model"), runtime="vllm")
    assert (caught.value.code, caught.value.value) == ("vllm-refused", "no kernel")
    assert (bundle.path / "measurements.jsonl").read_bytes() == before
