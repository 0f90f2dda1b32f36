"""Recipes: what ships loads, what is misspelt is named, what is changed is changed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit import content
from quantkit.errors import InputError
from quantkit.recipe import Recipe, assigners
from quantkit.recipe.recipe import _laid_over

BASE: dict[str, Any] = {
    "schema": 1,
    "summary": "a test",
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32}},
    "passes": [{"fold_norms": {}}, {"gptq": {"damping": 0.05}}],
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.from_dict({**BASE, **changes}, name="mine")


def refused(**changes: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        recipe(**changes)
    assert "\n" not in caught.value.line()
    assert "pydantic" not in caught.value.line()
    return caught.value


@pytest.mark.parametrize("name", content.names("recipes"))
def test_every_shipped_recipe_loads_and_comes_back_whole(name: str) -> None:
    found = Recipe.load(name)
    assert found.name == name
    assert found.summary
    assert Recipe.from_dict(found.as_dict(), name=name) == found
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(found.as_dict())), name=name).as_dict() == found.as_dict()
    # a pass by its name in a path of --set, and every key of the contract
    assert set(found.as_dict()) >= {"schema", "summary", "models", "calibration", "scheme", "passes", "export", "gates"}
    assert sum(step.name in assigners() for step in found.passes) == (0 if found.scheme.weights is None else 1)


def test_a_recipe_of_before_is_for_networks() -> None:
    """`vision` was the word; a recipe of a user's own goes on to be taken, and says today's."""
    assert recipe(models=["vision"]).models == ["network"]
    assert recipe(models=["decoder", "vision", "network"]).as_dict()["models"] == ["decoder", "network"]
    assert Recipe.load("int8", ["models=[vision]"]).models == Recipe.load("int8-network").models
    addition = {"summary": "x", "models": ["decoder", "vision"]}
    assert _laid_over({"models": ["encoder", "network"]}, addition, "more")["models"] == ["network"]
    assert _laid_over({"models": ["vision"]}, {**addition, "models": ["network"]}, "more")["models"] == ["vision"]


def test_all_settings_are_written_out() -> None:
    written = recipe().as_dict()
    gptq = written["passes"][1]["gptq"]
    assert gptq["damping"] == 0.05
    assert gptq["act_order"] is True
    assert written["schema"] == 1
    assert written["keep"] == ["embeddings", "lm_head"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pases": []}, "did you mean 'passes'?"),
        ({"scheme": {"weights": {"format": "int4", "grop": 32}}}, "did you mean 'group'?"),
        ({"scheme": {"weight": None}}, "did you mean 'weights'?"),
        ({"calibration": {"sample": 3}}, "did you mean 'samples'?"),
        ({"gates": {"kl_mx": 1}}, "did you mean 'kl_max'?"),
        ({"passes": ["gtpq"]}, "no pass is called 'gtpq'; did you mean 'gptq'?"),
        ({"passes": [{"gptq": {"dampning": 1}}]}, "did you mean 'damping'?"),
        ({"scheme": {"weights": {"format": "int5"}}}, "no format is called 'int5'; did you mean"),
        ({"export": ["chekpoint"]}, "no exporter is called 'chekpoint'; did you mean 'checkpoint'?"),
        ({"export": [{"checkpoint": {"layot": "dense"}}]}, "did you mean 'layout'?"),
        ({"overrides": [{"match": "*", "weights": {"grup": 3}}]}, "did you mean 'group'?"),
        ({"overrides": [{"match": "*", "weights": {"format": "int44"}}]}, "did you mean 'int4'?"),
        ({"overrides": [{"mach": "*"}]}, "did you mean 'match'?"),
    ],
)
def test_what_is_misspelt_is_named_with_its_nearest(changes: dict[str, Any], says: str) -> None:
    error = refused(**changes)
    assert error.code == "recipe-invalid"
    assert says in error.line()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"passes": "gptq"}, "must be a list"),
        ({"passes": [{"fold_norms": {}, "gptq": {}}]}, "each entry is one name"),
        ({"passes": [["gptq"]]}, "each entry is one name"),
        ({"passes": [{"gptq": 3}]}, "settings of gptq are a mapping"),
        ({"passes": [{"gptq": {1: 2}}]}, "Keys should be strings"),
        ({"passes": [{"gptq": {"damping": -1}}]}, "passes.gptq.damping: got -1"),
        ({"passes": [{"gptq": {"range": "best"}}]}, "'minmax'"),
        ({"passes": ["fold_norms"]}, "assigns the codes; found none"),
        ({"passes": ["rtn", "gptq"]}, "found rtn, gptq"),
        ({"passes": ["rtn", "rtn"]}, "found rtn, rtn"),
        ({"passes": []}, "needs a pass that assigns the codes"),
        ({"export": []}, "at least 1 item"),
        ({"export": [{"checkpoint": {"layout": "dens"}}]}, "no layout is called 'dens'; did you mean 'dense'"),
        ({"export": [{"checkpoint": {1: 2}}]}, "Keys should be strings"),
        ({"models": []}, "at least 1 item"),
        ({"models": ["decodr"]}, "'decoder'"),
        ({"schema": 2}, "Input should be 1"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"keep": None}, "valid list"),
        ({"on_indivisible": "drop"}, "'error', 'keep', 'pad' or 'shrink'"),
        ({"calibration": {"samples": 0}}, "greater than 0"),
        ({"gates": {"kl_max": float("nan")}}, "finite"),
        ({"scheme": {"weights": {"format": "int4", "group": 32}}}, "goes with `granularity: group`"),
        ({"scheme": {"weights": {"format": "int4", "granularity": "group"}}}, "goes with `granularity: group`"),
        ({"scheme": {"weights": {"format": "int4", "granularity": "group", "group": 0}}}, "greater than 0"),
        ({"scheme": {"weights": {"format": "int4", "granularity": "token"}}}, "'group' or 'block'"),
        ({"scheme": {"weights": {"format": "int4", "scale": "float64"}}}, "'float32'"),
        ({1: 2}, "Keys should be strings"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes: dict[Any, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_dict({**BASE, **changes}, name="mine")
    assert caught.value.code == "recipe-invalid"
    assert says in caught.value.line()
    assert len(caught.value.line()) < 600


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_recipe_is_a_mapping(data: Any) -> None:
    with pytest.raises(InputError, match="a recipe is a YAML mapping"):
        Recipe.from_dict(data, name="x")


def test_files_and_names_are_never_confused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(yaml.safe_dump(BASE))
    assert Recipe.load("own.yaml").name == "own"
    assert Recipe.load(tmp_path / "own.yaml").name == "own"
    with pytest.raises(InputError) as caught:
        Recipe.load("awq-int5")
    assert (caught.value.code, "did you mean 'awq-int4'?" in caught.value.remedy) == ("unknown-recipe", True)
    with pytest.raises(InputError) as caught:
        Recipe.load("awq-int4.yaml")
    assert caught.value.code == "file-missing"


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2\n",
        "passes:\n  - rtn: {range: mse, range: minmax}\n",
        "[1, 2]: 3\n",
        "? {a: 1}\n: 3\n",
        "a: 2024-13-45\n",
        "a: !!int foo\n",
        "a: !!timestamp foo\n",
        "a: &x [*x]\n",
        "[" * 1000,
        "[" * 100_000,
        "- " * 100_000,
        "a: !!python/name:os.system\n",
    ],
)
def test_bad_yaml_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Recipe.load(path)
    assert caught.value.code == "yaml-invalid"
    assert str(path) in caught.value.where


def test_overrides_merge_over_the_default_and_the_last_that_matches_wins() -> None:
    found = recipe(
        overrides=[
            {"match": "*.down_proj", "weights": {"format": "int8", "granularity": "channel"}},
            {"match": "*.0.*", "weights": {"symmetric": False}},
            {"match": "*.1.*"},
            {"match": "*.1.mlp.[gu]*", "weights": {"format": "int8", "granularity": "group", "group": 16}},
        ]
    )
    default = found.scheme.weights
    assert default is not None
    assert found.weights_for("l.2.q_proj") == default
    down = found.weights_for("l.2.mlp.down_proj")
    assert down is not None
    assert (down.format, down.granularity, down.group, down.symmetric) == ("int8", "channel", None, True)
    both = found.weights_for("l.0.mlp.down_proj")
    assert both == down.model_copy(update={"symmetric": False})
    assert found.weights_for("l.1.q_proj") is None
    up = found.weights_for("l.1.mlp.up_proj")
    assert up is not None
    assert (up.format, up.group) == ("int8", 16)
    assert found.weights_for("l.2.mlp.Down_proj") == default, "names keep their case"


def test_an_override_names_a_role_whatever_the_layer_is_called() -> None:
    found = recipe(overrides=[{"match": "lm_head", "weights": {"format": "int8"}}])
    named, other = found.weights_for("embed_out", "lm_head"), found.weights_for("embed_out")
    assert named is not None
    assert other is not None
    assert (named.format, named.group, other.format) == ("int8", 32, "int4")


def test_overrides_that_only_clash_upon_one_another_are_an_input_error() -> None:
    found = recipe(
        overrides=[{"match": "*", "weights": {"granularity": "channel"}}, {"match": "*.o", "weights": {"group": 8}}]
    )
    with pytest.raises(InputError) as caught:
        found.weights_for("a.o")
    assert caught.value.code == "recipe-invalid"
    assert "granularity: group" in caught.value.line()


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        recipe().seed = 3  # type: ignore[misc]


def test_an_override_with_another_format_keeps_what_that_has() -> None:
    base = {"format": "int4", "granularity": "group", "group": 64, "symmetric": False}
    overrides = [
        {"match": "a", "weights": {"format": "nvfp4"}},
        {"match": "b", "weights": {"format": "nf4"}},
        {"match": "c", "weights": {"format": "int8"}},
        {"match": "d", "weights": {"format": "fp8_e4m3", "granularity": "block"}},
    ]
    recipe = Recipe.from_dict(
        {**BASE, "scheme": {"weights": base}, "passes": ["rtn"], "overrides": overrides}, name="x"
    )
    found = {name: recipe.weights_for(name) for name in "abcd"}
    assert [(each.group, each.symmetric, each.scale) for each in found.values() if each] == [
        (16, True, "fp8_e4m3"),
        (64, True, "float32"),
        (64, False, "float16"),
        (128, True, "float16"),
    ]


def test_an_add_on_is_checked_like_a_recipe(tmp_path: Path) -> None:
    found = Recipe.load("awq-int4+kv-fp8")
    assert found.name == "awq-int4+kv-fp8"
    assert found.scheme.weights == Recipe.load("awq-int4").scheme.weights
    assert found.scheme.kv_cache == Recipe.load("kv-fp8").scheme.kv_cache
    assert [step.name for step in found.passes] == ["awq", "gptq"]
    other, passes = tmp_path / "other.yaml", "summary: x\nscheme: {weights: {format: int4}}\npasses: [rtn: {}]"
    for text, says in (("[1]", "not a mapping"), ("summary: x\nschem: {}", "did you mean"), (passes, "has passes")):
        other.write_text(text)
        with pytest.raises(InputError, match=says):
            Recipe.load(f"awq-int4+{other}")


@pytest.mark.parametrize("name", [["int4"], {"int4": 1}, None, 4], ids=str)
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    whole = {"schema": 1, "summary": "s", "scheme": {"weights": {"format": "int4"}}, "passes": ["rtn"]}
    for data in (
        {**whole, "scheme": {"weights": {"format": name}}},
        {**whole, "overrides": [{"match": "*", "weights": {"format": name}}]},
        {**whole, "passes": [name]},
        {**whole, "export": [name]},
    ):
        with pytest.raises(InputError) as caught:
            Recipe.from_dict(data, name="mine")
        assert caught.value.code == "recipe-invalid"
