"""What kind of model a class is: by what goes into it, whatever it inherits a claim to."""

from __future__ import annotations

import pytest
import transformers

from quantkit.errors import InputError
from quantkit.model.structure.kinds import kind_of, unknown_architecture


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "decoder"),
        ("BertModel", "encoder"),
        ("Emu3TextModel", "encoder"),  # the text part of a model of images
        ("Molmo2TextModel", "encoder"),
        ("UMT5EncoderModel", "encoder"),  # its config is that of an encoder and a decoder
        ("ViTForImageClassification", "network"),
    ],
)
def test_the_kind(name: str, kind: str) -> None:
    found = getattr(transformers, name)
    assert kind_of(found, found.config_class().to_dict(), "x") == kind


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("T5ForConditionalGeneration", "an encoder and a decoder"),
        ("BartForSequenceClassification", "an encoder and a decoder"),
        ("Gemma3ForConditionalGeneration", "image and text"),
        ("Emu3ForConditionalGeneration", "image and text"),
        ("WhisperForConditionalGeneration", "audio"),
    ],
)
def test_what_takes_more_is_refused(name: str, why: str) -> None:
    found = getattr(transformers, name)
    with pytest.raises(InputError, match=f"architecture-unsupported.*{why}"):
        kind_of(found, found.config_class().to_dict(), "x")


def test_a_class_that_transformers_has_as_a_part_is_not_called_unknown() -> None:
    found = unknown_architecture("WhisperEncoder", "x", "whisper")
    assert found.code == "architecture-unsupported" and "is a part of" in found.value
    assert unknown_architecture("WhisperEncodr", "x", "whisper").code == "architecture-unknown"
    assert unknown_architecture("WhisperEncoder", "x", "os").code == "architecture-unknown"
    for no_text in ({"a": 1}, ["whisper"], None, 3):  # `model_type` is what a stranger's config says
        assert unknown_architecture("WhisperEncoder", "x", no_text).code == "architecture-unknown"
