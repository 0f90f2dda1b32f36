"""vLLM's own checks of a checkpoint's config, on what we write; see `reference/plain_vllm.py` for its version."""

from typing import Any

import pytest
from reference import plain_vllm

from quantkit import content
from quantkit.exporters.checkpoint.exporter import CheckpointOptions
from quantkit.model import layouts
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme

LAYER, KEPT = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
SHAPE = (256, 512)
GROUP = {"granularity": "group", "group": 64}

SERVED = [
    ("pack-quantized", {"format": "int4", **GROUP}, "CompressedTensorsWNA16"),
    ("pack-quantized", {"format": "int4", **GROUP, "symmetric": False}, "CompressedTensorsWNA16"),
    ("pack-quantized", {"format": "int8"}, "CompressedTensorsWNA16"),
    ("pack-quantized", {"format": "int3", **GROUP, "symmetric": False}, "CompressedTensorsWNA16"),
    ("pack-quantized", {"format": "int2", **GROUP}, "CompressedTensorsWNA16"),
    ("nvfp4-pack-quantized", {"format": "nvfp4"}, "CompressedTensorsW4A16Fp4"),
    ("mxfp4-pack-quantized", {"format": "mxfp4"}, "CompressedTensorsW4A16Mxfp4"),
    ("gptq", {"format": "int4", **GROUP}, "GPTQMarlinLinearMethod"),
    ("gptq", {"format": "int8"}, "GPTQMarlinLinearMethod"),
    ("gptq-v2", {"format": "int4", **GROUP}, "GPTQMarlinLinearMethod"),
    ("bitsandbytes", {"format": "nf4"}, "BitsAndBytesLinearMethod"),
    ("bitsandbytes", {"format": "nf4", "scale": "double"}, "BitsAndBytesLinearMethod"),
]


def written(name: str, how: WeightScheme, ignore: list[str]) -> tuple[layouts.Layout, dict[str, Any]]:
    layout = layouts.load(name)
    return layout, layout.quantization_config({LAYER: how}, ignore, "float16")


@pytest.mark.parametrize(("name", "fields", "method"), SERVED)
def test_vllm_has_a_kernel_and_finds_its_parameters(name: str, fields: dict[str, Any], method: str) -> None:
    how = WeightScheme(**fields)
    layout, config = written(name, how, ["lm_head", KEPT])
    assert layout.served(how)
    stored = {header: (dtype, size) for header, dtype, size in layout.headers(LAYER, SHAPE, how)}
    dtype = {"float32": "F32", "float16": "F16"}.get(how.scale, "F16")
    taken, wanted = plain_vllm.kernel(config, LAYER, SHAPE, dtype)
    assert taken == method
    for parameter, (kind, size) in wanted.items():
        assert stored[f"{LAYER}.{parameter}"][0] == kind
        assert not size or stored[f"{LAYER}.{parameter}"][1] == size
    # what is left alone is left alone there as well
    for other in ("lm_head", KEPT):
        assert plain_vllm.kernel(config, other, SHAPE)[0] == "UnquantizedLinearMethod"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gptq-v2", {"format": "int3", **GROUP}),
        ("gptq-v2", {"format": "int4", **GROUP, "symmetric": False}),
        ("pack-quantized", {"format": "int4", "granularity": "group", "group": 256}),
    ],
)
def test_what_vllm_refuses_is_known(name: str, fields: dict[str, Any]) -> None:
    how = WeightScheme(**fields)
    layout, config = written(name, how, [])
    with pytest.raises(plain_vllm.Refused):
        plain_vllm.kernel(config, LAYER, SHAPE)
    assert not layout.served(how)


def test_the_layout_that_left_the_core_says_what_it_needs() -> None:
    layout, config = written("bitsandbytes", WeightScheme(format="nf4"), [])
    with pytest.raises(plain_vllm.Refused, match="Unknown quantization method"):
        plain_vllm.kernel(config, LAYER, SHAPE, plugins=())
    for name in layouts.names():
        assert (plain_vllm.PLUGIN in layouts.load(name).serving) == (name == layout.name)


@pytest.mark.parametrize("recipe", content.names("recipes"))
def test_recipes_whose_card_names_vllm_are_served_by_it(recipe: str) -> None:
    found = Recipe.load(recipe)
    scheme = found.scheme.weights
    for step in found.export:
        layout = CheckpointOptions(**step.options).found if step.name == "checkpoint" else None
        if scheme is None or layout is None or not layout.served(scheme) or found.scheme.activations:
            continue
        config = layout.quantization_config({LAYER: scheme}, [], "float16")
        assert plain_vllm.kernel(config, LAYER, SHAPE)[0] != "UnquantizedLinearMethod"
