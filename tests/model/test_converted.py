"""Tensors that loading joins or cuts: as plain `from_pretrained` has them, read late, and left alone when reloaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from zoo import shrink

from quantkit.errors import InputError
from quantkit.model.source.converted import NOTE, ConvertedTensor, may_apply
from quantkit.model.source.open import Source, open_model
from quantkit.model.source.weights import MadeTensor, Weights, torch_dtype
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.names import Obstacle, obstacles

# class -> how many tensors of the files become how many parameters, in the first layer that has such
CASES = {
    "NomicBertModel": (1, 3),  # Wqkv is cut
    "OlmoHybridForCausalLM": (3, 1),  # convolutions are joined
}


def opened(name: str, folder: Path, **changes: Any) -> Source:
    shrink.tiny(name, folder, **changes)
    return open_model(str(folder))


def made(source: Source) -> dict[str, ConvertedTensor]:
    return {name: entry for name, entry in source.weights.entries.items() if isinstance(entry, ConvertedTensor)}


def edited(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_what_plain_transformers_loads(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    plain = shrink.loaded(tmp_path).state_dict()
    found = made(source)
    first = next(iter(found.values()))
    assert (len(first.parts), sum(each.parts == first.parts for each in found.values())) == CASES[name]
    assert found.keys() <= plain.keys()
    for tensor, entry in found.items():
        value = source.weights.read(tensor)
        assert torch.equal(value, plain[tensor])
        assert (tuple(value.shape), value.dtype) == (entry.shape, torch_dtype(entry.dtype))
        assert value.nbytes == entry.bytes == value.untyped_storage().nbytes()
        assert torch.equal(source.weights.beginning(tensor, 3), plain[tensor][:3])
    stored = Weights.open(tmp_path)
    assert source.weights.total_bytes() == stored.total_bytes()
    gone = {part.name for entry in found.values() for _, part in entry.parts}
    assert source.weights.entries.keys() == (stored.entries.keys() - gone) | found.keys()
    assert NOTE in source.notes


@pytest.mark.parametrize("name", ["NomicBertModel", "OlmoHybridForCausalLM"])
def test_the_stream_is_the_model(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    stream, ids = StreamedModel(source), shrink.ids(2)
    assert made(source).keys() <= set(stream.files.values())
    found = stream.answers(ids).all()
    assert float((found - shrink.truth(tmp_path, ids, source.kind)).abs().max()) < 1e-4


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink.tiny("NomicBertModel", tmp_path)
    read: list[str] = []
    plain = Weights._read

    def noted(self: Weights, entry: Any, *device: Any) -> torch.Tensor:
        read.extend([] if isinstance(entry, MadeTensor) else [entry.name])
        return plain(self, entry, *device)

    monkeypatch.setattr(Weights, "_read", noted)
    source = open_model(str(tmp_path))
    StreamedModel(source)
    assert read == []
    source.weights.read("layers.1.self_attn.k_proj.weight")
    assert read == ["encoder.layers.1.attn.Wqkv.weight"]


def test_equal_is_equal_bit_for_bit(tmp_path: Path) -> None:
    shrink.tiny("NomicBertModel", tmp_path)
    whole = "encoder.layers.0.attn.Wqkv.weight"
    edited(tmp_path, lambda tensors: tensors | {whole: tensors[whole][:64].repeat(3, 1)})
    source = open_model(str(tmp_path))
    weights, names = source.weights, [f"layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    assert weights.same(names[0], names[1])
    assert not weights.same(names[0], "layers.1.self_attn.q_proj.weight")
    assert not weights.same(names[0], "encoder.layers.0.attn.out_proj.weight")
    # what was untied has an entry of its own, under another name
    twin = replace(weights, entries={**weights.entries, "twin": replace(weights.entries[names[2]], name="twin")})
    assert twin.same("twin", names[2])


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    shrink.tiny("OlmoHybridForCausalLM", tmp_path)
    edited(
        tmp_path, lambda tensors: {name: each for name, each in tensors.items() if "0.linear_attn.k_conv" not in name}
    )
    with pytest.raises(InputError, match=r"weights-shape.*conv1d"):
        StreamedModel(open_model(str(tmp_path)))


def test_a_tensor_that_is_there_both_ways_is_refused(tmp_path: Path) -> None:
    shrink.tiny("NomicBertModel", tmp_path)
    edited(tmp_path, lambda tensors: tensors | {"layers.0.self_attn.q_proj.weight": torch.ones(64, 64)})
    with pytest.raises(InputError, match="weights-ambiguous"):
        open_model(str(tmp_path))


def rules(monkeypatch: pytest.MonkeyPatch, source: str, target: str, operation: Any) -> None:
    """Have transformers know a rule for LLaMA."""
    known: dict[str, Any] = {"llama": lambda: [WeightConverter(source, target, [operation])], "legacy": list}
    monkeypatch.setattr(
        conversion_mapping, "get_checkpoint_conversion_mapping", lambda name: known[name]() if name in known else None
    )


def llama(folder: Path) -> Path:
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **settings)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_what_loading_would_make_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama(tmp_path)
    rules(monkeypatch, "q_proj.weight", "q_proj.weight", Transpose(0, 1))
    with pytest.raises(InputError, match=r"architecture-unsupported.*would convert or rename again"):
        open_model(str(tmp_path))


def test_a_rule_that_fails_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama(tmp_path)
    rules(monkeypatch, "mlp.up_proj.weight", "mlp.gate_proj.weight", Transpose(0, 7))
    with pytest.raises(InputError, match=r"architecture-unsupported.*cannot be made model.layers.0.mlp.gate_proj"):
        open_model(str(tmp_path))


def test_a_model_without_such_rules_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def builds(_: Source) -> None:
        raise AssertionError

    monkeypatch.setattr(Source, "skeleton", builds)
    assert not made(open_model(str(llama(tmp_path))))
    for each in (transformers.MixtralForCausalLM, transformers.Qwen3MoeForCausalLM, transformers.BertForMaskedLM):
        assert not may_apply(each, each.config_class())


def test_what_was_written_has_no_rule_left(tmp_path: Path) -> None:
    source = opened("NomicBertModel", tmp_path / "source")
    assert made(source)
    (tmp_path / "written").mkdir()
    values = {name: source.weights.read(name) for name in source.weights.entries}
    save_file(values, tmp_path / "written" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "written" / "config.json").write_bytes((tmp_path / "source" / "config.json").read_bytes())
    assert not made(open_model(str(tmp_path / "written")))
    plain, again = (shrink.loaded(tmp_path / each).state_dict() for each in ("source", "written"))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# class -> (what is in the way, why)
OBSTACLES = {
    "GptOssForCausalLM": ("model.layers.0.mlp.experts.0.gate_up_proj", "one tensor with the other experts"),
    "Molmo2TextModel": ("Molmo2TextModel", "mlp.ff_proj.weight"),
    "Inkling2ForCausalLM": ("model.layers.3.self_attn.k_sconv.weight_proj", "nothing packed under that name"),
    "Qwen4ExpForCausalLM": ("model.layers.0.attn_hyper_connection.block_inject_weight", "ends in `weight`"),
}


def obstacles_of(name: str, folder: Path) -> list[Obstacle]:
    shrink.tiny(name, folder)
    stream = StreamedModel(open_model(str(folder)))
    return obstacles(stream.skeleton, stream.files)


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_names_the_tensor_and_the_reason(name: str, tmp_path: Path) -> None:
    where, why = OBSTACLES[name]
    (one,) = [each for each in obstacles_of(name, tmp_path) if each.where == where]
    assert why in one.why
    assert one.hinders([where], ["compressed_tensors"])


@pytest.mark.parametrize(
    "name",
    [
        *("LlamaForCausalLM", "MixtralForCausalLM", "GPT2ForSequenceClassification", "NomicBertForMaskedLM"),
        "Llama4TextModel",
    ],
)
def test_nothing_is_in_the_way_of_what_loads(name: str, tmp_path: Path) -> None:
    found = obstacles_of(name, tmp_path)
    assert not [each for each in found if each.hinders([each.where], ["compressed_tensors"])]


def test_bitsandbytes_packs_nothing_that_transformers_keeps_in_floats(tmp_path: Path) -> None:
    held = {each.where for each in obstacles_of("T5ForConditionalGeneration", tmp_path) if "bitsandbytes" in each.why}
    named = {name for name, _ in shrink.loaded(tmp_path).named_modules() if name.endswith(".wo")}
    assert held == named and named


def test_only_what_is_packed_and_loaded_so_is_hindered() -> None:
    linear = Obstacle("a", "", frozenset(["compressed_tensors"]))
    assert not linear.hinders(["b"], ["compressed_tensors"])
    assert not linear.hinders(["a"], ["gptqmodel"])
    assert Obstacle("a", "").hinders(["a"], ["gptqmodel"])
    assert Obstacle("a", "", always=True).hinders([], [])
