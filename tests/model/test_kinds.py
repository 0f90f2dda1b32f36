"""What kind of model a class is: by what goes into it, whatever it inherits a claim to."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from quantkit.errors import InputError
from quantkit.model.structure.kinds import kind_of, positions, unknown_architecture


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "decoder"),
        ("BertModel", "encoder"),
        ("Gemma3ForConditionalGeneration", "decoder"),  # its text stack, with a tower of images beside it
        ("Qwen2_5_VLForConditionalGeneration", "decoder"),
        ("Emu3TextModel", "encoder"),  # the text part of a model of images
        ("Molmo2TextModel", "encoder"),
        ("UMT5EncoderModel", "encoder"),  # its config is that of an encoder and a decoder
        ("ViTForImageClassification", "network"),
        *(
            (name, "decoder")
            for name in ("T5ForConditionalGeneration", "MarianMTModel", "BartForConditionalGeneration")
        ),
    ],
)
def test_a_class_has_its_kind(name: str, kind: str) -> None:
    found = getattr(transformers, name)
    assert kind_of(found, found.config_class().to_dict(), "x") == kind


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("T5Model", "an encoder and a decoder"),
        ("BartForSequenceClassification", "an encoder and a decoder"),
        ("Gemma4ForConditionalGeneration", "audio and image and text"),
        ("Emu3ForConditionalGeneration", "image and text"),
        ("WhisperModel", "audio through an encoder and a decoder"),
        ("WhisperForAudioClassification", "audio"),
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
    for head in ("LlamaForCausalLMEagle3", "EagleLlamaForCausalLM", "DeepseekV3ForCausalLMNextN", "Eagle3Speculator"):
        with pytest.raises(InputError, match=r"architecture-unsupported.*is a draft head.*speculative_config"):
            unknown_architecture(head, "x", "llama")
    assert unknown_architecture("Eagle2_5_VLForConditionalGeneration", "x", "eagle").code == "architecture-unknown"
    assert unknown_architecture("WhisperEncoder", "x", "os").code == "architecture-unknown"
    for no_text in ({"a": 1}, ["whisper"], None, 3):  # `model_type` is what a stranger's config says
        assert unknown_architecture("WhisperEncoder", "x", no_text).code == "architecture-unknown"


SIZES = {
    **{"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "channel_shrink_ratio": 2},
    **{"word_embed_proj_dim": 24, "ffn_dim": 32},
    **{"entity_vocab_size": 5, "entity_emb_size": 8, "position_embedding_type": "absolute"},
    **{"attention_window": 8, "languages": ["en_XX"], "default_language": "en_XX", "mask_token_id": 3},
}
BEHIND = "roberta xlm-roberta xlm-roberta-xl camembert data2vec-text ibert roberta-prelayernorm mpnet longformer"
BEHIND += " xmod luke esm markuplm lilt"
WHOLE = "bert electra albert distilbert gpt2 opt biogpt xlm deberta"


@pytest.mark.parametrize(("name", "most"), [("XLNetLMHeadModel", None), ("XGLMForCausalLM", 40)])
def test_positions_that_are_computed_have_no_table(name: str, most: int | None) -> None:
    """XLNet says -1, for any number; XGLM's table of sines has no weight."""
    model_class = getattr(transformers, name)
    small = {"d_model": 24, "num_layers": 2, "ffn_dim": 32, "attention_heads": 2, "n_layer": 2, "n_head": 2}
    sizes = {"vocab_size": 50, **small, **({"max_position_embeddings": most} if most else {})}
    config = model_class.config_class(**sizes)
    config.architectures = [name]
    assert positions(config.to_dict()) == most


@pytest.mark.parametrize("kind", [*BEHIND.split(), *WHOLE.split()])
@pytest.mark.parametrize("padding", [1, 4])
def test_a_sequence_has_as_many_tokens_as_transformers_takes(kind: str, padding: int) -> None:
    config = AutoConfig.for_model(kind, **SIZES, max_position_embeddings=40)
    config.pad_token_id = padding
    model = AutoModel.from_config(config).eval()
    config.architectures = [type(model).__name__]
    most = positions(config.to_dict())
    assert most is not None
    assert (most < 40) == (kind in BEHIND.split())
    with torch.no_grad():
        model(input_ids=torch.full((1, most), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, most + 1), 7))
