"""Compiles of a vision-language model: its text as the plain model's, its tower as it was, images that calibrate."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from reference import plain_vllm
from safetensors.torch import load_file
from zoo import shrink

import quantkit
from quantkit import cli
from quantkit.calibrate.tokens.processed import ImageProcessor
from quantkit.errors import InputError, QuantkitError
from quantkit.model.streaming.own_forward import SEEING
from quantkit.model.structure import built
from quantkit.model.structure.traced import other_state
from quantkit.pipeline import Request, compile_model
from quantkit.pipeline.blocks.prepared import prepare
from quantkit.pipeline.export import export_bundle
from quantkit.pipeline.plan import PlanQuestion, _as_compiled, plan
from quantkit.recipe import Recipe
from quantkit.report.bundle import figures, usage
from quantkit.runtimes import load_runtime
from quantkit.runtimes.generate import demand_images

LLAVA = "LlavaForConditionalGeneration"
IMAGE, VOCABULARY = 258, 260
INT4 = {"format": "int4", "granularity": "group", "group": 32, "symmetric": True}


def recipe(*exports: str, **changes: Any) -> Recipe:
    data = {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 4, "tokens": 48, **changes.pop("calibration", {})},
        "scheme": {"weights": INT4},
        "passes": [{"gptq": {}}],
        "export": [{name: {}} for name in exports or ("checkpoint",)],
        **changes,
    }
    return Recipe.from_dict(data, name="tiny")


def compiled(model: Path, out: Path, *exports: str, **changes: Any) -> quantkit.Bundle:
    request = Request.of(str(model), recipe=recipe(*exports, **changes), out=out, speed=False)
    compile_model(request)
    return quantkit.load(out)


def refused(model: Path, *exports: str, **changes: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        compiled(model, model.parent / "never", *exports, **changes)
    assert "\n" not in str(caught.value) and not (model.parent / "never").exists()
    assert not list(model.parent.glob("never*"))
    return caught.value


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory, bos_tokenizer: Any) -> Path:
    """A LLaVA in a folder with its processor, and beside it the language model in it."""
    home = tmp_path_factory.mktemp("vision")
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 0}
    text = {**shrink.config_of(shrink.named("LlamaForCausalLM")).to_dict(), "vocab_size": VOCABULARY, **ids}
    model = shrink.tiny(LLAVA, home / "llava", text_config=text, image_token_index=IMAGE)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text)).eval()
    plain.model.load_state_dict(model.model.language_model.state_dict())
    plain.lm_head.load_state_dict(model.lm_head.state_dict())
    plain.save_pretrained(home / "llama")
    bos_tokenizer.save_pretrained(home / "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "llama")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(pixels, tokenizer, **how).save_pretrained(home / "llava")
    return home / "llava"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 256, (40, 36 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.usefixtures("few_scored")
def test_the_text_stack_is_compiled_as_the_plain_model_is(llava: Path, tmp_path: Path) -> None:
    whole, plain = compiled(llava, tmp_path / "whole"), compiled(llava.parent / "llama", tmp_path / "plain")
    kl = [next(row["value"] for row in one.measurements if row["name"] == "accuracy.kl") for one in (whole, plain)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-6) and kl[0] > 0
    before, after = load_file(llava / "model.safetensors"), load_file(whole.model_folder / "model.safetensors")
    alone = load_file(plain.model_folder / "model.safetensors")
    beside = [name for name in before if not name.startswith(("language_model.", "model.language_model.", "lm_head"))]
    assert len(beside) > 50
    for name in beside:
        assert torch.equal(before[name], after[name]), name
    packed = [name for name in after if name.endswith(".weight_packed")]
    assert len(packed) == len([name for name in alone if name.endswith(".weight_packed")]) > 20
    for name in packed:
        same = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        assert torch.equal(after[name], alone[same]), name
    # vLLM's tower has a further module, so no name of ours fits there
    ignore = json.loads((whole.model_folder / "config.json").read_text())["quantization_config"]["ignore"]
    tower, stack = "vision_tower.vision_model.encoder.layers.0.mlp.fc2", "language_model.model.layers.0.mlp.down_proj"
    for name, kept in ((tower, True), ("multi_modal_projector.linear_1", True), (stack, False)):
        assert plain_vllm.ignored(name, ignore) == kept, name
    text = "AutoModelForImageTextToText"
    loaded, info = getattr(transformers, text).from_pretrained(whole.model_folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(loaded).__name__ == LLAVA
    assert text in (whole.path / "README.md").read_text()
    assert (whole.model_folder / "processor_config.json").is_file()
    assert all(check.ok for check in quantkit.load(whole.path).verify())
    # what follows is what it can do, and its headline is of its text
    assert usage.measure(whole.manifest) == [] and usage.measure(plain.manifest)
    advice = next(taken.reason for taken in whole.manifest.decisions if taken.code == "emulated")
    assert "onnx" not in advice
    for to in ("onnx", "gguf"):
        with pytest.raises(InputError, match=r"layout-unsupported.*its checkpoint runs as it is: quantkit generate"):
            export_bundle(whole, to, dry_run=True)
    with pytest.raises(InputError, match="--runtime torch"):
        load_runtime("onnxruntime").generate(whole, "a")
    assert "of the linear weights" not in figures.verdict(whole.manifest, [])[0]
    said = figures.weights(whole.manifest.weights)
    assert said[0] == "100.0% of the linear weights are quantized" and said[1].endswith("linear weights, not counted")


@pytest.mark.usefixtures("few_scored")
def test_images_calibrate_through_the_model_s_processor(llava: Path, images: Path, tmp_path: Path) -> None:
    seen = compiled(llava, tmp_path / "seen", calibration={"images": str(images)})
    again = compiled(llava, tmp_path / "again", calibration={"images": str(images)})
    blind = compiled(llava, tmp_path / "blind")
    entry = seen.manifest.calibration
    assert entry is not None and entry.images == "images" and blind.manifest.calibration.images is None
    assert seen.manifest.content_sha256 == again.manifest.content_sha256 != blind.manifest.content_sha256
    checks = {check.name: check for check in seen.manifest.checks}
    assert checks[SEEING].ok and checks[SEEING].value < 1e-4
    notes = " ".join(taken.reason for taken in seen.manifest.decisions)
    assert "2 of 4 sequences begin with an image of images" in notes
    assert str(images.parent) not in json.dumps(seen.manifest.model_dump(mode="json"))


@pytest.mark.usefixtures("few_scored")
def test_an_override_stores_a_tower_in_a_scheme_of_its_own(llava: Path, tmp_path: Path) -> None:
    eight = {"format": "int8", "granularity": "channel", "symmetric": True}
    made = compiled(llava, tmp_path / "eight", overrides=[{"match": "model.vision_tower.*", "weights": eight}])
    layers = {layer.name: layer.scheme["format"] for layer in made.manifest.layers}
    tower = {name for name in layers if "vision_tower" in name}
    assert len(tower) == 24 and {layers[name] for name in tower} == {"int8"}
    assert {form for name, form in layers.items() if name not in tower} == {"int4"}
    # a glob that reaches the text too speaks of the text alone
    both = compiled(llava, tmp_path / "both", overrides=[{"match": "*.q_proj", "weights": {"group": 16}}])
    assert not [layer.name for layer in both.manifest.layers if "vision_tower" in layer.name]


@pytest.mark.usefixtures("few_scored")
def test_a_recipe_s_onnx_is_left_out_beside_a_checkpoint(llava: Path, tmp_path: Path) -> None:
    made = compiled(llava, tmp_path / "two", "checkpoint", "onnx")
    (left,) = [taken for taken in made.manifest.decisions if taken.code == "export-left-out"]
    assert left.where == "onnx" and "images" in left.reason and not (made.path / "onnx").exists()


@pytest.mark.usefixtures("few_scored")
@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("Qwen3_5ForCausalLM", "layers of linear_attention"),
        ("Qwen3_5ForConditionalGeneration", "layers of linear_attention"),
        ("Qwen3NextForCausalLM", "layers of linear_attention"),
        ("Lfm2ForCausalLM", "layers of conv"),
        ("FalconH1ForCausalLM", "layers of hybrid"),
        ("JambaForCausalLM", "layers of linear_attention"),
    ],
)
def test_a_graph_is_left_out_for_blocks_with_a_state(name: str, state: str, tmp_path: Path) -> None:
    """Before the work: a graph holds keys and values alone, and the checkpoint is made."""
    shrink.tiny(name, tmp_path / "model", dtype=torch.bfloat16)
    shrink.tokenizer().save_pretrained(tmp_path / "model")
    asked = recipe("checkpoint", "onnx", passes=[{"rtn": {}}], on_indivisible="keep")
    prepared = prepare(Request.of(str(tmp_path / "model"), recipe=asked, speed=False))
    assert [step.name for step in prepared.request.recipe.export] == ["checkpoint"]
    (left,) = [taken for taken in prepared.decisions if taken.code == "export-left-out"]
    assert left.where == "onnx" and state in left.reason
    assert not [taken for taken in prepared.decisions if taken.code == "emulated" and "onnx" in taken.reason]
    model = str(tmp_path / "model")
    foreseen, notes = _as_compiled(asked, built.read(model), functools.partial(built.skeleton, model))
    assert [step.name for step in foreseen.export] == ["checkpoint"] and state in notes[0]


def test_the_plan_of_a_model_with_images_has_the_usual_recipes_though_none_is_native(llava: Path) -> None:
    planned = plan(PlanQuestion(str(llava), target="cpu-x86-vnni", prompt=8, output=8))
    labels = [candidate.label for candidate in planned.candidates]
    assert labels == ["float", "fp8", "int8-dynamic", "awq-int4"]
    assert all(cell.state == "emulated" for one in planned.candidates[1:] for cell in one.cells)


@pytest.mark.usefixtures("few_scored")
def test_no_next_step_goes_to_an_export_that_was_left_out(tmp_path: Path) -> None:
    shrink.tiny("Lfm2ForCausalLM", tmp_path / "model")
    shrink.tokenizer().save_pretrained(tmp_path / "model")
    made = compiled(tmp_path / "model", tmp_path / "out", "checkpoint", "onnx", passes=[{"rtn": {}}])
    assert usage.measure(made.manifest) == []


def test_attention_alone_keeps_no_other_state() -> None:
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "CTRLLMHeadModel"):
        assert other_state(shrink.tiny(name)) == "", name
    hybrid = shrink.tiny("GraniteMoeHybridForCausalLM", layer_types=["full_attention"] * 4)
    assert other_state(hybrid) == "", "a class of hybrids may have layers of attention alone"


@pytest.mark.parametrize("export", ["onnx", "gguf"])
def test_exports_of_text_alone_are_refused_by_name(export: str, llava: Path) -> None:
    error = refused(llava, export)
    assert error.code == "layout-unsupported" and f"an export to {export}" in error.rule
    assert LLAVA in error.where and "images" in error.value


def test_images_that_cannot_calibrate_are_refused_before_the_work(llava: Path, images: Path, tmp_path: Path) -> None:
    asked = {"calibration": {"images": str(images)}}
    assert "takes text" in refused(llava.parent / "llama", **asked).value
    bare_error = refused(without(llava, tmp_path / "bare", "processor_config.json"), **asked)
    assert bare_error.code == "calibration-images" and "no processor" in bare_error.value
    few = refused(llava, calibration={"images": str(images), "tokens": 12})
    assert few.code == "calibration-images" and "--set calibration.tokens=" in few.remedy
    (images / "0.png").write_bytes(b"no image")
    assert refused(llava, calibration={"images": str(images), "samples": 16}).code == "calibration-unreadable"
    assert refused(llava, calibration={"images": "phtos"}).code == "unknown-calibration"
    (tmp_path / "empty").mkdir()
    for passes in ([{"gptq": {}}], [{"rtn": {}}]):  # whatever the recipe looks at
        for name, code in (("empty", "calibration-empty"), ("absent", "file-missing")):
            error = refused(llava, calibration={"images": str(tmp_path / name)}, passes=passes)
            assert error.code == code and name in str(error)


@pytest.mark.usefixtures("few_scored")
def test_a_recipe_that_looks_at_nothing_says_so_of_its_images(llava: Path, images: Path, tmp_path: Path) -> None:
    made = compiled(llava, tmp_path / "rounded", passes=[{"rtn": {}}], calibration={"images": str(images)})
    (note,) = [taken.reason for taken in made.manifest.decisions if taken.where == "calibration.images"]
    assert "no image is looked at" in note and made.manifest.calibration is None


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}[assistant]"
)


def without(folder: Path, copy: Path, *names: str) -> Path:
    copy.mkdir()
    for path in folder.iterdir():
        if path.name not in names:
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.mark.usefixtures("few_scored")
@pytest.mark.parametrize("framed", [False, True])
def test_generate_takes_images_through_the_model_s_processor(
    framed: bool, llava: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two images and a prompt; transformers by itself, from the same checkpoint, writes the same text."""
    model = without(llava, tmp_path / "copy")
    if framed:
        (model / "chat_template.jinja").write_text(TEMPLATE)
    made = compiled(model, tmp_path / "bundle", passes=[{"rtn": {}}])
    files = sorted(images.iterdir())[:2]
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(made.model_folder)
    processor = transformers.AutoProcessor.from_pretrained(made.model_folder)
    asked = "[user]<image><image>What is it?[assistant]" if framed else "<image><image>What is it?"
    pixels = [Image.open(file) for file in files]
    inputs = processor(images=pixels, text=[asked], return_tensors="pt", add_special_tokens=not framed)
    new = loaded.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = processor.tokenizer.decode(new, skip_special_tokens=True)
    answer = load_runtime("torch").generate(made, "What is it?", images=files, new_tokens=6)
    assert answer["text"] == expected and answer["tokens"] == len(new)
    assert framed != any("no chat template" in note for note in answer.get("notes", ()))
    assert made.generate("What is it?", images=[str(file) for file in files], new_tokens=6) == expected
    asked = ["generate", str(made.path), "--prompt", "What is it?", "--new-tokens", "6", "--json"]
    capfd.readouterr()
    assert cli.run(asked + [part for file in files for part in ("--image", str(file))]) == 0
    assert json.loads(capfd.readouterr().out)["result"]["text"] == expected


