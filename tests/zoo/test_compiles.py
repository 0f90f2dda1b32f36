"""Whole compiles of a few tiny models: their manifests against what plain transformers makes of source and bundle."""

from __future__ import annotations

import pytest

from zoo import judge, shrink


@pytest.mark.parametrize(
    "name",
    [
        "CpmAntForCausalLM",
        "DebertaV2Model",
        "Gemma4ForCausalLM",
        "GraniteMoeForCausalLM",
        "Llama4TextModel",
        "OlmoHybridForCausalLM",
    ],
)
def test_a_manifest_says_what_plain_transformers_finds(name: str) -> None:
    found = judge.whole_compile(shrink.named(name))
    assert found.verdict == "right", found


def test_what_stays_in_floats_is_said() -> None:
    """DBRX keeps its experts in matrices of two dimensions, in which no linear is found."""
    found = judge.whole_compile(shrink.named("DbrxForCausalLM"))
    assert found.verdict == "right", found
    assert found.share is not None
    assert found.share < 0.5


def test_an_image_model_is_refused() -> None:
    found = judge.whole_compile(shrink.named("ViTForImageClassification"))
    assert (found.verdict, found.code) == ("refused", "model-kind")
