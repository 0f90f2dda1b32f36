"""Opening models: what is found, what is assigned, what is refused and how."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from zoo import ARCHITECTURES, ids, tiny

from quantkit.errors import InputError
from quantkit.model.source.open import Source, open_model, untied
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.names import match_names


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def saved(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder with a tiny model in it, as `save_pretrained` leaves it."""
    changes = options.pop("changes", {})
    tiny(name, **changes).to(dtype).save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def filled(source: Source) -> Any:
    """The skeleton with every tensor in its place."""
    skeleton = source.skeleton()
    for name, file in match_names(source.weights, skeleton).items():
        owner = skeleton.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        value = source.weights.read(file).float()
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[leaf] = value
    return skeleton


def refused(folder: Path | str, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        source = open_model(str(folder), **options)
        match_names(source.weights, source.skeleton())
    assert "\n" not in caught.value.line()
    return caught.value


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_filled_skeleton_is_the_model(name: str, tmp_path: Path) -> None:
    source = open_model(str(saved(tmp_path / "model", name)))
    assert source.kind == ("encoder" if name == "bert" else "decoder")
    assert source.ref == "path:model" and source.name == "model"
    assert source.architecture == ARCHITECTURES[name][0]
    skeleton = source.skeleton()
    assert all(parameter.is_meta for parameter in skeleton.parameters()) and not skeleton.training
    with torch.no_grad():
        ours, theirs = filled(source)(ids()), tiny(name)(ids())
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_stored_dtype_is_told(dtype: torch.dtype, tmp_path: Path) -> None:
    source = open_model(str(saved(tmp_path / "model", dtype=dtype)))
    assert source.dtype == str(dtype).removeprefix("torch.")
    assert source.weights.read("model.norm.weight").dtype == dtype
    assert next(source.skeleton().parameters()).dtype == torch.float32


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    one = open_model(str(saved(tmp_path / "one")))
    many = open_model(str(saved(tmp_path / "many", max_shard_size="100KB")))
    assert len(many.weights.shards) > 2
    with torch.no_grad():
        assert torch.equal(filled(one)(ids()).logits, filled(many)(ids()).logits)
    assert one.sha256 != many.sha256


def test_first_blocks_are_loaded_without_the_shards_of_the_others(tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="20KB", changes={"num_hidden_layers": 3})
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    source = open_model(str(folder))
    expected = source.load(1).state_dict()
    first = {shard for name, shard in shards.items() if ".1." not in name and ".2." not in name}
    others = set(shards.values()) - first
    assert others
    for shard in others:
        (folder / shard).write_bytes(b"")
    found = source.load(1).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_an_image_model_is_a_network(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "vit")
    source = open_model(str(tmp_path / "vit"))
    assert source.kind == "network"
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(filled(source)(images).logits, model(images).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_config_without_architectures_means_the_usual_class(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name)
    edit_config(folder, architectures=None)
    source = open_model(str(folder))
    assert source.architecture == ARCHITECTURES[name][0]
    assert match_names(source.weights, source.skeleton())


@pytest.mark.parametrize("twice", [False, True])
def test_an_untied_model_has_a_head_of_its_own(twice: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama-tied")
    if twice:
        edit_weights(
            folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        )
    source = open_model(str(folder))
    files = match_names(source.weights, source.skeleton())
    assert files["lm_head.weight"] == files["model.embed_tokens.weight"]
    apart = untied(source, files)
    assert (apart.untied, apart.config["tie_word_embeddings"], apart.sha256) == (True, False, source.sha256)
    found = match_names(apart.weights, apart.skeleton())
    assert (found["lm_head.weight"], found["model.embed_tokens.weight"]) == (
        "lm_head.weight",
        "model.embed_tokens.weight",
    )
    assert torch.equal(apart.weights.read("lm_head.weight"), source.weights.read("model.embed_tokens.weight"))
    table = source.weights.entries["model.embed_tokens.weight"].bytes
    assert apart.weights.total_bytes() == source.weights.total_bytes() + (0 if twice else table)
    assert source.config["tie_word_embeddings"] is True
    with torch.no_grad():
        assert torch.equal(filled(apart)(ids()).logits, tiny("llama-tied")(ids()).logits)


def test_what_ties_nothing_is_untied_already(tmp_path: Path) -> None:
    source = open_model(str(saved(tmp_path / "model", "llama")))
    assert untied(source, match_names(source.weights, source.skeleton())) is source


# names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("llama", "model."), ("opt", "model.")])
def test_a_file_without_the_base_models_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name)
    edit_weights(folder, lambda tensors: {key.removeprefix(prefix): value for key, value in tensors.items()})
    source = open_model(str(folder))
    with torch.no_grad():
        assert torch.equal(filled(source)(ids()).logits, tiny(name)(ids()).logits)


def test_a_file_with_a_prefix_that_the_class_lacks(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "bert")
    head = {"cls.predictions.bias": torch.zeros(96)}
    edit_weights(folder, lambda tensors: {f"bert.{key}": value for key, value in tensors.items()} | head)
    source = open_model(str(folder))
    names = match_names(source.weights, source.skeleton())
    assert source.weights.entries.keys() - names.values() == {"cls.predictions.bias"}
    assert names["embeddings.word_embeddings.weight"] == "bert.embeddings.word_embeddings.weight"
    with torch.no_grad():
        assert torch.equal(filled(source)(ids())[0], tiny("bert")(ids())[0])


def test_names_from_before_a_renaming(tmp_path: Path) -> None:
    def old(key: str) -> str:
        return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    folder = saved(tmp_path / "model", "bert")
    edit_weights(folder, lambda tensors: {old(key): value for key, value in tensors.items()})
    source = open_model(str(folder))
    assert match_names(source.weights, source.skeleton())["embeddings.LayerNorm.weight"] == "embeddings.LayerNorm.gamma"


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama-tied")
    source = open_model(str(folder))
    assert "lm_head.weight" not in source.weights.entries
    assert match_names(source.weights, source.skeleton())["lm_head.weight"] == "model.embed_tokens.weight"

    def other_way(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    edit_weights(folder, other_way)
    source = open_model(str(folder))
    names = match_names(source.weights, source.skeleton())
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"] == "lm_head.weight"


def test_a_tied_head_stored_twice_is_one_or_an_error(tmp_path: Path) -> None:
    def twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    folder = saved(tmp_path / "model", "llama-tied")
    edit_weights(folder, twice)
    source = open_model(str(folder))
    names = match_names(source.weights, source.skeleton())
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"]

    edit_weights(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 2})
    assert refused(folder).code == "weights-tied"


def test_stored_rotary_tables_and_masks_are_not_missed_nor_used(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    edit_weights(folder, lambda tensors: tensors | extra)
    source = open_model(str(folder))
    assert source.weights.entries.keys() - match_names(source.weights, source.skeleton()).values() == extra.keys()

    folder = saved(tmp_path / "gpt2", "gpt2")
    edit_weights(folder, lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)})
    source = open_model(str(folder))
    unused = source.weights.entries.keys() - match_names(source.weights, source.skeleton()).values()
    assert unused == {"transformer.h.0.attn.bias"}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    gone = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: {key: value for key, value in tensors.items() if key != gone})
    error = refused(folder)
    assert error.code == "weights-missing" and error.where == gone and "1 of" in error.value


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_weights_of_a_dtype_that_weights_do_not_have(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    odd = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: {**tensors, odd: tensors[odd].to(dtype)})
    error = refused(folder)
    assert error.code == "weights-dtype" and odd in error.where and "bfloat16" in error.rule


