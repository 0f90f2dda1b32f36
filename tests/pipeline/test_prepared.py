"""What is wrong is found while everything is opened, before the first block is worked on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import zoo

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.pipeline import Request, prepare
from quantkit.pipeline.gates import refuse


def test_wrong_weights_in_the_last_block_are_found_before_the_first(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "m.odel"
    model = zoo.tiny("llama", vocab_size=len(byte_tokenizer))
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.down_proj.weight")[3, 5] = float("nan")
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    with pytest.raises(InputError, match="weights-nonfinite"):
        prepare(Request.of(str(folder), recipe="gptq-int4", out=tmp_path / "out"))


def test_what_vllm_needs_for_a_layout_is_noted_and_no_error_under_strict(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    folder = tmp_path / "model"
    model = zoo.tiny("llama", vocab_size=len(byte_tokenizer), hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)

    def noted(recipe: str, target: str) -> list[Decision]:
        request = Request.of(str(folder), recipe=recipe, target=target, out=tmp_path / "out", changes=["passes=[rtn]"])
        return [each for each in prepare(request).decisions if "vllm-bnb-plugin" in each.reason]

    found = noted("nf4", "l4")
    assert len(found) == 1
    refuse(found)
    assert noted("nf4", "cpu-x86") == noted("nvfp4", "l4") == []
