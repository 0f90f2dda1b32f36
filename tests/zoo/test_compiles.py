"""Whole compiles of a few tiny models: their manifests against what plain transformers makes of source and bundle."""

from pathlib import Path

import pytest
from thorough import beside

import quantkit
from zoo import judge, shrink

KEPT = ["AlbertModel", "DebertaV2Model", "GraniteMoeForCausalLM", "OlmoHybridForCausalLM"]


@pytest.mark.parametrize("name", beside(KEPT, [*KEPT, "CpmAntForCausalLM", "Gemma4ForCausalLM", "Llama4TextModel"]))
def test_a_manifest_says_what_plain_transformers_finds(name: str) -> None:
    found = judge.whole_compile(shrink.named(name))
    assert found.verdict == "right", found


@pytest.mark.parametrize(
    "name", beside(["BailingHybridForCausalLM"], ["BailingHybridForCausalLM", "Qwen3NextForCausalLM"])
)
def test_a_model_in_half_precision_is_right_too(name: str) -> None:
    """One has modules that transformers keeps in float32 unless it loads a packed checkpoint; of the other it leaves
    experts in bfloat16 whatever it is asked for."""
    found = judge.half(shrink.named(name))
    assert found.verdict == "right", found


def test_a_graph_of_a_masked_language_model_gives_its_hidden_states(tmp_path: Path) -> None:
    """What is scored of it; and queries that are rotated, in an encoder, have no shape in the graph."""
    shrink.tiny("GteForMaskedLM", tmp_path / "model", num_hidden_layers=1)
    shrink.tokenizer().save_pretrained(tmp_path / "model")
    tokens = judge._token_set(tmp_path / "ids", shrink.ids(4, seed=2))
    changes = [f"calibration.set={tokens}", "scheme.weights.group=32", "export=[{onnx: {}}]"]
    bundle = quantkit.compile(str(tmp_path / "model"), "rtn-int4", changes=changes, out=tmp_path / "out", speed=False)
    checks = {check.name: check.ok for check in bundle.manifest.checks}
    assert checks["reload.onnxruntime"]
    assert checks["score.original"]


def test_what_stays_in_floats_is_said() -> None:
    """XLNet multiplies by matrices that belong to no linear."""
    found = judge.whole_compile(shrink.named("XLNetLMHeadModel"))
    assert found.verdict == "right", found
    assert found.share is not None
    assert found.share < 0.5


@pytest.mark.parametrize("name", beside(["DbrxForCausalLM"], ["DbrxForCausalLM", "GptOssForCausalLM"]))
def test_merged_experts_are_quantized(name: str) -> None:
    found = judge.whole_compile(shrink.named(name))
    assert found.verdict == "right", found
    assert found.share is not None
    assert found.share > 0.95


def test_an_image_model_is_refused() -> None:
    found = judge.whole_compile(shrink.named("ViTForImageClassification"))
    assert (found.verdict, found.code) == ("refused", "model-graph")
