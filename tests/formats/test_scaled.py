"""Formats of scaled elements: FP8, microscaling's shared powers of two, and NVFP4 as compressed-tensors defines it."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given
from hypothesis import strategies as st

from quantkit.formats import load_format
from quantkit.formats.base.layout import extremes
from quantkit.scheme import WeightScheme

MXFP4, MXFP8 = load_format("mxfp4"), load_format("mxfp8")
ELEMENTS = {"mxfp4": (2, ml_dtypes.float4_e2m1fn), "mxfp8": (8, ml_dtypes.float8_e4m3fn)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_microscaling_is_that_of_the_specification(name: str, size: float) -> None:
    """One group at a time, in Python and ml_dtypes."""
    form, (exponent, dtype) = load_format(name), ELEMENTS[name]
    weight = random(4, 96) * size
    tensor = form.quantize(weight, WeightScheme(format=name))
    assert tensor.scale.dtype == torch.float8_e8m0fnu
    values = form.dequantize(tensor)
    for row in range(4):
        for group in range(3):
            part = weight[row, group * 32 : group * 32 + 32].numpy()
            power = math.floor(math.log2(float(np.abs(part).max()))) - exponent
            assert int(tensor.scale[row, group].view(torch.uint8)) == power + 127
            top = float(ml_dtypes.finfo(dtype).max)
            units = np.clip(part / np.float32(2.0**power), -top, top).astype(dtype)
            assert np.array_equal(values[row, group * 32 : group * 32 + 32], units.astype(np.float32) * 2.0**power)


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4), ("mxfp8", 8)])
def test_scales_are_those_of_compressed_tensors_or_one_power_below(name: str, bits: int) -> None:
    """They go up where the mantissa of the largest weight is 1.75 or more; the specification does not."""
    amax = torch.rand(4000, generator=torch.Generator().manual_seed(0)) * 8 + 1e-3
    scale, _ = load_format(name).parameters(-amax, amax, WeightScheme(format=name))
    arguments = QuantizationArgs(
        num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    )
    theirs, _ = calculate_qparams(-amax, amax, arguments)
    mantissa = torch.frexp(amax).mantissa * 2
    expected = torch.where(mantissa >= 1.75, 2.0, 1.0) * scale
    assert bool((mantissa >= 1.75).any())
    if theirs.dtype == torch.uint8:
        theirs = torch.exp2(theirs.float() - 127)
    assert torch.equal(theirs.float(), expected)


@given(exponent=st.integers(-126, 127), mantissa=st.floats(1.0, 1.9999998807907104, width=32))
def test_powers_of_two_are_exact(exponent: int, mantissa: float) -> None:
    amax = torch.tensor(mantissa * 2.0**exponent, dtype=torch.float32)
    scale, _ = MXFP4.parameters(-amax, amax, WeightScheme(format="mxfp4"))
    assert float(scale) == 2.0 ** max(exponent - 2, -127)
    nearest = float(MXFP4.stored(amax, WeightScheme(format="mxfp4")))
    assert nearest == 2.0 ** min(exponent + (mantissa >= 2**0.5), 127)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_the_largest_weight_is_the_largest_float(name: str) -> None:
    form, weight = load_format(name), random(6, 64)
    for granularity in ("tensor", "channel", "group", "block"):
        group = 32 if granularity in ("group", "block") else None
        how = WeightScheme.model_validate({"format": name, "granularity": granularity, "group": group})
        tensor = form.quantize(weight, how)
        assert tensor.codes.dtype == getattr(torch, "float8_e4m3fn" if name == "fp8_e4m3" else "float8_e5m2")
        assert float(tensor.codes.float().abs().max()) == form.element.top
        assert tensor.scale.dtype == torch.float32


def test_outliers_saturate_under_a_scale_that_is_too_small() -> None:
    form, how = load_format("fp8_e4m3"), WeightScheme(format="fp8_e4m3", granularity="tensor")
    tensor = form.nearest(torch.tensor([[1e9, -1e9, 449.0, 1.0]]), torch.ones(1, 1), None, how)
    assert form.dequantize(tensor).tolist() == [[448.0, -448.0, 448.0, 1.0]]


NVFP4 = load_format("nvfp4")
HOW = WeightScheme(format="nvfp4")


def weights(size: float = 0.02) -> torch.Tensor:
    """[24, 256] with a group of zeros, one far below the others, and outliers."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(5)) * size
    weight[0, :16], weight[3, 16:32], weight[7, 100] = 0.0, 1e-6 * size, 40 * size
    return weight


def test_a_scheme_needs_only_the_name() -> None:
    assert (HOW.granularity, HOW.group, HOW.symmetric, HOW.scale) == ("group", 16, True, "fp8_e4m3")


@pytest.mark.parametrize("size", [1e-3, 0.02, 5.0])
def test_scales_and_values_are_those_of_compressed_tensors(size: float) -> None:
    weight = weights(size)
    tensor = NVFP4.quantize(weight, HOW)
    arguments = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    low, high = extremes(weight, HOW)
    theirs = generate_gparam(weight.min(), weight.max())
    assert tensor.global_scale is not None
    assert float(1 / tensor.global_scale) == pytest.approx(float(theirs), rel=2e-7)
    scale, zero = calculate_qparams(low, high, arguments, global_scale=theirs)
    assert tensor.scale.dtype == torch.float8_e4m3fn
    # where E4M3 has no number small enough they take 0.125, which rounds the group to zero; we take the smallest, 2^-9
    tiny = (torch.maximum(-low, high) / 6 * theirs) < 2**-10
    assert int(tiny.sum()) == 2
    assert torch.equal(tensor.scale.float()[~tiny], scale.float()[~tiny])
    assert (tensor.scale.float()[tiny] == 2**-9).all()
    with torch.compiler.set_stance("force_eager"):
        wanted = fake_quantize(weight, scale, zero, arguments, global_scale=theirs)
    groups = (~tiny).repeat_interleave(16, dim=1)
    torch.testing.assert_close(NVFP4.dequantize(tensor)[groups], wanted[groups], rtol=3e-7, atol=0)


def test_the_largest_scale_is_the_largest_number_of_e4m3() -> None:
    assert float(NVFP4.quantize(weights(), HOW).scale.float().max()) == 448.0


def test_a_given_global_scale_is_kept() -> None:
    """A solver fixes it by the weights as they came, and rounds others under it."""
    weight = weights()
    whole = NVFP4.global_scale(weight.abs().max(), HOW)
    scale, _ = NVFP4.parameters(*extremes(weight, HOW), HOW, whole)
    assert scale.dtype == torch.float32
    tensor = NVFP4.nearest(weight * 0.5, scale, None, HOW, whole)
    assert torch.equal(tensor.global_scale, whole)
    assert torch.equal(tensor.scale.float() * whole, scale)


def test_zeros_have_a_global_scale_of_one() -> None:
    assert float(NVFP4.quantize(torch.zeros(2, 32), HOW).global_scale) == 1.0
