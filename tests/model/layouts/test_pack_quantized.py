"""pack-quantized: what compressed-tensors unpacks is what was packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.formats import load_format
from quantkit.model.layouts.pack_quantized import LAYOUT
from quantkit.scheme import WeightScheme


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (17, 3), (33, 40), (8, 4095)])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packing_agrees_with_the_library_and_is_its_own_inverse(
    bits: int, shape: tuple[int, int], granularity: Any, symmetric: bool
) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    torch.manual_seed(bits)
    how = WeightScheme(format=f"int{bits}", granularity=granularity, symmetric=symmetric, scale="float32")
    tensor = load_format(how.format).quantize(torch.randn(shape), how)
    stored = {"x" + LAYOUT.codes: LAYOUT.packed(tensor), **LAYOUT.companions("x", tensor, torch.float32)}
    assert [(name, tuple(value.shape)) for name, value in stored.items()] == [
        (name, size) for name, _, size in LAYOUT.headers("x", shape, how)
    ]
    assert torch.equal(unpack_from_int32(stored["x.weight_packed"], bits, torch.Size(shape)), tensor.codes)
    if not symmetric and granularity == "channel":
        zero = unpack_from_int32(stored["x.weight_zero_point"], bits, torch.Size((shape[0], 1)), packed_dim=0)
        assert torch.equal(zero, tensor.zero)
    back = LAYOUT.read_back("x", how, stored.__getitem__)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.scale, tensor.scale)
    assert back.zero is None if symmetric else torch.equal(back.zero, tensor.zero)
    # the same bytes as the format's own packing, rows filled up to whole words
    reference = load_format(f"int{bits}").pack(tensor.codes)
    assert torch.equal(stored["x.weight_packed"].view(torch.uint8)[:, : reference.shape[1]], reference)
