"""Files of every architecture that opens, ours and as llama.cpp's converter writes them: logits and ids come back."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
import zoo
from exported import quantize, write_as
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters.gguf.architecture import TYPES
from quantkit.exporters.gguf.exporter import EXPORT
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.source.gguf import note_on, stored_as
from quantkit.model.source.gguf.rules import llama3
from quantkit.model.source.gguf.tokenizer import PRE, SAME, tokenizer_json
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
IDS = torch.arange(3, 63).reshape(2, 30)
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16}


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def exported(folder: Path, floats: str = "float32") -> Path:
    """The file that our exporter writes of a folder."""
    values = Values(StreamedModel(open_model(str(folder))), {}, lambda *_, **__: None)
    EXPORT.export(folder.parent / "gguf", values, EXPORT.Options(floats=floats))
    return (folder.parent / "gguf" / "model.gguf").rename(folder.parent / "file.gguf")


def demand_same(path: Path, model: Any) -> Any:
    source = open_model(str(path))
    with torch.no_grad():
        found, wanted = source.load()(IDS).logits, model.eval()(IDS).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return source


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 20000.0, **more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama-tied", {}),
        ("llama", rope("llama3", **LLAMA3)),
        ("llama", rope("linear", factor=4.0)),
        ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0)),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", rope("yarn", factor=2.0, original_max_position_embeddings=32)),
        ("gemma2", GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}),
        ("gemma3", GEMMA | {"num_hidden_layers": 7}),
        (
            "gemma3",
            GEMMA
            | {"num_hidden_layers": 6}
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)
def test_what_we_export_opens(tmp_path: Path, merging_tokenizer: Any, name: str, changes: dict[str, Any]) -> None:
    model = zoo.tiny(name, vocab_size=len(merging_tokenizer), **changes)
    source = demand_same(exported(saved(tmp_path / "model", model, merging_tokenizer)), model)
    assert source.was == "gguf ALL_F32" and "losses are against that" in source.notes[0]
    for text in ("the 12 cats", " <s>the\n", "é"):
        assert source.tokenizer()(text)["input_ids"] == merging_tokenizer(text)["input_ids"]


@pytest.mark.parametrize("floats", ["float16", "bfloat16"])
def test_every_type_opens(tmp_path: Path, merging_tokenizer: Any, floats: str) -> None:
    """All types in one file, and a table of floats; `test_gguf_file.py` holds our codes against the package's."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 64}
    model = zoo.tiny("qwen3", vocab_size=len(merging_tokenizer), **sizes)
    folder = saved(tmp_path / "model", model, merging_tokenizer)
    inside = [name for name, module in model.model.layers.named_modules() if isinstance(module, torch.nn.Linear)]
    types = dict(zip((f"model.layers.{name}" for name in inside), TYPES * 2, strict=False))
    schemes = {name: WeightScheme(format=kind.lower()) for name, kind in types.items()}
    tensors = {name: quantize(model.get_parameter(f"{name}.weight").detach(), how) for name, how in schemes.items()}
    finished.save(tmp_path / "block.safetensors", tensors, {})
    source = open_model(str(folder))
    results = Finished([tmp_path / "block.safetensors"], schemes)
    write_as(EXPORT, tmp_path, source, StreamedModel(source), results, {"floats": floats})
    back = open_model(str((tmp_path / "gguf" / "model.gguf").rename(tmp_path / "file.gguf")))
    assert set(types.values()) == set(TYPES) and "quantizing them again" in back.notes[0]
    for name, tensor in tensors.items():
        wanted = load_format(tensor.scheme.format).dequantize(tensor)
        assert torch.equal(back.weights.read(f"{name}.weight"), wanted), types[name]
    table = model.get_input_embeddings().weight.detach()
    found = back.weights.read("model.embed_tokens.weight")
    assert torch.equal(found, table.to(getattr(torch, floats)).float()) and not torch.equal(found, table)


