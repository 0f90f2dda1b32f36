"""What every layout keeps to: what is written is read back, and plain transformers makes of it what was meant."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import zoo
from exported import check_as, write_as
from reference import plain_gptq
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM

from quantkit.errors import InputError
from quantkit.exporters.checkpoint.exporter import EXPORT
from quantkit.formats import QuantTensor, load_format
from quantkit.model import finished, layouts
from quantkit.model.finished import DenseWeights, Finished
from quantkit.model.layouts.pack_quantized import LAYOUT
from quantkit.model.source.open import open_model, open_written
from quantkit.model.source.weights import Weights
from quantkit.model.streaming.answers import Head
from quantkit.model.streaming.stream import StreamedModel
from quantkit.model.structure.traced import is_linear
from quantkit.runtimes import load_runtime
from quantkit.runtimes.torch.reloaded import expanded, reloaded
from quantkit.scheme import WeightScheme

PREFIX = "model.layers.0.mlp.up_proj"
GROUP = {"granularity": "group", "group": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"format": "int4", **GROUP, "symmetric": False}),
    "int3": ("pack-quantized", {"format": "int3", **GROUP, "symmetric": False}),
    "int2": ("pack-quantized", {"format": "int2", **GROUP}),
    "nvfp4": ("nvfp4-pack-quantized", {"format": "nvfp4"}),
    "mxfp4": ("mxfp4-pack-quantized", {"format": "mxfp4"}),
    "nf4": ("bitsandbytes", {"format": "nf4"}),
    "nf4-double": ("bitsandbytes", {"format": "nf4", "scale": "double"}),
    "gptq": ("gptq", {"format": "int4", **GROUP}),
    "gptq-v2": ("gptq-v2", {"format": "int4", **GROUP, "symmetric": False}),
}


def quantize(weight: torch.Tensor, how: WeightScheme) -> QuantTensor:
    found: QuantTensor = load_format(how.format).quantize(weight, how)
    return found


def test_every_layout_is_tried() -> None:
    # those for quantized inputs are tried with them; merged experts' in test_gpt_oss_has_its_own_layout
    elsewhere = {"int-quantized", "float-quantized", "mxfp4"}
    assert {layout for layout, _ in CASES.values()} >= set(layouts.names()) - elsewhere


@pytest.mark.parametrize(("name", "fields"), CASES.values(), ids=CASES)
def test_what_is_written_is_read_back(name: str, fields: dict[str, Any]) -> None:
    layout, how = layouts.load(name), WeightScheme(**fields)
    torch.manual_seed(0)
    tensor = quantize(torch.randn(96, 128), how)
    layout.accepts({PREFIX: how}, {PREFIX: (96, 128)})
    stored = {PREFIX + layout.codes: layout.packed(tensor)}
    stored |= layout.companions(PREFIX, tensor, torch.float32)
    headers = layout.headers(PREFIX, (96, 128), how)
    assert sorted((key, tuple(value.shape)) for key, value in stored.items()) == sorted(
        (key, at) for key, _, at in headers
    )
    assert {key.removeprefix(PREFIX) for key in stored} <= set(layout.parts)
    assert layout.prefixes([*stored, "model.norm.weight"]) == [PREFIX]
    assert layout.shape(PREFIX, stored.__getitem__) == (96, 128)
    assert bool((layout.scale(PREFIX, stored.__getitem__).float() > 0).all())
    back = layout.read_back(PREFIX, how, stored.__getitem__)
    values = load_format(how.format).dequantize(tensor)
    assert torch.equal(back.codes, tensor.codes)
    assert back.scale.dtype == tensor.scale.dtype
    torch.testing.assert_close(load_format(how.format).dequantize(back), values, rtol=2e-7, atol=0)
    bits = sum(8 * value.numel() * value.element_size() for value in stored.values())
    planned = load_format(how.format).bits_per_weight((96, 128), how) * 96 * 128
    assert planned <= bits <= planned + layout.overhead((96, 128), how)
    config = layout.quantization_config({PREFIX: how}, ["lm_head"], "bfloat16")
    assert layouts.of(json.loads(json.dumps(config))) is layout
    # what the library, or our own reader, makes of it
    # with quantized inputs, transformers does not expand as it reads, and the product is rounded elsewhere
    for told in (config, {key: value for key, value in config.items() if key != "dequantize"}):
        for dtype in (torch.bfloat16, torch.float32):
            expanded = layout.expansion(told, dtype).weight(PREFIX, stored.__getitem__)
            assert torch.equal(expanded, layout.as_loaded(tensor, dtype, told)), (dtype, "dequantize" in told)


def test_a_tie_in_bfloat16_goes_the_library_s_way() -> None:
    """1.5 · s · g lies between two numbers of bfloat16; `s / (1 / g)` has another last bit than `s · g`."""
    layout, how = layouts.load("nvfp4-pack-quantized"), WeightScheme(format="nvfp4")
    tensor = quantize(torch.ones(1, 16), how)
    scale = torch.tensor([[13]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensor = replace(tensor, codes=torch.full_like(tensor.codes, 3), scale=scale)
    tensor = replace(tensor, global_scale=torch.tensor(0.0005180162843316793))
    stored = {f"{PREFIX}.weight_packed": layout.packed(tensor), **layout.companions(PREFIX, tensor, torch.float32)}
    config = layout.quantization_config({PREFIX: how}, [], "bfloat16")
    expanded = layout.expansion(config, torch.bfloat16).weight(PREFIX, stored.__getitem__)
    assert torch.equal(expanded, layout.as_loaded(tensor, torch.bfloat16, config))
    assert not torch.equal(expanded, load_format("nvfp4").dequantize(tensor).bfloat16())


@pytest.mark.parametrize(
    "name", ["pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "bitsandbytes", "gptq"]
)
def test_another_format_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"layout-unsupported.*fp8_e4m3") as caught:
        layouts.load(name).accepts({PREFIX: WeightScheme(format="fp8_e4m3")}, {})
    assert caught.value.where == PREFIX


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown-layout.*did you mean 'gptq'"):
        layouts.load("gptk")
    with pytest.raises(InputError, match=r"unknown-layout.*awq"):
        layouts.of({"quant_method": "awq"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts") / "source"
    model: Any = zoo.tiny("llama", num_hidden_layers=2, intermediate_size=128)
    model.save_pretrained(folder)
    return folder


def export(path: Path, folder: Path, name: str, how: WeightScheme) -> tuple[Any, ...]:
    """Every linear of the blocks but one."""
    origin = open_model(str(path))
    stream = StreamedModel(origin)
    tensors = {
        linear: quantize(origin.weights.read(stream.files[f"{linear}.weight"]).float(), how)
        for linear, module in stream.skeleton.named_modules()
        if linear.startswith(tuple(stream.block_names))
        and is_linear(module)
        and not linear.endswith("1.self_attn.o_proj")
    }
    finished.save(folder / "block", tensors, {})
    results = Finished([folder / "block"], dict.fromkeys(tensors, how))
    (folder / "bundle").mkdir()
    taken = write_as(EXPORT, folder / "bundle", origin, stream, results, {"layout": name})
    return (folder / "bundle", origin, stream, results, {"layout": name}), tensors, taken


def dense(source: Path, tensors: dict[str, QuantTensor]) -> nn.Module:
    """The reference: our own dequantization in a float model."""
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for linear, tensor in tensors.items():
            values = load_format(tensor.scheme.format).dequantize(tensor)
            model.get_submodule(linear).weight.copy_(values)
    return model.eval()


def in_half_precision() -> bool:
    """Whether bitsandbytes multiplies in bfloat16 on this processor."""
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


# the library picks bits of int3 and int2 by masks, whose shapes a fake tensor does not know
@pytest.mark.parametrize("case", ["int4", "nvfp4", "mxfp4", "nf4", "gptq"])
def test_packed_weights_are_expanded_on_the_device(
    tmp_path: Path, source: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields = CASES[case]
    (bundle, _, stream, results, _), tensors, _ = export(source, tmp_path, name, WeightScheme(**fields))
    written = open_written(bundle / "model")
    linear = next(name for name, tensor in tensors.items() if tensor.shape[0] == tensor.shape[1])
    config = written.config["quantization_config"]
    anywhere = layouts.of(config).expansion(config, torch.float32).anywhere
    assert anywhere == (layouts.of(config).libraries == ("compressed_tensors",))
    if not anywhere:
        return
    weights, copied, read = expanded(written).weights, list[int](), Weights.read
    whole = weights.read(f"{linear}.weight")

    def there(self: Weights, name: str, device: torch.device | None = None) -> torch.Tensor:
        with _disable_current_modes():
            value = read(self, name)
        copied.append(value.nbytes if device is not None else 0)
        return value if device is None else fake_gpu.like(value)

    decided = results.quantized(linear)
    fields_of = {field: getattr(decided, field) for field in ("codes", "scale", "zero", "codebook", "global_scale")}
    monkeypatch.setattr(Weights, "read", there)
    with fake_gpu.gpu({torch.int64: whole.shape[0]}, others=True):  # what a stored shape says
        values = DenseWeights.read(weights, f"{linear}.weight", fake_gpu.CUDA)
        prefix = stream.files[f"{linear}.weight"].removesuffix(".weight")
        decided = decided.replace(**{field: fake_gpu.like(value) for field, value in fields_of.items()})
        meant = layouts.of(config).as_loaded(decided, whole.dtype, config)
    assert (values.device, values.dtype, values.shape) == (fake_gpu.CUDA, whole.dtype, whole.shape)
    assert 0 < sum(copied) < whole.nbytes
    assert (prefix, meant.device, meant.dtype, meant.shape) == (linear, fake_gpu.CUDA, whole.dtype, whole.shape)


@pytest.mark.parametrize(("name", "fields"), CASES.values(), ids=CASES)
def test_others_load_what_was_meant(tmp_path: Path, source: Path, name: str, fields: dict[str, Any]) -> None:
    how, layout = WeightScheme(**fields), layouts.load(name)
    arguments, tensors, taken = export(source, tmp_path, name, how)
    checks = {check.name: check for check in check_as(EXPORT, *arguments)}
    assert all(check.ok for check in checks.values()), checks
    ids = zoo.ids(2, 12)
    with torch.no_grad():
        meant = dense(source, tensors)(ids).logits
        if layouts.missing(layout):
            assert "reload.own_reader" in checks
            assert taken[0].code == "own-reader"
            assert "pip install" in taken[0].reason
        else:
            assert not taken
            half = name == "bitsandbytes" and in_half_precision()
            off, limit = checks["reload.transformers"].value, checks["reload.transformers"].limit
            assert off is not None and limit is not None
            assert 2**-8 < limit < 2**-4 if layout.kernels else limit == 1e-4
            assert off <= (limit if half else 1e-4)
            # and once more without any of our own code on the way
            found = AutoModelForCausalLM.from_pretrained(arguments[0] / "model").eval()(ids).logits
            # compressed-tensors multiplies 4-bit floats in bfloat16, others in the dtype of the scales
            limit = 2e-2 if "fp4" in how.format or half else 1e-3
            assert float((found - meant).abs().max() / meant.abs().max()) <= limit
        stream = reloaded(arguments[0] / "model")
        scored = Head(stream.rest(), stream.paths, stream.flow)(stream.run(ids, chunk=2), ids)
    assert float((scored - meant).abs().max() / meant.abs().max()) <= 2e-2


def test_where_the_library_is_missing_our_reader_covers_every_tensor(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layouts.importlib.util.find_spec
    absent = {"bitsandbytes", "gptqmodel"}
    monkeypatch.setattr(layouts.importlib.util, "find_spec", lambda name: None if name in absent else real(name))
    arguments, _, taken = export(source, tmp_path, "bitsandbytes", WeightScheme(format="nf4"))
    assert "pip install bitsandbytes" in taken[0].reason
    checks = check_as(EXPORT, *arguments)
    assert [check.name for check in checks][-1] == "reload.own_reader"
    assert checks[-1].value == 0
    # norms and embeddings are no part of the layout, and are compared all the same
    path = arguments[0] / "model/model.safetensors"
    from safetensors.torch import load_file, save_file

    stored = load_file(path)
    stored["model.norm.weight"] *= 1.01
    save_file(stored, path, metadata={"format": "pt"})
    wrong = check_as(EXPORT, *arguments)[-1]
    assert not wrong.ok
    assert wrong.where == "model.norm"


def test_a_bundle_without_its_library_still_runs(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, tensors, _ = export(source, tmp_path, "gptq-v2", WeightScheme(format="int4", **GROUP, symmetric=False))
    monkeypatch.setattr(layouts.importlib.util, "find_spec", lambda name: None)

    class Bundle:
        model_folder = arguments[0] / "model"

        def demand_intact(self, under: str) -> None:
            """As if a manifest listed all of it."""

    ids = zoo.ids(2, 12)
    with torch.no_grad():
        found = load_runtime("torch").load(Bundle())(ids).logits
        meant = dense(source, tensors)(ids).logits
    assert float((found - meant).abs().max() / meant.abs().max()) <= 1e-3


def test_the_library_takes_whole_groups_alone() -> None:
    """Which is why padding is refused: a last group that is shorter raises there, and vLLM asserts there is none."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    with pytest.raises(ValueError, match="divisble by the given group_size 32 but got 80"):
        dequantize(torch.zeros(4, 80, dtype=torch.int8), torch.ones(4, 3), None, arguments)


