"""The model card: complete, the same for the same bundle, and safe with names that others chose."""

from __future__ import annotations

import re

import planted
import pytest
import yaml

from quantkit.report.card import card, escape, fenced


def front(text: str) -> dict[str, object]:
    found = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_front_matter_says_what_the_hub_reads() -> None:
    found = front(card(planted.manifest(), planted.rows(), []))
    assert found["base_model"] == "org/a-model"
    assert found["base_model_relation"] == "quantized"
    assert found["pipeline_tag"] == "text-generation"
    assert {"quantkit", "compressed-tensors", "int4"} <= set(found["tags"])  # type: ignore[arg-type, call-overload]
    assert "license" not in found


def test_licence_of_an_alias_is_known() -> None:
    model = planted.manifest().model
    model = model.model_copy(update={"source": model.source.model_copy(update={"ref": "alias:smollm2-135m"})})
    assert front(card(planted.manifest(model=model), planted.rows(), []))["license"] == "apache-2.0"


@pytest.mark.parametrize(
    "part",
    [
        *("16.92", "19.53", "0.143", "82.1 %", "170 MB", "4.31", planted.CONTENT, "b" * 64, "c" * 64, "d" * 64),
        *('AutoModelForCausalLM.from_pretrained("./model")', "vllm serve ./model", "torch 2.13.0", "seed 7"),
        *("int4, group 64, asymmetric, float16 scales", "damping-raised", "range: mse", "16 sequences of 512 tokens"),
        *("quantkit compile hf:org/a-model@main --recipe ./recipe.yaml", "2027-01-01", "latency has not been measured"),
    ],
)
def test_card_holds(part: str) -> None:
    assert part in card(planted.manifest(), planted.rows(), [planted.NOTE])


def test_note_stands_with_the_figures() -> None:
    text = card(planted.manifest(), planted.rows(), [planted.NOTE])
    costs = text.split("## What it costs")[1].split("## ")[0]
    assert escape(planted.NOTE) in costs


def test_same_input_same_card() -> None:
    assert card(planted.manifest(), planted.rows(), []) == card(planted.manifest(), planted.rows(), [])


def test_an_unquantized_bundle_claims_no_quantization() -> None:
    recipe = {"name": "float", "export": [{"checkpoint": {"layout": "dense"}}]}
    found = front(card(planted.manifest(layers=[], recipe=recipe, calibration=None), [], []))
    assert "base_model_relation" not in found
    assert "compressed-tensors" not in found["tags"]  # type: ignore[operator]


def test_recipe_in_the_card_is_a_recipe() -> None:
    text = card(planted.manifest(), planted.rows(), [])
    found = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    assert found["passes"] == [{"rtn": {"range": "mse"}}]
    assert "name" not in found


@pytest.mark.parametrize(
    "name", ["a|b", "<script>x</script>", "`code`", "x\n---\nevil: yes", "# head", "[a](b)", "{{ 7*7 }}"]
)
def test_odd_names_change_nothing_but_the_name(name: str) -> None:
    model = planted.manifest().model.model_copy(update={"name": name})
    source = model.source.model_copy(update={"ref": f"path:{name}", "was": name})
    text = card(planted.manifest(model=model.model_copy(update={"source": source})), planted.rows(), [name])
    usual = card(planted.manifest(), planted.rows(), ["x"])
    assert front(text)["base_model"] == name.replace("\n", " ")
    body, usual_body = text.split("\n---\n\n", 1)[1], usual.split("\n---\n\n", 1)[1]
    assert "<script>" not in re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    assert "\nevil: yes" not in re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    assert "49" not in body.splitlines()[0]
    # the same headings and tables with the same columns
    shape = [line.count("|") - line.count("\\|") for line in body.splitlines() if line.startswith(("|", "#"))]
    assert shape == [
        line.count("|") - line.count("\\|") for line in usual_body.splitlines() if line.startswith(("|", "#"))
    ]


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fenced("a ``` b").startswith("````\n")
