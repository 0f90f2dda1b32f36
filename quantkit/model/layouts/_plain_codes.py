"""Codes in the shape of the weight: compressed-tensors' `int-quantized` and `float-quantized`.

A matrix [N, K] becomes

    weight             int8 or float8_e4m3fn [N, K]
    weight_scale       float of the scheme: channel [N, 1], tensor [1], block [⌈N/128⌉, ⌈K/128⌉], group [N, K/group]
    weight_zero_point  int8, as the scale; asymmetric only
    input_scale        [1], where calibration fixed the scale of the input (written by the checkpoint, in any layout)

These are the layouts that kernels compute on directly, when the inputs are quantized too. See
`compressed_tensors/compressors/naive_quantized`.

Integer codes densely packed into 32-bit words, least significant bit first: what several layouts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.formats import QuantTensor, load_format
from quantkit.lazy import torch
from quantkit.model.layouts import Header, Read, check_format, stored_with, unsupported
from quantkit.model.layouts._compressed_tensors import SCALE, CompressedTensors, exact_scale
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


# safetensors' names of what scales are stored as
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def bits_of(scheme: WeightScheme, layout: str = "pack-quantized", linear: str = "") -> int:
    """Bits of a code; `layout` and `linear` are for the refusal.

    Raises:
        InputError: `layout-unsupported`, not an integer format.
    """
    if scheme.format not in ("int8", "int4", "int3", "int2"):
        raise unsupported(linear, f"{layout} of {scheme.format}", "this layout holds integers of up to 8 bits")
    return int(scheme.format.removeprefix("int"))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> int32 [N, ceil(K b / 32)], rows filled up with zero bits."""
    rows, columns = codes.shape
    words = math.ceil(columns * bits / 32)
    if bits in (4, 8):
        # whole bytes at once: this is every weight of a model
        packed = codes.contiguous().view(torch.uint8) + 2 ** (bits - 1)
        missing = words * 32 // bits - columns
        if missing:
            packed = torch.nn.functional.pad(packed & (2**bits - 1), (0, missing))
        if bits == 4:
            # a pair of bytes is 0000 bbbb 0000 aaaa; its low byte is to be bbbb aaaa
            pairs = (packed & 15).reshape(-1).view(torch.int16)
            packed = (pairs | (pairs >> 4)).to(torch.uint8)
    else:
        packed = load_format(f"int{bits}").pack(codes)
        packed = torch.nn.functional.pad(packed, (0, 4 * words - packed.shape[1]))
    found: torch.Tensor = packed.reshape(-1).view(torch.int32).reshape(rows, words)
    return found


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 [N, ceil(K b / 32)] -> int8 [N, K]."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (packed[:, :columns] ^ 0x80).view(torch.int8)
    if bits == 4:
        pairs = torch.stack((packed & 15, packed >> 4), dim=2).reshape(packed.shape[0], -1)
        return pairs[:, :columns].to(torch.int8) - 8
    return load_format(f"int{bits}").unpack(packed, columns)
