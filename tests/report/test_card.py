"""The model card: complete, the same for the same bundle, safe with names that others chose; what to type."""

import inspect
import re
import types
from typing import Any

import planted
import pytest
import yaml

import quantkit
from quantkit.bundle import Manifest
from quantkit.measurement.rows import Row
from quantkit.report.bundle import figures, usage
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
    assert found["base_model"] == "org/a-model" and found["base_model_relation"] == "quantized"
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
    assert found["passes"] == [{"rtn": {"range": "mse"}}] and "name" not in found


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
        "| 1 | 31.2 → 13.0 | 2.40× | 2.32 to 2.48 | 35.9 → 15.6 | 76.8 | 52 % |",
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


def bundle(kind: str, *paths: str, **options: Any) -> Any:
    """The manifest of a bundle with these files; the options are those of its TensorRT export."""
    made = planted.manifest()
    file = made.files[0].model_dump(by_alias=True)
    model = made.model.model_dump() | {"kind": kind}
    recipe = {"name": "r", "export": [{"checkpoint": {}}, {"tensorrt": options}]}
    return planted.manifest(model=model, files=[{**file, "path": path} for path in paths], recipe=recipe)


@pytest.mark.parametrize(
    ("kind", "paths", "options", "last"),
    [
        ("decoder", ["model/m.safetensors"], {}, "quantkit measure . --runtime onnxruntime"),
        ("decoder", ["engine/sm89.engine"], {}, "quantkit measure . --runtime tensorrt_rtx"),
        ("decoder", ["engine/sm89.engine"], {"library": "tensorrt"}, "quantkit measure . --runtime tensorrt"),
        ("decoder", ["engine/sm89.engine", "onnx/model.onnx"], {}, "quantkit measure . --runtime onnxruntime"),
        ("network", ["engine/sm89.engine"], {}, "tensorrt_rtx --loadEngine=engine/sm89.engine"),
        ("network", ["engine/sm89.engine"], {"library": "tensorrt"}, "trtexec --loadEngine=engine/sm89.engine"),
    ],
)
def test_what_measures_speed_is_what_the_bundle_holds(kind: str, paths: Any, options: Any, last: str) -> None:
    found = usage.measure(bundle(kind, *paths, **options))
    assert found[-1] == last
    assert any("--to onnx" in line for line in found) == (paths == ["model/m.safetensors"])


def test_a_network_without_an_engine_is_built_first() -> None:
    found = usage.measure(bundle("network", "engine/network.onnx"), "'a place'")
    assert found[1:] == [
        "quantkit export 'a place' --to tensorrt",
        "tensorrt_rtx --loadEngine='a place'/engine/smNN.engine",
    ]


def test_an_engine_of_a_graph_is_run_by_its_own_tool() -> None:
    (command,) = [each for each in usage.commands(bundle("network", "engine/sm89.engine")) if each.label == "TensorRT"]
    assert "tensorrt_rtx --loadEngine=engine/sm89.engine" in command.text and "generate" not in command.text


def test_a_module_is_made_again_in_python_since_no_command_has_it() -> None:
    made = planted.manifest()
    model = made.model.model_dump() | {"source": made.model.source.model_dump() | {"ref": "module:Crepe"}}
    recipe = {"name": "r", "calibration": {"set": "path:pitch.npz"}}
    again = usage.again(planted.manifest(model=model, recipe=recipe))
    assert again.language == "python" and "module:Crepe" not in again.text
    given: list[Any] = []
    names = {"quantkit": types.SimpleNamespace(compile=lambda *args, **more: given.append((args, more)))}
    exec(again.text.replace("import quantkit", ""), names)
    ((args, more),) = given
    inspect.signature(quantkit.compile).bind(*args, **more)
    assert args[1] == "./recipe.yaml" and more["calibration"] == "./pitch.npz"


def test_files_are_named_as_they_were_typed() -> None:
    made = planted.manifest()
    model = made.model.model_dump() | {"kind": "network"}
    model["source"] |= {"ref": "path:x.onnx"}
    file = {**made.files[0].model_dump(by_alias=True), "path": "onnx/model.onnx"}
    recipe = {"name": "r", "calibration": {"set": "path:set.npz"}}
    manifest = planted.manifest(model=model, files=[file], recipe=recipe)
    typed = usage.Files("/data/my models/x.onnx", "/data/set.npz")
    assert usage.measure(manifest, "out", typed) == [
        "quantkit measure out --runtime onnxruntime --baseline '/data/my models/x.onnx' --calibration /data/set.npz"
    ]


def test_servers_stand_on_the_card_where_the_bundle_has_what_they_read() -> None:
    file = planted.manifest().files[0].model_dump(by_alias=True)
    gguf = planted.manifest(files=[{**file, "path": "gguf/model.gguf", "role": "weights"}])
    text = card(gguf, planted.rows(), [])
    assert "llama-server -m gguf/model.gguf" in text and "vllm serve" not in text
    text = card(planted.manifest(), planted.rows(), [])
    assert "vllm serve ./model" in text and "llama-server" not in text
    assert "vllm serve" not in card(onnx_only(), [], [])


def test_every_data_set_of_the_scores_is_named() -> None:
    one = [row for row in planted.rows() if row.name.startswith("accuracy.")]
    change = {"set": "chat-en", "items": 511, "sha256": "c" * 64}
    other = [
        row.model_copy(update={"runtime": "onnxruntime", "data": row.data and row.data.model_copy(update=change)})
        for row in one
    ]
    text = card(planted.manifest(), [*one, *other], [])
    facts = text.split("## Where it comes from")[1]
    assert "prose-en (eval), 6,132 items" in facts and "chat-en (eval), 511 items" in facts
    assert "6,132 positions of prose-en (eval) in torch, 511 positions of chat-en (eval) in onnxruntime" in text
