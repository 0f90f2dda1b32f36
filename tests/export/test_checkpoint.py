"""The checkpoint: what is written, what transformers and compressed-tensors make of it, what the checks catch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import shrink

from quantkit import registry
from quantkit.bundle import Bundle, Check, LayerEntry, Manifest, ModelEntry, SourceEntry, content_sha256, inventory
from quantkit.errors import GateError, InputError
from quantkit.export import _reload
from quantkit.export._asked import Asked
from quantkit.export.checkpoint import EXPORT
from quantkit.formats import QuantTensor
from quantkit.model import finished
from quantkit.model.finished import Finished
from quantkit.model.open import Source, open_model
from quantkit.model.stream import StreamedModel
from quantkit.model.unloadable import Obstacle
from quantkit.scheme import WeightScheme

pytestmark = pytest.mark.usefixtures("one_thread")

ASYMMETRIC = {"granularity": "group", "group": 32, "symmetric": False}


def scheme(form: str = "int4", **fields: Any) -> WeightScheme:
    return WeightScheme(format=form, **{**({} if fields else ASYMMETRIC), **fields})


def quantize(weight: Tensor, how: WeightScheme) -> QuantTensor:
    found: QuantTensor = registry.load("formats", how.format).quantize(weight.float(), how)
    return found


def llama(
    folder: Path, dtype: torch.dtype = torch.float32, *, tied: bool = True, shards: int = 1, **changes: Any
) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // shards + 20_000 if shards > 1 else "1GB")
    return folder


@dataclass
class Exported:
    folder: Path
    source: Source
    stream: StreamedModel
    results: Finished
    options: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def check(self, **settings: Any) -> list[Check]:
        return EXPORT.check(self.folder, self.source, self.stream, self.results, self.options, **settings)

    def weight(self, linear: str) -> Tensor:
        return self.source.weights.read(self.stream.files[f"{linear}.weight"])


def export(path: Path, folder: Path, schemes: Any, *, head: bool = False, **options: Any) -> Exported:
    """Round every linear of the blocks (all by one scheme, or by a function of the name), and change a norm."""
    source = open_model(str(path))
    stream = StreamedModel(source)
    blocks = tuple(f"{name}." for name in stream.block_names) + (("lm_head",) if head else ())
    from quantkit.model.structure import is_linear, is_transposed

    tensors, chosen = {}, {}
    for name, module in stream.skeleton.named_modules():
        how = schemes(name) if callable(schemes) else schemes
        if name.startswith(blocks) and is_linear(module) and how is not None:
            weight = source.weights.read(stream.files[f"{name}.weight"])
            tensors[name] = quantize(weight.T if is_transposed(module) else weight, how)
            chosen[name] = how
    changed = {}
    for name in stream.files:
        if name.endswith("post_attention_layernorm.weight"):
            changed[name] = source.weights.read(stream.files[name]) * 1.5
    file = folder.parent / f"{folder.name}-block.safetensors"
    folder.mkdir()
    finished.save(file, tensors, changed)
    exported = Exported(folder, source, stream, Finished([file], chosen), options)
    EXPORT.write(folder, source, stream, exported.results, options)
    return exported


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


SCHEMES = {
    "group-asymmetric": scheme(),
    "group-symmetric": scheme(granularity="group", group=32, symmetric=True),
    "channel-asymmetric": scheme(granularity="channel", symmetric=False),
    "channel-symmetric": scheme(granularity="channel"),
    "tensor-asymmetric": scheme(granularity="tensor", symmetric=False),
    "tensor-symmetric": scheme(granularity="tensor"),
    "int8-channel": scheme("int8", granularity="channel"),
    "int8-group-asymmetric": scheme("int8", **ASYMMETRIC),
    "float32-scales": scheme(scale="float32", **ASYMMETRIC),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("source") / "tiny")


@pytest.mark.parametrize("how", SCHEMES.values(), ids=SCHEMES)
def test_plain_transformers_loads_what_was_decided(tmp_path: Path, tiny: Path, how: WeightScheme) -> None:
    from transformers import AutoModelForCausalLM

    exported = export(tiny, tmp_path / "out", how)
    checks = by_name(exported.check())
    assert list(checks) == [
        "scales.finite",
        "bits_per_weight.checkpoint",
        "reload.compressed_tensors",
        "reload.transformers",
    ]
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
            values = registry.load("formats", how.format).dequantize(tensor)
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
        values = registry.load("formats", top.format).dequantize(exported.results.quantized("lm_head"))
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
        assert not registry.load("formats", tensor.scheme.format).dequantize(tensor).any()


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
            EXPORT.accepts({}, Asked(schemes, plain, padded))
        EXPORT.accepts({"layout": "dense"}, Asked(schemes, plain, padded))
    EXPORT.accepts({}, Asked({"a": scheme()}, {"a"}, []))
    hindered = Asked({"a": scheme()}, {"a"}, [], obstacles=[Obstacle("a", "it has a strange name")])
    with pytest.raises(InputError, match=r"layout-unsupported.*strange name"):
        EXPORT.accepts({}, hindered)
    EXPORT.accepts({"layout": "dense"}, hindered)
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
        EXPORT.write(out, source, stream, Finished([], {}), options)
        for shard in source.weights.shards:
            before, after = load_file(path / shard), load_file(out / "model" / shard)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
        assert json.loads((out / "model/config.json").read_text()) == json.loads((path / "config.json").read_text())
        assert all(check.ok for check in EXPORT.check(out, source, stream, Finished([], {}), options))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_dense_of_families_that_store_otherwise(tmp_path: Path, family: str) -> None:
    """GPT-2 stores [K, N] and its files lack the base model's prefix; BERT has a pooler and biases."""
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=128
        )
        model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "source")
    exported = export(tmp_path / "source", tmp_path / "out", scheme(), layout="dense")
    checks = exported.check()
    assert [check.name for check in checks] == ["reload.transformers"]
    assert checks[0].value == 0
    linear = next(iter(exported.results.schemes))
    stored = load_file(exported.model / "model.safetensors")[exported.stream.files[f"{linear}.weight"]]
    values = registry.load("formats", "int4").dequantize(exported.results.quantized(linear))
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
    taken = EXPORT.write(exported.folder, exported.source, exported.stream, exported.results, exported.options)
    assert [each.code for each in taken if each.code == "converted-names"] == ["converted-names"]


