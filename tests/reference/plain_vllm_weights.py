"""The weights and input scales that vLLM computes with, from the files of a checkpoint: fused as it fuses them.

q, k and v of an attention become one matrix, gate and up of an MLP another, and so do w1 and w3 of each expert. What
has a number for each row of a part goes below one another, and nothing changes. What has one number for a whole part
does not, and what becomes of it depends on the layout:

    weight_global_scale (nvfp4)        the largest of the parts' is that of all, and nothing is made up for; of experts
                                       that of w1
    weight_scale, fp8 per tensor       the largest of the parts' is that of all: each part is expanded to float16 and
                                       rounded again; where inputs stay floats, each row has that of its part
    weight_scale, int8 per tensor      each row has that of its part
    scales of blocks (fp8)             below one another, which needs parts of whole blocks, or vLLM refuses
    input_scale, fp8                   the largest of the parts'
    input_scale, int8                  one place, which every part is loaded into: the last one stays
    state of bitsandbytes              each part keeps its own

Commits of github.com/vllm-project/vllm that this follows, under `vllm/model_executor/`:

    layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py           17b6501a6ce9
    layers/quantization/compressed_tensors/compressed_tensors_moe/..._moe_w4a4_nvfp4.py        08f95fe56166
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py              00cb05c39f77
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a16_fp8.py             aa63715b2ba9
    layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py             c45614b5d83b
    layers/quantization/utils/w8a8_utils.py        646ad5a478f8  `requantize_with_max_scale`, `convert_to_channelwise`
    layers/quantization/utils/fp8_utils.py         007d50058a06  `validate_fp8_block_shape`
    layers/quantization/compressed_tensors/utils.py  008014e8503b  `should_ignore_layer`, `_match_fused_layer`
    kernels/linear/scaled_mm/cutlass.py            e2054e12d545  fixed scales of inputs
    model_loader/bitsandbytes_loader.py            0406fb9fb92d  a state for each part

Not here: DeepGEMM's rounding of block scales to powers of two (Blackwell), and what a kernel does with its operands.
Everything is computed in float32, where kernels have 16 bits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference.plain_vllm import Refused, kernel
from safetensors.torch import load_file
from torch import Tensor

# `packed_modules_mapping` of its Llamas; of experts by either of their names
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_CODES = (".weight_packed", ".qweight", ".weight_scale", ".weight.quant_state.bitsandbytes__nf4")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Stored = Mapping[str, Tensor]


@dataclass(frozen=True)
class Held:
    """One linear as vLLM has it.

    Args:
        weight: [N, K] float32.
        input_scale: [] of a fixed scale of its input.
        input_zero: [] of its zero point.
    """

    weight: Tensor
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None


def held(folder: Path) -> dict[str, Held]:
    """Every quantized linear of a checkpoint, by its name in the files.

    Raises:
        Refused: vLLM would not load it.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    names = {name.removesuffix(suffix) for name in stored for suffix in _CODES if name.endswith(suffix)}
    found: dict[str, Held] = {}
    for parts in _fused(sorted(names), stored):
        if not names.issuperset(parts):
            raise Refused(f"different quantization schemes for {parts}")
        methods = {kernel(config, name, _shape(stored, name))[0] for name in parts}
        schemes = {json.dumps(_group_of(config, name), sort_keys=True) for name in parts}
        if len(methods | schemes) > 2:
            raise Refused(f"different quantization schemes for {parts}")
        tensors = [
            {name.removeprefix(f"{part}."): value for name, value in stored.items() if name.startswith(f"{part}.")}
            for part in parts
        ]
        read = _READERS[methods.pop()]
        found |= dict(zip(parts, read(tensors, _group_of(config, parts[0]), ".experts." in parts[0]), strict=True))
    return found


def _fused(names: Sequence[str], stored: Stored) -> list[tuple[str, ...]]:
    """The linears, those together that vLLM stores as one."""
    found = []
    for name in names:
        owner, _, leaf = name.rpartition(".")
        group = next((group for group in FUSED if leaf in group), (leaf,))
        parts = tuple(
            f"{owner}.{each}" for each in group if f"{owner}.{each}.weight" in stored or f"{owner}.{each}" in names
        )
        if parts not in found:
            found.append(parts)
    return found


def _group_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the config says of a linear: of compressed-tensors, its group; else all of it."""
    groups = config.get("config_groups")
    if groups is None:
        return dict(config)
    targets = {target: group for group in groups.values() for target in group["targets"]}
    group = targets.get(name) or targets["Linear"]
    return {key: group[key] for key in ("weights", "input_activations")}


def _shape(stored: Stored, name: str) -> tuple[int, int]:
    for suffix, shape in (
        (".weight_shape", lambda value: value.tolist()),
        (".weight_packed", lambda value: (value.shape[0], 2 * value.shape[1])),
        (".qweight", lambda value: (value.shape[1], stored[f"{name}.g_idx"].shape[0])),
        (".weight.quant_state.bitsandbytes__nf4", lambda value: json.loads(bytes(value.tolist()))["shape"]),
        (".weight", lambda value: value.shape),
    ):
        if name + suffix in stored:
            rows, columns = shape(stored[name + suffix])
            return rows, columns
    raise KeyError(name)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _wna16(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    """compressed-tensors' packed integers: codes below one another, scales and zero points for every row."""
    bits, found = group["weights"]["num_bits"], []
    for part in parts:
        rows, columns = part["weight_shape"].tolist()
        codes = _unpacked(part["weight_packed"], bits)[:, :columns]
        zero = torch.full((1, 1), 2 ** (bits - 1))
        if "weight_zero_point" in part:
            zero = _spread(_unpacked(part["weight_zero_point"].T, bits)[:, :rows].T, columns)
        found.append(Held((codes - zero).float() * _spread(part["weight_scale"].float(), columns)))
    return found


