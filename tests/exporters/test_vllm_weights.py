"""What vLLM makes of our checkpoints once it has fused linears, against what their own libraries expand.

The reader is `reference/plain_vllm_weights.py`, which names the commits that it follows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from reference import plain_vllm_weights
from reference.plain_vllm import Refused
from safetensors.torch import load_file
from thorough import beside

from quantkit import content
from quantkit.exporters.checkpoint.exporter import CheckpointOptions
from quantkit.model import layouts
from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = {"granularity": "group", "group": 64}
FLOATS = {"format": "fp8_e4m3", "scale": "float32"}
STATIC = {"granularity": "tensor", "dynamic": False}
BLOCKS = {**FLOATS, "granularity": "block", "group": 128}
# every layout that vLLM reads, each way that its scales can lie: weights, inputs, passes
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "int4-group": ("pack-quantized", {"format": "int4", **GROUP}, None, "gptq"),
    "int4-zeros": ("pack-quantized", {"format": "int4", **GROUP, "symmetric": False}, None, "rtn"),
    "int8-channel": ("pack-quantized", {"format": "int8", "scale": "float32"}, None, "rtn"),
    "w8a8-token": ("int-quantized", {"format": "int8", "scale": "float32"}, {"format": "int8"}, "gptq"),
    "w8a8-tensor": (
        "int-quantized",
        {"format": "int8", "granularity": "tensor", "scale": "float32"},
        {"format": "int8", **STATIC},
        "rtn",
    ),
    "w8a8-zeros": (
        "int-quantized",
        {"format": "int8", "scale": "float32"},
        {"format": "int8", **STATIC, "symmetric": False},
        "rtn",
    ),
    "fp8-channel": ("float-quantized", FLOATS, {"format": "fp8_e4m3"}, "gptq"),
    "fp8-tensor": ("float-quantized", {**FLOATS, "granularity": "tensor"}, {"format": "fp8_e4m3", **STATIC}, "gptq"),
    "fp8-tensor-rtn": ("float-quantized", {**FLOATS, "granularity": "tensor"}, {"format": "fp8_e4m3"}, "rtn"),
    "fp8-alone": ("float-quantized", {**FLOATS, "granularity": "tensor"}, None, "rtn"),
    "fp8-block": ("float-quantized", BLOCKS, {"format": "fp8_e4m3", "granularity": "group", "group": 128}, "gptq"),
    "nvfp4-gptq": ("nvfp4-pack-quantized", {"format": "nvfp4"}, None, "gptq"),
    "nvfp4-rtn": ("nvfp4-pack-quantized", {"format": "nvfp4"}, None, "rtn"),
    "mxfp4": ("mxfp4-pack-quantized", {"format": "mxfp4"}, None, "gptq"),
    "gptq": ("gptq", {"format": "int4", **GROUP}, None, "rtn"),
    "gptq-v2": ("gptq-v2", {"format": "int8"}, None, "rtn"),
    "nf4": ("bitsandbytes", {"format": "nf4"}, None, "rtn"),
    "nf4-double": ("bitsandbytes", {"format": "nf4", "scale": "double"}, None, "rtn"),
}
# every layout, and the scales of inputs by token, tensor and block
KEPT = (
    "int4-zeros",
    "w8a8-token",
    "w8a8-zeros",
    "fp8-tensor",
    "fp8-block",
    "nvfp4-gptq",
    "mxfp4",
    "gptq",
    "gptq-v2",
    "nf4",
)
# where the library rounds what it expands: nvfp4 to bfloat16, 8-bit codes times float16 scales to float16
ROUNDED = {"nvfp4-gptq": 2**-8, "nvfp4-rtn": 2**-8, "gptq-v2": 2**-11}

Made = Callable[[Recipe], Path]


@pytest.fixture
def compiled(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A compile of a small Llama whose linears are of very different sizes; the folder of its checkpoint."""
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 60)
    model = zoo.tiny(
        "llama", vocab_size=258, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=4
    )
    with torch.no_grad():
        for name, factor in (("q_proj", 1.0), ("k_proj", 7.0), ("v_proj", 0.2), ("up_proj", 3.0)):
            for key, value in model.named_parameters():
                value.mul_(factor if name in key else 1.0)
        # a weight far from the others: one scale for all has to reach it
        model.get_parameter("model.layers.0.self_attn.v_proj.weight")[3, 5] *= 20
    source = tmp_path / "llama.tiny"
    model.save_pretrained(source)  # type: ignore[operator]
    byte_tokenizer.save_pretrained(source)

    def make(recipe: Recipe) -> Path:
        asked = Request.of(str(source), recipe=recipe, target="l4", out=tmp_path / "out", speed=False)
        return compile_model(asked).bundle.model_folder

    return make