def _spoil(exported: Exported, change: Any) -> dict[str, Check]:
    path = exported.model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return by_name(exported.check())


UP = "model.layers.1.mlp.up_proj"


def test_a_wrong_scale_is_found(tmp_path: Path, tiny: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"][3, 1] *= 1.01

    checks = _spoil(export(tiny, tmp_path / "out", scheme()), change)
    assert not checks["reload.compressed_tensors"].ok
    assert checks["reload.compressed_tensors"].where == UP
    with pytest.raises(GateError, match=f"reload-mismatch.*{UP}"):
        _reload.demand(list(checks.values()))


def test_the_logits_find_it_too(tmp_path: Path, tiny: Path) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    path = exported.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.input_layernorm.weight"] *= 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    checks = by_name(exported.check())
    assert checks["reload.compressed_tensors"].ok
    assert not checks["reload.transformers"].ok
    # the first block alone is as it should be
    assert by_name(exported.check(blocks=1))["reload.transformers"].value == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_is_no_scale_is_found(tmp_path: Path, tiny: Path, value: float) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"][3, 1] = value

    checks = _spoil(export(tiny, tmp_path / "out", scheme()), change)
    assert not checks["scales.finite"].ok
    assert checks["scales.finite"].where == UP


def test_missing_and_unexpected_tensors_are_found(tmp_path: Path, tiny: Path) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    checks = _spoil(exported, lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"))
    assert not checks["reload.transformers"].ok
    assert "missing" in checks["reload.transformers"].where
    EXPORT.write(exported.folder, exported.source, exported.stream, exported.results, {})
    checks = _spoil(exported, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}))
    assert "unexpected" in checks["reload.transformers"].where


