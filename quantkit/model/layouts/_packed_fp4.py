"""4-bit floats (E2M1) as compressed-tensors packs them: two a byte, the first in the low half.

A matrix [N, K] in G groups becomes

    weight_packed        uint8 [N, K / 2]   sign bit, then the place among 0, 0.5, 1, 1.5, 2, 3, 4, 6
    weight_scale         [N, G]             float8_e4m3fn (nvfp4), or uint8, the exponent plus 127 (mxfp4)
    weight_global_scale  float32 [1]        nvfp4 alone: what scales are *divided* by

so that [4096, 4096] in groups of 16 is uint8 [4096, 2048] and [4096, 256].
See `compressed_tensors/compressors/nvfp4` and `mxfp4`; its expansion multiplies in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.formats.base.elements import FP4_E2M1
from quantkit.lazy import torch
from quantkit.model.layouts import Header, Read, check_format
from quantkit.model.layouts._compressed_tensors import SCALE, CompressedTensors
from quantkit.scheme import WeightScheme

PACKED, GLOBAL = ".weight_packed", ".weight_global_scale"


@dataclass(frozen=True)
class PackedFp4(CompressedTensors):
    """See the module.

    Args:
        strategy: the library's name of its granularity.
        dtype: safetensors' name of what scales are stored as.
        argument: the library's name of the same.
    """

    format: str
    strategy: str
    dtype: str
    argument: str
    codes: ClassVar[str] = PACKED
    parts: ClassVar[tuple[str, ...]] = (PACKED, SCALE, GLOBAL)

    @property
    def _global(self) -> bool:
        return self.strategy == "tensor_group"

    def accepts(self, schemes: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        check_format(self.title, self.format, schemes)
        super().accepts(schemes, shapes)

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """See `Layout`."""
        rows, columns = shape
        groups = columns // (scheme.group or columns)
        found: list[Header] = [
            (prefix + PACKED, "U8", (rows, columns // 2)),
            (prefix + SCALE, self.dtype, (rows, groups)),
        ]
        return [*found, (prefix + GLOBAL, "F32", (1,))] if self._global else found

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """uint8 [N, K / 2]."""
        codes = tensor.codes
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See `Layout`."""
        found = {prefix + SCALE: tensor.scale.view(torch.uint8) if self.dtype == "U8" else tensor.scale}
        if tensor.global_scale is not None:
            found[prefix + GLOBAL] = (1 / tensor.global_scale.float()).reshape(1)
        return found

    def quantization_config(
        self, layers: Mapping[str, WeightScheme], ignore: Sequence[str], dtype: str
    ) -> dict[str, Any]:
        """See `Layout`."""
        # expanded as they are read: one scheme is all there is
        return super().quantization_config(layers, ignore, dtype) | {"dequantize": True}

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """See `Layout`."""
        rows, half = read(prefix + PACKED).shape
        return rows, 2 * half

    def scale(self, prefix: str, read: Read) -> torch.Tensor:
        """See `Layout`."""
        stored = read(prefix + SCALE)
        scale = stored.view(torch.float8_e8m0fnu).float() if self.dtype == "U8" else stored.float()
        return scale / read(prefix + GLOBAL) if self._global else scale

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """See `Layout`."""
        packed, scale = read(prefix + PACKED), read(prefix + SCALE)
        codes = torch.stack((packed & 15, packed >> 4), dim=2).reshape(packed.shape[0], -1)
        whole = 1 / read(prefix + GLOBAL).reshape(()) if self._global else None
        scale = scale.view(torch.float8_e8m0fnu) if self.dtype == "U8" else scale
        book = FP4_E2M1.codebook()
        return QuantTensor(codes, scale, None, scheme, codebook=book, global_scale=whole)

    def as_loaded(self, tensor: QuantTensor, dtype: torch.dtype, config: Mapping[str, Any]) -> torch.Tensor:
        """The library divides scales by the global one in float32, and rounds the product to bfloat16."""
        if tensor.global_scale is not None:
            # where a product lies between two numbers of bfloat16, the last bit of a factor decides
            tensor = replace(tensor, scale=tensor.scale.float() / (1 / tensor.global_scale.float()), global_scale=None)
        return super().as_loaded(tensor, torch.bfloat16, config).to(dtype)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        """See `CompressedTensors`."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": scheme.group,
            "scale_dtype": self.argument,
        }
