"""The candidates of one operation: the high-precision baseline, ours, our raw twin, torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.kernels.configs import Config
from quantkit.kernels.dequantize import dequantize
from quantkit.kernels.layout import KINDS, PackedWeight, codes_of
from quantkit.kernels.matmul import weight_only
from quantkit.kernels.native import native
from quantkit.kernels.quantize import quantize_tokens
from quantkit.kernels.workspace import Workspace
from quantkit.measurement.cuda.device import GpuDevice
from quantkit.measurement.cuda.timing import Implementation, copies
from quantkit.measurement.cuda.weights import FormatVariant, weight

Shape = tuple[int, int]
# codes [M, K] and the step of each row, [M]
Tokens = tuple[torch.Tensor, torch.Tensor]


def inputs(batch: int, columns: int, dtype: torch.dtype, at: str) -> torch.Tensor:
    """x [M, K] of unit normal numbers."""
    generator = torch.Generator(device=at).manual_seed(batch)
    return torch.randn(batch, columns, generator=generator, device=at).to(dtype)


def baseline(shape: Shape, batch: int, dtype: torch.dtype, device: GpuDevice) -> Implementation:
    """torch's product in 16 bits."""
    at, size = device.torch_device, 2 * shape[0] * shape[1]
    held = [torch.randn(shape, device=at).to(dtype) for _ in range(copies(size, device.cache_bytes))]
    x = inputs(batch, shape[1], dtype, at)
    return Implementation("torch.linear", [_linear(x, w) for w in held], size, {"dtype": str(dtype)})


def held_copies(variant: FormatVariant, shape: Shape, device: GpuDevice) -> list[PackedWeight]:
    """Copies of one packed weight that together are beyond the cache."""
    first = weight(variant, *shape, device.torch_device)
    count = copies(first.resident_bytes, device.cache_bytes)
    return [first, *(_copy(first) for _ in range(count - 1))]


def ours(
    held: Sequence[PackedWeight],
    x: torch.Tensor,
    config: Config,
    memory: Workspace,
    *,
    decode: bool = True,
    quantize: bool = False,
) -> Implementation:
    """Our kernel, or its raw twin; with `quantize`, inputs that have to be 8-bit are made so in each step."""
    settings = {"decode": decode, **config.as_dict()}
    if held[0].kind.endswith(".native"):
        quantized = _quantized(x, held[0].kind.removesuffix(".native"), within=quantize)
        steps = [_native(quantized, w, config, memory, x.dtype) for w in held]
    else:
        steps = [_weight_only(x, w, config, memory, decode) for w in held]
    return Implementation("quantkit" if decode else "quantkit raw twin", steps, held[0].resident_bytes, settings)


def tokens(variant: FormatVariant, x: torch.Tensor) -> Implementation:
    """Quantizing the activations, on its own."""
    return Implementation("quantize_tokens", [lambda: quantize_tokens(x, variant.format)] * 8, 0, {})


def expanded(held: Sequence[PackedWeight], x: torch.Tensor) -> Implementation:
    """Dequantize, then torch's product; the expanded weight is scratch."""

    def step(packed: PackedWeight) -> Callable[[], object]:
        return lambda: torch.nn.functional.linear(x, dequantize(packed, x.dtype))

    return Implementation("dequantize_matmul", [step(w) for w in held], held[0].resident_bytes, {})


def torch_own(
    variant: FormatVariant, held: Sequence[PackedWeight], x: torch.Tensor, *, quantize: bool = False
) -> Implementation:
    """torch's operator for the format; `quantize` as for `ours`.

    Raises:
        NotImplementedError: it has none for this format.
        RuntimeError: it cannot run here, with torch's reason.
    """
    if variant.name == "int8.dynamic":
        return _int_mm(held, x, quantize)
    if variant.name == "fp8_e4m3.dynamic":
        return _scaled_mm(held, x, quantize)
    if variant.kind == "int4" and variant.zeros and variant.group in (32, 64, 128, 256):
        return _int4pack(variant, held, x)
    raise NotImplementedError(f"torch has no operator for {variant.name}")


