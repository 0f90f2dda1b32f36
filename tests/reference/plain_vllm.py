"""What vLLM asks of a checkpoint's config before it loads it, restated from its source.

Commits of github.com/vllm-project/vllm that this follows, under `vllm/model_executor/layers/quantization/`:

    compressed_tensors/compressed_tensors.py                        be696453ee1b  `_get_scheme_from_parts`
    compressed_tensors/schemes/compressed_tensors_wNa16.py          519b90d4648d  bits, strategy, parameters
    compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py    17b6501a6ce9  parameters
    compressed_tensors/schemes/compressed_tensors_w4a16_mxfp4.py    1a6da5481826  parameters
    compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py       00cb05c39f77  strategies, parameters
    compressed_tensors/schemes/compressed_tensors_w8a8_int8.py      c45614b5d83b  parameters
    auto_gptq.py                                                    4276bd50998c  `AutoGPTQConfig`, `create_weights`
    bitsandbytes.py                                                 5a6541db9bfa  `BitsAndBytesConfig`, skipped modules
    compressed_tensors/utils.py, utils/config_utils.py              0.32.0, `should_ignore_layer`
    utils/marlin_utils.py                                           MARLIN_SUPPORTED_GROUP_SIZES = [-1, 32, 64, 128]

Held against vLLM 0.33.0 as it is published on PyPI. There the two schemes of 4-bit floats are one with those whose
inputs are quantized too (`compressed_tensors_w4a4_nvfp4.py` with `use_a16`, `compressed_tensors_w4a4_mxfp4.py`);
integers of 2 and 3 bits are taken by Humming, which it installs; and bitsandbytes left its core in 0.28 for
`vllm-bnb-plugin` (0.0.3, `quantization/config.py`), without which it knows no such method.

vLLM itself needs a GPU build; only decisions that depend on config and shapes are here. Parameters are given as
(dtype, shape) by the names that its loader looks for.
"""

import re
from typing import Any

MARLIN_GROUPS = (-1, 32, 64, 128)
WNA16_BITS = (2, 3, 4, 8)
PLUGIN = "vllm-bnb-plugin"
GPTQ_TYPES = ((4, True), (8, True))
# `packed_modules_mapping` of its Llamas and DeepSeeks
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}

Parameters = dict[str, tuple[str, tuple[int, ...]]]


class Refused(ValueError):
    """vLLM would raise."""


def kernel(
    config: dict[str, Any], name: str, shape: tuple[int, int], dtype: str = "F16", plugins: tuple[str, ...] = (PLUGIN,)
) -> tuple[str, Parameters]:
    """The linear method that vLLM takes for a layer [N, K], and the parameters that it then wants to load.

    Returns `("UnquantizedLinearMethod", {})` for a layer that the config excludes.
    """
    method = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "bitsandbytes": _bitsandbytes}
    if config["quant_method"] == "bitsandbytes" and PLUGIN not in plugins:
        raise Refused("Unknown quantization method: bitsandbytes")
    return method[config["quant_method"]](config, name, shape, dtype)


def ignored(name: str, patterns: list[str], fused: dict[str, tuple[str, ...]] | None = None) -> bool:
    """`should_ignore_layer`: a pattern that matches the fused name counts first, then those of its parts."""
    if any(_matches(name, pattern) for pattern in patterns):
        return True
    owner, _, leaf = name.rpartition(".")
    parts = [f"{owner}.{part}" for part in (FUSED if fused is None else fused).get(leaf, ())]
    shards = [any(_matches(part, pattern) for pattern in patterns) for part in parts]
    if any(shards) and not all(shards):
        raise Refused(f"Found different quantization schemes for the shards of {name}")
    return bool(shards) and all(shards)