def test_swapped_codes_are_found(tmp_path: Path, tiny: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        packed = tensors[f"{UP}.weight_packed"]
        tensors[f"{UP}.weight_packed"] = packed.flip(0).contiguous()

    assert not _spoil(export(tiny, tmp_path / "out", scheme()), change)["reload.compressed_tensors"].ok


@pytest.mark.parametrize("how", ["group-asymmetric", "group-symmetric"])
def test_only_the_first_blocks(tmp_path: Path, how: str) -> None:
    path = llama(tmp_path / "source", num_hidden_layers=4, shards=3)
    exported = export(path, tmp_path / "out", SCHEMES[how])
    check = by_name(exported.check(blocks=2))["reload.transformers"]
    assert (check.ok, check.value) == (True, 0)


def test_of_several_schemes_the_first_blocks_are_compared_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressed_tensors.utils import match

    said: list[str] = []
    monkeypatch.setattr(match._LOGGER, "warning", said.append)

    def mixed(name: str) -> WeightScheme:
        # a scheme whose linears are all in later blocks, too
        late = "layers.3." in name
        bits = "int8" if late or "mlp" in name else "int4"
        return scheme(bits, granularity="channel", group=None, symmetric=True) if late else scheme(bits, symmetric=True)

    exported = export(llama(tmp_path / "source", num_hidden_layers=4), tmp_path / "out", mixed)
    check = by_name(exported.check(blocks=2))["reload.transformers"]
    assert (check.ok, check.value) == (True, 0)
    assert said == []


def _bundle(exported: Exported) -> Bundle:
    files = inventory(exported.folder)
    layers = [
        LayerEntry(name=name, shape=list(exported.weight(name).shape), scheme=how.model_dump(), bits_per_weight=4.0)
        for name, how in exported.results.schemes.items()
    ]
    source = SourceEntry(ref="path:tiny", sha256="0" * 64, dtype="float32")
    manifest = Manifest(
        quantkit="0.1.0",
        content_sha256=content_sha256(files),
        state="complete",
        model=ModelEntry(name="tiny", kind="decoder", source=source),
        recipe={},
        target=None,
        calibration=None,
        seed=0,
        threads=1,
        isa="",
        device={},
        versions={},
        created="",
        layers=layers,
        files=files,
        decisions=[],
        checks=[],
        verdict=None,
    )
    (exported.folder / "manifest.json").write_bytes(manifest.as_bytes())
    return Bundle.load(exported.folder)


@pytest.mark.parametrize("options", [{}, {"layout": "dense"}], ids=["packed", "dense"])
def test_a_finished_bundle_is_checked_without_its_source(tmp_path: Path, tiny: Path, options: dict[str, str]) -> None:
    bundle = _bundle(export(tiny, tmp_path / "out", scheme(), **options))
    assert all(check.ok for check in bundle.verify())
    checks = by_name(EXPORT.check(bundle.path))
    assert all(check.ok for check in checks.values())
    assert checks["reload.transformers"].value == 0
    if options:
        return
    path = bundle.path / "model/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    path.write_text(json.dumps(config))
    assert not all(check.ok for check in EXPORT.check(bundle.path))


def test_writing_twice_gives_the_same_bytes(tmp_path: Path, tiny: Path) -> None:
    first = inventory(export(tiny, tmp_path / "one", scheme()).folder)
    second = inventory(export(tiny, tmp_path / "two", scheme()).folder)
    assert first == second


def test_what_is_carried_over(tmp_path: Path) -> None:
    path = llama(tmp_path / "source")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json", "1_Pooling/config.json"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    for name in ("README.md", "modeling_evil.py", "pytorch_model.bin", ".git/config", "onnx/model.onnx", ".hidden"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (path / "link.txt").symlink_to(tmp_path / "secret")
    model = export(path, tmp_path / "out", scheme()).model
    found = {file.relative_to(model).as_posix() for file in model.rglob("*") if file.is_file()}
    assert found == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
        "generation_config.json",
        "1_Pooling/config.json",
    }
    assert (model / "chat_template.jinja").read_text() == "chat_template.jinja"


def test_torch_free_at_import() -> None:
    import subprocess
    import sys

    code = "import sys\nfrom quantkit import registry\nregistry.load('export', 'checkpoint').Options()\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'compressed_tensors')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_that_memory_has_no_room_for_is_compared_on_its_first_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(llama(tmp_path / "source", num_hidden_layers=3), tmp_path / "out", scheme())
    asked: list[int | None] = []
    real = _reload.reload

    def spy(folder: Path, wanted: Any, *, inputs: Any, blocks: int | None) -> Check:
        asked.append(blocks)
        return real(folder, wanted, inputs=inputs, blocks=blocks)

    monkeypatch.setattr(_reload, "reload", spy)
    for limit in (10**12, 10**6):
        monkeypatch.setattr(_reload.machine, "memory_limit", lambda limit=limit: limit)
        checks = exported.check()
        assert all(check.ok for check in checks)
        # the rest of the model is still covered, linear by linear
        assert "reload.compressed_tensors" in by_name(checks)
    assert asked == [None, 2]


def test_a_model_that_is_not_cut_and_does_not_fit_is_compared_tensor_by_tensor(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = export(tiny, tmp_path / "out", scheme())
    monkeypatch.setattr(Source, "can_be_cut", lambda *_: False)
    assert "reload.transformers" in by_name(exported.check(blocks=1))
    monkeypatch.setattr(_reload.machine, "memory_available", lambda: 10**4)
    monkeypatch.setattr(_reload, "reload", lambda *_, **__: pytest.fail("it was loaded as a whole"))
    checks = by_name(exported.check(blocks=1))
    assert checks["reload.compressed_tensors"].ok
    assert checks["reload.tensors"].ok
    path = exported.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.input_layernorm.weight"] *= 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    wrong = by_name(exported.check(blocks=1))["reload.tensors"]
    assert not wrong.ok
    assert wrong.where == "model.layers.1.input_layernorm.weight"
    tensors.pop("model.layers.1.input_layernorm.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    assert "missing" in by_name(exported.check(blocks=1))["reload.tensors"].where
