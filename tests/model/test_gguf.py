"""GGUF to a Hugging Face folder: a tiny Llama there and back, its tokenizer, and the block formats by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from zoo import ids, tiny

from quantkit.errors import InputError
from quantkit.model.gguf import convert_gguf
from quantkit.model.open import open_model

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "Ġ a", "a b"]
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*CONTROL, *letters, *("".join(merge.split()) for merge in MERGES)]


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    role, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[role]}.{leaf}"


def llama_cpp_order(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's convert_hf_to_gguf.py permutes q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, blocks: Any = None, **fields: Any) -> None:
    """A tiny Llama as llama.cpp would have converted it; `blocks`: the type its linears are stored in."""
    config = model.config
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for key, value in fields.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = llama_cpp_order(
                array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        if blocks is not None and "_proj" in name:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, blocks), raw_dtype=blocks)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_model_comes_back_from_gguf(name: str, tmp_path: Path) -> None:
    model = tiny(name, vocab_size=len(vocabulary()), rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder)
    import transformers

    back, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert back.config.tie_word_embeddings == (name == "llama-tied")
    state = back.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    with torch.no_grad():
        assert torch.equal(back(ids()).logits, model(ids()).logits)
    assert (back.config.eos_token_id, back.generation_config.eos_token_id) == (2, 2)
    source = open_model(str(folder))
    assert source.kind == "decoder" and source.dtype == "float32"


def test_the_provenance_says_what_it_was(tmp_path: Path) -> None:
    model = tiny("llama", vocab_size=len(vocabulary()))
    write_gguf(tmp_path / "tiny.gguf", model, blocks=gguf.GGMLQuantizationType.Q4_1)
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["was"] == "gguf Q4_1" and provenance["licence"] == "apache-2.0"
    assert provenance["source"]["sha256"] == hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    written = {path.name for path in folder.iterdir()} - {"provenance.json"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in written} == provenance["files"]


def q4_1(raw: bytes) -> np.ndarray[Any, Any]:
    """One block of 32 by hand: scale and minimum in half precision, then 16 bytes of low and high halves."""
    scale, least = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    codes = [byte & 15 for byte in raw[4:]] + [byte >> 4 for byte in raw[4:]]
    return np.array(codes, np.float32) * scale + least


def test_blocks_are_decoded_as_llama_cpp_defines_them(tmp_path: Path) -> None:
    model = tiny("llama", vocab_size=len(vocabulary()))
    write_gguf(tmp_path / "tiny.gguf", model, blocks=gguf.GGMLQuantizationType.Q4_1)
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder)
    stored = next(t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.1.ffn_down.weight")
    raw = bytes(stored.data)
    by_hand = np.concatenate([q4_1(raw[at : at + 20]) for at in range(0, len(raw), 20)]).reshape(64, 96)
    read = open_model(str(folder)).weights.read("model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(read.numpy(), by_hand)


def test_the_tokenizer_splits_digits_and_keeps_control_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", vocab_size=len(vocabulary())))
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder)
    tokenizer = open_model(str(folder)).tokenizer()
    assert tokenizer.tokenize("12 ab") == ["1", "2", "Ġa", "b"]  # "12" is a token that digits never reach
    assert tokenizer.tokenize("ab") == ["ab"]  # merges do apply where the pre-tokenizer lets them
    assert tokenizer("<|im_start|>a")["input_ids"] == [1, vocabulary().index("a")]  # no token of its own is added
    text = "Ünïcode 2024, <|im_end|>\n\t  x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"architecture": "gemma"}, "gguf-architecture"),
        ({"pre": "qwen2"}, "gguf-tokenizer"),
        ({"llama__rope__dimension_count": 8}, "gguf-architecture"),
        ({"llama__expert_count": 8}, "gguf-architecture"),
        ({"llama__rope__scaling__factor": 2}, "gguf-architecture"),
    ],
)
def test_what_is_not_converted_exactly_is_refused(fields: dict[str, Any], code: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", vocab_size=len(vocabulary())), **fields)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(InputError) as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert caught.value.code == code


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough to look at"])
def test_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(InputError) as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    assert caught.value.code == "gguf-damaged"