@pytest.mark.parametrize(
    ("stated", "matrices", "was"),
    [
        ("ALL_F32", {"F32": 90, "Q8_0": 10}, "Q8_0"),  # a few codes are codes
        ("MOSTLY_Q4_K_M", {"F16": 90}, "F16"),
        ("MOSTLY_F16", {"F32": 90, "F16": 10}, "F32"),
        ("MOSTLY_F16", {"F16": 90, "F32": 10}, "F16"),
        ("MOSTLY_Q4_K_M", {"Q4_K": 80, "Q6_K": 20}, "Q4_K_M"),
        ("MOSTLY_Q4_K_M", {"Q5_0": 80, "Q4_K": 20}, "Q4_K_M mostly Q5_0"),
        ("MOSTLY_MXFP4_MOE", {"MXFP4": 80, "Q8_0": 20}, "MXFP4_MOE"),
        (None, {"F32": 90, "Q8_0": 10}, "Q8_0"),
    ],
)
def test_what_a_file_says_of_its_types_is_believed_where_it_is_so(
    stated: str | None, matrices: dict[str, int], was: str
) -> None:
    meta = {} if stated is None else {"general.file_type": int(gguf.LlamaFileType[stated])}
    found = stored_as(meta, Counter(matrices))
    assert found == was
    assert ("quantizing them again" in note_on("x", f"gguf {found}")) == any(kind[0] not in "FB" for kind in matrices)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 0,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
Change = Callable[[str, Any], Any]


