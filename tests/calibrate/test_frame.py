"""What a tokenizer puts around a text, asked of the tokenizer; and what sequences begin with."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.calibrate.tokens.pack import begins, frame, named


def tokenizer(single: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[gMASK]": 1, "<sop>": 2, "</s>": 3, "one": 4, "two": 5}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, number) for word, number in words.items() if number in (1, 2, 3)]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>")


def test_several_before_and_one_after() -> None:
    """Two before a text, as ChatGLM has it; the settings name neither of them as its beginning."""
    found = tokenizer("[gMASK] <sop> $A </s>")
    assert frame(found) == ([1, 2], [3])
    assert found("one two").input_ids == [1, 2, 4, 5, 3]
    assert named([1, 2], found) == "[gMASK]<sop>"


def test_none(bare_tokenizer: Any) -> None:
    assert frame(None) == frame(bare_tokenizer) == frame(tokenizer("$A")) == ([], [])


def test_what_all_sequences_begin_with() -> None:
    found = tokenizer("[gMASK] <sop> $A </s>")
    rows = [[1, 2, 4, 5], [1, 2, 4, 4]]
    assert begins(np.array(rows), found) == "[gMASK]<sop>", "and no ordinary word that they share"
    assert begins(np.array([*rows, [1, 3, 4, 4]]), found) == "[gMASK]"
    assert begins(np.array([*rows, [4, 2, 4, 4]]), found) is None
    assert begins(np.array([[3, 4], [3, 5]]), found) == "</s>", "special, though nothing puts it there"
    assert begins(np.array(rows), None) is None
    assert begins(np.zeros((0, 4), np.int64), found) is None
