"""The decisions that need names and shapes alone; what a compile makes of them is in `pipeline/test_layers.py`."""

from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.planning.assigned import ROUTER, Assigned, assign, takes_head
from quantkit.recipe import Recipe

SHAPES = {"a.0.up": (96, 64), "a.0.down": (64, 96), "a.0.gate": (8, 64)}


def recipe(**changes: Any) -> Recipe:
    weights = {"format": "int4", "granularity": "group", "group": 32}
    return Recipe.from_dict({"summary": "", "scheme": {"weights": weights}, "passes": ["rtn"], **changes}, name="x")


def assigned(dtype: str = "float32", **changes: Any) -> Assigned:
    return assign(recipe(**changes), SHAPES, dtype, routers=["a.0.gate", "a.1.gate"])


def test_routers_stay_and_are_recorded() -> None:
    found = assigned()
    assert set(found.schemes) == {"a.0.up", "a.0.down"}
    assert [(each.code, each.where, each.from_) for each in found.decisions] == [(ROUTER, "a.0.gate", "int4")]


def test_inputs_follow_their_weights() -> None:
    activations = {"format": "int8", "granularity": "token"}
    scheme = {"weights": {"format": "int8"}, "activations": activations}
    found = assigned(scheme=scheme, overrides=[{"match": "*.up", "weights": None}])
    assert set(found.activations) == {"a.0.down"}
    with pytest.raises(InputError, match=r"group-indivisible.*activations in groups of 64, K 96"):
        assigned(scheme={**scheme, "activations": {"format": "int8", "granularity": "group", "group": 64}})


def test_a_head_counts_where_the_recipe_takes_it() -> None:
    assert not takes_head(recipe())
    assert not takes_head(Recipe.load("float"))
    taken = recipe(keep=["embeddings"])
    assert takes_head(taken)
    with_head = {**SHAPES, "lm_head": (100, 64)}
    assert assign(taken, with_head, "float32", head="lm_head").head == "lm_head"
    kept = recipe(keep=["embeddings"], overrides=[{"match": "lm_head"}])
    found = assign(kept, with_head, "float32", head="lm_head")
    assert found.head is None
    assert "lm_head" not in found.schemes


def test_scales_are_stored_as_the_model_reads_them() -> None:
    assert {scheme.scale for scheme in assigned("bfloat16").schemes.values()} == {"bfloat16"}
    assert {scheme.scale for scheme in assigned("float32").schemes.values()} == {"float16"}


def test_errors_name_the_model() -> None:
    with pytest.raises(InputError, match=r"nothing-to-quantize\] a-model: 3 linears"):
        assign(recipe(keep=["a.*"]), SHAPES, "float32", model="a-model")


def test_a_model_that_no_group_divides_is_refused_for_its_widths() -> None:
    # `keep` would keep every layer: the error names the group and K, and a recipe that takes any width
    with pytest.raises(InputError, match=r"group-indivisible\] a.*: group 32, K 50; .*--recipe int8-weights"):
        assign(recipe(on_indivisible="keep"), {"a": (64, 50), "b": (50, 70)}, "float32")
    kept = assign(recipe(on_indivisible="keep"), {"a": (64, 50), "b": (50, 64)}, "float32")
    assert set(kept.schemes) == {"b"}