def turned(name: str, array: Any) -> Any:
    """As llama.cpp's converter turns rows of q and k, heads of 16."""
    if "q_proj" not in name and "k_proj" not in name:
        return array
    return array.reshape(len(array) // 16, 2, 8, -1).swapaxes(1, 2).reshape(array.shape)


def with_one(name: str, array: Any) -> Any:
    return array + 1 if name.endswith("norm.weight") else array


def transposed(name: str, array: Any) -> Any:
    return array.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else array


def unmixed(name: str, array: Any) -> Any:
    """Bloom's q, k and v one after the other, which stand head by head."""
    if "query_key_value" not in name:
        return array
    return array.reshape(4, 3, 16, -1).swapaxes(0, 1).reshape(array.shape)


# class's config -> (its settings, llama.cpp's name, what the converter says of it besides sizes, what it changes)
CONVERTED: dict[str, tuple[dict[str, Any], str, dict[str, Any], Change | None]] = {
    "gemma": (
        {"head_dim": 32, "rms_norm_eps": 1e-5},
        "gemma",
        RMS | {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": None},
        with_one,
    ),
    "granite": (
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
        | {"rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        "granite",
        RMS
        | {"vocab_size": 260, "rope.dimension_count": 16}
        | {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0},
        turned,
    ),
    "smollm3": ({"rms_norm_eps": 1e-5}, "smollm3", RMS | {"vocab_size": 260, "rope.dimension_count": 16}, turned),
    "olmo2": ({"rms_norm_eps": 1e-5}, "olmo2", RMS, None),
    "phi3": (
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 128},
        "phi3",
        RMS | {"rope.scaling.original_context_length": 128, "attention.sliding_window": 0, "rope.dimension_count": 16},
        None,
    ),
    "stablelm": (
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        "stablelm",
        LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": False, "rope.freq_base": None},
        None,
    ),
    "starcoder2": ({"norm_epsilon": 1e-5}, "starcoder2", LAYER_NORM, None),
    "nemotron": (
        {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "head_dim": 16},
        "nemotron",
        RMS
        | LAYER_NORM
        | {"attention.key_length": 16, "attention.value_length": 16, "vocab_size": 260}
        | {"rope.dimension_count": 8, "rope.scaling.type": "none"},
        lambda name, array: array + 1 if "norm" in name and name.endswith(".weight") else array,
    ),
    "gpt2": (
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
        "gpt2",
        LAYER_NORM | {"feed_forward_length": 256, "attention.head_count_kv": None, "rope.freq_base": None},
        transposed,
    ),
    "bloom": (
        {"n_layer": 4, "n_head": 4},
        "bloom",
        LAYER_NORM | {"feed_forward_length": 256, "attention.head_count_kv": 4, "rope.freq_base": None},
        unmixed,
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
        "lfm2",
        RMS | {"attention.head_count_kv": [0, 2, 0, 2], "vocab_size": 260, "shortconv.l_cache": 3},
        lambda name, array: array.squeeze(1) if "conv.conv" in name else array,
    ),
}


def converted(path: Path, model: Any, tokenizer: Any, kind: str, **more: Any) -> Path:
    """A file of the keys that llama.cpp's converter writes, tensors by the package's names."""
    _, name, fields, change = CONVERTED[kind]
    theirs = SIZES["max_position_embeddings"], SIZES["hidden_size"], SIZES["intermediate_size"]
    sizes = dict(zip(("context_length", "embedding_length", "feed_forward_length"), theirs, strict=True))
    sizes |= {"block_count": 4, "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0}
    writer = gguf.GGUFWriter(path, name)
    for key, value in (sizes | fields | more).items():
        if isinstance(value, bool):
            writer.add_bool(f"{name}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{name}.{key}", value)
    stated = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if number in tokenizer.added_tokens_decoder else 1 for number in range(len(words))])
    writer.add_token_merges([" ".join(merge) for merge in stated["merges"]])
    for key in ("bos", "eos", "pad"):
        writer.add_uint32(f"tokenizer.ggml.{key.replace('pad', 'padding')}_token_id", SIZES[f"{key}_token_id"])
    arch = next(key for key, called in gguf.MODEL_ARCH_NAMES.items() if called == name)
    names = gguf.get_tensor_name_map(arch, 4)
    for parameter, tensor in model.named_parameters():
        called = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        called = called or names.get_name(parameter.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        array = tensor.detach().numpy()
        writer.add_tensor(called, np.ascontiguousarray(change(parameter, array) if change else array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_kind(kind: str, tokenizer: Any) -> Any:
    settings = {**SIZES, "vocab_size": len(tokenizer), **CONVERTED[kind][0]}
    if kind in ("gpt2", "bloom"):
        settings = {key: value for key, value in settings.items() if key not in list(SIZES)[1:6]}
    if "rope.freq_base" not in CONVERTED[kind][2]:
        settings["rope_theta"] = 10000.0
    config = transformers.AutoConfig.for_model(kind, **settings)
    return zoo.filled(transformers.AutoModelForCausalLM._model_mapping[type(config)], config)


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_the_converter_writes_opens(tmp_path: Path, merging_tokenizer: Any, kind: str) -> None:
    model = of_kind(kind, merging_tokenizer)
    source = demand_same(converted(tmp_path / "file.gguf", model, merging_tokenizer, kind), model)
    assert source.architecture == type(model).__name__


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("olmo2", {"rope.scaling.type": "longrope"}),
        ("olmo2", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}),
        ("olmo2", {"attention.sliding_window": 16}),
        ("smollm3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5}),
        ("phi3", {"rope.scaling.attn_factor": 1.19}),
        ("starcoder2", {"rope.dimension_count": 8}),
        ("stablelm", {"use_parallel_residual": True}),
        ("bloom", {"feed_forward_length": 128}),
    ],
)
def test_what_nobody_speaks_of_is_refused(
    tmp_path: Path, merging_tokenizer: Any, kind: str, more: dict[str, Any]
) -> None:
    path = converted(tmp_path / "file.gguf", of_kind(kind, merging_tokenizer), merging_tokenizer, kind, **more)
    with pytest.raises(InputError, match=f"gguf-architecture.*{kind}.{list(more)[-1]}|{kind}.{next(iter(more))}"):
        open_model(str(path))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(kind.encode(), b"x" * len(kind)))
    with pytest.raises(InputError, match=r"gguf-architecture.*one of bloom, gemma"):
        open_model(str(path))


def test_no_special_token_is_of_another_vocabulary(tmp_path: Path, merging_tokenizer: Any) -> None:
    """Phi 3's class says 32000 where a file says nothing."""
    path = converted(tmp_path / "file.gguf", of_kind("phi3", merging_tokenizer), merging_tokenizer, "phi3")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.padding_token_id", b"tokenizer.ggml.padding_token_xx"))
    assert open_model(str(path)).load().config.pad_token_id is None


def test_a_number_that_cannot_be_is_refused(tmp_path: Path, merging_tokenizer: Any) -> None:
    model, key = of_kind("starcoder2", merging_tokenizer), "attention.layer_norm_epsilon"
    path = converted(tmp_path / "file.gguf", model, merging_tokenizer, "starcoder2", **{key: float("nan")})
    with pytest.raises(InputError, match=f"gguf-damaged.*{key} = nan"):
        open_model(str(path))


@pytest.mark.parametrize(
    ("factor", "low", "high", "context", "base"),
    [(8.0, 1.0, 4.0, 8192, 5e5), (32.0, 1.0, 4.0, 8192, 5e5), (4.0, 2.0, 6.0, 5000, 1e4), (16.0, 1.0, 8.0, 64, 1e4)],
)
def test_llama_3s_numbers_come_from_its_factors(
    factor: float, low: float, high: float, context: int, base: float
) -> None:
    """Of transformers' own frequencies; another low with the same line is the same."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def frequencies(scaling: dict[str, Any]) -> torch.Tensor:
        config = transformers.LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": base, **scaling},
        )
        return ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]

    given = dict(zip(LLAMA3, (low, high, factor, context), strict=True))
    theirs = frequencies({"rope_type": "llama3", **given})
    factors = (1 / base ** (torch.arange(0, 128, 2) / 128) / theirs).float()
    factors[(factors - 1).abs() < 1e-5] = 1
    factors[(factors - factor).abs() < 1e-4] = factor
    found = llama3(factors.numpy(), base, "here")
    assert found is not None and (low != 1 or found == {"rope_type": "llama3", **given})
    torch.testing.assert_close(frequencies(found), theirs, rtol=2e-5, atol=0)
    with pytest.raises(InputError, match=r"gguf-architecture.*rope_freqs"):
        llama3(factors.flip(0).numpy(), base, "here")
    assert llama3(np.ones(8, np.float32), base, "here") is None


# as their tokenizer.json have them
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([], False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True)], False),
    "qwen2": ([pre_tokenizers.Split(Regex(QWEN), "isolated")], False),
    "llama-bpe": ([pre_tokenizers.Split(Regex(LLAMA_3), "isolated")], True),
    "smaug-bpe": ([pre_tokenizers.Split(Regex(LLAMA_3), "isolated")], False),
    "tekken": ([pre_tokenizers.Split(Regex(TEKKEN), "isolated")], True),
    "gpt-4o": ([pre_tokenizers.Split(Regex(GPT_4O), "isolated")], False),
}
MERGES = ["1 2", "12 3", "123 4", "t h", "th e", "Ġ t", "Ġt h", "Ġth e", "Ġ Ġ", "Ċ Ċ", "' s", "' S", "A b", "Ab C"]
MERGES += ["e d", "Ġ 1", ", Ġ", "/ Ċ", "! !", "Ã ©", "= ="]
TEXTS = [
    "the 1234 12345 cat's THE'S thE AbCd",
    "the\n\n\nx  /\n !!\r\n  y  ",
    "thewhole foo",  # a token that no merge makes
    "naïve café É日本語 😀 ǅx",
    "a's b'S '' 'll <s>the<s> the",
    "x==\t\ty/\n//\n",
    "",
]


def byte_level(pre: str) -> Any:
    """A tokenizer of that kind, of tokenizers' own parts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(["<s>", *letters, *("".join(merge.split()) for merge in MERGES), "thewhole", "Ġfoo"])
    splits, whole = SPLITS[pre]
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=whole)
    made = Tokenizer(model)
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    made.decoder = decoders.ByteLevel()
    return of_tokens(made, ["<s>"])


