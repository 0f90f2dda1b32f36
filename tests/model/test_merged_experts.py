"""Merged experts of every form: seen as linears, read one by one, equal to transformers', and quantized alike."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from thorough import beside
from torch import Tensor
from zoo import judge, shrink

import quantkit
from quantkit.errors import InputError
from quantkit.model.device import one_thread
from quantkit.model.source.converted import ExpertTensor, joined
from quantkit.model.source.open import Source, open_model
from quantkit.model.source.weights import Weights
from quantkit.model.streaming import calls
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure import experts
from quantkit.model.structure.names import apart
from quantkit.runtimes import load_runtime

# class -> form of the call, the linears of an expert, and whether the first parameter is [K, N]
FORMS: dict[str, tuple[str, list[str], bool]] = {
    "GptOssForCausalLM": ("routed", ["gate_up_proj", "down_proj"], True),  # in turns, with biases
    "GraniteMoeHybridForCausalLM": ("routed", ["gate_proj", "up_proj", "down_proj"], False),
    "Llama4ForCausalLM": ("ordered", ["gate_proj", "up_proj", "down_proj"], True),  # all experts in one product
    "DbrxForCausalLM": ("routed", ["w1", "v1", "w2"], False),  # two dimensions, in a module inside
    "JetMoeForCausalLM": ("sized", ["proj"], False),  # one parameter
    "AriaTextForCausalLM": ("routed", ["gate_proj", "up_proj", "down_proj"], True),
    "OpenAIPrivacyFilterModel": ("routed", ["gate_proj", "up_proj", "down_proj"], True),  # halves, with biases
    "MuseSparkTextModel": ("routed", ["gate_proj", "up_proj", "down_proj"], False),  # a norm behind each expert
    "InklingForCausalLM": ("routed", ["gate_proj", "up_proj", "down_proj"], False),
    "Qwen3VLMoeTextModel": ("routed", ["gate_proj", "up_proj", "down_proj"], False),
}
KEPT = ["GptOssForCausalLM", "Llama4ForCausalLM", "DbrxForCausalLM", "JetMoeForCausalLM"]


def opened(name: str, folder: Path, **changes: Any) -> Source:
    shrink.tiny(name, folder, **changes)
    return open_model(str(folder))


def parts(source: Source) -> dict[str, ExpertTensor]:
    return {name: entry for name, entry in source.weights.entries.items() if isinstance(entry, ExpertTensor)}


def in_float64(folder: Path, ids: Tensor, kind: str) -> Tensor:
    """What plain transformers makes of ids, one expert after the other: its grouped product takes no float64."""
    model: Any = shrink.loaded(folder).double()
    model.set_experts_implementation("eager")
    return (shrink.answer if kind == "decoder" else shrink.states)(model, ids)


@pytest.mark.parametrize("name", beside(KEPT, list(FORMS)))
def test_the_model_computes_what_it_did(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    stream, ids = StreamedModel(source), shrink.ids()
    plain, exact = shrink.truth(tmp_path, ids, source.kind), in_float64(tmp_path, ids, source.kind)
    # two runs in float32 are at most twice as far apart as one is from float64
    assert judge.apart(stream.answers(ids, chunk=2).all(), plain) < 2 * judge.apart(plain.double(), exact) < 1e-3
    path, layer = next(iter(experts.found_in(stream.skeleton).items()))
    call, leaves, transposed = FORMS[name]
    assert layer.form == call
    assert [leaf for cut in layer.cuts.values() for leaf in cut.names] == leaves
    assert next(iter(layer.cuts.values())).transposed is transposed
    index = next(index for index, block in enumerate(stream.block_names) if path.startswith(f"{block}."))
    assert all(experts.prove(one) < 1e-13 for one in experts.found_in(stream.load(index)).values())


@pytest.mark.parametrize("name", beside(KEPT, list(FORMS)))
def test_the_parts_are_the_tensor_and_only_one_expert_is_read(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    found, stored = parts(source), load_file(tmp_path / "model.safetensors")
    assert found
    assert source.weights.total_bytes() == Weights.open(tmp_path).total_bytes()
    merged = experts.wholes(source.skeleton())
    for whole in {entry.whole.name for entry in found.values()}:
        own = {entry.name: entry for entry in found.values() if entry.whole.name == whole}
        first = next(iter(own.values()))
        layer, path, leaf = merged[first.parameter]
        again = layer.whole(leaf, lambda part, path=path: source.weights.read(f"{path}.{part}"))  # type: ignore[misc]
        if whole in stored:
            assert torch.equal(again, stored[whole])
            assert torch.equal(joined(source.weights).read(whole), stored[whole])
    sizes: list[int] = []
    read = Weights._read

    def noted(self: Weights, entry: Any, device: Any = None) -> Tensor:
        sizes.append(entry.bytes)
        return read(self, entry, device)

    with patch.object(Weights, "_read", noted):
        source.weights.read(first.name)
    assert max(sizes) <= first.whole.bytes // first.cut.shape[0]


def test_the_names_of_llama_4_are_those_of_the_class_that_loads_packed_experts(tmp_path: Path) -> None:
    skeleton = opened("Llama4ForCausalLM", tmp_path).skeleton()
    assert set(apart(skeleton)) == set(experts.found_in(skeleton))
    assert set(next(iter(apart(skeleton).values()))) == {"compressed_tensors", "bitsandbytes"}


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    shrink.tiny("GraniteMoeForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if "input_linear" in name or "gate_up_proj" in name)
    save_file({**stored, name: stored[name][:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"weights-shape.*config.json makes"):
        open_model(str(tmp_path))


# --- compiles -------------------------------------------------------------------------------------------------------

RECIPE = """
schema: 1
summary: experts
models: [decoder, encoder]
calibration: {set: %s, samples: 8, tokens: %d}
scheme: {weights: {%s}}
passes: [%s]
on_indivisible: keep
keep: [embeddings, lm_head, %s]
export: [{checkpoint: {layout: %s}}]
"""
INT4 = "format: int4, granularity: group, group: 32, symmetric: true, scale: float32"


def compiled(folder: Path, layout: str, keep: str = "'no_such'", weights: str = INT4, steps: str = "gptq") -> Any:
    """A bundle of the model in `folder`, and the share of its linear weights that is quantized."""
    place = folder.parent / f"{folder.name}-{layout.partition(',')[0]}-{steps}"
    place.mkdir()
    shrink.tokenizer().save_pretrained(folder)
    tokens = judge._token_set(place / "ids", shrink.ids(20, seed=2))
    recipe = place / "recipe.yaml"
    text = RECIPE % (tokens, shrink.TOKENS, weights, steps, keep, layout)
    recipe.write_text(text.replace(", 'no_such'", ""))
    with patch("quantkit.pipeline.blocks.tokens.SCORED", 20 * (shrink.TOKENS - 1)):
        return quantkit.compile(str(folder), str(recipe), out=place / "out", speed=False)


def share(bundle: Any) -> float:
    linear = [entry for entry in bundle.manifest.weights if entry.linear]
    done = sum(entry.elements for entry in linear if entry.state == "quantized")
    return float(done / sum(entry.elements for entry in linear))


def plain(folder: Path) -> Any:
    """The logits of plain transformers."""
    model = shrink.loaded(folder)
    with torch.no_grad():
        return model(input_ids=shrink.ids(2)).logits


@pytest.mark.parametrize("name", beside(["GraniteMoeHybridForCausalLM"], ["GptOssForCausalLM", "Llama4ForCausalLM"]))
def test_all_experts_are_quantized_and_plain_transformers_loads_them(name: str, tmp_path: Path) -> None:
    shrink.tiny(name, tmp_path / "model", dtype=torch.bfloat16)
    bundle = compiled(tmp_path / "model", "dense")
    assert share(bundle) > 0.95
    assert all(check.ok for check in bundle.manifest.checks)
    assert plain(bundle.model_folder).isfinite().all()


def test_llama_4_is_packed_expert_by_expert(tmp_path: Path) -> None:
    shrink.tiny("Llama4ForCausalLM", tmp_path / "model")
    bundle = compiled(tmp_path / "model", "pack-quantized")
    assert share(bundle) > 0.95
    assert {check.name: check.ok for check in bundle.manifest.checks}["reload.transformers"]
    stored = load_file(bundle.model_folder / "model.safetensors")
    assert any(".experts.0.gate_proj.weight_packed" in name for name in stored)
    assert not any(name.endswith("experts.gate_up_proj") for name in stored)
    dense = compiled(tmp_path / "model", "dense")
    assert float((plain(bundle.model_folder) - plain(dense.model_folder)).abs().max()) < 1e-5


def test_identity_experts_have_rows_that_no_token_reaches(tmp_path: Path) -> None:
    """LongCat has rows of gate and up for experts that compute nothing, and takes no single expert for a token."""
    shrink.tiny("LongcatFlashForCausalLM", tmp_path / "model")
    skeleton = open_model(str(tmp_path / "model")).skeleton()
    layer = next(iter(experts.found_in(skeleton).values()))
    assert {leaf: cut.shape[0] for cut in layer.cuts.values() for leaf in cut.names[:1]} == {
        "gate_proj": 10,
        "down_proj": 8,
    }
    bundle = compiled(tmp_path / "model", "pack-quantized")
    assert share(bundle) > 0.99
    assert not [taken for taken in bundle.manifest.decisions if taken.code == "never-ran"]  # nor of the router
    assert all(check.ok for check in bundle.manifest.checks)
    rounded = {taken.where for taken in bundle.manifest.decisions if "no token can reach it" in taken.reason}
    assert {name.rpartition(".")[2] for name in rounded} == {"8", "9"}


def test_gpt_oss_has_its_own_layout(tmp_path: Path) -> None:
    shrink.tiny("GptOssForCausalLM", tmp_path / "model")
    bundle = compiled(tmp_path / "model", "mxfp4", "'*.self_attn.*'", "format: mxfp4")
    names = {check.name: check.ok for check in bundle.manifest.checks}
    assert names["reload.transformers"] and names["reload.own_reader"]
    stored = load_file(bundle.model_folder / "model.safetensors")
    blocks = next(value for name, value in stored.items() if name.endswith("experts.gate_up_proj_blocks"))
    assert blocks.dtype == torch.uint8 and blocks.dim() == 4
    config = json.loads((bundle.model_folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert all(check.ok for check in judge.verified(bundle))


@pytest.mark.parametrize(
    ("name", "layout", "line"),
    [
        ("GptOssForCausalLM", "pack-quantized", "one tensor with the other experts"),
        ("GraniteMoeForCausalLM", "pack-quantized", "one tensor with the other experts"),
        ("Llama4ForCausalLM", "mxfp4", "is no such expert"),
    ],
)
def test_what_a_reader_would_not_load_is_refused_by_name(name: str, layout: str, line: str, tmp_path: Path) -> None:
    shrink.tiny(name, tmp_path / "model")
    weights = "format: mxfp4" if layout == "mxfp4" else INT4
    with pytest.raises(InputError, match=rf"layout-unsupported.*{line}"):
        compiled(tmp_path / "model", layout, weights=weights)


# --- a dense model, cut into experts ----------------------------------------------------------------------------------


def cut_into_experts(dense: Any, count: int) -> Any:
    """A Granite mixture that computes the same: each expert has a share of the hidden features, and all are chosen.

    Routers of zeros give each expert the weight 1 / count, and its last matrix is multiplied by `count`.
    """
    config = dense.config
    mixture = transformers.GraniteMoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size // count,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        attention_multiplier=(config.hidden_size // config.num_attention_heads) ** -0.5,
        tie_word_embeddings=config.tie_word_embeddings,
        num_local_experts=count,
        num_experts_per_tok=count,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    model = transformers.GraniteMoeForCausalLM(mixture).eval()
    state = dict(dense.state_dict())
    own: dict[str, Tensor] = {}
    for name, like in model.state_dict().items():
        layer, _, leaf = name.partition(".block_sparse_moe.")
        gate, up, down = (state.get(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        if leaf == "experts.gate_up_proj":
            own[name] = torch.stack([torch.cat(pair) for pair in zip(gate.chunk(count), up.chunk(count), strict=True)])
        elif leaf == "experts.down_proj":
            own[name] = torch.stack([part * count for part in down.chunk(count, dim=1)])
        else:
            own[name] = torch.zeros_like(like) if leaf else state[name]
    model.load_state_dict(own)
    return model


@pytest.mark.parametrize("name", beside(["tiny"], ["tiny", "smollm2-135m"]))
def test_a_dense_model_cut_into_experts_is_quantized_alike(name: str, tmp_path: Path) -> None:
    """Rounding knows no other rows or groups, so the codes of both are the same; of SmolLM2 two blocks."""
    if name == "tiny":
        config = transformers.LlamaConfig(
            **{"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        )
        dense = transformers.LlamaForCausalLM(config).eval()
    else:
        folder = open_model(name).path
        config = transformers.AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = 2
        dense = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    mixture = cut_into_experts(dense, 4)
    ids = torch.arange(48).mul(7919).remainder(config.vocab_size).reshape(2, 24)
    with torch.no_grad():
        before = [model(input_ids=ids).logits for model in (dense, mixture)]
    assert judge.apart(before[1], before[0]) < 1e-5
    made = []
    for kind, model in (("dense", dense), ("mixture", mixture)):
        model.save_pretrained(tmp_path / kind)
        bundle = compiled(tmp_path / kind, "dense", steps="rtn")
        assert share(bundle) > 0.99
        with torch.no_grad():
            made.append(shrink.loaded(bundle.model_folder)(input_ids=ids).logits)
    assert float((made[1] - made[0]).abs().max() / made[0].abs().max()) < 1e-6
    assert judge.apart(made[0], before[0]) > 1e-2


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated(events: Any, mapped: set[int]) -> int:
    """The peak of the bytes that torch had given out, from a profile; without those at addresses of mapped files."""
    seen, waiting = list[tuple[int, int]](), list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation" and event.extra_fields.ptr not in mapped:
            seen.append((event.start_time_ns, event.extra_fields.alloc_size))
    level = most = 0
    for _, size in sorted(seen):
        level += size
        most = max(most, level)
    return most


def peak(folder: Path, count: int, steps: Sequence[str]) -> int:
    """The peak while one block of a mixture is loaded, calibrated, quantized and run."""
    from pipeline.conftest import recipe
    from zoo import ids as tokens

    from quantkit.passes import pass_of
    from quantkit.pipeline.blocks.layers import lay_out
    from quantkit.pipeline.blocks.work import PassRun, work

    config = transformers.GraniteMoeConfig(
        **{"vocab_size": 384, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": count, "num_experts_per_tok": 2},
    )
    transformers.GraniteMoeForCausalLM(config).save_pretrained(folder)
    stream = StreamedModel(open_model(str(folder)))
    chosen = recipe(
        "checkpoint", passes=steps, scheme={"weights": {"format": "int4", "granularity": "group", "group": 32}}
    )
    layers = lay_out(chosen, stream.skeleton, stream.block_names, "float32")
    mapped = set[int]()
    make = calls.in_file

    def noted(count: int, dtype: torch.dtype) -> Tensor:
        made = make(count, dtype)
        mapped.add(made.data_ptr())
        return made

    # another thread's memory is not profiled
    with one_thread(), patch.object(calls, "in_file", noted), torch.profiler.profile(profile_memory=True) as profile:
        runs = [PassRun(pass_of(step), step.settings) for step in chosen.passes]
        more: dict[str, Any] = {"probe_ids": tokens(1, 4), "widest": layers.widest, "dtype": torch.float32}
        done = list(work(stream, runs, layers.schemes, tokens(4, 24), **more))
        assert len(done[0].block.tensors) == 4 + 3 * count
    return allocated(profile.profiler.kineto_results.experimental_event_tree(), mapped)  # type: ignore[union-attr]


@pytest.mark.parametrize("steps", [("gptq",), ("awq", "gptq")], ids=["gptq", "awq"])
def test_memory_does_not_grow_with_the_number_of_experts_in_files(steps: Sequence[str], tmp_path: Path) -> None:
    """8 experts have 13 MB in floats, 2 have 3 MB; AWQ proves its folds on a copy in float64."""
    few, many = (peak(tmp_path / f"in-memory-{count}", count, steps) for count in (2, 8))
    assert many > few + 8.5e6
    with patch("quantkit.model.streaming.stream.EXPERTS_IN_MEMORY", 0):
        few, many = (peak(tmp_path / f"in-files-{count}", count, steps) for count in (2, 8))
    assert many < few + 1e6


def test_packed_experts_for_vllm_alone_are_said_and_never_loaded_at_random(tmp_path: Path) -> None:
    shrink.tiny("GraniteMoeHybridForCausalLM", tmp_path / "model")
    bundle = compiled(tmp_path / "model", "pack-quantized, readers: vllm")
    assert share(bundle) > 0.95
    assert "checkpoint-vllm-alone" in {taken.code for taken in bundle.manifest.decisions}
    names = {check.name for check in bundle.manifest.checks}
    assert "reload.tensors" in names and "reload.transformers" not in names
    stored = load_file(bundle.model_folder / "model.safetensors")
    assert any(".block_sparse_moe.experts.0.gate_proj.weight_packed" in name for name in stored)
    dense = compiled(tmp_path / "model", "dense")
    ids = {"input_ids": shrink.ids(2)}
    with torch.no_grad():
        found = load_runtime("torch").load(bundle)(**ids).logits
        wanted = shrink.loaded(dense.model_folder)(**ids).logits
    assert float((found - wanted).abs().max()) < 1e-5
    assert "from_pretrained" not in (bundle.path / "README.md").read_text()
