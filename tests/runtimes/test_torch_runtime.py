"""The torch runtime: loads what a compile left, continues a prompt, and refuses what it cannot do."""

from pathlib import Path
from typing import Any

import pytest
import small_onnx
import torch
import zoo

from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import load_runtime

RUNTIME = load_runtime("torch")


def bundle(folder: Path, name: str, tokenizer: Any, kind: Any = "decoder", checkpoint: bool = True) -> Bundle:
    folder.mkdir()
    if checkpoint:
        zoo.save(folder / "model", tokenizer, name, vocab_size=len(tokenizer))
    return small_onnx.bundle(folder, kind)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Bundle:
    return bundle(tmp_path_factory.mktemp("r") / "d", "llama", byte_tokenizer)


def test_load_is_what_from_pretrained_gives(decoder: Bundle) -> None:
    model = RUNTIME.load(decoder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    expected = zoo.tiny("llama", vocab_size=258)
    with torch.no_grad():
        assert torch.equal(model(input_ids=zoo.ids()).logits, expected(input_ids=zoo.ids()).logits)
        assert torch.equal(decoder.model()(input_ids=zoo.ids()).logits, model(input_ids=zoo.ids()).logits)
    assert RUNTIME.load(decoder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_generate_continues_a_prompt_the_same_way_twice(decoder: Bundle) -> None:
    first = RUNTIME.generate(decoder, "The state of the", new_tokens=6)
    second = RUNTIME.generate(decoder, "The state of the", new_tokens=6)
    assert isinstance(first["text"], str)
    assert 1 <= first["tokens"] <= 6
    assert first["seconds"] > 0
    assert first["text"] == second["text"]
    drawn = [RUNTIME.generate(decoder, "The", new_tokens=8, sample=True, seed=seed)["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]


def test_an_encoder_generates_nothing(tmp_path: Path, byte_tokenizer: Any) -> None:
    encoder = bundle(tmp_path / "e", "bert", byte_tokenizer, kind="encoder", checkpoint=False)
    with pytest.raises(InputError) as caught:
        RUNTIME.generate(encoder, "The")
    assert (caught.value.code, caught.value.value) == ("not-a-decoder", "an encoder")


def test_a_bundle_without_a_checkpoint_says_how_to_get_one(tmp_path: Path, byte_tokenizer: Any) -> None:
    empty = bundle(tmp_path / "x", "llama", byte_tokenizer, checkpoint=False)
    for use in (lambda: RUNTIME.load(empty), lambda: RUNTIME.generate(empty, "The"), empty.model):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.code == "bundle-without-checkpoint"
        assert "export: [checkpoint: {}]" in caught.value.remedy


def test_an_empty_prompt_is_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    bare.post_processor = None  # type: ignore[assignment]
    found = bundle(tmp_path / "b", "llama", PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>"))
    with pytest.raises(InputError) as caught:
        RUNTIME.generate(found, "")
    assert caught.value.code == "prompt-empty"