def sentencepiece(*, prefix: bool) -> Any:
    """As Llama 2's or, without a space before the text, Gemma's: pieces that merges make, bytes for the rest."""
    words = ["the", "quick", "brown", "fox", "jumps", "lazy", "dog", "and", "then", "it", "returns", "house"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,'12"]
    merges = []
    for word in words:
        for end in range(1, len(word) + 1):
            if (piece := "▁" + word[:end]) not in tokens:
                merges.append((piece[:-1], piece[-1]))
                tokens.append(piece)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces, text = [normalizers.Replace(" ", "▁")], [decoders.Replace("▁", " "), decoders.ByteFallback()]
    text.append(decoders.Fuse())
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        text.append(decoders.Strip(" ", 1, 0))
    made.normalizer, made.decoder = normalizers.Sequence(spaces), decoders.Sequence(text)
    return of_tokens(made, ["<unk>", "<s>", "</s>"])


def of_tokens(made: Tokenizer, special: list[str]) -> Any:
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    begins = ("<s>", made.token_to_id("<s>"))
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [begins])
    ends = {"eos_token": "</s>", "unk_token": "<unk>"} if "</s>" in special else {"eos_token": "<s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", **ends)


def of(name: str) -> Any:
    return byte_level(name) if name in SPLITS else sentencepiece(prefix=name == "prefix")


