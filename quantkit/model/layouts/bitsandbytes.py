"""Layout of NF4 in bitsandbytes, with or without double quantization.

A matrix [N, K] in blocks of 64 becomes, under the name of its weight,

    weight                                uint8 [N K / 2, 1]      two codes per byte, the first in the high half
    weight.absmax                         float32 [N K / 64]      scale of each block; double: its uint8 code
    weight.quant_map                      float32 [16]            value of each code
    weight.nested_absmax                  float32 [N K / 16384]   double: scale of each 256 scales
    weight.nested_quant_map               float32 [256]           double: value of each of their codes
    weight.quant_state.bitsandbytes__nf4  uint8                   JSON: shape, dtype, block sizes, mean of the scales

so that [4096, 4096] is uint8 [8388608, 1] and [262144]. Blocks continue over row ends, which equals groups along K if
64
divides K. See `bitsandbytes/functional.py`, `QuantState`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.formats import Nested, QuantTensor
from quantkit.lazy import torch
from quantkit.model.layouts import (
    REGEX,
    Expansion,
    Header,
    Layout,
    Read,
    Schemes,
    Shapes,
    check_format,
    missing,
    stored_with,
    unsupported,
)
from quantkit.model.source.places import quiet_loading
from quantkit.scheme import WeightScheme

WEIGHT, ABSMAX, MAP = ".weight", ".weight.absmax", ".weight.quant_map"
NESTED_ABSMAX, NESTED_MAP = ".weight.nested_absmax", ".weight.nested_quant_map"
STATE = ".weight.quant_state.bitsandbytes__nf4"
_NESTED = 256
# of a product on processors with AVX512-BF16 (`functional._convert_weight_packed_for_cpu`)
_ROWS = 32
# JSON padded with spaces, so that its length does not depend on the mean of the scales
_STATE_BYTES = 256


class BitsAndBytes(Layout):
    """Layout of NF4, as described in the module."""

    name = "bitsandbytes"
    libraries = ("bitsandbytes",)
    kernels = True
    serving = "vLLM reads it with vllm-bnb-plugin installed beside it, since bitsandbytes left its core in 0.28"
    codes = WEIGHT
    parts = (WEIGHT, ABSMAX, MAP, NESTED_ABSMAX, NESTED_MAP, STATE)

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        check_format(self.name, "nf4", schemes)
        odd = sorted(linear for linear in schemes if shapes.get(linear, (0, 0))[0] % _ROWS)
        if odd:
            kept = dict.fromkeys(f"*.{linear.rpartition('.')[2]}" for linear in odd)
            value, rule = (
                f"{shapes[odd[0]][0]} rows",
                f"on many processors bitsandbytes takes rows in multiples of {_ROWS}",
            )
            listed = ", ".join(f'{{match: "{one}", weights: null}}' for one in kept)
            raise unsupported(odd[0], value, rule, f"--set 'overrides=[{listed}]'")

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        size = shape[0] * shape[1]
        blocks, double = size // (scheme.group or size), scheme.scale == "double"
        listed: list[Header] = [
            (prefix + WEIGHT, "U8", (size // 2, 1)),
            (prefix + ABSMAX, "U8" if double else "F32", (blocks,)),
            (prefix + MAP, "F32", (16,)),
            (prefix + STATE, "U8", (_STATE_BYTES,)),
        ]
        if double:
            listed += [
                (prefix + NESTED_ABSMAX, "F32", (-(-blocks // _NESTED),)),
                (prefix + NESTED_MAP, "F32", (256,)),
            ]
        return listed

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        codes = tensor.codes.reshape(-1, 2)
        return (codes[:, :1] << 4) | codes[:, 1:]  # uint8 [N K / 2, 1]

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        from quantkit.formats.nf4 import dynamic_values

        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": tensor.scheme.group,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        assert tensor.codebook is not None
        stored = {prefix + MAP: tensor.codebook, prefix + ABSMAX: tensor.scale.float().reshape(-1)}
        if tensor.nested is not None:
            stored[prefix + ABSMAX] = tensor.nested.codes
            stored[prefix + NESTED_ABSMAX] = tensor.nested.absmax
            stored[prefix + NESTED_MAP] = dynamic_values()
            state |= {"nested_blocksize": _NESTED, "nested_dtype": "float32"}
            state["nested_offset"] = float(tensor.nested.offset)
        text = json.dumps(state).encode().ljust(_STATE_BYTES)
        stored[prefix + STATE] = torch.tensor(list(text), dtype=torch.uint8)
        return stored

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        double = any(scheme.scale == "double" for scheme in layers.values())
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": dtype,
            "llm_int8_skip_modules": [name for name in ignore if not name.startswith(REGEX)],
        }

    def wrote(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "bitsandbytes" and config.get("bnb_4bit_quant_type") == "nf4"

    def prefixes(self, names: Iterable[str]) -> list[str]:
        return stored_with(STATE, names)

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        rows, columns = _state(prefix, read)["shape"]
        return int(rows), int(columns)

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        stored = read(prefix + ABSMAX)
        if stored.is_floating_point():
            return stored
        absmax = read(prefix + NESTED_ABSMAX).repeat_interleave(_NESTED)[: len(stored)]
        scales: torch.Tensor = read(prefix + NESTED_MAP)[stored.int()] * absmax + _state(prefix, read)["nested_offset"]
        return scales

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Return the bits of the codebooks and the JSON."""
        return 32 * 16 + 8 * _STATE_BYTES + (32 * 256 if scheme.scale == "double" else 0)

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        packed, stored = read(prefix + WEIGHT), read(prefix + ABSMAX)
        rows, columns = self.shape(prefix, read)
        codes = torch.cat((packed >> 4, packed & 15), dim=1).reshape(rows, columns)
        scale = self.scale(prefix, read).reshape(rows, -1)
        nested = None
        if not stored.is_floating_point():
            offset = torch.tensor(_state(prefix, read)["nested_offset"], dtype=torch.float32)
            nested = Nested(stored, read(prefix + NESTED_ABSMAX), offset)
        return QuantTensor(codes, scale, None, scheme, codebook=read(prefix + MAP), nested=nested)

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """Expand by `bitsandbytes.functional.dequantize_4bit`, or by our own reader."""
        if missing(self):
            return Expansion(None, lambda prefix, read: self._own(prefix, read).to(dtype))
        return Expansion("bitsandbytes", lambda prefix, read: self._theirs(prefix, read).to(dtype))

    def _own(self, prefix: str, read: Read) -> torch.Tensor:
        state = _state(prefix, read)
        tensor = self.read_back(prefix, WeightScheme(format="nf4", group=state["blocksize"]), read)
        assert tensor.codebook is not None
        scale = tensor.scale.repeat_interleave(state["blocksize"], dim=1)
        return tensor.codebook[tensor.codes.int()] * scale

    def _theirs(self, prefix: str, read: Read) -> torch.Tensor:
        with quiet_loading():
            from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = [*self.parts[1:3], STATE]
        if not read(prefix + ABSMAX).is_floating_point():
            parts += [NESTED_ABSMAX, NESTED_MAP]
        packed = read(prefix + WEIGHT)
        state = QuantState.from_dict(
            {part.removeprefix(f"{WEIGHT}."): read(prefix + part) for part in parts}, device=packed.device
        )
        weight: torch.Tensor = dequantize_4bit(packed, state)
        return weight


def _state(prefix: str, read: Read) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bytes(read(prefix + STATE).tolist()))
    return state


LAYOUT: Layout = BitsAndBytes()
