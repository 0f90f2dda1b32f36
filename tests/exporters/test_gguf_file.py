"""A GGUF file: its blocks against the `gguf` package, the whole against transformers' own reader, and its refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import zoo
from exported import Exported, by_name, check_as, export, scheme, write_as

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec
from quantkit.exporters.gguf import check, writer
from quantkit.exporters.gguf.architecture import TYPES, architecture_of, rope_factors, type_of
from quantkit.exporters.gguf.exporter import EXPORT, MODEL
from quantkit.exporters.gguf.tokenizer import kind_of, spaced
from quantkit.exporters.gguf.writer import StoredTensor, file_type
from quantkit.exporters.values import Values
from quantkit.formats import load_format
from quantkit.model.sizes import configs
from quantkit.model.source.open import open_model
from quantkit.scheme import ActivationScheme, WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")
FLOAT = {"floats": "float32"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# what llama.cpp knows of these without being told
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "llama-tied": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3": GEMMA | {"layer_types": ["sliding_attention"] * 2},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, merging_tokenizer: Any) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("sources")

    def made(name: str) -> Path:
        folder = place / name
        if not folder.exists():
            model = zoo.tiny(name, vocab_size=len(merging_tokenizer), **MODELS[name])
            torch.manual_seed(1)
            for key, parameter in model.named_parameters():
                if key.endswith(("bias", "norm.weight")):  # which no class draws at random
                    parameter.data += torch.randn_like(parameter) / 8
            model.save_pretrained(folder)
            merging_tokenizer.save_pretrained(folder)
        return folder

    return made


def saved(folder: Path, tokenizer: Any, name: str = "llama", **changes: Any) -> Path:
    """A tiny model with a row of its table for every token."""
    return zoo.save(folder, tokenizer, name, **{"vocab_size": len(tokenizer)} | changes)


def written(source: Path, folder: Path, how: Any, options: dict[str, Any], **more: Any) -> Exported:
    made = export(source, folder, how, layout="dense", **more)
    made.decisions = write_as(EXPORT, folder, made.source, made.stream, made.results, options)
    return made


def checks(made: Exported, options: dict[str, Any] | None = None) -> dict[str, Any]:
    return by_name(check_as(EXPORT, made.folder, made.source, made.stream, made.results, options))


def file_of(made: Exported) -> Path:
    return made.folder / "gguf" / MODEL


def kinds_of(made: Exported) -> dict[str, str]:
    return {each.name: each.tensor_type.name for each in gguf.GGUFReader(file_of(made)).tensors}


def change_tensor(file: Path, name: str, change: Callable[[Any], None]) -> None:
    """In the file."""
    tensor = next(each for each in gguf.GGUFReader(file, "r+").tensors if each.name == name)
    change(tensor.data)
    tensor.data.flush()


def change_field(file: Path, ending: str, value: float) -> None:
    field = next(each for key, each in gguf.GGUFReader(file, "r+").fields.items() if key.endswith(ending))
    field.parts[field.data[0]][:] = value
    field.parts[field.data[0]].flush()


def retold(source: Path, folder: Path, change: Callable[[Any], Any]) -> Any:
    """The model with another tokenizer.json; `change` of the one it has."""
    if not folder.exists():
        shutil.copytree(source, folder)
    stated = json.loads((source / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(change(stated)))
    return open_model(str(folder))


OWN = {"Q4_0": scheme("int4", granularity="group", group=32, symmetric=True), "Q4_1": scheme()}


@pytest.mark.parametrize(
    ("kind", "how"), [*((name, WeightScheme(format=name.lower())) for name in TYPES), *OWN.items()]
)
def test_blocks_are_what_the_package_reads(kind: str, how: WeightScheme) -> None:
    """Of formats that are called as ggml's types, and of integers of our own that a type holds."""
    torch.manual_seed(0)
    tensor = load_format(how.format).quantize(torch.randn(3, 512), how)
    name, raw = writer.packed(tensor)
    assert name == kind == type_of(how)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(values, tensor.dense().numpy())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_are_the_bytes_that_the_package_writes(name: str) -> None:
    """Of weights none of which lies halfway between two values of MXFP4, where ggml goes towards zero."""
    weight = torch.randn(5, 768, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1], [3], [7], [50]]
    )
    weight[0, :32], weight[1, :32], weight[2, 32:64] = 0.0, -weight[1, :32].abs(), weight[2, 32:64].abs()
    tensor = load_format(name.lower()).quantize(weight, WeightScheme(format=name.lower()))
    wanted = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(writer.packed(tensor)[1], wanted)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_floats_are_the_bytes_that_the_package_writes(name: str) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 1e-6])  # halfway, both ways
    wanted = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(writer.floats(weight, name).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_was_decided(tmp_path: Path, sources: Callable[[str], Path], name: str) -> None:
    """transformers' reader undoes names, the order of rows and norms with code of its own."""
    made = written(sources(name), tmp_path / "out", scheme(), FLOAT)
    found = checks(made, FLOAT)
    assert {"gguf.tensors", "reload.gguf"} <= found.keys()
    assert all(each.ok for each in found.values()), found
    assert found["reload.gguf"].value < 1e-5


def test_half_precision_and_codes_of_the_embedding(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    # rows of no whole super-block: what stands in for its type
    options = {"floats": "float16", "embedding": {"format": "q6_k"}}
    made = written(sources("llama"), tmp_path / "out", WeightScheme(format="q4_0"), options)
    kinds = kinds_of(made)
    assert kinds["token_embd.weight"] == "Q8_0" and kinds["output.weight"] == "F16"
    assert kinds["blk.0.attn_q.weight"] == "Q4_0" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert all(each.ok for each in checks(made, options).values())
    assert all(each.ok for each in checks(made).values())  # a finished file says how it is stored


@pytest.mark.parametrize(
    ("name", "head", "floats"),
    [
        ("llama", False, "float16"),
        ("llama", True, "float32"),
        ("llama-tied", False, "bfloat16"),
        ("llama-tied", True, "float16"),
    ],
)
def test_what_the_file_holds_is_what_transformers_computes_with(
    tmp_path: Path, sources: Callable[[str], Path], name: str, head: bool, floats: str
) -> None:
    """The table by its codes, as the file has it, and a tied head in floats by the table's."""
    from transformers import AutoModelForCausalLM

    options = {"floats": floats, "embedding": {"format": "q4_0"}}
    made = written(sources(name), tmp_path / "out", WeightScheme(format="q5_0"), options, head=head)
    values = Values.of_results(made.source, made.stream, made.results)
    ids = torch.arange(24).reshape(2, 12) * 7
    theirs = AutoModelForCausalLM.from_pretrained(
        made.folder / "gguf", gguf_file=MODEL, dtype=torch.float32, attention_bias=name == "llama"
    )
    with torch.no_grad():
        wanted = theirs(ids).logits
    found = EXPORT.held(values, EXPORT.Options(**options)).running().answers(ids).all()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    decided = values.running().answers(ids).all()
    assert float((decided - wanted).abs().max() / wanted.abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("width", "kind", "to", "reason"),
    [
        (64, "Q5_0", "q5_0", "256 does not divide its width 64: 5.5 bits a weight, not 4.5"),
        (48, "F16", "float16", "32 does not divide its width 48: 16 bits a weight, not 4.5"),
    ],
)
def test_a_table_of_no_whole_blocks_falls_back(
    tmp_path: Path, merging_tokenizer: Any, width: int, kind: str, to: str, reason: str
) -> None:
    def narrow(name: str) -> WeightScheme | None:
        return WeightScheme(format="q4_0") if name.endswith("down_proj") else None  # K is 96

    options = {"floats": "float16", "embedding": {"format": "q4_k"}}
    source = saved(tmp_path / "m", merging_tokenizer, hidden_size=width)
    made = written(source, tmp_path / "out", narrow, options)
    (taken,) = made.decisions
    assert (taken.code, taken.from_, taken.to) == ("type-fallback", "q4_k", to)
    assert reason in taken.reason
    assert kinds_of(made)["token_embd.weight"] == kind
    assert all(each.ok for each in checks(made, options).values())


def test_a_tied_heads_codes_are_the_embeddings(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    made = written(sources("llama-tied"), tmp_path / "out", WeightScheme(format="q5_0"), FLOAT, head=True)
    kinds = kinds_of(made)
    assert kinds["token_embd.weight"] == "Q5_0" and "output.weight" not in kinds
    assert checks(made, FLOAT)["gguf.tensors"].ok


def row_out_of_place(rows: Any) -> None:
    rows[[0, 1]] = rows[[1, 0]]


def no_number(values: Any) -> None:
    values[0] = np.nan


@pytest.mark.parametrize(
    ("name", "change"), [("blk.1.ffn_up.weight", row_out_of_place), ("output_norm.weight", no_number)]
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, sources: Callable[[str], Path], name: str, change: Callable[[Any], None]
) -> None:
    made = written(sources("llama"), tmp_path / "out", scheme(), FLOAT)
    change_tensor(file_of(made), name, change)
    found = checks(made, FLOAT)["gguf.tensors"]
    assert not found.ok and name in found.where


def test_the_metadata_describe_the_model(tmp_path: Path, sources: Callable[[str], Path]) -> None:
    made = written(sources("llama"), tmp_path / "out", WeightScheme(format="q4_0"), FLOAT)
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file_of(made)).fields.items()}
    assert fields["general.architecture"] == "llama" and fields["general.name"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 2 and fields["llama.rope.dimension_count"] == 16
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert fields["tokenizer.ggml.pre"] == "gpt-2" and len(fields["tokenizer.ggml.tokens"]) == 260
    assert fields["tokenizer.ggml.bos_token_id"] == 256 and fields["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (WeightScheme(format="nf4"), "weights in nf4"),
        (scheme(granularity="group", group=64, symmetric=True), "int4 by group of 64"),
        (scheme("int8", granularity="channel"), "int8 by channel"),
        (scheme("int4", granularity="group", group=32, scale="float32"), "scales in float32"),
    ],
)
def test_other_schemes_are_refused(how: WeightScheme, said: str) -> None:
    with pytest.raises(InputError, match=f"layout-unsupported.*q_proj.*{said}"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec({"q_proj": how}))


def test_inputs_and_padding_are_refused() -> None:
    how = WeightScheme(format="q8_0")
    with pytest.raises(InputError, match="activations in int8"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec({"a": how}, activations={"a": ActivationScheme(format="int8")}))
    with pytest.raises(InputError, match="its last group is padded"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec({"a": how}, padded=["a"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu"}, "activation relu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 8}, "lets all tokens see all"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(changes: dict[str, Any], said: str) -> None:
    from transformers import LlamaConfig

    config = {**LlamaConfig().to_dict(), **changes}
    with pytest.raises(InputError, match=said):
        architecture_of("LlamaForCausalLM", config)


def test_an_unknown_architecture_is_refused_before_work(tmp_path: Path, merging_tokenizer: Any) -> None:
    source = open_model(str(saved(tmp_path / "olmo", merging_tokenizer, "olmo")))
    with pytest.raises(InputError, match=r"layout-unsupported.*OlmoForCausalLM.*LlamaForCausalLM"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec(source=source))


def test_a_tokenizer_that_llama_cpp_cannot_hold_is_refused(sources: Callable[[str], Path], tmp_path: Path) -> None:
    def extra(stated: Any) -> Any:
        stated["added_tokens"].append({**stated["added_tokens"][0], "id": 300, "content": "<extra>"})
        return stated

    for change, said in (
        (lambda stated: {**stated, "model": {"type": "Unigram", "vocab": []}}, r"gguf-tokenizer.*Unigram"),
        (lambda stated: {}, "tokenizer-damaged"),
        (extra, r"gguf-tokenizer.*id 300.*260 rows"),
    ):
        with pytest.raises(InputError, match=said):
            EXPORT.accepts(EXPORT.Options(), LayerSpec(source=retold(sources("llama"), tmp_path / "m", change)))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}


DIGITS = {"type": "Digits", "individual_digits": True}


def several(*parts: Any) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        ({"pre_tokenizer": BYTES}, ("gpt2", "gpt-2")),
        (several(DIGITS, BYTES), ("gpt2", "smollm")),
        ({"normalizer": {"type": "NFC"}, **several(SPLIT, {**BYTES, "use_regex": False})}, ("gpt2", "qwen2")),
        ({"model": {"byte_fallback": True}, "normalizer": {"type": "Replace"}}, ("llama", "default")),
    ],
)
def test_pre_tokenizers_go_by_what_they_split_by(stated: dict[str, Any], kind: tuple[str, str]) -> None:
    model = {"type": "BPE", "merges": [["a", "b"]], **stated.get("model", {})}
    assert kind_of({**stated, "model": model}, "here") == kind


