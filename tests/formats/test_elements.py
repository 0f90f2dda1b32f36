"""Floats as codes: small ones against ml_dtypes, whole ones against a cast, bit for bit, with ties and extremes."""

import struct

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.formats import load_format
from quantkit.formats.base import scaled as elements
from quantkit.formats.base.scaled import FP4_E2M1, FP8_E4M3, FP8_E5M2, Fp4, Fp8
from quantkit.scheme import WeightScheme

ELEMENTS: dict[str, tuple[Fp8 | Fp4, type]] = {
    "fp8_e4m3": (FP8_E4M3, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": (FP8_E5M2, ml_dtypes.float8_e5m2),
    "fp4_e2m1": (FP4_E2M1, ml_dtypes.float4_e2m1fn),
}


def awkward(dtype: type) -> np.ndarray:
    """Every finite value, every midpoint of neighbours, what lies one float32 beside these, and values at random."""
    count = 16 if dtype is ml_dtypes.float4_e2m1fn else 256
    values = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2
    points = np.concatenate([values, middles.astype(np.float32), [-0.0, 1e-30, -1e-30, 1e-40]]).astype(np.float32)
    beside = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    everything = np.concatenate([points, *beside, random, random * 100, random * 1e-3])
    return everything[np.abs(everything) <= values.max()]


def codes_of(element: Fp8 | Fp4, units: np.ndarray) -> np.ndarray:
    return element.encode(torch.from_numpy(units)).view(torch.uint8).numpy()


@pytest.mark.parametrize("name", ELEMENTS)
def test_casts_are_those_of_ml_dtypes(name: str) -> None:
    element, dtype = ELEMENTS[name]
    units = awkward(dtype)
    theirs = units.astype(dtype)
    assert np.array_equal(codes_of(element, units), theirs.view(np.uint8))
    values = element.decode(element.encode(torch.from_numpy(units))).numpy()
    assert np.array_equal(values.view(np.uint32), theirs.astype(np.float32).view(np.uint32))
    assert np.array_equal(element.snap(torch.from_numpy(units)).numpy(), values)


@pytest.mark.parametrize("name", ELEMENTS)
def test_beyond_the_range_is_the_largest_finite_value(name: str) -> None:
    element, dtype = ELEMENTS[name]
    top = float(ml_dtypes.finfo(dtype).max)
    assert element.top == top
    beyond = torch.tensor([top * 1.01, top * 2, 3e38, float("inf")])
    for sign in (1, -1):
        assert element.snap(sign * beyond).tolist() == [sign * top] * 4
        assert element.decode(element.encode(sign * beyond)).tolist() == [sign * top] * 4


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_nan_stays_nan(name: str) -> None:
    element, _ = ELEMENTS[name]
    assert element.snap(torch.tensor([float("nan"), 1.0])).isnan().tolist() == [True, False]


def test_the_codebook_of_fp4_is_that_of_ml_dtypes() -> None:
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(FP4_E2M1.codebook().numpy().view(np.uint32), theirs.view(np.uint32))
    assert tuple(theirs[:8].tolist()) == elements.FP4_VALUES


@pytest.mark.parametrize("columns", [1, 2, 7, 32])
def test_packed_fp4_bytes_are_those_of_compressed_tensors(columns: int) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    codes = torch.randint(0, 16, (3, columns), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[codes == 8] = 0  # theirs has one zero
    even = torch.nn.functional.pad(FP4_E2M1.decode(codes), (0, columns % 2))
    assert torch.equal(FP4_E2M1.pack(codes), pack_fp4_to_uint8(even))


NAMES = ["float32", "float16", "bfloat16"]


def corners_and_random() -> torch.Tensor:
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
    weight = corners_and_random().reshape(-1)[: shape[0] * shape[1]].reshape(shape)
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
    once = form.dequantize(form.quantize(corners_and_random(), how))
    assert torch.equal(form.dequantize(form.quantize(once, how)), once)
    codes = form.quantize(corners_and_random(), how).codes
    assert (
        form.bits_per_weight((3, 17), how) == codes.element_size() * 8 == form.pack(codes).numel() * 8 / codes.numel()
    )
