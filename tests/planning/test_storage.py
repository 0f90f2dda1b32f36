"""Bytes of weights: held against checkpoints that were written, and against sums made by hand.

ONNX graphs of real compiles are in `pipeline/test_stored.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import small_onnx
import zoo

from quantkit import content
from quantkit.errors import InputError
from quantkit.exporters import load_exporter
from quantkit.model.sizes import configs
from quantkit.model.sizes.storage import Storage
from quantkit.planning.memory import storage
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme

# wide enough for groups of 128, large enough for half a percent to be more than rounding
CHANGES: dict[str, object] = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 512, "num_hidden_layers": 2}
LAYOUTS = (
    {"rtn-int4": [], "int3": [], "int2": [], "int4-symmetric": [], "int8-weights": [], "int8-dynamic": [], "int8": []}
    | {"fp8": [], "fp8-block": [], "nf4": [], "nvfp4": [], "mxfp4": [], "float": []}
    | {"int4-symmetric, gptq": ["export=[{checkpoint: {layout: gptq}}]"]}
    | {"rtn-int4, gptq-v2": ["export=[{checkpoint: {layout: gptq-v2}}]"]}
    | {"rtn-int4, dense": ["export=[{checkpoint: {layout: dense}}]"]}
    | {"int4-symmetric, head": ["keep=[embeddings]"], "nf4, undoubled": ["scheme.weights.scale=float32"]}
)


def recipe(label: str) -> Recipe:
    return Recipe.load(label.partition(",")[0], LAYOUTS[label])


@pytest.mark.parametrize(
    ("label", "dtype"),
    [
        *((label, "float32") for label in LAYOUTS),
        *((label, "bfloat16") for label in ("rtn-int4", "int2", "int8", "float")),
    ],
)
def test_a_checkpoint_holds_what_was_predicted(tmp_path: Path, label: str, dtype: str) -> None:
    import torch

    asked = recipe(label)
    architecture = configs.from_config(config(dtype), "tiny")
    found = storage(architecture, asked, "checkpoint")
    schemes = {each.matrix.name: each.scheme for each in [*found.linears, found.head] if each is not None}
    layout = next(step.options["layout"] for step in asked.export if step.name == "checkpoint")
    small_onnx.export(
        tmp_path,
        "llama",
        schemes.get,
        dtype=getattr(torch, dtype),
        changes=CHANGES,
        activations=asked.scheme.activations,
        exporter=load_exporter("checkpoint"),
        layout=layout,
    )
    real = sum(path.stat().st_size for path in (tmp_path / "bundle" / "model").glob("*.safetensors"))
    assert found.total == pytest.approx(real, rel=0.005)


def config(dtype: str) -> dict[str, Any]:
    settings = {**zoo.ARCHITECTURES["llama"][2], **CHANGES, "dtype": dtype}
    return {**settings, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_every_shipped_recipe_has_a_size_or_a_reason() -> None:
    models = {"decoder": "llama-3-8b", "encoder": "minilm-l6", "network": "vit-b-16"}
    for name in content.names("recipes"):
        asked = Recipe.load(name)
        architecture = configs.read(models[asked.models[0]])
        for step in asked.export:
            found = storage(architecture, asked, step.name)
            assert 0 < found.total < 6 * architecture.parameters, name
            assert found.total == pytest.approx(sum(found.parts.values()))
            assert found.least == (step.name == "tensorrt")


def int4(model: str = "llama-3-8b", *changes: str) -> Storage:
    return storage(configs.read(model), Recipe.load("rtn-int4", changes))


def test_parts_of_llama_3_8b_by_hand() -> None:
    """int4 in groups of 64 with zero points: 32 blocks of 218,103,808 weights, two tables of 128,256 by 4,096."""
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    parts = int4().parts
    assert parts["codes"] == weights / 2
    assert parts["scales"] == 2 * weights / 64
    assert parts["zeros"] == weights / 64 / 2
    assert parts["tables"] == 32 * 7 * 16
    assert parts["padding"] == parts["unquantized"] == 0
    assert parts["embeddings"] == parts["head"] == 2 * 128256 * 4096
    assert parts["others"] == 2 * (65 * 4096)
    assert parts["files"] < 1e-4 * int4().total


def test_capacities_that_are_published() -> None:
    """Two bytes for each of 7 billion; 70 billion of them are more than a card of 80 GB, in four bits half of one."""
    seven = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    seven |= {"num_attention_heads": 32, "vocab_size": 32000, "dtype": "float16"}
    assert storage(configs.from_config(seven, "llama-2-7b"), Recipe.load("float")).total == pytest.approx(
        14e9, rel=0.05
    )
    assert storage(configs.read("llama-3-70b"), Recipe.load("float")).total > 80e9
    assert int4("llama-3-70b").total < 0.55 * 80e9


def test_experts_are_counted_each_and_told_apart_where_globs_do() -> None:
    whole = int4("mixtral-8x7b")
    experts = [each for each in whole.linears if ".experts." in each.matrix.name]
    assert {each.matrix.count for each in experts} == {8}
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    assert whole.parts["codes"] == weights / 2
    assert whole.parts["unquantized"] == 32 * 8 * 4096 * 2  # routers
    some = int4("mixtral-8x7b", "keep=[embeddings, lm_head, 'model.layers.0.mlp.experts.[0-2].w1']")
    first = [each for each in some.linears if each.matrix.name == "model.layers.0.mlp.experts.*.w1"]
    assert sorted((each.matrix.count, each.scheme is None) for each in first) == [(3, True), (5, False)]
    assert some.parts["unquantized"] == whole.parts["unquantized"] + 3 * 4096 * 14336 * 2
    with pytest.raises(InputError, match="keep-unmatched"):
        int4("mixtral-8x7b", "keep=[embeddings, lm_head, 'model.layers.0.mlp.experts.8.w1']")


def test_bits_are_those_of_the_format() -> None:
    found = int4()
    assert found.bits == pytest.approx(4.3125, abs=1e-4)
    assert storage(configs.read("llama-3-8b"), Recipe.load("float")).bits is None


def test_overrides_and_indivisible_groups_decide_as_a_compile_does() -> None:
    mixed = int4("llama-3-8b", "overrides=[{match: '*.down_proj', weights: {format: int8}}]")
    kinds = {each.matrix.name.rpartition(".")[2]: each.format for each in mixed.linears}
    assert (kinds["down_proj"], kinds["up_proj"]) == ("int8", "int4")
    with pytest.raises(InputError, match=r"group-indivisible.*K 576"):
        storage(configs.read("smollm2-135m"), Recipe.load("rtn-int4", ["scheme.weights.group=128"]))
    kept = storage(
        configs.read("smollm2-135m"), Recipe.load("rtn-int4", ["scheme.weights.group=128", "on_indivisible=keep"])
    )
    assert {each.code for each in kept.decisions} == {"kept"}
    assert kept.parts["unquantized"] > 0


def test_what_an_export_cannot_hold_is_refused() -> None:
    tied, experts = configs.read("smollm2-135m"), configs.read("mixtral-8x7b")
    with pytest.raises(InputError, match=r"layout-unsupported\] lm_head"):
        storage(tied, Recipe.load("rtn-int4", ["keep=[embeddings]"]))
    with pytest.raises(InputError, match=r"layout-unsupported.*mixture of experts"):
        storage(experts, Recipe.load("awq-int4"), "onnx")
    padded = Recipe.load("rtn-int4", ["scheme.weights.group=128", "on_indivisible=pad"])
    with pytest.raises(InputError, match=r"layout-unsupported.*padded"):
        storage(tied, padded)
    with pytest.raises(InputError, match=r"export-unknown.*checkpoint"):
        storage(tied, Recipe.load("rtn-int4"), "onnx")


def test_a_tied_head_in_a_graph_is_a_table_or_codes_of_its_own() -> None:
    model = configs.read("smollm2-135m")
    shared, apart = storage(model, Recipe.load("awq-int4"), "onnx"), storage(model, Recipe.load("int4-cpu"), "onnx")
    assert shared.shared
    assert shared.parts["head"] == 0
    assert not apart.shared
    codes = 49152 * 576 * (0.5 + (4 + 0.5) / 32)  # int4: a scale and half a byte for a zero point a block
    assert apart.parts["head"] == pytest.approx(codes, rel=0.01)
    assert apart.parts["embeddings"] == pytest.approx(49152 * 576 * (0.25 + 4 / 64), rel=0.01)  # two bits more
    assert sum(apart.parts.values()) == pytest.approx(90.34e6, rel=0.01)  # as a compile has written it
    more = apart.parts["others"] - shared.parts["others"]
    assert more == pytest.approx(2048 * 576 * (1 + 4 / 64), rel=0.01)  # first rows in 8 bits


def test_blocks_of_matmulnbits_are_those_of_the_exporter() -> None:
    from quantkit.exporters.onnx.nbits import block_size
    from quantkit.model.sizes.storage import _block

    for group in (16, 32, 48, 64, 96, 128, 256, 512):
        scheme = WeightScheme(format="int4", granularity="group", group=group)
        assert _block(1536, scheme) == block_size(1536, scheme, "x")
    for columns in (8, 16, 40, 100, 4096):
        scheme = WeightScheme(format="int8", granularity="channel")
        assert _block(columns, scheme) == block_size(columns, scheme, "x")


@pytest.mark.parametrize(("model", "said"), [("phi-4", "Phi3ForCausalLM"), ("mixtral-8x7b", "MixtralForCausalLM")])
def test_a_class_that_no_file_is_written_of_is_refused(model: str, said: str) -> None:
    with pytest.raises(InputError, match=rf"layout-unsupported.*{said}; `gguf` supports LlamaForCausalLM"):
        storage(configs.read(model), Recipe.load("gguf-q4_0"))
