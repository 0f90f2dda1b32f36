"""Adapters: merged as PEFT merges them, or refused in one line before any work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from exported import export, scheme
from safetensors.torch import load_file, save_file
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.adapter import Adapter
from quantkit.model.source.merged import merge, open_merged, open_origin
from quantkit.model.source.open import Source, open_model
from quantkit.model.streaming import own_forward
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.names import match_names

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def saved(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    zoo.tiny(name, **changes).to(dtype).save_pretrained(folder)  # type: ignore[operator]
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()


def trained(base: Path, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write an adapter whose values are all random, as after a training."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, **settings}
    model = peft.get_peft_model(loaded(base, dtype), peft.LoraConfig(**settings), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    for _, value in sorted((name, value) for name, value in model.named_parameters() if value.requires_grad):
        value.data = value.data + 0.2 * torch.randn(value.shape, generator=generator).to(value.dtype)
    model.save_pretrained(folder, save_embedding_layers="auto")
    return folder


def by_peft(base: Path, *adapters: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = loaded(base, dtype)
    for adapter in adapters:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(model.state_dict())


def ours(source: Source) -> dict[str, torch.Tensor]:
    files = match_names(source.weights, source.skeleton())
    return {name: source.weights.read(file) for name, file in files.items()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {}),
        ("llama", {"use_rslora": True}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
        ("llama", {"target_modules": r".*layers\.[02]\..*(up|down)_proj"}),
        ("llama", {"rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 8}, "alpha_pattern": {"v_proj": 1}}),
        ("llama", {"modules_to_save": ["lm_head", "norm"]}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("llama", {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True}),
        ("llama", {"layers_to_transform": [1], "exclude_modules": ["v_proj"]}),
        ("qwen2", {"bias": "all"}),
        ("qwen2", {"bias": "lora_only", "lora_bias": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    ],
)
def test_a_merge_is_peft_s(model: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = saved(tmp_path / "base", model)
    adapter = trained(base, tmp_path / "adapter", **settings)
    source = open_merged(str(base), [str(adapter)])
    before, after, theirs = ours(open_model(str(base))), ours(source), by_peft(base, adapter)
    assert apart(after, theirs) <= 1e-6
    assert apart(before, theirs) > 1e-2
    assert source.name == "base+adapter" and source.kind == "decoder"


def test_an_adapter_goes_onto_the_opened_values_of_a_quantized_source(tmp_path: Path) -> None:
    floats = saved(tmp_path / "floats")
    packed = export(floats, tmp_path / "bundle", scheme(), layout="pack-quantized", norms=1.0).model
    opened, dense = open_model(str(packed)).weights, shutil.copytree(floats, tmp_path / "dense")
    tensors = {name: opened.read(name) for name in opened.entries}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    adapter = trained(dense, tmp_path / "adapter")
    source = open_merged(str(packed), [str(adapter)])
    assert source.was == "compressed-tensors int4 group 32"
    assert apart(ours(source), by_peft(dense, adapter)) < 1e-6
    assert own_forward.demand_equal(StreamedModel(source), zoo.ids(4, 32), 3).ok


def test_two_adapters_are_merged_one_after_the_other(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    one = trained(base, tmp_path / "one", seed=1, use_dora=True)
    two = trained(base, tmp_path / "two", seed=2, r=2, use_dora=True)
    first, second = (open_merged(str(base), order) for order in ([str(one), str(two)], [str(two), str(one)]))
    assert apart(ours(first), by_peft(base, one, two)) <= 1e-6
    assert apart(ours(first), ours(second)) > 1e-3
    assert len({first.sha256, second.sha256, open_model(str(base)).sha256}) == 3
    assert first.name == "base+one+two"


def test_in_half_precision_it_is_rounded_once(tmp_path: Path) -> None:
    """Each value is the bfloat16 nearest to the exact sum, and no further from it than PEFT's."""
    half = torch.bfloat16
    base = saved(tmp_path / "base", dtype=half)
    adapter = trained(base, tmp_path / "adapter", dtype=half)
    merged, theirs = ours(open_merged(str(base), [str(adapter)])), by_peft(base, adapter, dtype=half)
    exact: dict[str, torch.Tensor] = {name: value.double() for name, value in ours(open_model(str(base))).items()}
    opened = Adapter.open(adapter)
    for module, low in opened.parts.items():
        a, b = (opened.weights.read(str(name)).double() for name in (low.a, low.b))
        exact[f"{module}.weight"] += opened.factor(module) * (b @ a)
    assert all(value.dtype == half for value in merged.values())
    assert apart(merged, {name: value.to(half) for name, value in exact.items()}) == 0
    assert apart(merged, exact) <= apart(theirs, exact)


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["embed_tokens"]}, {"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}],
)
def test_what_shares_a_tensor_is_parted_and_computes_as_with_the_adapter_beside_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", "llama-tied")
    adapter = trained(base, tmp_path / "adapter", **settings)
    source = open_merged(str(base), [str(adapter)])
    assert source.untied and "no longer share" in source.notes[-1]
    ids = zoo.ids(2, 12)
    beside = peft.PeftModel.from_pretrained(loaded(base), adapter).eval()
    with torch.no_grad():
        expected = beside(input_ids=ids).logits
    stream = StreamedModel(source)
    assert torch.allclose(stream.answers(ids).all(), expected, atol=1e-4)
    assert own_forward.demand_equal(stream, zoo.ids(5, 24), len(stream.block_names)).ok