def expanded(folder: Path) -> dict[str, torch.Tensor]:
    """Every quantized linear as its own library expands it, each by itself, in float32."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    layout = layouts.of(config)
    weight = layout.expansion(config, torch.float32).weight
    return {prefix: weight(prefix, stored.__getitem__) for prefix in layout.prefixes(stored)}


@pytest.mark.parametrize("name", beside(KEPT, CASES))
def test_fused_weights_and_input_scales_are_those_that_were_stored(name: str, compiled: Made) -> None:
    layout, weights, activations, assigner = CASES[name]
    recipe = {
        "summary": "a test",
        "calibration": {"set": "prose-en", "samples": 2, "tokens": 32},
        "scheme": {"weights": weights, "activations": activations},
        "passes": [assigner],
        "export": [{"checkpoint": {"layout": layout}}],
    }
    folder = compiled(Recipe.from_dict(recipe, name=name))
    found, wanted, stored = plain_vllm_weights.held(folder), expanded(folder), load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert len(found) == 7
    for linear, each in found.items():
        torch.testing.assert_close(each.weight, wanted[linear], rtol=ROUNDED.get(name, 3e-7), atol=0, msg=linear)
        scale, zero = stored.get(f"{linear}.input_scale"), stored.get(f"{linear}.input_zero_point")
        assert (each.input_scale is None) == (scale is None)
        if scale is not None and each.input_scale is not None:
            torch.testing.assert_close(each.input_scale.reshape(1), scale, rtol=3e-7, atol=0)
        if zero is not None and each.input_zero is not None:
            # vLLM cuts it off where it should round; one step off, it moves the range by one step and no value
            assert abs(int(each.input_zero) - int(zero)) <= 1


def served() -> list[str]:
    """The shipped recipes whose checkpoints vLLM reads."""
    found = []
    for name in content.names("recipes"):
        recipe = Recipe.load(name)
        scheme, options = recipe.scheme.weights, {step.name: step.options for step in recipe.export}
        layout = CheckpointOptions(**options["checkpoint"]).found if "checkpoint" in options else None
        if scheme is not None and layout is not None and layout.served(scheme) and "decoder" in recipe.models:
            found.append(name)
    return found


@pytest.mark.parametrize("name", beside(["awq-int4"], served()))
def test_so_are_those_of_every_shipped_recipe(name: str, compiled: Made) -> None:
    recipe = Recipe.load(name, ["calibration.samples=2", "calibration.tokens=32"])
    only = [step for step in recipe.export if step.name == "checkpoint"]
    folder = compiled(recipe.model_copy(update={"export": only}))
    found, wanted = plain_vllm_weights.held(folder), expanded(folder)
    assert len(found) == 7
    for linear, weight in wanted.items():
        torch.testing.assert_close(found[linear].weight, weight, rtol=2**-8, atol=0, msg=linear)


def test_what_vllm_refuses_once_it_fuses(compiled: Made) -> None:
    """Scales of blocks that do not lie below one another, and parts that are stored in different ways."""
    recipe = {
        "summary": "a test",
        "scheme": {"weights": {**BLOCKS, "group": 96}, "activations": {"format": "fp8_e4m3"}},
        "passes": ["rtn"],
        "export": [{"checkpoint": {"layout": "float-quantized"}}],
    }
    folder = compiled(Recipe.from_dict(recipe, name="blocks"))
    with pytest.raises(Refused, match="not divisible by block_n = 96"):
        plain_vllm_weights.held(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.0.mlp.up_proj")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="different quantization schemes"):
        plain_vllm_weights.held(folder)
