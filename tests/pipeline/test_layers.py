"""Which layer is stored how: overrides, exceptions, what does not divide, what a dtype can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from quantkit.errors import InputError
from quantkit.pipeline.layers import AS_ASKED, Layers, lay_out
from quantkit.recipe import Recipe

BLOCKS = [f"model.layers.{index}" for index in range(3)]


def layers(dtype: str = "float32", name: str = "llama", **changes: Any) -> Layers:
    weights = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
    data = {"summary": "", "scheme": {"weights": weights}, "passes": ["rtn"], **changes}
    with torch.device("meta"):
        model = zoo.tiny(name)
    blocks = BLOCKS if name == "llama" else [f"transformer.h.{index}" for index in range(3)]
    return lay_out(Recipe.from_dict(data, name="x"), model, blocks, dtype)


def test_every_linear_inside_the_blocks_and_none_outside() -> None:
    found = layers()
    assert len(found.schemes) == len(found.shapes) == len(found.plain) == 21
    assert found.shapes["model.layers.0.mlp.down_proj"] == (64, 96)
    assert found.shapes["model.layers.2.self_attn.k_proj"] == (32, 64)
    assert "lm_head" not in found.shapes
    assert found.widest == 96
    assert not found.decisions
    assert not found.padded()


def test_transposed_linears_are_outputs_by_inputs_and_not_plain() -> None:
    found = layers(name="gpt2")
    assert found.shapes["transformer.h.0.attn.c_attn"] == (192, 64)
    assert not found.plain
    assert len(found.schemes) == 12


def test_what_the_recipe_names_is_kept_and_recorded_as_asked() -> None:
    overrides = [{"match": "*.0.*"}, {"match": "*.1.mlp.*", "weights": {"group": 16}}]
    found = layers(keep=["embeddings", "*.o_proj"], overrides=overrides)
    assert {each.code for each in found.decisions} == {AS_ASKED}
    assert len(found.decisions) == 7 + 2
    kept = {each.where: each.reason for each in found.decisions}
    assert kept["model.layers.0.self_attn.o_proj"] == "keep: *.o_proj"
    assert kept["model.layers.0.mlp.up_proj"] == "an override says so"
    assert found.schemes["model.layers.1.mlp.up_proj"].group == 16
    assert found.schemes["model.layers.2.mlp.up_proj"].group == 32


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"keep": ["*.oproj"]}, "keep-unmatched", "keep"),
        ({"keep": ["lm_heads"]}, "keep-unmatched", "keep"),
        ({"overrides": [{"match": "model.layers.7.*"}]}, "override-unmatched", "overrides"),
        ({"keep": ["model.*"]}, "nothing-to-quantize", "LlamaForCausalLM"),
    ],
)
def test_a_glob_that_matches_nothing_is_an_error(changes: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        layers(**changes)
    assert (caught.value.code, caught.value.where) == (code, where)
    if code != "nothing-to-quantize":
        assert "model.layers.0.self_attn.q_proj" in caught.value.remedy


def test_roles_may_be_named_although_nothing_of_them_is_quantized() -> None:
    assert len(layers(keep=["embeddings", "lm_head", "norms"]).schemes) == 21


def test_indivisible_is_an_error_that_says_what_would_fit_all() -> None:
    weights = {"format": "int4", "granularity": "group", "group": 64}
    with pytest.raises(InputError) as caught:
        layers(scheme={"weights": weights})
    error = caught.value
    assert error.code == "group-indivisible"
    assert error.where == "model.layers.0.mlp.down_proj (and 2 other layers)"
    assert error.value == "group 64, K 96"
    assert error.remedy.startswith("use 48, or on_indivisible")


@pytest.mark.parametrize("how", ["keep", "pad"])
def test_indivisible_is_kept_or_padded_with_a_record(how: str) -> None:
    weights = {"format": "int4", "granularity": "group", "group": 64}
    found = layers(scheme={"weights": weights}, on_indivisible=how)
    downs = [f"model.layers.{index}.mlp.down_proj" for index in range(3)]
    assert [each.where for each in found.decisions] == downs
    if how == "keep":
        assert len(found.schemes) == 18
        assert {each.code for each in found.decisions} == {"kept"}
        assert not found.padded()
    else:
        assert found.padded() == downs
        assert {(each.code, each.from_, each.to) for each in found.decisions} == {("padded", 96, 128)}


@pytest.mark.parametrize(
    ("dtype", "scale", "stored", "recorded"),
    [
        ("float32", "float32", "float32", False),
        ("float32", "float16", "float16", False),
        ("float16", "float16", "float16", False),
        ("float16", "float32", "float16", True),
        ("bfloat16", "float16", "bfloat16", True),
        ("bfloat16", "bfloat16", "bfloat16", False),
    ],
)
def test_scales_are_stored_as_runtimes_read_them(dtype: str, scale: str, stored: str, recorded: bool) -> None:
    found = layers(dtype, scheme={"weights": {"format": "int8", "scale": scale}})
    assert {scheme.scale for scheme in found.schemes.values()} == {stored}
    assert [each.code for each in found.decisions] == ["scale-dtype"] * recorded


def test_a_recipe_without_passes_lays_nothing_out() -> None:
    found = layers(passes=[], scheme={"weights": None}, keep=["*.nothing"])
    assert not found.schemes
    assert len(found.shapes) == 21


def test_a_model_that_is_one_block() -> None:
    recipe = Recipe.from_dict({"summary": "", "scheme": {"weights": {"format": "int8"}}, "passes": ["rtn"]}, name="x")
    found = lay_out(recipe, nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5)), [""], "float32")
    assert found.shapes == {"0": (3, 4), "2": (5, 3)}