def test_an_expression_of_its_own_is_refused() -> None:
    split = {**SPLIT, "pattern": {"Regex": r"\d+"}}
    model = {"type": "BPE", "merges": [["a", "b"]]}
    with pytest.raises(InputError, match=r"gguf-tokenizer.*pre-tokenizer"):
        kind_of({"model": model, "pre_tokenizer": split}, "here")
    with pytest.raises(InputError, match=r"gguf-tokenizer.*no merges"):
        kind_of({"model": {"type": "BPE", "merges": []}, "pre_tokenizer": BYTES}, "here")


def test_llama_3s_frequencies_are_transformers_own() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    found = rope_factors(config.to_dict())
    assert found is not None
    torch.testing.assert_close(plain / found, theirs)


WRITTEN = json.loads((Path(__file__).parents[1] / "reference/llama_cpp_types.json").read_text())
PLACES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}


@pytest.mark.parametrize(("model", "mixture"), [(model, name) for model, kinds in WRITTEN.items() for name in kinds])
def test_a_file_is_called_what_llama_cpp_calls_those_types(model: str, mixture: str) -> None:
    """`llama-quantize` writes the name that it was asked for, though another type stands in for most matrices."""
    sizes = configs.read(model)
    wrote = {
        name: [kind for kind, times in runs for _ in range(times)] for name, runs in WRITTEN[model][mixture].items()
    }
    tensors = []
    for matrix in sizes.inside():
        _, _, layer, rest = matrix.name.split(".", 3)
        name = PLACES.get(rest.rpartition(".")[2].removesuffix("_proj"), "ffn_down")
        kind = wrote[name][int(layer)].upper()
        tensors.append(
            StoredTensor(f"blk.{layer}.{name}.weight", kind, (matrix.N, matrix.K), bytes, f"{matrix.name}.weight")
        )  # type: ignore[arg-type]
    assert sizes.head is not None
    for end in ("token_embd", "output"):
        if end in wrote:
            shape = sizes.head.N, sizes.head.K
            tensors.append(StoredTensor(f"{end}.weight", wrote[end][0].upper(), shape, bytes, end))  # type: ignore[arg-type]
    found = gguf.LlamaFileType(file_type(tensors, "lm_head"))
    assert found.name == f"MOSTLY_{mixture.upper()}"


@pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
def test_llama_cpp_writes_what_it_was_asked_for(sources: Callable[[str], Path], tmp_path: Path) -> None:
    import llama_cpp

    made = written(sources("llama"), tmp_path / "b", None, FLOAT)
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype, asked.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    out = tmp_path / "q4_k_m.gguf"
    assert llama_cpp.llama_model_quantize(str(file_of(made)).encode(), str(out).encode(), asked) == 0
    reader = gguf.GGUFReader(out)
    kinds = {each.tensor_type.name for each in reader.tensors if len(each.shape) > 1 and "blk" in each.name}
    assert kinds == {"Q5_0", "Q8_0"}, "no super-block divides its rows"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


def test_a_file_alone_is_read_and_run(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """`verify` of a bundle that holds nothing else."""
    made = written(sources("llama"), tmp_path / "b", WeightScheme(format="q8_0"), FLOAT)
    alone = tmp_path / "alone"
    shutil.copytree(made.folder / "gguf", alone / "gguf")
    found = by_name(EXPORT.check(alone))
    wanted = {"gguf.tensors", *(["gguf.logits"] if machine.has("llama_cpp") else [])}
    assert found.keys() == wanted and all(check.ok for check in found.values())
    # the scale of a block: infinity, or no number
    change_tensor(alone / "gguf" / MODEL, "blk.0.ffn_up.weight", lambda rows: rows[:, 1].fill(0x7C))
    assert not by_name(EXPORT.check(alone))["gguf.tensors"].ok


@pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
def test_llama_cpp_s_logits_are_held_against_the_codes(sources: Callable[[str], Path], tmp_path: Path) -> None:
    made = written(sources("llama"), tmp_path / "b", WeightScheme(format="q8_0"), FLOAT)
    assert checks(made, FLOAT)["reload.llama_cpp"].ok
    # the tensors are what they were, and a norm computes something else
    change_field(file_of(made), "llama.attention.layer_norm_rms_epsilon", 1.0)
    found = checks(made, FLOAT)
    assert found["gguf.tensors"].ok and not found["reload.llama_cpp"].ok


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_type": "llama3", **LLAMA3}),
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0}),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0}),
    "gemma3's linear": ("gemma3", {"rope_type": "linear", "factor": 8.0}),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embedding_that_is_scaled(tmp_path: Path, merging_tokenizer: Any, kind: str) -> None:
    """transformers' reader is told of it, so a file that does not say it is held against the config."""
    name, how = ROPES[kind]
    scaled = {"rope_theta": 10000.0, **how}
    local = {"rope_type": "default", "rope_theta": 5000.0}
    ropes = {"full_attention": scaled, "sliding_attention": local} if name == "gemma3" else scaled
    source = saved(tmp_path / "m", merging_tokenizer, name, **MODELS[name], rope_parameters=ropes)
    made = written(source, tmp_path / "out", scheme(), FLOAT)
    found = checks(made, FLOAT)
    assert all(each.ok for each in found.values()), found
    field = "rope.freq_base" if kind == "llama3" else "rope.scaling.factor"
    change_field(file_of(made), field, 3.0)
    said = checks(made, FLOAT)["gguf.fields"]
    assert not said.ok and field in said.where