def with_tokenizer(place: Path, tokenizer: Any) -> Path:
    model = zoo.tiny("llama-tied", vocab_size=len(tokenizer), num_hidden_layers=1)
    return exported(saved(place / "model", model, tokenizer))


@pytest.mark.parametrize("name", [*SPLITS, "prefix", "plain"])
def test_every_tokenizer_comes_back(tmp_path: Path, name: str) -> None:
    assert set(SPLITS) == set(PRE.values())
    tokenizer = of(name)
    path = with_tokenizer(tmp_path, tokenizer)
    back = open_model(str(path)).tokenizer()
    for text in [*TEXTS, "the fox", "  the  fox", " x", "</s> the fox", "the lazy dog, isn't it?"]:
        ids = tokenizer(text)["input_ids"]
        assert back(text)["input_ids"] == ids, text
        assert back.decode(ids) == tokenizer.decode(ids), text


@pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
@pytest.mark.parametrize("name", [*SPLITS, *SAME, "prefix", "plain"])
def test_tokens_are_llama_cpps(tmp_path: Path, name: str) -> None:
    from quantkit.runtimes.llama_cpp.library import Vocabulary

    path = with_tokenizer(tmp_path, of(SAME.get(name, name)))
    if name in SAME:
        path = renamed(path, name)
    meta = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    ours, theirs = Tokenizer.from_str(tokenizer_json(meta, "here")), Vocabulary(path)
    for text in [*TEXTS, "the fox", "  the  fox", " x", "</s> the fox", "a</s>b the"]:
        assert ours.encode(text).ids == theirs.encode(text), text


def renamed(path: Path, pre: str) -> Path:
    """The vocabulary of a file under another name of its pre-tokenizer, which says nothing of what texts begin with."""
    reader, written = gguf.GGUFReader(path), path.with_name("renamed.gguf")
    writer = gguf.GGUFWriter(written, "llama")
    for key, each in reader.fields.items():
        if not key.startswith(("GGUF.", "general.")) and key != "tokenizer.ggml.add_bos_token":
            value = pre if key == "tokenizer.ggml.pre" else each.contents()
            writer.add_key_value(key, value, each.types[0], each.types[-1] if len(each.types) > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
