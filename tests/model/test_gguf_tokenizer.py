"""Tokenizers from GGUF metadata: against transformers' own classes, and SentencePiece's rule followed slowly."""

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from quantkit.errors import InputError
from quantkit.model.source.gguf.tokenizer import demand_whole, tokenizer_config, tokenizer_json

TEXTS = [
    "",
    "the cat  sat",
    "It's 2024,  isn't it?\n\n\tyes",
    "é naïve 日本 😀",
    "a\u0301 b",
    " x ",
    "<b>tt</b>",
    "cat▁cat",
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def sentencepiece() -> dict[str, Any]:
    """A vocabulary whose pieces have distinct scores, with byte tokens and text that is one token."""
    chosen = random.Random(0)
    pieces = sorted({"".join(chosen.choices("▁catshe", k=chosen.randint(2, 4))) for _ in range(300)})
    chosen.shuffle(pieces)
    letters = ["▁", *"abcdehinstxy.,?<>/"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "<b>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [CONTROL] * 4 + [USER_DEFINED] * 3 + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(letters)) + [UNUSED]
    scores = [-1000.0] * 7 + [0.0] * 256 + [-float(i) for i in range(len(pieces) + len(letters))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *pieces, *letters, "[PAD]"],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def slow(text: str, meta: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE: of all neighbours, those whose union scores highest are merged, the leftmost first."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    number = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    score = dict(zip(tokens, meta["tokenizer.ggml.scores"], strict=True))
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    whole = sorted((t.replace(" ", "▁") for t, k in zip(tokens, types, strict=True) if k == USER_DEFINED), key=len)
    text, found = text.replace(" ", "▁"), []
    while text:
        at, token = min(((text.find(t), t) for t in reversed(whole) if t in text), default=(len(text), ""), key=_first)
        parts = list(text[:at])
        while True:
            pairs = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in normal]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for part in parts:
            found += [number[part]] if part in normal else [number[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [number[token]] if token else []
        text = text[at + len(token) :]
    return found


def _first(candidate: tuple[int, str]) -> tuple[int, int]:
    return candidate[0], -len(candidate[1])


def test_sentencepiece_merges_by_score() -> None:
    meta = sentencepiece()
    tokenizer = Tokenizer.from_str(tokenizer_json(meta, "x"))
    chosen = random.Random(1)
    texts = [*TEXTS, *("".join(chosen.choices("  catshex<b>é", k=40)) for _ in range(60))]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False).ids == slow(text, meta), text
        assert tokenizer.encode(text).ids == [2, *slow(text, meta)]
        decoded = tokenizer.decode(slow(text, meta), skip_special_tokens=False)
        assert decoded == text.replace("▁", " ")
    assert tokenizer.token_to_id("[PAD]") is None


def test_no_token_is_put_in_front_where_none_is_asked_for() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json({**sentencepiece(), "tokenizer.ggml.add_bos_token": False}, "x"))
    assert tokenizer.encode("cat").ids == slow("cat", sentencepiece())


def test_qwen2_splits_as_transformers_own_class() -> None:
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "Ġ i", "i s", "s a", "t h", "th e", "Ċ Ċ", "' s", "Ġ Ġ", "Ġ 1", ", Ġ"]
    tokens = [*letters, *("".join(merge.split(" ")) for merge in merges), "<|endoftext|>", "<tool_call>", "[PAD0]"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 3) + [CONTROL, USER_DEFINED, UNUSED],
        "tokenizer.ggml.merges": merges,
    }
    ours = Tokenizer.from_str(tokenizer_json(meta, "x"))
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens[:-3])}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    for text in [*TEXTS, "12 1212 the thesis's 12,5\n\n\n x\r\n", "IS'S it'S", "a,\n\nb"]:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.encode("<tool_call>a").tokens == ["<tool_call>", "a"]
    assert "<tool_call>" in ours.decode(ours.encode("<tool_call>").ids)  # text, and no special token
    assert ours.token_to_id("[PAD0]") is None


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.add_eos_token": True}])
def test_what_would_be_another_tokenizer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        tokenizer_json({**sentencepiece(), **changes}, "tiny.gguf")
    assert caught.value.code == "gguf-tokenizer" and caught.value.where == "tiny.gguf"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.token_type": [NORMAL]}, "token_type of 1; its vocabulary has"),
        ({"tokenizer.ggml.scores": []}, "scores of 0; its vocabulary has"),
        ({"tokenizer.ggml.bos_token_id": -1}, "bos_token_id = -1; its vocabulary has"),
        ({"tokenizer.ggml.merges": ["a b", "x"]}, "the merge 'x'; two tokens"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"gguf-damaged.*{said}"):
        demand_whole({**sentencepiece(), **changes}, "tiny.gguf")
    with pytest.raises(InputError, match=r"gguf-tokenizer.*no tokens"):
        demand_whole({}, "tiny.gguf")


def test_what_is_white_behind_a_special_token_of_phi_3_goes() -> None:
    """llama.cpp knows it by the name."""
    meta = {**sentencepiece(), "tokenizer.ggml.tokens": [*sentencepiece()["tokenizer.ggml.tokens"]]}
    meta["tokenizer.ggml.tokens"][1] = "<s>"
    phi3 = Tokenizer.from_str(tokenizer_json({**meta, "general.name": "Phi-3 Mini"}, "x"))
    other = Tokenizer.from_str(tokenizer_json(meta, "x"))
    for text, same in (("<pad>\n cat", "<pad>cat"), ("<s> cat", "<s> cat")):
        assert phi3.encode(text).ids == other.encode(same).ids
    assert phi3.encode("<pad> cat").ids != other.encode("<pad> cat").ids


def test_special_tokens_are_named() -> None:
    config = tokenizer_config({**sentencepiece(), "tokenizer.chat_template": "{{ x }}"}, 64)
    assert (config["bos_token"], config["unk_token"], config["chat_template"]) == ("<bos>", "<unk>", "{{ x }}")
    assert config["model_max_length"] == 64 and "eos_token" not in config
