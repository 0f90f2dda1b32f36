"""The model card: complete, the same for the same bundle, and safe with names that others chose."""

from __future__ import annotations

import re

import planted
import pytest
import yaml

from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures
from quantkit.report.bundle.document import card
from quantkit.report.kit.markdown import escape, fenced
from report import labelled
from report.timed import everything, exported_rows, judged, onnx_only, timed_rows


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


def test_the_task_and_tags_follow_the_kind_of_model_and_what_it_was_scored_by() -> None:
    def task(manifest: Manifest, rows: list[Row]) -> object:
        found = front(card(manifest, rows, []))
        assert manifest.model.kind in found["tags"]  # type: ignore[operator]
        return found.get("pipeline_tag")

    images, samples = labelled.classified(), labelled.classified()
    assert task(labelled.classifier(), images) == "image-classification"
    samples = [row.model_copy(update={"flags": ["ci95-by-sample"]}) for row in samples]
    assert task(labelled.classifier(), samples) is None, "classes of something else"
    assert task(labelled.classifier(), []) is None
    texts = [row.model_copy(update={"flags": ["ci95-by-text"]}) for row in images]
    assert [figures.counted(rows[0]) for rows in (images, samples, texts)] == ["image", "sample", "text"]
    assert task(labelled.encoder(), []) == "feature-extraction"
    assert task(labelled.encoder(), labelled.retrieved()) == "sentence-similarity"


def test_licence_of_an_alias_is_known() -> None:
    model = planted.manifest().model
    model = model.model_copy(update={"source": model.source.model_copy(update={"ref": "alias:smollm2-135m"})})
    assert front(card(planted.manifest(model=model), planted.rows(), []))["license"] == "apache-2.0"


@pytest.mark.parametrize(
    "part",
    [
        *("16.92", "19.53", "0.143", "82.1 %", "170 MB", "4.31", planted.CONTENT, "b" * 64, "c" * 64, "d" * 64),
        *('AutoModelForCausalLM.from_pretrained("./model")', "vllm serve ./model", "torch 2.13.0", "| seed | 7 |"),
        *("int4, group 64, asymmetric, float16 scales", "damping-raised", "range: mse", "16 sequences of 512 tokens"),
        *("quantkit compile hf:org/a-model@main --recipe ./recipe.yaml", "2027-01-01", "ot measured yet: nothing says"),
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


@pytest.mark.parametrize(
    "part",
    [
        *("**Verdict:** ship it up to batch 8.", "- 2.40× the speed of float32 at batch 1"),
        "| 1 | 31.2 → 13.0 | 2.40× | 2.33 to 2.47 | 35.9 → 15.6 | 76.8 | 52 % |",
        *("2 threads; onnxruntime 1.31.1; accuracy level 4; A Processor", "p50 of 60 steps a side", "A/A spread 1.3 %"),
        *('quantkit generate . --runtime onnxruntime --prompt "', "og.Model(", "| **onnxruntime, level 0** |"),
        "| peak memory | 912 MB | 391 MB | 2.33× smaller, onnxruntime |",
    ],
)
def test_card_of_a_timed_bundle_holds(part: str) -> None:
    assert part in card(judged(), everything(), [])


def test_the_page_is_linked_where_there_is_one() -> None:
    file = planted.manifest().files[0].model_dump(by_alias=True)
    text = card(judged(files=[{**file, "path": "report.html", "role": "report"}]), [], [])
    assert "[report.html](report.html)" in text
    assert "report.html" not in card(judged(), [], [])


def test_a_bundle_of_onnx_alone_claims_no_checkpoint() -> None:
    text = card(onnx_only(), [*exported_rows(), *timed_rows()], [])
    found = front(text)
    assert found["library_name"] == "onnx"
    assert "onnx" in found["tags"]  # type: ignore[operator]
    assert not re.search(r"from_pretrained|vllm|`model/`|compressed-tensors|og\.Model", text)


def test_tables_have_as_many_cells_as_heads() -> None:
    text = card(judged(), everything(), [])
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1, table


def test_what_vllm_needs_for_a_layout_stands_above_its_command() -> None:
    layers = [{"name": "layers.0.q", "shape": [64, 64], "scheme": {"format": "nf4"}, "bits_per_weight": 4.5}]
    recipe = planted.manifest().recipe | {"export": [{"checkpoint": {"layout": "bitsandbytes"}}]}
    text = card(planted.manifest(layers=layers, recipe=recipe), planted.rows(), [])
    assert re.search(r"# vLLM reads it with vllm-bnb-plugin .*\nvllm serve ./model", text)
    assert "vllm-bnb-plugin" not in card(planted.manifest(), planted.rows(), [])
