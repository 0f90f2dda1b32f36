"""GGUF to a Hugging Face folder: a tiny Llama there and back, its tokenizer, and the block formats by hand."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from zoo import ids, tiny

from quantkit.errors import InputError
from quantkit.model.source.gguf import convert_gguf
from quantkit.model.source.gguf.file import fields, tensors
from quantkit.model.source.open import open_model

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "Ġ a", "a b"]
_ARCHES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}


def vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*CONTROL, *letters, *("".join(merge.split()) for merge in MERGES)]


def llama_cpp_order(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's convert_hf_to_gguf.py permutes q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, blocks: Any = None, **fields: Any) -> None:
    """A tiny model as llama.cpp would have converted it; `blocks`: the type its linears are stored in.

    Names of tensors are those that the `gguf` package gives Hugging Face's.
    """
    config = model.config
    arch = _ARCHES[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, fields.pop("architecture", gguf.MODEL_ARCH_NAMES[arch]))
    whole, tokens = config.rope_parameters.get("full_attention", config.rope_parameters), vocabulary()
    stated = {
        **{"name": "Tiny", "license": "apache-2.0", "block_count": config.num_hidden_layers},
        **{"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size},
        **{"feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads},
        **{"head_count_kv": config.num_key_value_heads, "rope_freq_base": whole["rope_theta"]},
        "layer_norm_rms_eps": config.rms_norm_eps,
    }
    if arch == gguf.MODEL_ARCH.GEMMA3:
        stated |= {"key_length": config.head_dim, "value_length": config.head_dim}
        stated["sliding_window"] = config.sliding_window
    stated |= {"tokenizer_model": "gpt2", "tokenizer_pre": fields.pop("pre", "smollm"), "token_list": tokens}
    stated |= {"token_types": [3 if token in CONTROL else 1 for token in tokens], "token_merges": MERGES}
    stated |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    stated["chat_template"] = "{{ messages[0]['content'] }}"
    for key, value in stated.items():
        getattr(writer, f"add_{key}")(value)
    for key, value in fields.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            array = llama_cpp_order(
                array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        if arch == gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            array = array + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if blocks is not None and name.endswith("_proj.weight"):
            raw = encoded(array, blocks)
            writer.add_tensor(theirs, raw, raw_dtype=blocks)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(array: np.ndarray[Any, Any], blocks: Any) -> np.ndarray[Any, Any]:
    """In blocks of a type; of K-quants, which the package does not write, bytes at random with small scales."""
    try:
        return gguf.quants.quantize(array, blocks)
    except NotImplementedError:
        size, width = gguf.GGML_QUANT_SIZES[blocks]
        count = array.shape[1] // size
        raw = np.random.default_rng(0).integers(0, 256, (array.shape[0], count, width), np.uint8)
        halves = {"Q4_K": [0, 2], "Q6_K": [208]}[blocks.name]
        for at in halves:
            raw[..., at : at + 2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
        return raw.reshape(array.shape[0], -1)


def converted(place: Path, model: Any, **written: Any) -> Path:
    """The folder that the file of a tiny model becomes."""
    write_gguf(place / "tiny.gguf", model, **written)
    (place / "tiny").mkdir()
    convert_gguf(place / "tiny.gguf", place / "tiny")
    return place / "tiny"


def model_of(name: str) -> Any:
    """A random model with the vocabulary of `write_gguf`; Gemma's norms to 9 bits, so that 1 + w and back is exact."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    changes: dict[str, Any] = {}
    if name == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        changes = {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "eos_token_id": 2}
    model: Any = tiny(name, vocab_size=len(vocabulary()), rope_parameters=rope, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_((parameter * 512).round() / 512)
    return model


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gemma3"])
def test_a_model_comes_back_from_gguf(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    folder = converted(tmp_path, model)
    import transformers

    back, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert type(back) is type(model) and back.config.tie_word_embeddings == (name in ("llama-tied", "gemma3"))
    state = back.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key
    with torch.no_grad():
        assert torch.equal(back(ids()).logits, model(ids()).logits)
    assert (back.config.eos_token_id, back.generation_config.eos_token_id) == (2, 2)
    source = open_model(str(folder))
    assert source.kind == "decoder" and source.dtype == "float32"


def test_a_file_is_opened_as_it_is_and_says_what_it_was(tmp_path: Path, own_cache: Path) -> None:
    model = model_of("llama")
    write_gguf(tmp_path / "mine.gguf", model, blocks=gguf.GGMLQuantizationType.Q8_0)
    source = open_model(str(tmp_path / "mine.gguf"))
    assert (source.ref, source.name, source.was, source.kind) == ("path:mine.gguf", "mine", "gguf Q8_0", "decoder")
    assert "converted from gguf Q8_0" in source.notes[0]
    stored = source.weights.read("model.layers.0.mlp.up_proj.weight")
    expected = model.model.layers[0].mlp.up_proj.weight
    assert torch.allclose(stored, expected, atol=float(expected.abs().max()) / 127)
    assert open_model(str(tmp_path / "mine.gguf")).sha256 == source.sha256
    # a folder that holds nothing else says which file to give
    with pytest.raises(InputError, match=r"config-missing.*give the file: (.*mine\.gguf)"):
        open_model(str(tmp_path))


def test_the_provenance_says_what_it_was(tmp_path: Path) -> None:
    model = tiny("llama", vocab_size=len(vocabulary()))
    folder = converted(tmp_path, model, blocks=gguf.GGMLQuantizationType.Q4_1)
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
    folder = converted(tmp_path, model, blocks=gguf.GGMLQuantizationType.Q4_1)
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
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"architecture": "falcon"}, "gguf-architecture"),
        ({"pre": "deepseek-llm"}, "gguf-tokenizer"),
        ({"llama__rope__dimension_count": 8}, "gguf-architecture"),
        ({"llama__expert_count": 8}, "gguf-architecture"),
        ({"llama__rope__scaling__yarn_ext_factor": 2}, "gguf-architecture"),
        ({"llama__attention__sliding_window": 8}, "gguf-architecture"),
    ],
)
def test_what_is_not_converted_exactly_is_refused(fields: dict[str, Any], code: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny("llama", vocab_size=len(vocabulary())), **fields)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(InputError) as caught:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert caught.value.code == code


