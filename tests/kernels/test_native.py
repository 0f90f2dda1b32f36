"""8-bit codes times 8-bit codes, and tokens to codes, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")  # Linux alone has it
from kernel_tools import bound, quantized
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.formats.base import activation
from quantkit.kernels import matmul
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import PackedWeight, pack
from quantkit.kernels.native import multiply, native, quantize_tokens, require, torch_product
from quantkit.scheme import ActivationScheme

WHOLE = Config(block_n=32, block_m=16, unroll=2, split=1, warps=2, stages=2)
SPLIT = Config(block_n=64, block_m=16, unroll=4, split=3, warps=4, stages=3)


@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 40, 96), (17, 24, 200)])
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_products_equal_float64(fmt: str, M: int, N: int, K: int, config: Config) -> None:
    tensor = quantized(N, K, format=fmt, granularity="channel")
    weight = load_format(fmt).dequantize(tensor).double()
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(5)).half()
    codes, step = quantize_tokens(x, fmt)
    y = native(codes, step, pack(tensor, native=True), config)
    exact = codes.double() * step.double()[:, None]
    assert torch.all((y.double() - exact @ weight.T).abs() <= bound(exact, weight, y))


def test_sums_of_whole_numbers_are_exact() -> None:
    tensor = quantized(24, 160, format="int8")
    codes = torch.randint(-128, 128, (3, 160), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    one = tensor.replace(scale=torch.full_like(tensor.scale, 1.0, dtype=torch.float32))
    y = native(codes, torch.ones(3), pack(one, native=True), SPLIT, dtype=torch.float32)
    assert torch.equal(y, (codes.int() @ tensor.codes.int().T).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("M", [1, 17, 40])
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_products_of_torch_read_the_same_rows(fmt: str, M: int, dtype: torch.dtype) -> None:
    tensor = quantized(48, 96, format=fmt, granularity="channel")
    packed, weight = pack(tensor, native=True), load_format(fmt).dequantize(tensor).double()
    x = torch.randn(M, 96, generator=torch.Generator().manual_seed(5)).to(dtype)
    codes, step = quantize_tokens(x, fmt)
    y = multiply(codes, step, packed, dtype)
    exact = codes.double() * step.double()[:, None]
    assert y.dtype == dtype and y.shape == (M, 48)
    bits = 11 if dtype == torch.float16 else 8
    assert torch.all((y.double() - exact @ weight.T).abs() <= bound(exact, weight, y, bits=bits))
    assert packed.resident_bytes == 48 * 96 + packed.scale.numel() * packed.scale.element_size(), (
        "one copy for all ways"
    )


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_shapes_that_torch_takes_on_cuda_are_taken_and_no_others(fmt: str) -> None:
    """Its own checks, without a GPU: sizes, strides, scales."""
    taken = []
    kind = torch.int8 if fmt == "int8" else torch.float8_e4m3fn
    with FakeTensorMode():
        for N, K in ((64, 96), (64, 72), (40, 96), (60, 96)):
            scale, words = torch.empty(1, N, device="cuda").half(), torch.empty(N, K, dtype=kind, device="cuda")
            weight = PackedWeight(f"{fmt}.native", words, scale, None, (N, K), K)
            name = torch_product(weight)
            taken.append(name)
            for M in (1, 16, 17, 33):
                codes, step = torch.empty(M, K, dtype=kind, device="cuda"), torch.empty(M, device="cuda")
                for dtype in (torch.bfloat16, torch.float16):
                    if name:
                        y = multiply(codes, step, weight, dtype)
                        assert (y.shape, y.dtype, y.device.type) == ((M, N), dtype, "cuda")
            if fmt == "fp8_e4m3" and not name:
                with pytest.raises(RuntimeError, match="divisible by 16"):
                    torch._scaled_mm(codes, words.T, step.unsqueeze(1), scale.float(), out_dtype=torch.bfloat16)
    own = "torch._int_mm" if fmt == "int8" else "torch._scaled_mm"
    assert taken == ([own, own, own, ""] if fmt == "int8" else [own, "", "", ""])


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_tokens_are_quantized_as_activations_are(fmt: str) -> None:
    """Bit for bit; a token of zeros, one of small numbers and one with an outlier among them."""
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(8)).half()
    x[1] = 0
    x[2] *= 2.0**-14
    x[3, 7] = 6e4
    codes, step = quantize_tokens(x, fmt)
    want = activation.fake_quantize(x, ActivationScheme(format=fmt))
    assert torch.equal((codes.float() * step[:, None]).half(), want)
    if fmt == "fp8_e4m3":
        units = (x / step.half()[:, None]).clamp(-448, 448)
        assert torch.equal(codes.view(torch.uint8) & 127, units.to(torch.float8_e4m3fn).view(torch.uint8) & 127)


@pytest.mark.parametrize("planted", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_a_token_that_is_no_number_stays_none_and_spoils_no_other(fmt: str, planted: float) -> None:
    """Whatever codes it gets, its step is NaN: so is its row of every product, ours and torch's."""
    x = torch.randn(3, 1008, generator=torch.Generator().manual_seed(8)).half()
    packed = pack(quantized(48, 1008, format=fmt, granularity="channel"), native=True)
    clean = quantize_tokens(x, fmt)
    x[1, 700] = planted
    codes, step = quantize_tokens(x, fmt)
    assert step.isnan().tolist() == [False, True, False]
    assert torch.equal(codes.float()[::2], clean[0].float()[::2]) and torch.equal(step[::2], clean[1][::2])
    for y in (native(codes, step, packed, SPLIT), multiply(codes, step, packed, torch.float16)):
        assert y.isnan().all(dim=1).tolist() == [False, True, False] and not y[::2].isnan().any()


def test_a_device_without_the_type_is_named_with_those_that_have_it() -> None:
    require("fp8_e4m3.native", 89)
    require("int8.native", 80)
    with pytest.raises(
        InputError, match=r"SM 8.0; its products run from SM 8.9 on \(Ada, Hopper\); an emulation would not"
    ):
        require("fp8_e4m3.native", 80)


def test_kernels_overlap_where_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul.overlap() == {"OVERLAP": False}
    monkeypatch.setattr(matmul, "interpreted", lambda: False)
    for arch, able in ((80, False), (89, False), (90, True), (100, True)):
        active = SimpleNamespace(get_current_target=lambda arch=arch: GPUTarget("cuda", arch, 32))
        monkeypatch.setattr(matmul, "driver", SimpleNamespace(active=active))
        asked = matmul.overlap()
        assert asked.pop("OVERLAP") is able
        assert set(asked) == ({"launch_pdl"} if able else set()) <= {field.name for field in fields(CUDAOptions)}


def test_weights_for_other_inputs_are_refused() -> None:
    weight = pack(quantized(16, 64, format="int8"))
    with pytest.raises(InputError) as caught:
        native(torch.zeros(1, 64, dtype=torch.int8), torch.ones(1), weight, WHOLE)
    assert caught.value.code == "kernel-unsupported"
