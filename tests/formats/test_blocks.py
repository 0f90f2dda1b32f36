"""The types of GGUF against the `gguf` package: bytes, values, bits."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import QuantTensor, load_format
from quantkit.formats.base.blocks import BlockFormat
from quantkit.scheme import WeightScheme

BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
SUPER_BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
QUANTIZED_BY_GGUF = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


def form_of(name: str) -> BlockFormat:
    found = load_format(name)
    assert isinstance(found, BlockFormat)
    return found


def weights(rows: int = 5, seed: int = 0) -> torch.Tensor:
    """Blocks of many sizes, of zeros, of one sign, of one value, with ties between the largest of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, 768, generator=generator) * torch.rand(rows, 1, generator=generator)
    found[0, :32], found[1, :32] = 0.0, found[1, :32].abs()
    found[2, :32], found[3, :16], found[3, 16:32] = -0.25, 0.5, -0.5
    found[4, :64] = torch.arange(-32, 32) / 16  # halves between codes
    return found


def row_bytes(tensor: QuantTensor) -> Iterator[Any]:
    """GGUF's bytes of a tensor in blocks of 32, row by row, written down from the layout's description alone."""
    form = form_of(tensor.scheme.format)
    codes = (tensor.codes.int() - (0 if form.codebook() is not None else form.lowest)).numpy()
    for row, (line, scale) in enumerate(zip(codes, tensor.scale.numpy(), strict=True)):
        for number, block in enumerate(line.reshape(-1, 32)):
            yield scale[number].tobytes()
            if tensor.offset is not None:
                yield tensor.offset[row, number].numpy().tobytes()
            if form.bits == 5:
                yield int(sum(int(code >> 4) << place for place, code in enumerate(block))).to_bytes(4, "little")
            if form.bits == 8:
                yield (block - 128).astype(np.int8).tobytes()
            else:
                low = block & 15
                yield (low[:16] | low[16:] << 4).astype(np.uint8).tobytes()


@pytest.mark.parametrize("name", QUANTIZED_BY_GGUF)
def test_rounds_as_gguf_does(name: str) -> None:
    weight = weights()
    before = weight.clone()
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name.upper()])
    ours = form_of(name).quantize(weight, WeightScheme(format=name))
    assert torch.equal(weight, before)
    assert b"".join(row_bytes(ours)) == theirs.tobytes()


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_stand_for_what_gguf_reads(name: str) -> None:
    """Random codes under random scales, negative ones too."""
    form, generator = form_of(name), torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (7, 96 * form.bits // 8), generator=generator).to(torch.uint8)
    codes = form.unpack(packed, 96)
    scale, offset = (torch.randn(7, 3, generator=generator).half() for _ in range(2))
    book = form.codebook()
    tensor = QuantTensor(codes, scale, None, WeightScheme(format=name), codebook=book)
    tensor = tensor.replace(offset=offset) if form.has_offset else tensor
    theirs = np.frombuffer(b"".join(row_bytes(tensor)), np.uint8)
    values = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[name.upper()]).reshape(7, 96)
    assert np.array_equal(form.dequantize(tensor).numpy(), values)


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks_stand_for_what_ggml_computes(name: str) -> None:
    """One weight at a time in numpy's float32: `d * sc * q - dmin * mn`, the products rounded first."""
    form = form_of(name)
    weight = weights()
    tensor = form.quantize(weight, WeightScheme(format=name))
    stored, values = tensor.super_blocks, form.dequantize(tensor)
    assert stored is not None and stored.d.dtype == torch.float16
    group = tensor.scheme.group or 0
    assert tensor.scale.shape == stored.sc.shape == (5, 768 // group)
    assert stored.d.shape == (5, 3)
    for row, column in [(0, 5), (1, 300), (3, 511), (4, 767)]:
        step = np.float32(stored.d[row, column // 256]) * np.float32(stored.sc[row, column // group])
        code = tensor.codes[row, column]
        expected = step * np.float32(code if tensor.codebook is None else tensor.codebook[code.int()])
        if stored.dmin is not None and stored.mn is not None:
            expected -= np.float32(stored.dmin[row, column // 256]) * np.float32(stored.mn[row, column // group])
        assert values[row, column].item() == expected


@pytest.mark.parametrize("name", [*BLOCKS, *SUPER_BLOCKS])
def test_bits_are_those_of_gguf(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert form_of(name).bits_per_weight((3, 768), WeightScheme(format=name)) == 8 * size / block


@pytest.mark.parametrize("name", [*BLOCKS, *SUPER_BLOCKS])
def test_nearest_is_the_nearest_of_all_codes(name: str) -> None:
    form, scheme = form_of(name), WeightScheme(format=name)
    weight = weights()[:, :512]
    tensor = form.nearest(weight, *form.parameters(*_ends(weight, scheme), scheme), scheme)
    every = form.unpack(torch.arange(2**form.bits)[None].to(torch.uint8), 2**form.bits) if form.bits == 8 else None
    numbers = torch.arange(form.lowest, form.lowest + 2**form.bits) if every is None else every[0]
    values = form.codebook() if form.codebook() is not None else numbers[numbers >= form.low]
    assert values is not None
    grid = tensor.scale.float()[..., None, None] * values.double()
    grid = grid if tensor.offset is None else grid + tensor.offset.double()[..., None, None]
    parts = weight.double().unflatten(1, (-1, scheme.group or 0))
    least = (parts[..., None] - grid).abs().amin(dim=3).flatten(1)
    error = (form.dequantize(tensor).double() - weight).abs()
    assert bool((error <= least + 1e-6 * weight.abs() + 1e-12).all())
    # what is on the grid stays there
    again = form.nearest(form.dequantize(tensor), tensor.scale, tensor.offset, scheme)
    assert torch.equal(form.dequantize(again), form.dequantize(tensor))


def _ends(weight: torch.Tensor, scheme: WeightScheme) -> tuple[torch.Tensor, torch.Tensor]:
    parts = weight.unflatten(1, (-1, scheme.group or 0))
    return parts.amin(dim=2), parts.amax(dim=2)


def test_rows_are_whole_super_blocks() -> None:
    scheme = WeightScheme(format="q4_k")
    assert (scheme.group, scheme.padding(576), scheme.padding(1536)) == (32, 192, 0)
    with pytest.raises(InputError, match="group 256, K 576"):
        load_format("q4_k").quantize(torch.zeros(2, 576), scheme)