def test_a_layer_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """transformers would fill it at random."""
    model = model_of("gemma3")
    del model.model.layers[1].self_attn.q_norm
    with pytest.raises(InputError) as caught:
        converted(tmp_path, model)
    assert caught.value.code == "gguf-damaged" and "blk.1.attn_q_norm.weight" in caught.value.value


def q4_k(raw: bytes) -> list[float]:
    """A super-block of 256 by hand, as ggml-quants.c reads it: eight groups of 32, scales and minima of 6 bits."""
    scale, least = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    packed, codes, found = raw[4:16], raw[16:], []
    for group in range(8):
        if group < 4:
            step, offset = packed[group] & 63, packed[group + 4] & 63
        else:
            step = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            offset = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for byte in codes[32 * (group // 2) : 32 * (group // 2) + 32]:
            code = byte & 15 if group % 2 == 0 else byte >> 4
            found.append(np.float32(scale * np.float32(step)) * code - np.float32(least * np.float32(offset)))
    return found


def q6_k(raw: bytes) -> list[float]:
    """A super-block of 256: 4 low bits, 2 high ones, a signed byte a group of 16."""
    low, high = raw[:128], raw[128:192]
    steps, scale = np.frombuffer(raw[192:208], np.int8), np.frombuffer(raw[208:], np.float16).astype(np.float32)[0]
    found = []
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, at = divmod(place, 32)
        nibble = low[64 * half + 32 * (quarter % 2) + at] >> (4 if quarter > 1 else 0) & 15
        bits = high[32 * half + at] >> (2 * quarter) & 3
        found.append(np.float32(scale * np.float32(steps[i // 16])) * ((nibble | bits << 4) - 32))
    return found


@pytest.mark.parametrize(("blocks", "by_hand", "was"), [("Q4_K", q4_k, "Q4_K_M"), ("Q6_K", q6_k, "Q4_K_M mostly Q6_K")])
def test_super_blocks_are_decoded_as_llama_cpp_defines_them(
    blocks: str, by_hand: Any, was: str, tmp_path: Path
) -> None:
    model = tiny("qwen2", vocab_size=len(vocabulary()), hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    folder = converted(tmp_path, model, blocks=gguf.GGMLQuantizationType[blocks], general__file_type=15)
    stored = next(t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if t.name == "blk.0.ffn_down.weight")
    rows = np.array([by_hand(bytes(row)) for row in stored.data[:9]], np.float32)
    read = open_model(str(folder)).weights.read("model.layers.0.mlp.down_proj.weight")[:9]
    assert np.abs(rows).max() > 0.1 and np.allclose(read.numpy(), rows, rtol=1e-6, atol=1e-7)
    assert json.loads((folder / "provenance.json").read_text())["was"] == f"gguf {was}"


def test_metadata_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "bool"):
        getattr(writer, f"add_{kind}")(f"x.{kind}", 1)
    writer.add_array("x.numbers", [1.5, 2.5])
    writer.add_array("x.words", ["a", "é 日本"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    library = gguf.GGUFReader(path).fields.items()
    assert fields(path) == {key: field.contents() for key, field in library if not key.startswith("GGUF.")}
    assert fields(path)["x.words"] == ["a", "é 日本"]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match="gguf-damaged"):
        fields(path)


def test_tensors_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"))
    ours, theirs = (
        [(each.name, each.tensor_type, [*each.shape], each.data_offset, each.data.tobytes()) for each in found]
        for found in (tensors(path), gguf.GGUFReader(path).tensors)
    )
    assert theirs
    assert ours == theirs


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough to look at"])
def test_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(InputError, match=r"\[gguf-damaged\]"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize(
    ("part", "lie", "said"),
    [
        (4, (77).to_bytes(4, "little"), "type 77, which the gguf package does not know"),
        (4, int(gguf.GGMLQuantizationType.Q8_0).to_bytes(4, "little"), "is next"),
        (5, (4).to_bytes(8, "little"), "is next"),
        (5, (2**50).to_bytes(8, "little"), "is next"),
        (3, bytes(8), "0] in blocks of 1"),
        (3, (2**40).to_bytes(8, "little"), "the data end at"),
        (2, (200).to_bytes(4, "little"), "200 dimensions"),
    ],
)
def test_a_tensor_that_lies_of_itself_is_refused(part: int, lie: bytes, said: str, tmp_path: Path) -> None:
    """Of one in the middle: type, offset, sizes. Parts are those of the package's reader."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"))
    data = path.read_bytes()
    reader = gguf.GGUFReader(path)
    tensor = next(each for each in reader.tensors if each.name == "blk.0.attn_q.weight")
    at = tensor.field.parts[part].ctypes.data - reader.data.ctypes.data
    path.write_bytes(data[:at] + lie + data[at + len(lie) :])
    with pytest.raises(InputError, match=f"gguf-damaged.*{said}"):
        convert_gguf(path, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("key", "number", "said"),
    [
        ("general.alignment", 0, "an alignment of 0"),
        ("general.alignment", 48, "an alignment of 48"),
        ("llama.attention.head_count", 0, "head_count = 0"),
        ("llama.attention.head_count_kv", 3, "head_count_kv = 3; it divides 4 heads"),
        ("llama.attention.layer_norm_rms_epsilon", 0x7FC00000, "epsilon = nan"),  # as float32
        ("llama.rope.freq_base", 0, "freq_base = 0.0"),
        ("llama.embedding_length", 128, r"token_embd.weight is \[262, 64\]; .* \[262, 128\]"),
        ("llama.feed_forward_length", 128, "ffn_gate.weight is"),
        ("tokenizer.ggml.bos_token_id", 10**6, "bos_token_id = 1000000; its vocabulary has 262 tokens"),
    ],
)
def test_a_number_that_cannot_be_is_refused(key: str, number: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"), general__alignment=32)
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InputError, match=f"gguf-damaged.*{said}"):
        convert_gguf(path, tmp_path)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model_of("llama"), split__count=3)
    with pytest.raises(InputError, match=r"gguf-split.*one of 3 files.*llama-gguf-split"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


def test_another_order_of_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"))
    data = path.read_bytes()
    for version, said in ((3, "version 3 for machines that begin at the big end"), (9 << 24, "version 9, and 2 and 3")):
        path.write_bytes(data[:4] + version.to_bytes(4, "big") + data[8:])
        with pytest.raises(InputError, match=f"gguf-damaged.*{said}"):
            convert_gguf(path, tmp_path)


def test_a_count_that_its_file_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"))
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    for count in (10**7, 2**63):
        path.write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
        started = time.monotonic()
        with pytest.raises(InputError, match="gguf-damaged"):
            convert_gguf(path, tmp_path)
        assert time.monotonic() - started < 2
