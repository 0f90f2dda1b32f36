"""`--set`: one thing is changed, and what there is not is named."""

from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.recipe import Recipe
from quantkit.recipe.changes import apply_change

BASE: dict[str, Any] = {
    "schema": 1,
    "summary": "a test",
    "scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32}},
    "passes": [{"fold_norms": {}}, {"gptq": {"damping": 0.05}}],
}


@pytest.mark.parametrize(
    ("change", "at", "value"),
    [
        ("seed=7", ("seed",), 7),
        ("scheme.weights.group=16", ("scheme", "weights", "group"), 16),
        ("calibration.samples=8", ("calibration", "samples"), 8),
        ("gates.kl_max=1e-1", ("gates", "kl_max"), 0.1),
        ("gptq.damping=1e-3", ("passes", 1, "gptq", "damping"), 0.001),
        ("gptq.act_order=false", ("passes", 1, "gptq", "act_order"), False),
        ("keep=['*.k_proj', lm_head]", ("keep",), ["*.k_proj", "lm_head"]),
        ("passes=[rtn]", ("passes", 0, "rtn", "range"), "mse"),
        ("on_indivisible=pad", ("on_indivisible",), "pad"),
        ("summary=a=b", ("summary",), "a=b"),
    ],
)
def test_set_changes_one_thing(change: str, at: tuple[Any, ...], value: Any) -> None:
    before = {**BASE, "passes": [{"fold_norms": {}}, {"gptq": {"damping": 0.05}}]}
    found: Any = Recipe.from_dict(before, name="x", changes=[change]).as_dict()
    plain: Any = Recipe.from_dict(before, name="x").as_dict()
    assert before["passes"] == BASE["passes"], "the mapping itself is left alone"
    for key in at:
        found = found[key]
    assert found == value
    if at[0] != "passes":
        for key in set(plain) - {at[0]}:
            assert Recipe.from_dict(before, name="x", changes=[change]).as_dict()[key] == plain[key]


def test_set_reaches_into_an_export() -> None:
    found = Recipe.load("int4-tensorrt", ["tensorrt.engine=false"])
    assert found.export[1].options == {"engine": False}
    with pytest.raises(InputError, match="one setting of an export at a time"):
        Recipe.load("int4-tensorrt", ["tensorrt={engine: false}"])


def test_changes_add_up_in_their_order() -> None:
    found = Recipe.load("awq-int4", ["awq.grid=5", "passes=[{awq: {}}, rtn]", "awq.grid=7", "seed=1", "seed=2"])
    assert [step.name for step in found.passes] == ["awq", "rtn"]
    assert (found.passes[0].settings.grid, found.seed) == (7, 2)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("seed", "set-invalid", "PATH=YAML"),
        ("=3", "set-invalid", "PATH=YAML"),
        ("sead=3", "set-invalid", "did you mean 'seed'?"),
        ("gtpq.damping=3", "set-invalid", "did you mean 'gptq'?"),
        ("awq.grid=3", "set-invalid", "known:"),  # a pass, but not one of this recipe's
        ("name=x", "set-invalid", "neither a key"),
        ("gptq={damping: 1}", "set-invalid", "one setting of a pass at a time"),
        ("seed=[1", "set-invalid", "the value is YAML"),
        ("seed=2024-13-45", "set-invalid", "the value is YAML"),
        ("calibration={samples: 1, samples: 2}", "set-invalid", "given twice"),
        ("gptq.dampning=3", "recipe-invalid", "did you mean 'damping'?"),
        ("calibration.samples.x=3", "recipe-invalid", "calibration.samples"),
        ("scheme..x=1", "recipe-invalid", "unknown key"),
        ("seed=abc", "recipe-invalid", "valid integer"),
    ],
)
def test_set_of_what_there_is_not(change: str, code: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_dict(BASE, name="x", changes=[change])
    assert caught.value.code == code
    assert says in caught.value.line()


def test_set_on_a_recipe_whose_passes_are_wrong_tells_of_the_passes() -> None:
    with pytest.raises(InputError, match=r"passes.*must be a list"):
        Recipe.from_dict({**BASE, "passes": "rtn"}, name="x", changes=["seed=1"])


def test_apply_change_leaves_its_input_alone() -> None:
    data = {"scheme": {"weights": {"format": "int4"}}, "passes": ["rtn"]}
    changed = apply_change(data, "scheme.weights.format=int8", keys=["scheme"])
    assert data["scheme"]["weights"]["format"] == "int4"
    assert changed["scheme"]["weights"]["format"] == "int8"
    assert apply_change(data, "rtn.range=minmax", keys=[])["passes"] == [{"rtn": {"range": "minmax"}}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("onnx.prefill=x", "export.onnx.prefill: got 'x'; Input should be 'same', 'int8' or 'auto'"),
        ("onnx.embedding=x", "export.onnx.embedding: got 'x'; Input should be 'float', 'int8', 'shared' or 'refined'"),
        ("onnx.head_rows=-1", "export.onnx.head_rows: got -1; Input should be greater than or equal to 0"),
        ("onnx.head_rows=1e9", "export.onnx.head_rows: got 1000000000.0; Input should be less than or equal"),
    ],
)
def test_settings_of_a_graph_that_are_none_are_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.load("int4-cpu", changes=[text])
    assert caught.value.code == "recipe-invalid"
    assert said in caught.value.line()
