"""Codes in the shape of the weight: compressed-tensors' `int-quantized` and `float-quantized`.

A matrix [N, K] becomes

    weight             int8 or float8_e4m3fn [N, K]
    weight_scale       float of the scheme: channel [N, 1], tensor [1], block [⌈N/128⌉, ⌈K/128⌉], group [N, K/group]
    weight_zero_point  int8, as the scale; asymmetric only
    input_scale        [1], where calibration fixed the scale of the input (written by the checkpoint, in any layout)

These are the layouts that kernels compute on directly, when the inputs are quantized too. See
`compressed_tensors/compressors/naive_quantized`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.formats import QuantTensor
from quantkit.model.layouts import Header, Read, check_format, stored_with
from quantkit.model.layouts._compressed_tensors import SCALE, CompressedTensors, exact_scale
from quantkit.model.layouts._words import FLOATS
from quantkit.scheme import WeightScheme

if TYPE_CHECKING:
    import torch

WEIGHT, ZERO = ".weight", ".weight_zero_point"


@dataclass(frozen=True)
class PlainCodes(CompressedTensors):
    """A layout for one format.

    Args:
        stored: their dtype in safetensors.
        type: what compressed-tensors calls the kind of number.
    """

    format: str
    stored: str
    type: str
    codes: ClassVar[str] = WEIGHT
    parts: ClassVar[tuple[str, ...]] = (WEIGHT, SCALE, ZERO)

    def accepts(self, schemes: Mapping[str, WeightScheme], shapes: Mapping[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        check_format(self.title, self.format, schemes, "export: checkpoint: {layout: pack-quantized}, or `dense`")
        super().accepts(schemes, shapes)

    def served(self, scheme: WeightScheme) -> bool:
        """Beside quantized inputs; blocks of floats alone."""
        blocks = ("channel", "tensor", "block") if self.type == "float" else ("channel", "tensor")
        return scheme.symmetric and scheme.granularity in blocks

    def headers(self, prefix: str, shape: tuple[int, int], scheme: WeightScheme) -> list[Header]:
        """See `Layout`."""
        rows, columns = shape
        found: list[Header] = [
            (prefix + WEIGHT, self.stored, shape),
            (prefix + SCALE, FLOATS[scheme.scale], _scales(rows, columns, scheme)),
        ]
        if not scheme.symmetric:
            found.append((prefix + ZERO, "I8", _scales(rows, columns, scheme)))
        return found

    def packed(self, tensor: QuantTensor) -> torch.Tensor:
        """The codes as they are, [N, K]."""
        return tensor.codes.contiguous()

    def companions(self, prefix: str, tensor: QuantTensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Scales and zero points.

        Raises:
            InputError: `scale-inexact`, a scale that `dtype` cannot hold: loaders cast scales to it.
        """
        shape = _scales(*tensor.shape, tensor.scheme)
        found = {prefix + SCALE: exact_scale(prefix, tensor, dtype).reshape(shape).contiguous()}
        if tensor.zero is not None:
            found[prefix + ZERO] = tensor.zero.reshape(shape).contiguous()
        return found

    def prefixes(self, names: Iterable[str]) -> list[str]:
        """See `Layout`. Every linear has a weight; those with a scale are stored this way."""
        return stored_with(SCALE, names)

    def shape(self, prefix: str, read: Read) -> tuple[int, int]:
        """See `Layout`."""
        rows, columns = read(prefix + WEIGHT).shape
        return rows, columns

    def overhead(self, shape: tuple[int, int], scheme: WeightScheme) -> int:
        """Nothing is padded; one zero point takes a byte."""
        return 8

    def read_back(self, prefix: str, scheme: WeightScheme, read: Read) -> QuantTensor:
        """See `Layout`."""
        scale = read(prefix + SCALE)
        zero = None if scheme.symmetric else read(prefix + ZERO)
        if scheme.granularity == "tensor":
            scale, zero = scale.reshape(1, 1), None if zero is None else zero.reshape(1, 1)
        return QuantTensor(read(prefix + WEIGHT), scale, zero, scheme)

    def arguments(self, scheme: WeightScheme) -> dict[str, Any]:
        """See `CompressedTensors`."""
        block = scheme.granularity == "block" and scheme.group
        return {
            "num_bits": 8,
            "type": self.type,
            "symmetric": scheme.symmetric,
            "strategy": scheme.granularity,
            "group_size": scheme.group if scheme.granularity == "group" else None,
            "block_structure": (block, block) if block else None,
        }


def _scales(rows: int, columns: int, scheme: WeightScheme) -> tuple[int, ...]:
    """The shape that scales are stored in."""
    if scheme.granularity == "tensor":
        return (1,)
    if scheme.granularity == "block" and scheme.group:
        return -(-rows // scheme.group), -(-columns // scheme.group)
    return rows, columns // scheme.group if scheme.group else 1