def test_a_tokenizer_that_leaves_spaces_out_has_a_decision(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """SentencePiece's BPE whose spaces Metaspace puts there: of a text that begins with one llama.cpp has two."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 258, "▁x": 259, "x": 260, "<unk>": 261}
    vocabulary |= {"<s>": 256, "</s>": 257}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    ahead = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}

    def told(stated: Any, **more: Any) -> Any:
        stated["model"] |= {"byte_fallback": True, "vocab": vocabulary, "merges": [["▁", "x"]], "unk_token": "<unk>"}
        return stated | {"decoder": metaspace} | more

    for more, wanted in (({"pre_tokenizer": metaspace}, True), ({"pre_tokenizer": None, "normalizer": ahead}, False)):
        source = retold(sources("llama"), tmp_path / "m", lambda stated, more=more: told(stated, **more))
        assert spaced(source) is wanted


def sentencepiece(first: bool) -> Any:
    """A tokenizer of 288 tokens that spells in bytes, and puts a space before texts or before the first word alone."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abefhnortux"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "x"), ("▁", "f"), ("▁f", "o"), ("▁", "▁")]
    words += [left + right for left, right in merges]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.skipif(not machine.has("llama_cpp"), reason="llama-cpp-python compiles for minutes")
@pytest.mark.parametrize("first", [False, True])
def test_tokens_of_sentencepiece(tmp_path: Path, first: bool) -> None:
    """Spaces and special tokens amid a text are llama.cpp's own; of Metaspace they differ, and are left out."""
    found = sentencepiece(first)
    found.chat_template = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
    made = written(saved(tmp_path / "m", found), tmp_path / "out", None, FLOAT)
    assert [each.code for each in made.decisions] == (["tokens-differ"] if first else [])
    values = Values.of_results(made.source, made.stream, made.results)
    assert check._tokens(file_of(made), values, spaced=first).ok
    assert check._tokens(file_of(made), values, spaced=False).ok is not first


