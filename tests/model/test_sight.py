"""What cannot work is refused by its name and its config.json alone: torch is not imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from quantkit.errors import InputError
from quantkit.model.sight import demand_possible
from quantkit.model.structure.kinds import kind_of

WHY = {
    "WhisperForConditionalGeneration": "audio and text through an encoder and a decoder",
    "CLIPModel": "image and text",
    "LlavaForConditionalGeneration": "image and text",
    "T5ForConditionalGeneration": "for part in (transformers.T5EncoderModel, transformers.AutoTokenizer)",
    "BartForConditionalGeneration": "get_encoder",
    "Qwen2VLForConditionalGeneration": "image",
    "Wav2Vec2ForCTC": "audio",
    "ViTForImageClassification": "model-graph",
}
FINE = [
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "T5EncoderModel",
    "BartForCausalLM",
    "XLMRobertaModel",
    "Gemma3ForCausalLM",
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
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=120)
