"""Small floats against ml_dtypes: every cast, ties and extremes, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.formats.base import scaled as elements
from quantkit.formats.base.scaled import FP4_E2M1, FP8_E4M3, FP8_E5M2, Fp4, Fp8

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
