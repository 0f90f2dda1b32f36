"""What transformers does not load packed: named before the work, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo import shrink

from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.names import Obstacle, obstacles

# class -> (what is in the way, why)
CASES = {
    "Llama4TextModel": ("layers.0.feed_forward.experts", "another class"),
    "Molmo2TextModel": ("Molmo2TextModel", "mlp.ff_proj.weight"),
    "Inkling2ForCausalLM": ("model.layers.3.self_attn.k_sconv.weight_proj", "nothing packed under that name"),
    "Qwen4ExpForCausalLM": ("model.layers.0.attn_hyper_connection.block_inject_weight", "ends in `weight`"),
}


def found(name: str, folder: Path) -> list[Obstacle]:
    shrink.tiny(name, folder)
    stream = StreamedModel(open_model(str(folder)))
    return obstacles(stream.skeleton, stream.files)


@pytest.mark.parametrize("name", CASES)
def test_it_is_named(name: str, tmp_path: Path) -> None:
    where, why = CASES[name]
    (one,) = [each for each in found(name, tmp_path) if each.where == where]
    assert why in one.why
    assert one.hinders([where], ["compressed_tensors"])


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MixtralForCausalLM", "GPT2ForSequenceClassification", "NomicBertForMaskedLM"]
)
def test_nothing_is_in_the_way_of_what_loads(name: str, tmp_path: Path) -> None:
    assert found(name, tmp_path) == []


def test_only_what_is_packed_and_loaded_so_is_hindered() -> None:
    linear = Obstacle("a", "", frozenset(["compressed_tensors"]))
    assert not linear.hinders(["b"], ["compressed_tensors"])
    assert not linear.hinders(["a"], ["gptqmodel"])
    assert Obstacle("a", "").hinders(["a"], ["gptqmodel"])
    assert Obstacle("a", "", always=True).hinders([], [])