@pytest.mark.parametrize("blocks", [1, 3])
def test_transformers_loads_what_is_merged(blocks: int, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama", max_shard_size=None)
    adapter = trained(base, tmp_path / "adapter", use_dora=True, target_modules="all-linear")
    stream = StreamedModel(open_merged(str(base), [str(adapter)]))
    assert own_forward.demand_equal(stream, zoo.ids(5, 24), blocks).value < 1e-5  # type: ignore[operator]


def test_blocks_on_disk_have_the_merged_weights(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter")
    source = open_merged(str(base), [str(adapter)])
    stream, ids = StreamedModel(source), zoo.ids(2, 12)
    with own_forward.on_disk(stream.skeleton, stream.paths) as placed, torch.no_grad():
        logits = source.load(None, placed)(input_ids=ids, use_cache=False).logits
    assert torch.allclose(stream.answers(ids).all(), logits, atol=1e-4)


def test_an_expert_of_its_own_name_is_merged(tmp_path: Path) -> None:
    """An adapter of an older transformers names the experts as the files do."""
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    zoo.mixture("qwen3").save_pretrained(folder)  # type: ignore[operator]
    adapter.mkdir()
    module = "model.layers.1.mlp.experts.2.gate_proj"
    a, b = torch.randn(2, 64), torch.randn(32, 2)
    save_file(
        {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    before, after = ours(open_model(str(folder))), ours(open_merged(str(folder), [str(adapter)]))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [f"{module}.weight"]
    assert torch.allclose(after[changed[0]], before[changed[0]] + 2 * (b @ a), atol=1e-6)
    stream = StreamedModel(open_merged(str(folder), [str(adapter)]))
    assert own_forward.demand_equal(stream, zoo.ids(5, 24), 2).ok


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("parameters", [["down_proj", "gate_up_proj"], ["gate_up_proj"]])
def test_merged_experts_are_targets(name: str, parameters: list[str], tmp_path: Path) -> None:
    """PEFT's `target_parameters`: one A and one B for all experts of a layer."""
    base = tmp_path / "base"
    shrink.tiny(name, base)
    targets = [f"experts.{parameter}" for parameter in parameters]
    adapter = trained(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=targets)
    assert Adapter.at(str(adapter)).ranks == [4]
    source = open_merged(str(base), [str(adapter)])
    before, theirs = loaded(base).state_dict(), by_peft(base, adapter)
    after = source.load().state_dict()
    assert apart(dict(after), theirs) <= 1e-6
    changed = {key.rpartition(".")[2] for key in theirs if not torch.equal(before[key], theirs[key])}
    assert set(parameters) < changed
    assert own_forward.demand_equal(StreamedModel(source), shrink.ids(), 2).ok


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    base, wide = tmp_path / "base", tmp_path / "wide"
    zoo.mixture("qwen3").save_pretrained(base)  # type: ignore[operator]
    zoo.mixture("qwen3", moe_intermediate_size=64).save_pretrained(wide)  # type: ignore[operator]
    error = refused(base, trained(wide, tmp_path / "a", target_modules=[], target_parameters=["experts.down_proj"]))
    assert error.code == "adapter-misfit"
    dense = saved(tmp_path / "dense")
    error = refused(dense, trained(base, tmp_path / "b", target_modules=[], target_parameters=["experts.down_proj"]))
    assert error.code == "adapter-misfit" and "no such weight" in error.line()


def test_onto_a_quantized_source_it_is_merged_onto_the_opened_weights(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", dtype=torch.bfloat16)
    adapter = trained(base, tmp_path / "adapter")
    folder = tmp_path / "fp8"
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax().reshape(1, 1) / 448
        tensors |= {name: (tensors[name].float() / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edited = json.loads((folder / "config.json").read_text()) | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(edited))
    opened, source = open_model(str(folder)), open_merged(str(folder), [str(adapter)])
    before, after, one = ours(opened), ours(source), Adapter.at(str(adapter))
    for module, low in one.parts.items():
        a, b = (one.weights.read(str(name)).float() for name in (low.a, low.b))
        expected = before[f"{module}.weight"].float() + one.factor(module) * (b @ a)
        assert torch.equal(after.pop(f"{module}.weight"), expected.to(torch.bfloat16))
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert source.quantization is not None and source.was == opened.was and source.dtype == "bfloat16"
    stream = StreamedModel(source)
    assert own_forward.demand_equal(stream, zoo.ids(5, 24), len(stream.block_names)).ok
    written = open_model(str(source.in_files().path))
    assert written.quantization is None and apart(ours(written), ours(source)) == 0


def test_the_merged_model_as_files_is_the_merged_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    zoo.tiny("llama-tied").save_pretrained(base, max_shard_size="60KB")  # type: ignore[operator]
    adapter = trained(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    source = open_merged(str(base), [str(adapter)])
    written = source.in_files()
    assert written.path != source.path and written.in_files().path == source.in_files().path
    assert apart(ours(source), ours(open_model(str(written.path)))) == 0
    plain = open_model(str(base))
    assert plain.in_files() is plain


def test_what_it_was_made_from_is_found_again_as_long_as_it_is_unchanged(tmp_path: Path) -> None:
    from quantkit.bundle import AdapterEntry, SourceEntry

    base = saved(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter")
    source = open_merged(str(base), [str(adapter)])
    assert source.base is not None
    entry = SourceEntry(
        ref=source.ref,
        sha256=source.sha256,
        dtype=source.dtype,
        base=source.base.sha256,
        adapters=[AdapterEntry.model_validate(one.about()) for one in source.adapters],
    )
    assert SourceEntry.model_validate(entry.model_dump()) == entry
    again = open_origin(entry)
    assert again is not None and again.sha256 == source.sha256
    source.demand_unchanged()
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: value + 1 for name, value in tensors.items()}, path)
    assert open_origin(entry) is None
    with pytest.raises(InputError, match="source-changed"):
        source.demand_unchanged()


# --- what is refused -------------------------------------------------------------------------------------------------


def config(adapter: Path, **changes: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(base: Path, adapter: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        merge(open_model(str(base)), Adapter.at(str(adapter)))
    assert "\n" not in caught.value.line()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "adapter-kind", "changes no weight"),
        ({"peft_type": "IA3"}, "adapter-kind", "merge_and_unload"),
        ({"peft_type": "LOHA"}, "adapter-kind", "merge_and_unload"),
        ({"peft_type": None}, "adapter-kind", "of no known kind"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "adapter-kind", "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "adapter-kind", "alora_invocation_tokens"),
        ({"trainable_token_indices": [5]}, "adapter-kind", "trainable_token_indices"),
        ({"use_something_new": True}, "adapter-kind", "use_something_new"),
        ({"init_lora_weights": "pissa"}, "adapter-kind", "base model"),
        ({"lora_alpha": "much"}, "adapter-invalid", "alpha is a number"),
        ({"alpha_pattern": {"(": 3}}, "adapter-invalid", "regular expression"),
        ({"use_dora": True}, "adapter-invalid", "magnitudes"),
    ],
)
def test_a_kind_that_is_not_merged_is_refused(
    changes: dict[str, object], code: str, words: str, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter")
    config(adapter, **changes)
    error = refused(base, adapter)
    assert error.code == code and words in error.line()


def test_the_remedy_names_the_model_that_was_given(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter")
    config(adapter, peft_type="IA3", base_model_name_or_path="org/base")
    with pytest.raises(InputError, match="adapter-kind") as caught:
        open_merged(str(base), [str(adapter)])
    # the class of the base: AutoModelForCausalLM opens no T5
    assert f"transformers.LlamaForCausalLM.from_pretrained({str(base)!r})" in caught.value.remedy
    assert "org/base" not in caught.value.remedy
    (adapter / "adapter_model.safetensors").unlink()
    config(adapter, peft_type="LORA")
    with pytest.raises(InputError, match=r"adapter-invalid.*save it again"):
        open_merged(str(base), [str(adapter)])


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, wide = saved(tmp_path / "base"), saved(tmp_path / "wide", hidden_size=32, head_dim=16)
    other, deep = saved(tmp_path / "gpt2", "gpt2"), saved(tmp_path / "deep", num_hidden_layers=5)
    error = refused(base, trained(wide, tmp_path / "a"))
    assert error.code == "adapter-misfit" and "[4, 32], not [4, 64]" in error.line()
    assert "wide" in error.remedy
    error = refused(base, trained(other, tmp_path / "b", target_modules=["c_attn"]))
    assert error.code == "adapter-misfit" and "3 of 3 are missing" in error.line()
    error = refused(base, trained(deep, tmp_path / "c"))
    assert error.code == "adapter-misfit" and "4 of 10 are missing" in error.line()


def test_it_is_refused_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, wide = saved(tmp_path / "base"), saved(tmp_path / "wide", hidden_size=32, head_dim=16)
    adapter = trained(wide, tmp_path / "a")

    def read(*_: object, **__: object) -> str:
        raise AssertionError("the files are hashed")

    monkeypatch.setattr("quantkit.model.source.open.identity", read)
    with pytest.raises(InputError, match="adapter-misfit"):
        open_merged(str(base), [str(adapter)])


def test_a_folder_without_an_adapter_and_pickles_are_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    adapter = trained(base, tmp_path / "adapter")
    assert refused(base, tmp_path / "nowhere").code == "file-missing"
    assert refused(base, base).code == "adapter-invalid"
    with pytest.raises(InputError, match=r"adapter-invalid.*\./french"):
        open_merged(str(base), ["french"])
    weights = adapter / "adapter_model.safetensors"
    flat = {name: value[:0] for name, value in load_file(weights).items()}
    save_file(flat, tmp_path / "empty.safetensors")
    shutil.copytree(adapter, tmp_path / "empty")
    (tmp_path / "empty.safetensors").rename(tmp_path / "empty" / weights.name)
    assert "a matrix" in refused(base, tmp_path / "empty").line()
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    error = refused(base, adapter)
    assert error.code == "weights-pickle"
    exec(error.remedy.partition("in Python: ")[2], {})  # the remedy is a program
    assert merge(open_model(str(base)), Adapter.open(adapter)).name == "base+adapter"
    shutil.rmtree(adapter)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert refused(base, adapter).code == "adapter-invalid"
