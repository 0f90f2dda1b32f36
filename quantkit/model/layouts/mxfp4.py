"""MXFP4 of merged experts, as gpt-oss is published, and transformers and vLLM read it.

The experts of a layer are one tensor. A matrix [N, K] of 4-bit floats in groups of 32 becomes a part of

    experts.gate_up_proj_blocks   uint8 [E, N, K/32, 16]   two codes a byte, the first in the low half
    experts.gate_up_proj_scales   uint8 [E, N, K/32]       exponent + 127

with gate and up in turns (row 2i and 2i + 1), and likewise `down_proj`. All other weights stay in floats.
Sources: `transformers/integrations/mxfp4.py`; vLLM 0.32 `model_executor/models/gpt_oss.py`, `_load_weights_mxfp4`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.formats.base.scaled import FP4_E2M1
from quantkit.lazy import torch
from quantkit.model.layouts import REGEX, Expansion, Header, Layout, Read, Schemes, Shapes, check_format, unsupported
from quantkit.scheme import WeightScheme

BLOCKS, SCALES = "_blocks", "_scales"
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_up_proj|down_proj)$")
_GROUP = 32
_KEEP = "--set 'keep=[embeddings, lm_head, \"*.self_attn.*\"]'"


@dataclass(frozen=True)
class Mxfp4(Layout):
    """Layout of merged experts in 4-bit floats."""

    name: str = "mxfp4"
    serving: str = ""
    libraries: ClassVar[tuple[str, ...]] = ()
    stacks: ClassVar[bool] = True
    classes: ClassVar[tuple[str, ...]] = ("GptOssForCausalLM",)
    asked: ClassVar[str] = f"--recipe mxfp4 {_KEEP} --set 'export=[{{checkpoint: {{layout: mxfp4}}}}]'"
    codes: ClassVar[str] = BLOCKS
    parts: ClassVar[tuple[str, ...]] = (BLOCKS, SCALES)

    def accepts(self, schemes: Schemes, shapes: Shapes) -> None:
        check_format(self.name, "mxfp4", schemes, "--recipe mxfp4")
        for linear in schemes:
            if not _EXPERT.search(linear):
                rule = "this layout holds merged experts, with gate and up in turns, and nothing else"
                packed = "--set 'export=[{checkpoint: {layout: mxfp4-pack-quantized}}]'"
                remedy = f"{_KEEP}, for gpt-oss; or {packed}, for linears"
                raise unsupported(linear, "is no such expert", rule, remedy)

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        rows, groups = shape[0], shape[1] // _GROUP
        return [
            (prefix + BLOCKS, "U8", (rows, groups, _GROUP // 2)),
            (prefix + SCALES, "U8", (rows, groups)),
        ]

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        joined = tensor.codes[:, ::2] | (tensor.codes[:, 1::2] << 4)
        return joined.reshape(joined.shape[0], -1, _GROUP // 2)

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {prefix + SCALES: tensor.scale.view(torch.uint8)}

    def quantization_config(self, layers: Schemes, ignore: Sequence[str], dtype: str) -> dict[str, Any]:
        kept = [name for name in ignore if not name.startswith(REGEX)]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}

    def wrote(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "mxfp4"

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        rows, groups, _ = read(prefix + BLOCKS).shape
        return rows, groups * _GROUP

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        return read(prefix + SCALES).view(torch.float8_e8m0fnu).float()

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        blocks = read(prefix + BLOCKS)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=3).reshape(len(blocks), -1)
        scale = read(prefix + SCALES).view(torch.float8_e8m0fnu)
        return QuantTensor(codes, scale, None, scheme, codebook=FP4_E2M1.codebook())

    def expansion(self, config: Mapping[str, Any], dtype: torch.dtype) -> Expansion:
        """Expand by our own reader: transformers expands whole layers."""
        scheme = WeightScheme(format="mxfp4")

        def weight(prefix: str, read: Read) -> torch.Tensor:
            return self.as_loaded(self.read_back(prefix, scheme, read), dtype, config)

        return Expansion(None, weight)


LAYOUT: Layout = Mxfp4()
