"""NF4 against bitsandbytes: codes, scales, doubled scales and values, bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quantkit.formats import load_format
from quantkit.formats.nf4 import VALUES, doubled, dynamic_values, undoubled
from quantkit.scheme import WeightScheme

NF4 = load_format("nf4")
# compiling theirs, which falls on groups of 4096 alone, takes half a minute and changes no bit
pytestmark = pytest.mark.usefixtures("uncompiled")
RECORDED = "000001111111122222333344455566677788999aaabbbccccddddeeeeeeeffff"


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def functional() -> Any:
    """Of bitsandbytes, whose import brings torch's compiler: not for every process that collects tests."""
    from bitsandbytes import functional

    return functional


def weights(dtype: torch.dtype, size: float) -> torch.Tensor:
    """[16, 4096] with a group of zeros, one of a single size, and values at the midpoints of the codebook."""
    weight = torch.randn(16, 4096, generator=torch.Generator().manual_seed(3)) * size
    weight[0, :64], weight[1, :64] = 0.0, -0.25 * size
    values = torch.tensor(VALUES)
    weight[2, :15] = (values[1:] + values[:-1]) / 2 * size
    weight[2, 15:64], weight[2, 63] = 0.0, size
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 256, 4096])
@pytest.mark.parametrize("scale", ["float32", "double"])
def test_bits_are_those_of_bitsandbytes(dtype: torch.dtype, group: int, scale: str, functional: Any) -> None:
    for size in (0.02, 1.0, 30.0):
        weight = weights(dtype, size)
        packed, state = functional.quantize_4bit(
            weight, quant_type="nf4", blocksize=group, compress_statistics=scale == "double"
        )
        tensor = NF4.quantize(weight, WeightScheme.model_validate({"format": "nf4", "group": group, "scale": scale}))
        assert torch.equal(NF4.pack(tensor.codes).reshape(-1), packed.reshape(-1))
        if scale == "double":
            assert tensor.nested is not None
            assert torch.equal(tensor.nested.codes, state.absmax)
            assert torch.equal(tensor.nested.absmax, state.state2.absmax)
            assert torch.equal(tensor.nested.offset, state.offset)
        else:
            assert torch.equal(tensor.scale.reshape(-1), state.absmax)
        assert torch.equal(tensor.codebook, state.code)
        # they have two ways to multiply, by size; a half of the smallest float16 either way
        assert torch.equal(NF4.dequantize(tensor).to(dtype), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("scale", ["float32", "double"])
def test_zeros_are_those_of_bitsandbytes(scale: str, functional: Any) -> None:
    """Blocks, rows and a whole matrix of them, some below scales that are small beside others."""
    holey = weights(torch.float32, 0.02)
    holey[3], holey[5, 64:512], holey[7] = 0.0, 0.0, 1e-6 * holey[7]
    for weight in (holey, torch.zeros(16, 4096)):
        packed, state = functional.quantize_4bit(
            weight, quant_type="nf4", blocksize=64, compress_statistics=scale == "double"
        )
        tensor = NF4.quantize(weight, WeightScheme.model_validate({"format": "nf4", "scale": scale}))
        assert torch.equal(NF4.pack(tensor.codes).reshape(-1), packed.reshape(-1))
        values = NF4.dequantize(tensor)
        assert torch.equal(values, functional.dequantize_4bit(packed, state))
        assert not values[weight == 0].any()


def test_the_types_are_those_of_bitsandbytes(functional: Any) -> None:
    assert torch.equal(dynamic_values(), functional.create_dynamic_map())
    assert torch.equal(NF4.element.codebook(), functional.get_4bit_type("nf4", device="cpu"))


def test_a_recorded_vector() -> None:
    """What bitsandbytes 0.50.2 gives for 64 weights k / 64 - 1/2: runs where it is not installed."""
    weight = (torch.arange(64) / 64 - 0.5).reshape(1, 64)
    tensor = NF4.quantize(weight, WeightScheme(format="nf4"))
    assert NF4.pack(tensor.codes).numpy().tobytes().hex() == RECORDED
    assert float(tensor.scale) == 0.5


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 700])
def test_doubled_scales_are_within_their_steps(count: int) -> None:
    scales = torch.rand(count, generator=torch.Generator().manual_seed(count)) + 0.5
    nested = doubled(scales)
    assert nested.codes.shape == (count,)
    assert nested.absmax.shape == (-(-count // 256),)
    error = (undoubled(nested) - scales).abs()
    # the widest step of the type is 1/64 · 0.9; half of it, and half of what the table of 2^16 places rounds
    widest = float(dynamic_values()[1:].diff().max()) / 2 + 2.0**-16
    assert bool((error <= widest * nested.absmax.max() + 1e-6).all())


def test_scales_all_alike_are_their_mean() -> None:
    scales = torch.full((300,), 0.125)
    assert torch.equal(undoubled(doubled(scales)), scales)


def test_a_searched_range_is_kept() -> None:
    """`nearest` takes any scale, not only the largest magnitude; what is beyond it becomes ±1."""
    how = WeightScheme(format="nf4")
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    tensor = NF4.nearest(weight, torch.full((3, 2), 0.5), None, how)
    assert torch.equal(tensor.scale, torch.full((3, 2), 0.5))
    assert float(NF4.dequantize(tensor).abs().max()) == 0.5
