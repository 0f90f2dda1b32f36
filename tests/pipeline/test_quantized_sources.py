"""Quantized sources from a model to a bundle: the checkpoint of one bundle is the source of another."""

from pathlib import Path
from typing import Any

import pytest
import zoo
from conftest import recipe  # type: ignore[import-not-found]

from quantkit.bundle import Bundle, Check
from quantkit.model.source.open import open_model
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.measure import measure_bundle

INT8 = {
    "weights": {"format": "int8", "granularity": "channel", "scale": "float32"},
    "activations": {"format": "int8", "granularity": "token"},
}
WRITTEN = {
    "int4": ("pack-quantized", {}),
    "int8": ("int-quantized", {"scheme": INT8}),
    "gptq": ("gptq-v2", {}),
}


@pytest.fixture(autouse=True)
def _quick(few_scored: None) -> None:
    return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama.tiny"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=258, num_hidden_layers=2)


def compiled(model: Path, out: Path, *, exports: tuple[str, ...] = ("checkpoint",), **changes: Any) -> Bundle:
    return compile_model(Request.of(str(model), recipe=recipe(*exports, **changes), out=out, speed=False)).bundle


def kl(bundle: Bundle) -> float:
    return next(row["value"] for row in bundle.measurements if row["name"] == "accuracy.kl")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_is_quantized_again(model: Path, tmp_path: Path, name: str) -> None:
    layout, changes = WRITTEN[name]
    before = compiled(model, tmp_path / "before", export=[{"checkpoint": {"layout": layout}}], **changes)
    source = open_model(str(before.model_folder))
    again = compiled(before.model_folder, tmp_path / "again", exports=("checkpoint", "onnx"), passes=("gptq",))
    manifest = Bundle.load(again.path).manifest
    assert manifest.model.source.was == source.was and manifest.model.source.sha256 == source.sha256
    (note,) = source.notes
    assert note in [decision.reason for decision in manifest.decisions]
    checks: dict[str, Check] = {check.name: check for check in manifest.checks}
    assert checks["stream.own_forward"].ok and checks["score.loss"].ok and checks["score.kl"].ok
    row = next(row for row in again.measurements if row["name"] == "size.bytes")
    assert row["baseline"]["value"] == source.bytes
    flag = f"source-was-{source.was}".replace(" ", "-") if source.was else ""
    scored = next(row for row in again.measurements if row["name"] == "accuracy.kl")
    assert flag in scored["flags"] and 0 < scored["value"] < 5
    assert all(check.ok for check in Bundle.load(again.path).verify())
    # the original is found by its hash
    measured = measure_bundle(Bundle.load(again.path), runtime="torch", speed=False)
    assert next(one.value for one in measured if one.name == "accuracy.kl") == pytest.approx(scored["value"], rel=0.2)


@pytest.mark.parametrize(("name", "rounds"), [("int4", False), ("int8", True)])
def test_the_reference_is_the_source_as_it_runs(model: Path, tmp_path: Path, name: str, rounds: bool) -> None:
    """Opened floats lose nothing of a source of weights alone, and the rounding of inputs of one that rounds them."""
    layout, changes = WRITTEN[name]
    before = compiled(model, tmp_path / "before", export=[{"checkpoint": {"layout": layout}}], **changes)
    floats = compiled(before.model_folder, tmp_path / "floats", passes=())
    assert (kl(floats) > 1e-6) == rounds and kl(floats) < 1e-3
