"""Sizes of a class that no table of families knows, held against the model that a compile opens."""

import json
from pathlib import Path
from typing import Any

import pytest
from thorough import beside
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure import built, experts
from quantkit.pipeline.blocks.layers import lay_out
from quantkit.pipeline.plan import PlanQuestion, plan
from quantkit.recipe import Recipe

KEPT = ["GraniteMoeHybridForCausalLM", "OlmoeForCausalLM"]
MIXTURES = [
    *KEPT,
    *("Qwen3NextForCausalLM", "JambaForCausalLM", "Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "DbrxForCausalLM"),
    *("NemotronHForCausalLM", "Lfm2MoeForCausalLM", "PhimoeForCausalLM", "MiniMaxForCausalLM", "AfmoeForCausalLM"),
]


def linears(matrices: Any) -> dict[str, tuple[int, int]]:
    """Every linear that a plan counts, one name for each expert."""
    named: dict[str, tuple[int, int]] = {}
    for matrix in matrices:
        before, place, after = matrix.name.partition(".*.")
        names = [f"{before}.{number}.{after}" for number in range(matrix.count)] if place else [matrix.name]
        named |= {} if matrix.router else dict.fromkeys(names, (matrix.N, matrix.K))
    return named


@pytest.mark.parametrize("name", beside(KEPT, MIXTURES))
def test_a_plan_counts_what_a_compile_opens(name: str, tmp_path: Path) -> None:
    shrink.tiny(name, tmp_path)
    with pytest.raises(InputError, match="config-unknown"):
        configs.read(str(tmp_path))
    stream = StreamedModel(open_model(str(tmp_path)))
    laid = lay_out(Recipe.load("int8-weights"), stream.skeleton, stream.block_names, "float32")
    (alone := tmp_path / "config").mkdir()
    (alone / "config.json").write_text((tmp_path / "config.json").read_text())
    sizes = built.read(str(alone))
    assert linears(sizes.inside()) == {name: laid.shapes[name] for name in laid.schemes}
    assert sizes.parameters == sum(value.numel() for value in stream.skeleton.parameters())
    counts = {len(layer) for layer in experts.found_in(stream.skeleton).values()}
    assert {matrix.count for matrix in sizes.inside() if matrix.count > 1} == counts
    assert sizes.active_parameters < sizes.parameters
    changes = ["export=[{checkpoint: {layout: pack-quantized, readers: vllm}}]"]
    (planned,) = plan(
        PlanQuestion(str(alone), recipes=("int8-weights",), target="h100", prompt=16, output=8, changes=changes)
    ).candidates
    assert planned.problem is None and planned.memory is not None
    assert planned.memory.parts["weights"] < 4 * sizes.parameters


def test_attention_follows_the_config(tmp_path: Path) -> None:
    shrink.tiny("GraniteMoeHybridForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = built.read(str(tmp_path))
    kinds = config["layer_types"]
    assert len(set(kinds)) == 2
    assert [layer.attention is not None for layer in sizes.layers] == [kind == "full_attention" for kind in kinds]
    assert any("keep no states" in text for text in sizes.assumed)


def test_a_class_that_nobody_knows_stays_unknown(tmp_path: Path) -> None:
    config = {"model_type": "mine", "architectures": ["MineForCausalLM"], "num_experts": 4, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="config-unknown"):
        built.read(str(tmp_path))
    config = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_hidden_layers": "three"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="config-invalid"):
        built.read(str(tmp_path))


def test_layers_whose_heads_differ_are_counted_by_their_own(tmp_path: Path) -> None:
    shrink.tiny("Gemma4ForCausalLM", tmp_path)
    sizes = built.read(str(tmp_path))
    heads = [layer.attention.heads * layer.attention.head_dim for layer in sizes.layers if layer.attention]
    assert len(set(heads)) > 1
    queries = [matrix.N for layer in sizes.layers for matrix in layer.matrices if matrix.name.endswith("q_proj")]
    assert heads == queries
