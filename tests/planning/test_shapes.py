"""Shapes of linears: typed, shipped, from configs, from stored tensors."""

import pytest

from quantkit.errors import InputError
from quantkit.model.sizes import configs, shapes
from quantkit.model.sizes.shapes import LinearShape

# of the models' own config.json
CONFIGS = {
    "llama-3-8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-3-70b": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    "qwen2.5-7b": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "smollm2-135m": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
}
# linears of the blocks and the head, in billions of weights: what model cards and papers say less the embedding
SIZES = {"llama-3-8b": 7.50, "llama-3-70b": 69.50, "qwen2.5-7b": 7.07, "smollm2-135m": 0.1345, "vit-b-16": 0.0857}


def test_typed_shapes_are_inputs_by_outputs_once_each() -> None:
    found = shapes.typed(["4096x14336", " 96×32", "4096X14336"])
    assert [(each.K, each.N, each.count) for each in found.linears] == [(4096, 14336, 1), (96, 32, 1)]
    assert found.name == ""


@pytest.mark.parametrize("text", ["4096", "0x8", "8x0", "4096x14336x2", "x", "-1x4", "4.5x2", ""])
def test_what_is_no_shape_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="shape-invalid") as caught:
        shapes.typed([text])
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("name", SIZES)
def test_shipped_lists_add_up_to_the_model(name: str) -> None:
    found = shapes.shipped(name)
    weights = sum(each.K * each.N * each.count for each in found.linears)
    assert weights / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert found.source
    assert sum(each.count for each in found.distinct()) == sum(each.count for each in found.linears)


def test_models_with_experts_have_no_one_batch_for_all_linears() -> None:
    assert set(SIZES) <= set(shapes.names()) < set(configs.shipped_names())
    with pytest.raises(InputError, match=r"config-unknown.*experts.*--shape"):
        shapes.shipped("mixtral-8x7b")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_what_the_shipped_list_says(name: str) -> None:
    def sizes(found: shapes.LinearShapes) -> list[tuple[str, int, int, int]]:
        return sorted((each.name, each.K, each.N, each.count) for each in found.linears)

    assert sizes(shapes.from_config(CONFIGS[name], name)) == sizes(shapes.shipped(name))


def test_grouped_queries_and_a_head_size_of_its_own() -> None:
    config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
    found = {each.name: (each.K, each.N, each.count) for each in shapes.from_config(config, "x").linears}
    assert found["q_proj"] == (64, 128, 2)
    assert found["k_proj"] == found["v_proj"] == (64, 64, 2)
    assert found["o_proj"] == (128, 64, 2)
    assert found["lm_head"] == (64, 100, 1)


def test_fused_projections_stay_fused() -> None:
    config = {"model_type": "phi3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    found = {each.name: (each.K, each.N) for each in shapes.from_config(config, "x").linears}
    assert found["qkv_proj"] == (64, 128)
    assert found["gate_up_proj"] == (64, 192)
    assert "q_proj" not in found


def test_distinct_adds_up_counts_and_puts_the_heaviest_first() -> None:
    found = shapes.shipped("llama-3-8b").distinct()
    assert [(each.K, each.N, each.count) for each in found] == [
        (4096, 14336, 64),
        (14336, 4096, 32),
        (4096, 4096, 64),
        (4096, 128256, 1),
        (4096, 1024, 64),
    ]
    assert found[2].name == "q_proj, o_proj"


def test_a_config_that_is_not_known_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"config-unknown.*--shape"):
        shapes.from_config({"model_type": "mamba"}, "x")
    llama = {"model_type": "my-llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5}
    with pytest.raises(InputError, match="config-unknown"):  # nothing is timed on an assumption
        shapes.from_config(llama, "x")
    with pytest.raises(InputError, match="hidden_size"):
        shapes.from_config({"model_type": "llama", "hidden_size": "a"}, "x")


def test_unknown_names_get_a_guess() -> None:
    with pytest.raises(InputError, match="did you mean 'llama-3-8b'"):
        shapes.shipped("lama-3-8b")


def test_stored_tensors() -> None:
    stored = {"model.embed_tokens.weight": (100, 8), "model.norm.weight": (8,)}
    for layer in range(3):
        stored |= {
            f"model.layers.{layer}.self_attn.qkv.weight": (24, 8),
            f"model.layers.{layer}.mlp.down.weight": (8, 16),
        }
        stored |= {f"model.layers.{layer}.mlp.down.bias": (8,), f"model.layers.{layer}.input_layernorm.weight": (8,)}
    assert list(shapes.from_tensors(stored, "x").linears) == [
        LinearShape(name="qkv", K=8, N=24, count=3),
        LinearShape(name="down", K=16, N=8, count=3),
    ]
    tied = shapes.from_tensors(stored, "x", tied_head=True)
    assert LinearShape(name="lm_head", K=8, N=100, count=1) in tied.linears
    with pytest.raises(InputError, match="no-linears"):
        shapes.from_tensors({"a.bias": (4,)}, "x")