def _matches(name: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name


def _compressed_tensors(
    config: dict[str, Any], name: str, shape: tuple[int, int], dtype: str
) -> tuple[str, Parameters]:
    if ignored(name, config["ignore"]):
        return "UnquantizedLinearMethod", {}
    rows, columns = shape
    targets = {target: group for group in config["config_groups"].values() for target in group["targets"]}
    # find_matched_target: by name, then by the module's class
    found = targets.get(name) or targets.get("Linear")
    if found is None:
        raise Refused(f"no target matches {name}")
    weights, inputs = found["weights"], found.get("input_activations")
    form = found.get("format") or config["format"]
    bits, group = weights["num_bits"], weights.get("group_size")
    packed: Parameters = {"weight_packed": ("U8", (rows, columns // 2))}
    if inputs is None and weights["type"] == "float" and bits == 4 and weights["symmetric"]:
        if weights["strategy"] == "tensor_group" and group == 16:
            scale = {"weight_scale": ("F8_E4M3", (rows, columns // 16)), "weight_global_scale": ("F32", (1,))}
            return "CompressedTensorsW4A16Fp4", {**packed, **scale}
        if weights["strategy"] == "group" and group == 32 and form == "mxfp4-pack-quantized":
            return "CompressedTensorsW4A16Mxfp4", {**packed, "weight_scale": ("U8", (rows, columns // 32))}
    weight_only = weights["strategy"] in ("channel", "group") and inputs is None and not weights.get("dynamic")
    if weight_only and form == "pack-quantized" and bits in WNA16_BITS:
        if (group or -1) not in MARLIN_GROUPS or weights.get("actorder"):
            raise Refused(f"no Marlin kernel for groups of {group}")  # Humming's groups were not looked at
        groups = columns // (group or columns)
        wanted: Parameters = {
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": (dtype, (rows, groups)),
            "weight_shape": ("I64", (2,)),
        }
        if not weights["symmetric"]:
            wanted["weight_zero_point"] = ("I32", (rows * bits // 32, groups))
        return "CompressedTensorsWNA16", wanted
    if form in ("int-quantized", "float-quantized"):
        return _plain_codes(weights, inputs, shape)
    raise Refused("No compressed-tensors compatible scheme was found.")


def _plain_codes(
    weights: dict[str, Any], inputs: dict[str, Any] | None, shape: tuple[int, int]
) -> tuple[str, Parameters]:
    """Schemes of activation quantization formats: W8A8, and FP8 weights alone."""
    rows, columns = shape
    strategy, static = weights["strategy"], inputs is not None and not inputs["dynamic"]
    integers = weights["type"] == "int"
    if not weights["symmetric"] or strategy not in ("tensor", "channel", *(() if integers else ("block",))):
        raise Refused("No compressed-tensors compatible scheme was found.")
    scale: tuple[int, ...] = {"tensor": (1,), "channel": (rows, 1)}.get(strategy, ())
    if strategy == "block":
        high, wide = weights["block_structure"]
        scale = (-(-rows // high), -(-columns // wide))
    wanted: Parameters = {"weight": ("I8" if integers else "F8_E4M3", shape), "weight_scale": ("F32", scale)}
    if static:
        wanted["input_scale"] = ("F32", (1,))
    if not integers:
        if inputs is None:
            return "CompressedTensorsW8A16Fp8", wanted
        if not static or (inputs["symmetric"] and inputs["strategy"] == "tensor" and strategy != "block"):
            return "CompressedTensorsW8A8Fp8", wanted
    elif inputs is not None and inputs["strategy"] == ("tensor" if static else "token"):
        if not inputs["symmetric"] and static:
            wanted["input_zero_point"] = ("I8", (1,))
        return "CompressedTensorsW8A8Int8", wanted
    raise Refused("No compressed-tensors compatible scheme was found.")


def _gptq(config: dict[str, Any], name: str, shape: tuple[int, int], dtype: str) -> tuple[str, Parameters]:
    # get_dynamic_override: a negative match skips the module
    for pattern in config.get("dynamic") or {}:
        if pattern.startswith("-:") and re.match(pattern.removeprefix("-:"), name):
            return "UnquantizedLinearMethod", {}
    chosen = [module for listed in config.get("modules_in_block_to_quantize") or [] for module in listed]
    if (chosen and not any(module in name for module in chosen)) or (name == "lm_head" and not config["lm_head"]):
        return "UnquantizedLinearMethod", {}
    bits, group = config["bits"], config["group_size"]
    if (bits, config["sym"]) not in GPTQ_TYPES:
        raise Refused(f"Unsupported quantization config: bits={bits}, sym={config['sym']}")
    if group not in MARLIN_GROUPS or config["desc_act"]:
        raise Refused(f"no Marlin kernel for groups of {group}")
    rows, columns = shape
    groups = columns // (group if group > 0 else columns)
    return "GPTQMarlinLinearMethod", {
        "qweight": ("I32", (columns * bits // 32, rows)),
        "g_idx": ("I32", (columns,)),
    } | {"qzeros": ("I32", (groups, rows * bits // 32)), "scales": (dtype, (groups, rows))}


def _bitsandbytes(config: dict[str, Any], name: str, shape: tuple[int, int], dtype: str) -> tuple[str, Parameters]:
    if config["bnb_4bit_quant_storage"] != "uint8":
        raise Refused("Unsupported bnb_4bit_quant_storage")
    if config["load_in_8bit"] or not config["load_in_4bit"]:
        raise Refused("not 4 bit")
    components = name.split(".")
    prefixes = {".".join(components[: at + 1]) for at in range(len(components))}
    skipped = config["llm_int8_skip_modules"]
    if any(module in components for module in skipped) or prefixes & set(skipped):
        return "UnquantizedLinearMethod", {}
    # its loader recognises a quantized weight by the name of the state beside it
    return "BitsAndBytesLinearMethod", {
        "weight": ("U8", (shape[0] * shape[1] // 2, 1)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", ()),
    }