LAYER = "model.layers.0.mlp.up_proj"


def quantized(how: WeightScheme, shape: tuple[int, int] = (64, 96), seed: int = 0) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    found: QuantTensor = load_format(how.format).quantize(weight, how)
    return found


def stored(layout: layouts.Layout, tensor: QuantTensor, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    return {LAYER + layout.codes: layout.packed(tensor), **layout.companions(LAYER, tensor, dtype)}


@pytest.mark.parametrize("name", ["gptq", "gptq-v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fields", [{"granularity": "group", "group": 32}, {"granularity": "channel"}])
@pytest.mark.parametrize("symmetric", [True, False])
def test_an_independent_reader_finds_what_was_stored(name: str, bits: int, fields: Any, symmetric: bool) -> None:
    layout = layouts.load(name)
    how = WeightScheme(format=f"int{bits}", symmetric=symmetric, scale="float16", **fields)
    tensor = quantized(how)
    if name == "gptq" and not symmetric:
        with pytest.raises(InputError, match=r"layout-unsupported.*minus one.*gptq-v2"):
            layout.accepts({LAYER: how}, {LAYER: tensor.shape})
        return
    layout.accepts({LAYER: how}, {LAYER: tensor.shape})
    found = stored(layout, tensor)
    headers = layout.headers(LAYER, tensor.shape, how)
    assert {(key, tuple(value.shape)) for key, value in found.items()} == {(key, size) for key, _, size in headers}
    assert {key.removeprefix(LAYER) for key in found} == set(layout.parts)

    parts = {key.removeprefix(f"{LAYER}."): value.numpy() for key, value in found.items()}
    read = plain_gptq.weight(**parts, bits=bits, version=1 if name == "gptq" else 2)
    meant = layout.as_loaded(tensor, torch.float16, {})
    assert torch.equal(torch.from_numpy(read).T, meant)

    back = layout.read_back(LAYER, how, found.__getitem__)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.scale, tensor.scale)
    assert back.zero is None if symmetric else torch.equal(back.zero, tensor.zero)
    assert layout.prefixes(found) == [LAYER]
    assert layout.shape(LAYER, found.__getitem__) == tensor.shape
    bits_stored = sum(8 * value.numel() * value.element_size() for value in found.values())
    planned = load_format(how.format).bits_per_weight(tensor.shape, how) * tensor.codes.numel()
    assert planned <= bits_stored <= planned + layout.overhead(tensor.shape, how)


def test_our_reader_goes_by_the_files_and_the_config_alone() -> None:
    layout = layouts.load("gptq-v2")
    how = WeightScheme(format="int4", granularity="group", group=32, symmetric=False)
    tensor = quantized(how)
    found = stored(layout, tensor)
    config = layout.quantization_config({LAYER: how}, [], "float32")
    expansion = layout.expansion(config, torch.float32)
    if layouts.missing(layout):
        assert expansion.library is None
    assert torch.equal(expansion.weight(LAYER, found.__getitem__), layout.as_loaded(tensor, torch.float32, config))
    # inputs that are assigned to groups in another order are read in that order
    found[f"{LAYER}.g_idx"] = found[f"{LAYER}.g_idx"].flip(0)
    assert not torch.equal(expansion.weight(LAYER, found.__getitem__), layout.as_loaded(tensor, torch.float32, config))


def test_the_config_is_what_its_readers_look_for() -> None:
    how = WeightScheme(format="int4", granularity="group", group=128)
    kept = "model.layers.1.mlp.up_proj"
    for name, version in (("gptq", "gptq"), ("gptq-v2", "gptq_v2")):
        layout = layouts.load(name)
        config = layout.quantization_config({LAYER: how}, ["lm_head"], "float16")
        assert config["quant_method"] == "gptq"
        assert (config["bits"], config["group_size"], config["sym"], config["desc_act"]) == (4, 128, True, False)
        assert config["checkpoint_format"] == version
        assert not {"dynamic", "modules_in_block_to_quantize"} & config.keys()
        assert layouts.of(config) is layout
        mixed = layout.quantization_config({LAYER: how}, ["lm_head", kept], "float16")
        assert mixed["modules_in_block_to_quantize"] == [[LAYER]]
        assert mixed["dynamic"] == {"-:^model\\.layers\\.1\\.mlp\\.up_proj$": {}}
    per_channel = layouts.load("gptq").quantization_config({LAYER: WeightScheme(format="int8")}, [], "float16")
    assert per_channel["group_size"] == -1


@pytest.mark.parametrize(
    ("schemes", "shapes", "reason"),
    [
        ({LAYER: WeightScheme(format="int4", granularity="tensor")}, {}, "a scale for every row"),
        ({"lm_head": WeightScheme(format="int4")}, {}, "outside of the blocks"),
        ({LAYER: WeightScheme(format="int4")}, {LAYER: (60, 64)}, "multiples of 8"),
        (
            {LAYER: WeightScheme(format="int4"), "model.layers.1.x": WeightScheme(format="int8")},
            {},
            "2 different schemes",
        ),
        ({LAYER: WeightScheme(format="float16")}, {}, "gptq of float16"),
    ],
)
def test_what_it_cannot_hold_is_refused(schemes: Any, shapes: Any, reason: str) -> None:
    with pytest.raises(InputError, match=f"layout-unsupported.*{reason}"):
        layouts.load("gptq").accepts(schemes, shapes)


def test_zero_points_of_a_few_rows_are_read_from_a_file(tmp_path: Path) -> None:
    """Packed they are one row. Our reader takes them; compressed-tensors does not, so they are refused before."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors.torch import load_file, save_file

    how = WeightScheme(format="int4", granularity="group", group=32, symmetric=False, scale="float32")
    for rows in (1, 4, 8):
        tensor = quantized(how, (rows, 96))
        save_file(
            {"x" + LAYOUT.codes: LAYOUT.packed(tensor), **LAYOUT.companions("x", tensor, torch.float32)},
            tmp_path / "x.safetensors",
        )
        back = LAYOUT.read_back("x", how, load_file(tmp_path / "x.safetensors").__getitem__)
        assert torch.equal(back.codes, tensor.codes) and torch.equal(back.zero, tensor.zero)
        with pytest.raises(RuntimeError, match="stride"):
            unpack_from_int32(
                load_file(tmp_path / "x.safetensors")["x.weight_zero_point"], 4, torch.Size((rows, 3)), packed_dim=0
            )
        with pytest.raises(InputError, match=r"layout-unsupported.*symmetric=true"):
            LAYOUT.accepts({LAYER: how}, {LAYER: (rows, 96)})
    LAYOUT.accepts({LAYER: how}, {LAYER: (9, 96)})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (17, 3), (33, 40), (8, 4095)])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packing_agrees_with_the_library_and_is_its_own_inverse(
    bits: int, shape: tuple[int, int], granularity: Any, symmetric: bool
) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    torch.manual_seed(bits)
    how = WeightScheme(format=f"int{bits}", granularity=granularity, symmetric=symmetric, scale="float32")
    tensor = load_format(how.format).quantize(torch.randn(shape), how)
    stored = {"x" + LAYOUT.codes: LAYOUT.packed(tensor), **LAYOUT.companions("x", tensor, torch.float32)}
    assert [(name, tuple(value.shape)) for name, value in stored.items()] == [
        (name, size) for name, _, size in LAYOUT.headers("x", shape, how)
    ]
    assert torch.equal(unpack_from_int32(stored["x.weight_packed"], bits, torch.Size(shape)), tensor.codes)
    if not symmetric and granularity == "channel":
        zero = unpack_from_int32(stored["x.weight_zero_point"], bits, torch.Size((shape[0], 1)), packed_dim=0)
        assert torch.equal(zero, tensor.zero)
    back = LAYOUT.read_back("x", how, stored.__getitem__)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.scale, tensor.scale)
    assert back.zero is None if symmetric else torch.equal(back.zero, tensor.zero)
    # the same bytes as the format's own packing, rows filled up to whole words
    reference = load_format(f"int{bits}").pack(tensor.codes)
    assert torch.equal(stored["x.weight_packed"].view(torch.uint8)[:, : reference.shape[1]], reference)


@pytest.mark.parametrize("rows", [4, 32, 48, 96])
def test_rows_that_bitsandbytes_does_not_multiply_are_refused(rows: int) -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    layout, scheme = layouts.load("bitsandbytes"), WeightScheme.model_validate({"format": "nf4"})
    codes, state = library.quantize_4bit(torch.randn(rows, 64), quant_type="nf4")
    try:
        library._convert_weight_packed_for_cpu(codes, state)
    except AssertionError:
        with pytest.raises(InputError, match=r"layout-unsupported.*\{match: \"\*\.up_proj\", weights: null\}"):
            layout.accepts({PREFIX: scheme}, {PREFIX: (rows, 64)})
    else:
        layout.accepts({PREFIX: scheme}, {PREFIX: (rows, 64)})
