"""What cannot work is refused by its name and its config.json alone: torch is not imported for it."""

import json
import re
from pathlib import Path

import forked
import pytest
import transformers
import zoo

from quantkit.errors import InputError
from quantkit.model.sight import demand_no_adapter, demand_possible
from quantkit.model.source.open import open_model
from quantkit.model.structure.kinds import kind_of

WHY = {
    "WhisperModel": "audio through an encoder and a decoder",
    "CLIPModel": "image and text",
    "Emu3ForConditionalGeneration": "image and text",
    "T5Model": "for part in (transformers.T5EncoderModel, transformers.AutoTokenizer)",
    "BartForSequenceClassification": "get_encoder",
    "Gemma4ForConditionalGeneration": "audio and image and text",
    "Wav2Vec2ForCTC": "audio",
    "ViTForImageClassification": "model-graph",
}
FINE = [
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "T5EncoderModel",
    "T5ForConditionalGeneration",
    "MarianMTModel",
    "WhisperForConditionalGeneration",
    "MoonshineForConditionalGeneration",
    "BartForCausalLM",
    "XLMRobertaModel",
    "Gemma3ForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
]


def folder_of(name: str, place: Path) -> Path:
    config = getattr(transformers, name).config_class()
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [name]}, default=str))
    return place


@pytest.mark.parametrize("name", [*WHY, *FINE])
def test_a_class_is_judged_as_it_is_when_the_model_is_opened(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "m")
    with pytest.raises(InputError) as caught:  # what is fine has no weights yet
        demand_possible(str(folder))
    assert WHY.get(name, "weights-absent") in caught.value.line()
    found = getattr(transformers, name)
    if caught.value.code == "architecture-unsupported":
        with pytest.raises(InputError) as opened:
            kind_of(found, found.config_class().to_dict(), "path:m")
        assert opened.value.line() == caught.value.line()


@pytest.mark.parametrize("suffix", ["pth", "bin", "ckpt", "h5", "keras", "tflite", "engine", "csv", "safetensors"])
def test_a_file_is_refused_by_its_suffix(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"x.{suffix}").write_text("{}")
    with pytest.raises(InputError, match="not-a-folder") as caught:
        demand_possible(str(tmp_path / f"x.{suffix}"))
    assert caught.value.remedy


def test_a_file_of_a_model_is_answered_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a file; .*give its folder") as caught:
        demand_possible(str(tmp_path / "config.json"))
    assert caught.value.remedy == f"give its folder: {tmp_path}"


def test_torch_is_not_imported_for_what_is_refused(tmp_path: Path) -> None:
    """By the command itself, in one process."""
    for number, name in enumerate(WHY):
        folder_of(name, tmp_path / str(number))
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / "x.pth").touch()
    models = [*map(str, range(len(WHY))), "empty", "pipeline", "x.pth", "not-there"]
    code = (
        "import sys; from quantkit.cli import run\n"
        f"codes = [run(['compile', './' + name]) for name in {models!r}]\n"
        "assert codes == [2] * len(codes), codes\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    forked.run("-c", code, light=True, cwd=tmp_path, check=True, timeout=120)


LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somebody/base"}
BESIDE, MERGED = "without it, if the weights are merged already", "merged, in Python"
HERE, ASIDE = "merged: quantkit compile hf:somebody/base --adapter ", "merged: move the adapter's files to a folder"


def with_adapter(tmp_path: Path, stated: object, weights: str, *, model: bool) -> Path:
    folder = tmp_path / "model"
    if model:
        zoo.tiny("llama", num_hidden_layers=1).save_pretrained(folder)  # type: ignore[operator]
    else:
        folder.mkdir()
    (folder / "adapter_config.json").write_text(stated if isinstance(stated, str) else json.dumps(stated))
    if weights:
        (folder / weights).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("stated", "weights", "model", "ways"),
    [
        (LORA, "adapter_model.safetensors", True, [BESIDE, ASIDE]),
        (LORA, "adapter_model.safetensors", False, [HERE]),
        (LORA, "adapter_model.bin", True, [BESIDE, MERGED]),
        ({**LORA, "peft_type": "IA3"}, "adapter_model.safetensors", False, [MERGED]),
        (LORA, "", True, [BESIDE]),
        ({**LORA, "peft_type": "PREFIX_TUNING"}, "adapter_model.safetensors", True, [BESIDE]),
        ({**LORA, "peft_type": "PROMPT_TUNING"}, "adapter_model.bin", False, ["compile its base model: somebody/base"]),
        (LORA, "", False, ["compile its base model: somebody/base"]),
        ("{", "adapter_model.safetensors", True, [BESIDE, MERGED]),
        ([1], "adapter_model.safetensors", False, [MERGED]),
    ],
)
def test_an_adapter_is_refused_with_what_to_do(
    tmp_path: Path, stated: object, weights: str, model: bool, ways: list[str]
) -> None:
    folder = with_adapter(tmp_path, stated, weights, model=model)
    with pytest.raises(InputError, match="adapter-unmerged") as refused:
        open_model(str(folder))
    remedy = refused.value.remedy
    assert [
        way for way in (BESIDE, MERGED, HERE, ASIDE, "compile its base model: somebody/base") if way in remedy
    ] == ways
    if BESIDE in ways:
        for name in re.findall(r"adapter_\w+\.\w+", remedy.partition(";")[0]):
            (folder / name).unlink()
        assert open_model(str(folder)).architecture == "LlamaForCausalLM"
        assert not list(folder.glob("adapter*"))


def test_what_is_no_adapter_of_the_model_is_left_alone(tmp_path: Path) -> None:
    """Weights that nothing loads without their config, and an adapter in a folder below, which no library reads."""
    folder = with_adapter(tmp_path, LORA, "adapter_model.safetensors", model=True)
    (folder / "checkpoint-10").mkdir()
    (folder / "adapter_config.json").rename(folder / "checkpoint-10" / "adapter_config.json")
    demand_no_adapter(folder, "./model")


def test_of_the_hub_the_model_is_fetched_without_it(tmp_path: Path) -> None:
    folder = with_adapter(tmp_path, {**LORA, "peft_type": "IA3"}, "adapter_model.safetensors", model=True)
    with pytest.raises(InputError) as refused:
        demand_no_adapter(folder, "hf:org/name@v1")
    call = "snapshot_download('org/name', revision='v1', ignore_patterns='adapter_*', local_dir='./name')"
    assert call in refused.value.remedy
    assert "from_pretrained('org/name')" in refused.value.remedy


def test_no_command_imports_torch_for_it(tmp_path: Path) -> None:
    folder = with_adapter(tmp_path, LORA, "", model=False)
    program = (
        "import sys; from quantkit.cli import main\n"
        f"sys.argv = ['quantkit', 'compile', {str(folder)!r}]\n"
        "try: code = main()\nexcept SystemExit as end: code = end.code\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = forked.run("-c", program, light=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.count("\n") == 1
    assert "adapter-unmerged" in done.stderr