def _int_mm(held: Sequence[PackedWeight], x: torch.Tensor, quantize: bool) -> Implementation:
    # torch asks for more than 16 rows
    more = max(17 - len(x), 0) and 32 - len(x)
    quantized = _quantized(x, "int8", within=quantize, more=more)

    def one(packed: PackedWeight) -> Callable[[], object]:
        w, scale = codes_of(packed), packed.scale[0, : packed.shape[0]].float()

        def multiply() -> object:
            codes, step = quantized()
            sums = torch._int_mm(codes, w.T)[: len(x)]
            return (sums * (step[: len(x), None] * scale)).to(x.dtype)

        return multiply

    return Implementation(
        "torch._int_mm", [one(w) for w in held], _codes_bytes(held[0]), {"rows": len(x) + more, "fused": False}
    )


def _scaled_mm(held: Sequence[PackedWeight], x: torch.Tensor, quantize: bool) -> Implementation:
    # row-wise scales, and whole blocks of 16 rows
    more = -len(x) % 16
    quantized = _quantized(x, "fp8_e4m3", within=quantize, more=more)

    def one(packed: PackedWeight) -> Callable[[], object]:
        w = codes_of(packed).view(torch.float8_e4m3fn)
        scale = packed.scale[:1, : packed.shape[0]].float().contiguous()

        def multiply() -> object:
            codes, step = quantized()
            # row-wise scales give bfloat16 alone
            y = torch._scaled_mm(codes, w.T, scale_a=step[:, None], scale_b=scale, out_dtype=torch.bfloat16)
            return y[: len(x)].to(x.dtype)

        return multiply

    return Implementation("torch._scaled_mm", [one(w) for w in held], _codes_bytes(held[0]), {"rows": len(x) + more})


def _int4pack(variant: FormatVariant, held: Sequence[PackedWeight], x: torch.Tensor) -> Implementation:
    if x.dtype != torch.bfloat16:
        raise NotImplementedError("torch._weight_int4pack_mm takes bfloat16 alone")

    def one(packed: PackedWeight) -> Callable[[], object]:
        rows = packed.shape[0]
        codes = (codes_of(packed).int() + KINDS["int4"].offset).to(torch.uint8)
        words = torch._convert_weight_to_int4pack((codes[:, ::2] << 4) | codes[:, 1::2], 8)
        scale = packed.scale[:, :rows].float()
        zero = packed.zero[:, :rows].float() if packed.zero is not None else torch.full_like(scale, 8.0)
        # w = (code - 8) scale + offset
        both = torch.stack([scale, (8 - zero) * scale], dim=2).bfloat16().contiguous()
        return lambda: torch._weight_int4pack_mm(x, words, variant.group, both)

    size = held[0].words.numel() * 4 + held[0].scale.numel() * 4
    return Implementation("torch._weight_int4pack_mm", [one(w) for w in held], size, {"group": variant.group})


def _codes_bytes(packed: PackedWeight) -> int:
    return packed.shape[0] * packed.shape[1] + 4 * packed.shape[0]


def _linear(x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.nn.functional.linear(x, w)


def _weight_only(
    x: torch.Tensor, w: PackedWeight, config: Config, memory: Workspace, decode: bool
) -> Callable[[], object]:
    return lambda: weight_only(x, w, config, workspace=memory, decode=decode)


def _native(
    quantized: Callable[[], Tokens], w: PackedWeight, config: Config, memory: Workspace, dtype: torch.dtype
) -> Callable[[], object]:
    def multiply() -> object:
        codes, step = quantized()
        return native(codes, step, w, config, dtype=dtype, workspace=memory)

    return multiply


def _quantized(x: torch.Tensor, name: str, *, within: bool, more: int = 0) -> Callable[[], Tokens]:
    """What gives the codes of x, with `more` rows of zeros, and their steps: anew each time, or made once."""

    def make() -> Tokens:
        codes, step = quantize_tokens(x, name)
        if more:
            codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, more)).view(codes.dtype)
            step = torch.nn.functional.pad(step, (0, more), value=1.0)
        return codes, step

    if within:
        return make
    made = make()
    return lambda: made


def _copy(packed: PackedWeight) -> PackedWeight:
    fields: dict[str, Any] = {"words": packed.words.clone(), "scale": packed.scale.clone()}
    if packed.zero is not None:
        fields["zero"] = packed.zero.clone()
    return type(packed)(**{**packed.__dict__, **fields})
