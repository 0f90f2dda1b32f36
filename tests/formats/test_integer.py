"""Integer formats of any width: against exact arithmetic, over awkward shapes, and the properties they promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_formats

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base.integers import IntegerFormat
from quantkit.formats.base.layout import groups_of
from quantkit.scheme import WeightScheme

FORMATS = {name: load_format(name) for name in ("int4", "int8")}
# [N, K], group: a lone weight, odd sizes, a row a runtime would split unevenly, groups of one weight
SHAPES = [((1, 1), 1), ((3, 17), 17), ((2, 34), 17), ((5, 4095), 4095), ((7, 96), 32), ((4, 6), 1)]


def scheme(name: str = "int4", granularity: str = "channel", **fields: object) -> WeightScheme:
    return WeightScheme.model_validate({"format": name, "granularity": granularity, **fields})


def random(shape: tuple[int, int], seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize(("shape", "group"), [pair for pair in SHAPES if pair[0][1] < 1000])
def test_codes_are_those_of_exact_arithmetic(
    name: str, symmetric: bool, granularity: str, shape: tuple[int, int], group: int
) -> None:
    how = scheme(name, granularity, symmetric=symmetric, group=group if granularity == "group" else None)
    form = FORMATS[name]
    weight = random(shape)
    before = weight.clone()
    tensor = form.quantize(weight, how)
    assert torch.equal(weight, before)
    rows, columns = shape
    groups = columns // group if granularity == "group" else 1
    assert tensor.scale.shape == ((1, 1) if granularity == "tensor" else (rows, groups))
    assert tensor.scale.dtype == torch.float16
    assert (tensor.zero is None) == symmetric
    values = form.dequantize(tensor)
    for n in range(rows):
        for k in range(columns):
            at = plain_formats.group_of(n, k, columns, groups, per_tensor=granularity == "tensor")
            step, zero = float(tensor.scale[at]), 0 if tensor.zero is None else int(tensor.zero[at])
            code = plain_formats.encode(float(weight[n, k]), step, zero, form.bits)
            assert int(tensor.codes[n, k]) == code
            assert float(values[n, k]) == plain_formats.decode(code, step, zero)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), columns=st.integers(1, 41), seed=st.integers(0, 2**31))
def test_packing_is_bit_twiddling(bits: int, rows: int, columns: int, seed: int) -> None:
    form = IntegerFormat(f"int{bits}", bits)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(form.low, form.high + 1, (rows, columns), generator=generator).to(torch.int8)
    packed = form.pack(codes)
    assert packed.dtype == torch.uint8
    assert [bytes(row) for row in packed.numpy()] == plain_formats.pack(codes.tolist(), bits)
    unsigned = (codes.numpy().astype(np.int16) - form.low).astype(np.uint8)
    every = np.unpackbits(unsigned[:, :, None], axis=2, bitorder="little")[:, :, :bits].reshape(rows, -1)
    assert np.array_equal(np.packbits(every, axis=1, bitorder="little"), packed.numpy())
    assert torch.equal(form.unpack(packed, columns), codes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [1, 7, 8, 17, 4095])
def test_packed_bytes_are_those_of_compressed_tensors(name: str, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    form = FORMATS[name]
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(form.low, form.high + 1, (3, columns), generator=generator).to(torch.int8)
    theirs = pack_to_int32(codes, form.bits).contiguous().view(torch.uint8)
    ours = form.pack(codes)
    assert torch.equal(theirs[:, : ours.shape[1]], ours)
    assert not theirs[:, ours.shape[1] :].any()


def test_packing_takes_strided_codes() -> None:
    codes = FORMATS["int4"].quantize(random((6, 10)), scheme()).codes
    assert torch.equal(FORMATS["int4"].pack(codes.T), FORMATS["int4"].pack(codes.T.contiguous()))


@settings(max_examples=40, deadline=None)
@given(symmetric=st.booleans(), exponent=st.integers(-13, 9), seed=st.integers(0, 2**31))
def test_four_bit_products_are_exact_in_float16(symmetric: bool, exponent: int, seed: int) -> None:
    """What a runtime computes in float16 is what was decided on, to the last bit."""
    form = FORMATS["int4"]
    weight = random((4, 64), seed) * 2.0**exponent
    tensor = form.quantize(weight, scheme("int4", "group", group=16, symmetric=symmetric))
    scale = tensor.scale.repeat_interleave(16, dim=1)
    zero = 0 if tensor.zero is None else tensor.zero.repeat_interleave(16, dim=1).to(torch.float16)
    half = (tensor.codes.to(torch.float16) - zero) * scale
    assert half.dtype == torch.float16
    assert torch.equal(half.float(), form.dequantize(tensor))
    # for every code there is, not only those that occur
    every = torch.arange(-15, 16, dtype=torch.float16) if not symmetric else torch.arange(-8, 8, dtype=torch.float16)
    products = every[:, None] * tensor.scale.reshape(1, -1)
    assert torch.equal(products.float(), every.float()[:, None] * tensor.scale.float().reshape(1, -1))


def test_bits_per_weight_of_the_contract() -> None:
    how = scheme("int4", "group", group=64, symmetric=False)
    assert FORMATS["int4"].bits_per_weight((4096, 4096), how) == 4.3125
    assert FORMATS["int4"].bits_per_weight((4096, 4096), how.model_copy(update={"symmetric": True})) == 4.25


@pytest.mark.parametrize(("columns", "group", "remedy"), [(576, 128, "use 96, or"), (100, 64, "use on_indivisible")])
def test_a_group_that_does_not_divide_says_which_would(columns: int, group: int, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        groups_of(columns, scheme("int4", "group", group=group))
    assert caught.value.code == "group-indivisible"
    assert f"group {group}, K {columns}" in caught.value.value
    assert caught.value.remedy.startswith(remedy)
