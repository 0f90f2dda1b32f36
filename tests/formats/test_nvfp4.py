"""NVFP4 against compressed-tensors' definition: global scale, group scales, values."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from quantkit.formats import load_format
from quantkit.formats.base.layout import extremes
from quantkit.scheme import WeightScheme

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
