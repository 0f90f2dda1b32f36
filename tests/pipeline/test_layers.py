"""Which layer is stored how: overrides, exceptions, what does not divide, what a dtype can hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline.blocks.layers import Layers, lay_out
from quantkit.planning.assigned import AS_ASKED, ASKED, ROUNDED, SHRUNK
from quantkit.recipe import Recipe

BLOCKS = [f"model.layers.{index}" for index in range(3)]


def layers(dtype: str = "float32", name: str = "llama", head: str | None = None, **changes: Any) -> Layers:
    weights = {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}
    data = {"summary": "", "scheme": {"weights": weights}, "passes": ["rtn"], **changes}
    with torch.device("meta"):
        model = zoo.tiny(name)
    blocks = BLOCKS if name.startswith("llama") else [f"transformer.h.{index}" for index in range(3)]
    return lay_out(Recipe.from_dict(data, name="x"), model, blocks, dtype, head=head)


def test_every_linear_inside_the_blocks_and_none_outside() -> None:
    found = layers()
    assert len(found.schemes) == len(found.shapes) == len(found.plain) == 21
    assert found.shapes["model.layers.0.mlp.down_proj"] == (64, 96)
    assert found.shapes["model.layers.2.self_attn.k_proj"] == (32, 64)
    assert "lm_head" not in found.shapes
    assert found.widest == 96
    assert not found.decisions
    assert not found.padded()


@pytest.mark.parametrize("name", zoo.MIXTURES)
def test_a_plan_knows_the_linears_of_a_mixture_by_the_same_names(name: str, tmp_path: Path) -> None:
    zoo.mixture(name).save_pretrained(tmp_path)  # type: ignore[operator]
    streamed = StreamedModel(open_model(str(tmp_path)))
    recipe = Recipe.load("int8-weights")
    laid_out = lay_out(recipe, streamed.skeleton, streamed.block_names, "float32")
    planned: dict[str, tuple[int, int]] = {}
    for matrix in configs.read(str(tmp_path)).inside():
        before, place, after = matrix.name.partition(".*.")
        names = [f"{before}.{number}.{after}" for number in range(matrix.count)] if place else [matrix.name]
        planned |= {} if matrix.router else dict.fromkeys(names, (matrix.N, matrix.K))
    assert planned == {name: laid_out.shapes[name] for name in laid_out.schemes}


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
    assert error.remedy == "--set scheme.weights.group=32, or --set on_indivisible=keep"


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


def test_shrunk_groups_are_powers_of_two_that_divide() -> None:
    """K 64 and 96 in groups of 128: 64 and 32; 48 would divide 96, but no kernel wants it."""
    weights = {"format": "int4", "granularity": "group", "group": 128}
    overrides = [{"match": "*.o_proj", "weights": {"group": 16}}]
    found = layers(scheme={"weights": weights}, overrides=overrides, on_indivisible="shrink")
    groups = {name.rpartition(".")[2]: scheme.group for name, scheme in found.schemes.items()}
    wide = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert groups == {**dict.fromkeys(wide, 64), "down_proj": 32, "o_proj": 16}
    assert not found.padded()
    assert {each.code for each in found.decisions} == {SHRUNK} <= set(ASKED)
    assert [(each.where, each.from_, each.to) for each in found.decisions] == [
        ("model.layers.0.self_attn.q_proj (and 14 other layers)", 128, 64),
        ("model.layers.0.mlp.down_proj (and 2 other layers)", 128, 32),
    ]


def test_a_group_never_grows_and_what_nothing_divides_is_an_error() -> None:
    small = {"format": "int4", "granularity": "group", "group": 24}
    found = layers(scheme={"weights": small}, on_indivisible="shrink")
    assert {(scheme.group, found.shapes[name][1]) for name, scheme in found.schemes.items()} == {(16, 64), (24, 96)}
    tiny = {"format": "int4", "granularity": "group", "group": 12}
    with pytest.raises(InputError) as caught:
        layers(scheme={"weights": tiny}, on_indivisible="shrink")
    assert caught.value.where == "model.layers.0.self_attn.q_proj (and 17 other layers)"


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_head_that_is_not_kept_is_one_of_the_layers(name: str) -> None:
    head = {"match": "lm_head", "weights": {"format": "int8", "symmetric": True}}
    found = layers(name=name, head="lm_head", keep=["embeddings"], overrides=[head])
    assert found.head == "lm_head"
    assert found.tied == ({"lm_head"} if name == "llama-tied" else set())
    assert len(found.schemes) == len(found.shapes) == len(found.plain) == 22
    assert found.shapes["lm_head"] == (96, 64)
    assert found.schemes["lm_head"].format == "int8"
    assert len(found.inside) == 21
    assert "lm_head" not in found.inside
    assert not found.decisions  # it is solved as the others are
    alone = layers(name=name, head="lm_head", keep=["embeddings"], overrides=[head], passes=[{"round": {}}])
    assert [each.code for each in alone.decisions] == [ROUNDED]
    assert ROUNDED in ASKED


def test_the_head_is_not_what_is_widest() -> None:
    model = nn.Module()
    model.block, model.out = nn.Sequential(nn.Linear(32, 64)), nn.Linear(32, 4096)
    recipe = Recipe.from_dict(
        {"summary": "", "scheme": {"weights": {"format": "int8"}}, "passes": ["rtn"], "keep": []}, name="x"
    )
    found = lay_out(recipe, model, ["block"], "float32", head="out")
    assert (found.head, found.shapes["out"], found.widest) == ("out", (4096, 32), 64)


def test_an_override_calls_the_head_by_its_role_or_by_its_name() -> None:
    model = nn.Module()
    model.block, model.embed_out = nn.Sequential(nn.Linear(32, 64)), nn.Linear(32, 96)
    for match in ("lm_head", "embed_*"):
        data = {"summary": "", "scheme": {"weights": {"format": "int4"}}, "passes": ["rtn"], "keep": []}
        override = {"match": match, "weights": {"format": "int8"}}
        recipe = Recipe.from_dict({**data, "overrides": [override]}, name="x")
        found = lay_out(recipe, model, ["block"], "float32", head="embed_out")
        assert {name: scheme.format for name, scheme in found.schemes.items()} == {
            "block.0": "int4",
            "embed_out": "int8",
        }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep": ["lm_*"]},
        {"keep": [], "overrides": [{"match": "lm_head"}]},
        {"keep": [], "passes": [], "scheme": {"weights": None}},
    ],
)
def test_a_head_that_is_kept_is_no_layer(changes: dict[str, Any]) -> None:
    found = layers(name="llama-tied", head="lm_head", **changes)
    assert found.head is None
    assert not found.tied
    assert len(found.shapes) == len(found.inside) == 21
    assert "lm_head" not in found.schemes
    # keeping by name or override is recorded, by role it is the default
    kept = [each.where for each in found.decisions]
    assert kept == (["lm_head"] if changes.get("keep") or changes.get("overrides") else [])


def test_an_override_for_a_head_that_is_kept_contradicts_itself() -> None:
    override = [{"match": "lm_head", "weights": {"format": "int8"}}]
    with pytest.raises(InputError) as caught:
        layers(head="lm_head", overrides=override)
    assert caught.value.code == "override-unmatched"
    assert caught.value.remedy == "take lm_head out of `keep`"
    # a model without a head has none to quantize
    assert len(layers(keep=["embeddings"], overrides=override).schemes) == 21


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


def test_a_format_is_shrunk_only_to_groups_that_it_has() -> None:
    found = layers(scheme={"weights": {"format": "nf4"}}, on_indivisible="shrink")
    assert found.schemes["model.layers.0.mlp.down_proj"].group == 32
    assert found.schemes["model.layers.0.self_attn.q_proj"].group == 64
    with pytest.raises(InputError) as caught:
        layers(scheme={"weights": {"format": "nf4", "group": 128}})
    assert caught.value.code == "group-indivisible"
    assert caught.value.remedy == "--set scheme.weights.group=32"


def test_blocks_are_cut_off_at_the_edges_and_never_filled_up() -> None:
    scheme = {"format": "fp8_e4m3", "granularity": "block"}
    found = layers(scheme={"weights": scheme})
    assert not found.decisions
    assert not found.padded()
    assert found.schemes["model.layers.0.mlp.down_proj"].group == 128


def test_scales_that_are_no_plain_floats_stay_as_they_are_in_a_half_precision_model() -> None:
    for name in ("nf4", "mxfp4", "nvfp4"):
        found = layers("bfloat16", scheme={"weights": {"format": name}}, on_indivisible="shrink")
        assert "scale-dtype" not in {each.code for each in found.decisions}
    found = layers("bfloat16", scheme={"weights": {"format": "fp8_e4m3"}})
    assert {scheme.scale for scheme in found.schemes.values()} == {"bfloat16"}


def test_a_float_format_has_no_codes_to_assign() -> None:
    with pytest.raises(InputError) as caught:
        layers(scheme={"weights": {"format": "float16"}})
    assert caught.value.code == "format-unsupported"
    assert "nvfp4" in caught.value.remedy