def test_a_shape_other_than_the_configs(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_config(folder, intermediate_size=128)
    error = refused(folder)
    assert error.code == "weights-shape" and "[96, 64]" in error.value and "[128, 64]" in error.rule


@pytest.mark.parametrize(
    ("extra", "changes"),
    [
        ("model.layers.0.self_attn.q_proj.bias", {}),  # would be dropped without a word
        ("model.layers.0.self_attn.q_norm.weight", {}),  # another architecture
        ("model.layers.2.mlp.up_proj.weight", {"num_hidden_layers": 2}),  # layers that the config does not have
    ],
)
def test_a_tensor_that_the_config_would_drop(extra: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_weights(folder, lambda tensors: {extra: torch.ones(64), **tensors})
    edit_config(folder, **changes)
    assert refused(folder).code == "weights-unexpected"


def test_two_tensors_for_one_parameter(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "gpt2")
    edit_weights(folder, lambda t: t | {"h.0.ln_1.weight": torch.ones(64)})
    assert refused(folder).code == "weights-ambiguous"


def test_what_is_merged_while_loading_and_cannot_be_taken_apart_is_read_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.model.structure.experts.split", lambda *_: None)
    settings = {**ARCHITECTURES["llama"][2], "num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))
    model.save_pretrained(tmp_path / "moe")
    stream = StreamedModel(open_model(str(tmp_path / "moe")))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(stream.tensor(name), model.get_parameter(name))


# folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "code"),
    [
        (None, "config-missing"),
        ("[]", "config-invalid"),
        ('{"architectures": ["Llama', "config-invalid"),
        ('{"model_type": "llama", "model_type": "opt"}', "config-invalid"),
        ("{}", "config-invalid"),
        ({"hidden_size": "many"}, "config-invalid"),
        ({"num_attention_heads": 0}, "config-invalid"),
        ({"model_type": "bert"}, "config-invalid"),
        ({"architectures": "LlamaForCausalLM"}, "config-invalid"),
        ({"architectures": ["LlamaForCausalML"]}, "architecture-unknown"),
        ({"architectures": None, "model_type": "lama"}, "architecture-unknown"),
        ({"architectures": ["pipeline"]}, "architecture-unknown"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already-quantized"),
    ],
)
def test_a_spoilt_config(stated: str | dict[str, Any] | None, code: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    if stated is None:
        (folder / "config.json").unlink()
    elif isinstance(stated, str):
        (folder / "config.json").write_text(stated)
    else:
        edit_config(folder, **stated)
    error = refused(folder)
    assert error.code == code and (error.remedy or error.rule)
    if stated == {"architectures": ["LlamaForCausalML"]}:
        assert "did you mean LlamaForCausalLM?" in error.remedy


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.float8_e4m3fn, "already-quantized"), (torch.float64, "weights-dtype")]
)
def test_weights_of_another_dtype(dtype: torch.dtype, code: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    edit_weights(folder, lambda tensors: {key: value.to(dtype) for key, value in tensors.items()})
    assert refused(folder).code == code


def test_packed_missing_and_pickled_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    edit_weights(folder, lambda tensors: tensors | {"model.layers.0.mlp.up_proj.qweight": torch.ones(2, 2).int()})
    assert refused(folder).code == "already-quantized"
    (folder / "model.safetensors").unlink()
    assert refused(folder).code == "weights-absent"
    torch.save(tensors, folder / "pytorch_model.bin")
    assert refused(folder).code == "weights-pickle"


def test_an_encoder_decoder_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    transformers.T5Model(config).save_pretrained(tmp_path / "t5")
    assert refused(tmp_path / "t5").code == "architecture-unsupported"


def test_the_hash_is_of_config_weights_and_tokenizer(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert open_model(str(one)).sha256 == open_model(str(two)).sha256
    (two / "README.md").write_text("other words")
    assert open_model(str(one)).sha256 == open_model(str(two)).sha256
    edit_weights(two, lambda tensors: {key: value + 1 for key, value in tensors.items()})
    changed = open_model(str(two)).sha256
    assert changed != open_model(str(one)).sha256
    (two / "tokenizer.json").write_text("{}")
    assert open_model(str(two)).sha256 != changed


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    shutil.move(folder / "config.json", tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert refused(folder).code == "weights-outside"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    monkeypatch.setattr(
        "os.access", lambda path, mode: Path(path).name != "model.safetensors"
    )  # root may read anything
    assert refused(folder).code == "file-unreadable"


# references -----------------------------------------------------------------------------------------------------------


def test_a_bare_word_is_never_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    error = refused("mine")
    assert error.code == "unknown-model" and error.remedy.startswith("did you mean ./mine?")
    assert open_model("./mine").name == "mine"


def test_a_misspelt_alias(tmp_path: Path) -> None:
    error = refused("smolm2-135m")
    assert error.code == "unknown-model" and "did you mean 'smollm2-135m'?" in error.remedy
    assert "hf:org/name" in refused("org/name").remedy


def test_a_path_that_is_not_there_or_no_folder(tmp_path: Path) -> None:
    assert refused("./nowhere").code == "file-missing"
    assert refused("~nobody-by-that-name/model").code == "file-missing"
    (tmp_path / "model.pt").write_bytes(b"1")
    assert refused(tmp_path / "model.pt").code == "not-a-folder"
    (tmp_path / "model.onnx").write_bytes(b"1")
    assert refused(tmp_path / "model.onnx").code == "model-graph"


def test_a_hub_model_is_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = saved(tmp_path / "plain")
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "0a1", tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in plain.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    asked = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = open_model("hf:org/Name-2.5B@main")
    assert (source.ref, source.name) == ("hf:org/Name-2.5B@main", "Name-2.5B")
    assert (asked["repository"], asked["revision"]) == ("org/Name-2.5B", "main")
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["allow_patterns"])
    assert source.sha256 == open_model(str(plain)).sha256


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(repository: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the snapshot\nplease check your connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    error = refused("hf:org/name")
    assert error.code == "hub-unreachable" and error.value == "cannot find the snapshot"


@pytest.mark.parametrize("ref", ["hf:", "hf:name", "hf:../up", "hf:a/b/c", "hf:org/na me"])
def test_a_hub_id_that_is_none(ref: str) -> None:
    assert refused(ref).code == "unknown-model"


# code and tokenizers --------------------------------------------------------------------------------------------------

REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
(Path(%r) / "ran").touch()
class OddConfig(LlamaConfig):
    model_type = "odd-llama"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def with_code(folder: Path, architecture: str) -> Path:
    saved(folder)
    (folder / "odd.py").write_text(REMOTE % str(folder))
    edit_config(
        folder,
        architectures=[architecture],
        auto_map={"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": f"odd.{architecture}"},
    )
    return folder


def test_a_models_own_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = with_code(tmp_path / "odd", "OddForCausalLM")
    edit_config(folder, model_type="odd-llama")
    error = refused(folder)
    assert error.code == "remote-code" and "--trust-remote-code" in error.remedy
    assert not (folder / "ran").exists()
    source = open_model(str(folder), trust_remote_code=True)
    assert (folder / "ran").exists() and source.architecture == "OddForCausalLM" and source.kind == "decoder"
    with torch.no_grad():
        assert torch.equal(filled(source)(ids()).logits, tiny("llama")(ids()).logits)


def test_code_for_a_class_that_transformers_has_is_left_alone(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "plain", "LlamaForCausalLM")
    source = open_model(str(folder))
    source.skeleton()
    assert not (folder / "ran").exists() and "auto_map" in source.notes[0]


def test_a_missing_tokenizer_is_refused_when_it_is_needed(tmp_path: Path, byte_tokenizer: Any) -> None:
    folder = saved(tmp_path / "model")
    source = open_model(str(folder))
    with pytest.raises(InputError) as caught:
        source.tokenizer()
    assert caught.value.code == "tokenizer-missing" and "tokenizer files" in caught.value.remedy
    byte_tokenizer.save_pretrained(folder)
    assert source.tokenizer()("ab")["input_ids"] == byte_tokenizer("ab")["input_ids"]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"\[tokenizer-damaged\]"):
        source.tokenizer()
