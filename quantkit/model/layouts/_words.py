"""Integer codes densely packed into 32-bit words, least significant bit first: what several layouts have in common."""

from __future__ import annotations

import math

from quantkit.formats import load_format
from quantkit.lazy import torch
from quantkit.model.layouts import unsupported
from quantkit.scheme import WeightScheme

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
