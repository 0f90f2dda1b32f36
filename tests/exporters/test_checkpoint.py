"""The checkpoint: what is written, and what transformers and compressed-tensors make of it."""

import json
import threading
from pathlib import Path

import forked
import pytest
import torch
import zoo
from exported import SCHEMES, by_name, check_as, export, llama, scheme, write_as
from safetensors.torch import load_file
from zoo import shrink

from quantkit.bundle import inventory
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.exporters.checkpoint.writer import Writer
from quantkit.formats import load_format
from quantkit.model.finished import Finished
from quantkit.model.source.open import open_model
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.names import Obstacle
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("how", SCHEMES.values(), ids=SCHEMES)
def test_plain_transformers_loads_what_was_decided(tmp_path: Path, tiny: Path, how: WeightScheme) -> None:
    from transformers import AutoModelForCausalLM

    exported = export(tiny, tmp_path / "out", how)
    checks = by_name(exported.check())
    stored = ["scales.finite", "bits_per_weight.checkpoint"]
    assert list(checks) == [*stored, "reload.compressed_tensors", "reload.transformers"]
    assert all(check.ok for check in checks.values()), checks
    assert checks["reload.transformers"].value == 0

    # and once more without any of our own code on the way
    model, info = AutoModelForCausalLM.from_pretrained(exported.model, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        loaded = model(ids).logits
        reference = AutoModelForCausalLM.from_pretrained(tiny)
        for linear in exported.results.schemes:
            tensor = exported.results.quantized(linear)
            values = load_format(how.format).dequantize(tensor)
            reference.get_submodule(linear).weight.copy_(values)
        for layer in reference.model.layers:
            layer.post_attention_layernorm.weight.mul_(1.5)
        # float16 scales are multiplied in float16 by the loader; 2^-11 a weight, averaged over 64 and more of them
        bound = 1e-5 if how.scale == "float32" else 5e-4
        expected = reference(ids).logits
    assert float((loaded - expected).abs().max() / expected.abs().max()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_half_precision_sources(tmp_path: Path, dtype: torch.dtype, symmetric: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    how = scheme(granularity="group", group=32, symmetric=symmetric, scale=name)
    exported = export(llama(tmp_path / "source", dtype, tied=False), tmp_path / "out", how)
    checks = exported.check()
    assert all(check.ok for check in checks)
    assert by_name(checks)["reload.transformers"].value == 0
    stored = load_file(exported.model / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].dtype is dtype
    assert stored["lm_head.weight"].dtype is dtype


def test_scales_that_the_model_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = llama(tmp_path / "source", torch.bfloat16)
    with pytest.raises(InputError, match=r"scale-inexact.*float16 scales in a bfloat16 model.*scale=bfloat16"):
        export(path, tmp_path / "out", SCHEMES["int8-group-asymmetric"])


@pytest.mark.parametrize("tied", [True, False])
def test_shards_stay_as_they_were(tmp_path: Path, tied: bool) -> None:
    exported = export(llama(tmp_path / "source", tied=tied, shards=3), tmp_path / "out", scheme())
    assert len(exported.source.weights.shards) == 3
    index = json.loads((exported.model / "model.safetensors.index.json").read_text())
    source = json.loads((tmp_path / "source/model.safetensors.index.json").read_text())["weight_map"]
    total, seen = 0, {}
    for shard in sorted({*source.values()}):
        for name, tensor in load_file(exported.model / shard).items():
            seen[name] = shard
            total += tensor.numel() * tensor.element_size()
            origin = name.partition(".weight_")[0] + ".weight" if ".weight_" in name else name
            assert source[origin] == shard
    assert index["weight_map"] == seen
    assert index["metadata"]["total_size"] == total
    assert ("lm_head.weight" in seen) is not tied
    assert all(check.ok for check in exported.check())


def test_config_is_what_vllm_and_transformers_read(tmp_path: Path, tiny: Path) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    config = json.loads((exported.model / "config.json").read_text())
    before = json.loads((tiny / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == before
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "pack-quantized"
    assert quantization["quantization_status"] == "compressed"
    assert quantization["ignore"] == ["lm_head"]
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["num_bits"] == 4
    assert (group["weights"]["group_size"], group["weights"]["symmetric"]) == (32, False)


def test_several_symmetric_schemes(tmp_path: Path, tiny: Path) -> None:
    def mixed(name: str) -> WeightScheme | None:
        if name.endswith("o_proj"):
            return None
        return scheme("int8", granularity="channel") if "mlp" in name else SCHEMES["group-symmetric"]

    exported = export(tiny, tmp_path / "out", mixed)
    config = json.loads((exported.model / "config.json").read_text())["quantization_config"]
    targets = {group["weights"]["num_bits"]: group["targets"] for group in config["config_groups"].values()}
    assert sorted(targets) == [4, 8]
    assert "model.layers.1.mlp.down_proj" in targets[8]
    assert not any("o_proj" in target for names in targets.values() for target in names)
    checks = exported.check()
    assert all(check.ok for check in checks), checks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_an_untied_head_is_packed_like_any_linear(tmp_path: Path, mixed: bool, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    stored = {"scale": str(dtype).removeprefix("torch.")}
    body = scheme(granularity="group", group=32, symmetric=mixed, **stored)
    top = scheme("int8", granularity="group", group=32, **stored) if mixed else body
    exported = export(
        llama(tmp_path / "source", dtype, tied=False),
        tmp_path / "out",
        lambda name: top if name == "lm_head" else body,
        head=True,
    )
    assert "lm_head" in exported.results.schemes
    checks = exported.check()
    assert all(check.ok for check in checks), checks
    tensors = load_file(exported.model / "model.safetensors")
    assert "lm_head.weight_packed" in tensors
    assert "lm_head.weight" not in tensors
    config = json.loads((exported.model / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == []

    # without any of our own code on the way
    model, info = AutoModelForCausalLM.from_pretrained(exported.model, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        loaded = model(ids).logits.float()
        hidden = model.model(ids).last_hidden_state
        values = load_format(top.format).dequantize(exported.results.quantized("lm_head"))
        expected = torch.nn.functional.linear(hidden, values.to(dtype)).float()
        unquantized = torch.nn.functional.linear(hidden, exported.weight("lm_head")).float()
    off = float((loaded - expected).abs().max() / expected.abs().max())
    assert off < (1e-6 if dtype is torch.float32 else 1e-2)
    if dtype is torch.float32:
        assert float((loaded - unquantized).abs().max() / expected.abs().max()) > 100 * off


HOLEY = {
    "pack-quantized": scheme(),
    "int-quantized": scheme("int8", granularity="tensor"),
    "float-quantized": scheme("fp8_e4m3", granularity="block", group=32, scale="float32"),
    "nvfp4-pack-quantized": WeightScheme(format="nvfp4"),
    "mxfp4-pack-quantized": WeightScheme(format="mxfp4"),
    "gptq": scheme(granularity="group", group=32),
    "gptq-v2": scheme(),
    "bitsandbytes": WeightScheme(format="nf4", group=32),
    "bitsandbytes-double": WeightScheme(format="nf4", group=32, scale="double"),
}


@pytest.mark.parametrize("layout", HOLEY)
def test_zeros_are_stored_and_loaded_in_every_layout(tmp_path: Path, layout: str) -> None:
    """A group, a row and whole matrices of them: nf4 stores their scale as it is, zero."""
    from transformers import LlamaForCausalLM

    source = llama(tmp_path / "source")
    model = LlamaForCausalLM.from_pretrained(source)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.q_proj.weight[0, :32] = 0
        layer.self_attn.k_proj.weight[1] = 0
        layer.mlp.up_proj.weight[7] *= 1e-6  # next to others, its doubled scales are anything near zero
        layer.mlp.gate_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(source)
    exported = export(source, tmp_path / "out", HOLEY[layout], layout=layout.removesuffix("-double"))
    checks = exported.check()
    assert all(check.ok for check in checks), checks
    assert {"reload.transformers", "reload.own_reader"} & {check.name for check in checks}
    results = exported.results
    for name in ("mlp.gate_proj", "mlp.down_proj"):
        tensor = results.quantized(f"model.layers.0.{name}")
        assert not load_format(tensor.scheme.format).dequantize(tensor).any()


def test_what_the_layout_cannot_hold_is_refused_before_any_work() -> None:
    mixed = {"a": scheme(), "b": scheme("int8", granularity="channel")}
    refused: list[tuple[dict[str, WeightScheme], set[str], list[str], str]] = [
        (mixed, {"a", "b"}, [], "zero points"),
        ({"a": scheme()}, set(), [], r"\[K, N\]"),
        ({"a": scheme()}, {"a"}, ["a"], "padded"),
        ({"a": scheme("float16", granularity="tensor")}, {"a"}, [], "float16"),
    ]
    for schemes, plain, padded, reason in refused:
        with pytest.raises(InputError, match=f"layout-unsupported.*{reason}"):
            EXPORT.accepts(EXPORT.Options(), LayerSpec(schemes, plain, padded))
        EXPORT.accepts(EXPORT.Options(layout="dense"), LayerSpec(schemes, plain, padded))
    EXPORT.accepts(EXPORT.Options(), LayerSpec({"a": scheme()}, {"a"}, []))
    hindered = LayerSpec({"a": scheme()}, {"a"}, [], obstacles=[Obstacle("a", "it has a strange name")])
    with pytest.raises(InputError, match=r"layout-unsupported.*strange name"):
        EXPORT.accepts(EXPORT.Options(), hindered)
    EXPORT.accepts(EXPORT.Options(layout="dense"), hindered)
    nf4, libraries = scheme("nf4", granularity="group", group=64), frozenset(["bitsandbytes"])
    apart = LayerSpec({"e.0.up": nf4}, {"e.0.up"}, [], merged=["e.0.up"], apart={"e": libraries})
    with pytest.raises(InputError, match=r"layout-unsupported.*e\.0\.up: an expert in layout bitsandbytes"):
        EXPORT.accepts(EXPORT.Options(layout="bitsandbytes"), apart)
    with pytest.raises(ValueError, match="layout"):
        EXPORT.Options(layout="packed")
    with pytest.raises(ValueError, match="Extra inputs"):
        EXPORT.Options(shape=1)  # type: ignore[call-arg]


def test_dense_equals_the_source_where_nothing_was_decided(tmp_path: Path) -> None:
    path = llama(tmp_path / "source", torch.bfloat16, shards=3)
    source = open_model(str(path))
    stream = StreamedModel(source)
    for number, options in enumerate([{}, {"layout": "dense"}]):
        out = tmp_path / f"out{number}"
        out.mkdir()
        write_as(EXPORT, out, source, stream, Finished([], {}), options)
        for shard in source.weights.shards:
            before, after = load_file(path / shard), load_file(out / "model" / shard)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
        assert json.loads((out / "model/config.json").read_text()) == json.loads((path / "config.json").read_text())
        assert all(check.ok for check in check_as(EXPORT, out, source, stream, Finished([], {}), options))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_dense_of_families_that_store_otherwise(tmp_path: Path, family: str) -> None:
    """GPT-2 stores [K, N] and its files lack the base model's prefix; BERT has a pooler and biases."""
    zoo.tiny(family).save_pretrained(tmp_path / "source")  # type: ignore[operator]
    exported = export(tmp_path / "source", tmp_path / "out", scheme(), layout="dense")
    checks = exported.check()
    assert [check.name for check in checks] == ["reload.transformers"]
    assert checks[0].value == 0
    linear = next(iter(exported.results.schemes))
    stored = load_file(exported.model / "model.safetensors")[exported.stream.files[f"{linear}.weight"]]
    values = load_format("int4").dequantize(exported.results.quantized(linear))
    assert torch.equal(stored, values.T if family == "gpt2" else values)
    if family == "bert":
        packed = export(tmp_path / "source", tmp_path / "packed", scheme())
        assert all(check.ok for check in packed.check())


@pytest.mark.parametrize("layout", ["pack-quantized", "dense"])
def test_what_loading_cuts_is_written_as_it_is_then_called(tmp_path: Path, layout: str) -> None:
    """NomicBert's files hold query, key and value as one; each is a linear, and has codes of its own."""
    shrink.tiny("NomicBertModel", tmp_path / "source")
    how = scheme(granularity="group", group=32, symmetric=True)
    exported = export(tmp_path / "source", tmp_path / "out", how, layout=layout)
    stored = load_file(exported.model / "model.safetensors")
    suffix = ".weight" if layout == "dense" else ".weight_packed"
    assert {f"layers.0.self_attn.{each}_proj{suffix}" for each in "qkv"} < stored.keys()
    assert not any("Wqkv" in name for name in stored)
    assert all(check.ok for check in exported.check())
    taken = write_as(EXPORT, exported.folder, exported.source, exported.stream, exported.results, exported.options)
    assert [each.code for each in taken if each.code == "converted-names"] == ["converted-names"]


def test_writing_twice_gives_the_same_bytes(tmp_path: Path, tiny: Path) -> None:
    first = inventory(export(tiny, tmp_path / "one", scheme()).folder)
    second = inventory(export(tiny, tmp_path / "two", scheme()).folder)
    assert first == second


@pytest.mark.parametrize("memory", [1 << 40, 0])
def test_shards_are_written_on_threads_where_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    path = llama(tmp_path / "source", shards=3)
    plain = inventory(export(path, tmp_path / "one", scheme()).folder)
    assert sum(entry.role == "weights" for entry in plain) > 1
    threads, write = set[int](), Writer.write_shard

    def watched(self: Writer, shard: str, place: Path) -> None:
        threads.add(threading.get_ident())
        write(self, shard, place)

    monkeypatch.setattr(Writer, "write_shard", watched)
    monkeypatch.setattr("quantkit.machine.cores", lambda: 32)
    monkeypatch.setattr("quantkit.machine.memory_available", lambda: memory)
    assert inventory(export(path, tmp_path / "two", scheme()).folder) == plain
    assert (threading.get_ident() in threads) == (memory == 0)


def test_what_is_carried_over_is_as_it_was(tmp_path: Path) -> None:
    path = llama(tmp_path / "source")
    for name in ("chat_template.jinja", "LICENSE", "modeling_evil.py"):
        (path / name).write_text(name)
    model = export(path, tmp_path / "out", scheme()).model
    names = {"config.json", "model.safetensors", "chat_template.jinja", "LICENSE", "generation_config.json"}
    assert {file.name for file in model.iterdir()} == names
    assert (model / "chat_template.jinja").read_text() == "chat_template.jinja"


def test_torch_free_at_import() -> None:
    code = "import sys\nfrom quantkit.exporters import load_exporter\nload_exporter('checkpoint').Options()\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'compressed_tensors')))"
    assert forked.run("-c", code, light=True).returncode == 0