@pytest.mark.parametrize("beyond", [1, 5])
def test_tokens_beyond_the_table_are_left_out_of_sentencepiece(tmp_path: Path, beyond: int) -> None:
    """As llama.cpp's converter has it; one that ends or begins a text cannot be, nor any of a byte-level BPE."""
    tokenizer = sentencepiece(False)
    rows, words = len(tokenizer), {number: token for token, number in tokenizer.get_vocab().items()}
    tokenizer.add_tokens([f"<image{i}>" for i in range(beyond)], special_tokens=True)
    made = written(saved(tmp_path / "m", tokenizer, vocab_size=rows), tmp_path / "out", None, FLOAT)
    EXPORT.accepts(EXPORT.Options(), LayerSpec(source=made.source))
    (taken,) = made.decisions
    assert taken.code == "tokens-beyond" and str(taken.model_dump(by_alias=True)["from"]).startswith("<image0>")
    held = gguf.GGUFReader(file_of(made)).fields["tokenizer.ggml.tokens"].contents()
    assert held == [words[number] for number in range(rows)]
    tokenizer.eos_token = "<image0>"
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=rf"gguf-tokenizer.*a token has the id {rows}.*has {rows} rows"):
        EXPORT.accepts(EXPORT.Options(), LayerSpec(source=open_model(str(tmp_path / "m"))))
