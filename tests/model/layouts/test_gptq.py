"""GPTQ, both versions: what an independent reader unpacks, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import plain_gptq

from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.model import layouts
from quantkit.scheme import WeightScheme

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