def _int8(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    """Scales for every row, made of those for a whole part if need be."""
    inputs = _fixed_int8(parts)
    return [Held(part["weight"].float() * part["weight_scale"].float().reshape(-1, 1), *inputs) for part in parts]


def _fp8(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    strategy = group["weights"]["strategy"]
    scales = [part["weight_scale"].float() for part in parts]
    weights = [part["weight"].float() for part in parts]
    given = [part["input_scale"] for part in parts if "input_scale" in part]
    fixed = torch.cat(given).max() if given else None
    if strategy == "block":
        high, wide = group["weights"]["block_structure"]
        for part in parts if expert else parts[:-1]:
            if part["weight"].shape[0] % high:
                raise Refused(f"output_partition_size = {part['weight'].shape[0]} is not divisible by block_n = {high}")
        scales = [
            scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: weight.shape[0], : weight.shape[1]]
            for scale, weight in zip(scales, weights, strict=True)
        ]
    elif strategy == "tensor" and group["input_activations"] is not None:
        largest = torch.cat(scales).max()
        # the scale is a number beside float16 ones, so the product is rounded to these
        wide16 = [(weight.half() * scale.reshape(())) for weight, scale in zip(weights, scales, strict=True)]
        again = [(each.float() * (1 / largest)).clamp(-448, 448).to(torch.float8_e4m3fn) for each in wide16]
        return [Held(each.float() * largest, fixed) for each in again]
    else:
        scales = [scale.reshape(-1, 1) for scale in scales]
    return [Held(weight * scale, fixed) for weight, scale in zip(weights, scales, strict=True)]


def _nvfp4(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    divisors = torch.cat([part["weight_global_scale"] for part in parts])
    whole = 1 / (divisors[0] if expert else divisors.max())
    return [Held(_e2m1(part["weight_packed"], part["weight_scale"].float()) * whole) for part in parts]


def _mxfp4(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    return [Held(_e2m1(part["weight_packed"], 2.0 ** (part["weight_scale"].float() - 127))) for part in parts]


def _gptq(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    """Symmetric codes, whose zero points Marlin does not look at; without `desc_act` nor at the order of groups."""
    bits = group["bits"]
    return [
        Held(
            (_unpacked(part["qweight"].T, bits) - 2 ** (bits - 1)).float()
            * _spread(part["scales"].float().T, part["g_idx"].shape[0])
        )
        for part in parts
    ]


def _bitsandbytes(parts: Sequence[Stored], group: Mapping[str, Any], expert: bool) -> list[Held]:
    found = []
    for part in parts:
        state = json.loads(bytes(part["weight.quant_state.bitsandbytes__nf4"].tolist()))
        absmax = part["weight.absmax"]
        if "nested_offset" in state:
            coarse = part["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
            absmax = part["weight.nested_quant_map"][absmax.int()] * coarse + state["nested_offset"]
        places = torch.stack((part["weight"] >> 4, part["weight"] & 15), dim=1).reshape(-1)
        values = part["weight.quant_map"][places.int()] * absmax.repeat_interleave(state["blocksize"])
        found.append(Held(values.reshape(state["shape"])))
    return found


_READERS: dict[str, Callable[[Sequence[Stored], Mapping[str, Any], bool], list[Held]]] = (
    {"CompressedTensorsWNA16": _wna16, "CompressedTensorsW8A8Int8": _int8}
    | {"CompressedTensorsW8A8Fp8": _fp8, "CompressedTensorsW8A16Fp8": _fp8}
    | {"CompressedTensorsW4A16Fp4": _nvfp4, "CompressedTensorsW4A16Mxfp4": _mxfp4}
    | {"GPTQMarlinLinearMethod": _gptq, "BitsAndBytesLinearMethod": _bitsandbytes}
)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[N, W] 32-bit words -> [N, 32 W / bits] unsigned codes, least significant first; one of 3 bits may lie in two."""
    each = ((words.unsqueeze(2).long() >> torch.arange(32)) & 1).flatten(1)
    codes = each[:, : each.shape[1] // bits * bits].unflatten(1, (-1, bits))
    return (codes << torch.arange(bits)).sum(dim=2)


def _e2m1(packed: Tensor, scale: Tensor) -> Tensor:
    """Two a byte, the first in the low half; [N, K / 2] and [N, G] -> [N, K]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).int()
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])[codes]
    return values * _spread(scale, values.shape[1])


def _spread(scale: Tensor, columns: int) -> Tensor:
    """[N, G] -> [N, K]."""
    return scale.repeat_interleave(columns // scale.shape[1], dim=1)


def _fixed_int8(parts: Sequence[Stored]) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point of an input; of several parts', that of the one that happens to be loaded last."""
    if "input_scale" not in parts[0]:
        return None, None
    scales = torch.cat([part["input_scale"] for part in parts]).unique()
    zeros = torch.cat([part.get("input_zero_point", torch.zeros(1, dtype=torch.int8)) for part in parts]).unique()
    if len(scales) > 1 or len(zeros) > 1:
        raise Refused("fixed scales of one input differ, and the order of loading decides between them")
    if "input_zero_point" not in parts[0]:
        return scales[0], None
    # the range that they cover, and back: the zero point is cut off there, not rounded
    high, low = (scales * (end - zeros.int()) for end in (127, -128))
    scale = (high.max() - low.min()) / 255
    return scale, (-128 - low.min() / scale).to(torch.int32)
