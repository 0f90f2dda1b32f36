"""Floating-point formats: a cast, bit for bit, and its bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from quantkit.formats import load_format
from quantkit.scheme import WeightScheme

NAMES = ["float32", "float16", "bfloat16"]


def awkward() -> torch.Tensor:
    """[3, 17]: ties, subnormals, extremes, negative zero, and values at random."""
    corners = [0.0, -0.0, 1.0, -1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 6e-8, 1e-40, 65504.0]
    corners += [65519.9, 65520.0, 3.3e38, -3.4e38, 2**-14, 5.9604645e-08]
    random = torch.randn(2, 17, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(corners).reshape(1, 17), random])


def bfloat16_bits(value: float) -> int:
    """Round to nearest even on the upper half of the float32's bits."""
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16) & 0xFFFF


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 17), (1, 1), (1, 51)])
def test_casts_and_bytes(name: str, shape: tuple[int, int]) -> None:
    form = load_format(name)
    weight = awkward().reshape(-1)[: shape[0] * shape[1]].reshape(shape)
    tensor = form.quantize(weight, WeightScheme(format=name))
    packed = form.pack(tensor.codes)
    assert packed.shape == (shape[0], shape[1] * form.bits // 8)
    with np.errstate(over="ignore"):
        expected = {
            "float32": lambda: weight.numpy().astype("<f4").tobytes(),
            "float16": lambda: weight.numpy().astype("<f2").tobytes(),
            "bfloat16": lambda: np.array([bfloat16_bits(x) for x in weight.reshape(-1).tolist()], "<u2").tobytes(),
        }[name]()
    assert packed.numpy().tobytes() == expected
    back = form.unpack(packed, shape[1])
    assert back.dtype == getattr(torch, name)
    assert torch.equal(back, tensor.codes)
    assert torch.equal(form.dequantize(tensor), tensor.codes.float())
    assert tensor.zero is None
    assert torch.equal(tensor.scale, torch.ones(1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_cast_changes_nothing_and_the_width_is_counted(name: str) -> None:
    form, how = load_format(name), WeightScheme(format=name)
    once = form.dequantize(form.quantize(awkward(), how))
    assert torch.equal(form.dequantize(form.quantize(once, how)), once)
    codes = form.quantize(awkward(), how).codes
    assert (
        form.bits_per_weight((3, 17), how) == codes.element_size() * 8 == form.pack(codes).numel() * 8 / codes.numel()
    )
