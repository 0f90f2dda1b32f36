"""Which schemes a unit may have, and why others may not."""

from collections.abc import Callable

import pytest

from quantkit.errors import InputError
from quantkit.formats import stored_bits
from quantkit.pipeline import Prepared
from quantkit.scheme import WeightScheme
from quantkit.tuning.candidates import choices, name_of

ASYMMETRIC = {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}}


def test_a_mixture_that_the_checkpoint_cannot_hold_is_made_symmetric(prepared: Callable[..., Prepared]) -> None:
    given = prepared(scheme=ASYMMETRIC)
    found = choices(given, ["int4", "int8", "float"])
    assert [each.name for each in found.candidates] == ["int4 g32", "int8 g32", "float"]
    made = [each for each in found.decisions if each.code == "made-symmetric"]
    assert len(made) == 1
    assert "zero points" in made[0].reason


def test_where_nothing_is_mixed_packed_zero_points_stay(prepared: Callable[..., Prepared]) -> None:
    found = choices(prepared(scheme=ASYMMETRIC), ["int4", "float"])
    assert [each.name for each in found.candidates] == ["int4 g32 asymmetric", "float"]
    dense = prepared(scheme=ASYMMETRIC, export=[{"checkpoint": {"layout": "dense"}}])
    assert [each.name for each in choices(dense, ["int4", "int8"]).candidates] == [
        "int4 g32 asymmetric",
        "int8 g32 asymmetric",
    ]


def test_snippets_change_the_recipes_scheme(prepared: Callable[..., Prepared]) -> None:
    found = choices(prepared(), ["int4"], [{"group": 16}, {"format": "int8", "granularity": "channel"}])
    assert [each.name for each in found.candidates] == ["int4 g32", "int4 g16", "int8 channel"]
    layer = "model.layers.0.mlp.down_proj"
    assert found.candidates[1].layers[layer].group == 16


def test_what_the_recipe_names_itself_is_not_up_for_choice(prepared: Callable[..., Prepared]) -> None:
    given = prepared(
        keep=["embeddings", "lm_head", "*.layers.0.mlp.*"],
        overrides=[{"match": "*.layers.1.*", "weights": {"format": "int8"}}],
    )
    found = choices(given, ["int4", "int8"])
    for each in found.candidates:
        assert each.layers.keys() == {name for name in each.layers if ".2." in name or ".0.self_attn" in name}
    assert all(".layers.1." in name for name in found.fixed)
    assert {scheme.format for scheme in found.fixed.values()} == {"int8"}
    assert [name for name in found.kept if ".0.mlp." in name] == found.kept
    assert len(found.fixed) + len(found.kept) + len(found.candidates[0].layers) == len(found.shapes)


@pytest.mark.parametrize(
    ("formats", "schemes", "code"),
    [
        (["int5"], [], "unknown-format"),
        (["int4"], [], "nothing-to-choose"),
        (["int4"], [{"group": 48}], "group-indivisible"),
        (["int4"], [{"grup": 16}], "recipe-invalid"),
        (["int4"], [{"format": "int5"}], "unknown-format"),
    ],
)
def test_what_is_named_and_cannot_be_is_an_error(
    prepared: Callable[..., Prepared], formats: list[str], schemes: list[dict[str, object]], code: str
) -> None:
    with pytest.raises(InputError) as problem:
        choices(prepared(), formats, schemes)
    assert problem.value.code == code


def test_a_recipe_without_a_weight_scheme_is_refused(prepared: Callable[..., Prepared]) -> None:
    with pytest.raises(InputError, match="nothing-to-choose"):
        choices(prepared(scheme={}, passes=[]))


def test_bits_count_scales_and_padding() -> None:
    int4 = WeightScheme(format="int4", granularity="group", group=32, symmetric=True)
    assert (name_of(int4), name_of(None)) == ("int4 g32", "float")
    assert stored_bits((10, 64), int4) == 10 * 64 * 4 + 10 * 2 * 16
    assert stored_bits((10, 40), int4) == stored_bits((10, 64), int4)