@pytest.mark.usefixtures("few_scored")
def test_images_that_generate_cannot_take_are_refused_in_one_line(llava: Path, images: Path, tmp_path: Path) -> None:
    seeing = compiled(llava, tmp_path / "seeing", passes=[{"rtn": {}}])
    plain = compiled(llava.parent / "llama", tmp_path / "plain", passes=[{"rtn": {}}])
    bare = compiled(without(llava, tmp_path / "copy", "processor_config.json"), tmp_path / "bare", passes=[{"rtn": {}}])
    bad, file = tmp_path / "bad.png", images / "0.png"
    bad.write_bytes(b"no image")
    for bundle, runtime, image, code, words in [
        (plain, "torch", file, "generate-images", "takes text"),
        (seeing, "vllm", file, "generate-images", "runtime vllm"),
        (seeing, "onnxruntime", file, "generate-images", "runtime onnxruntime"),
        (bare, "torch", file, "generate-images", "no processor in the folder"),
        (seeing, "torch", bad, "generate-images", "bad.png"),
        (seeing, "torch", tmp_path / "none.png", "file-missing", "none.png"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            load_runtime(runtime).generate(bundle, "a", images=[image])
        assert caught.value.code == code and "\n" not in str(caught.value) and "<_io" not in str(caught.value)
    for image, words in [(bad, "bad.png"), (tmp_path / "none.png", "none.png")]:  # before anything is loaded
        with pytest.raises(InputError, match=words):
            demand_images(seeing, load_runtime("torch"), [image])
    with pytest.raises(InputError, match="on a-device"):
        demand_images(seeing, load_runtime("torch"), [file], "a-device")


def test_a_missing_package_of_a_processor_names_the_extra(llava: Path, tmp_path: Path) -> None:
    model = without(llava, tmp_path / "copy", "processor_config.json")
    (model / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"})
    )
    load = functools.partial(ImageProcessor.load, model, "generate-images", "leave it out", where="x")
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(
            QuantkitError, match=r"missing-dependency.*torchvision is not installed.*pip install"
        ) as caught:
            load()
        assert ("download.pytorch.org/whl/cpu" in caught.value.remedy) == (torch.version.cuda is None)
    else:
        assert type(load().processor).__name__ == "Qwen2_5_VLProcessor"


def test_a_torchvision_for_another_torch_is_refused_with_its_remedy(tmp_path: Path) -> None:
    """As the package index's beside a torch for processors: a model with images cannot even be opened."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from quantkit.errors import InputError
from quantkit.model.structure.kinds import demand_torchvision
try:
    demand_torchvision("architecture-unsupported")
except InputError as problem:
    print(problem.line())
"""
    said = forked.run("-c", program).stdout
    assert "nms is missing; torchvision is built for torch" in said and "whl/cpu" in said and said.count("\n") == 1


def test_a_graph_has_its_set_of_images_elsewhere() -> None:
    from quantkit.recipe import CalibrationChoice

    assert CalibrationChoice().pictures is None and CalibrationChoice(images="photos").pictures == "photos"


@pytest.mark.usefixtures("few_scored")
def test_a_rotation_leaves_a_vision_language_model_alone(llava: Path, tmp_path: Path) -> None:
    made = compiled(llava, tmp_path / "turned", passes=["rotate", {"gptq": {}}])
    assert any(taken.code == "not-rotated" and "images" in taken.reason for taken in made.manifest.decisions)
