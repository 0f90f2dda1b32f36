"""What is wrong is found while everything is opened, before the first block is worked on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
import zoo

from quantkit.errors import InputError
from quantkit.pipeline import Request, prepare


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
