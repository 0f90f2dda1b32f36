"""The candidates of one operation: the high-precision baseline, ours, our raw twin, torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parts.device import Device
from parts.timing import Side, copies
from parts.weights import Variant, weight
from quantkit.kernels.configs import Config
from quantkit.kernels.dequantize import dequantize
from quantkit.kernels.layout import KINDS, PackedWeight, codes_of
from quantkit.kernels.matmul import weight_only
from quantkit.kernels.native import native
from quantkit.kernels.quantize import quantize_tokens
from quantkit.kernels.workspace import Workspace

Shape = tuple[int, int]


def inputs(batch: int, columns: int, dtype: torch.dtype, at: str) -> torch.Tensor:
    """x [M, K] of unit normal numbers."""
    generator = torch.Generator(device=at).manual_seed(batch)
    return torch.randn(batch, columns, generator=generator, device=at).to(dtype)


def baseline(shape: Shape, batch: int, dtype: torch.dtype, device: Device) -> Side:
    """torch's product in 16 bits."""
    at, size = device.torch_device, 2 * shape[0] * shape[1]
    held = [torch.randn(shape, device=at).to(dtype) for _ in range(copies(size, device.cache_bytes))]
    x = inputs(batch, shape[1], dtype, at)
    return Side("torch.linear", [_linear(x, w) for w in held], size, {"dtype": str(dtype)})


def held_copies(variant: Variant, shape: Shape, device: Device) -> list[PackedWeight]:
    """Copies of one packed weight that together are beyond the cache."""
    first = weight(variant, *shape, device.torch_device)
    count = copies(first.resident_bytes, device.cache_bytes)
    return [first, *(_copy(first) for _ in range(count - 1))]


def ours(
    held: Sequence[PackedWeight], x: torch.Tensor, config: Config, memory: Workspace, *, decode: bool = True
) -> Side:
    """Our kernel, or its raw twin."""
    settings = {"decode": decode, **config.as_dict()}
    if held[0].kind.endswith(".native"):
        codes, step = quantize_tokens(x, held[0].kind.removesuffix(".native"))
        steps = [_native(codes, step, w, config, memory, x.dtype) for w in held]
    else:
        steps = [_weight_only(x, w, config, memory, decode) for w in held]
    return Side("quantkit" if decode else "quantkit raw twin", steps, held[0].resident_bytes, settings)


def tokens(variant: Variant, x: torch.Tensor) -> Side:
    """Quantizing the activations, on its own."""
    return Side("quantize_tokens", [lambda: quantize_tokens(x, variant.format)] * 8, 0, {})


def expanded(held: Sequence[PackedWeight], x: torch.Tensor) -> Side:
    """Dequantize, then torch's product; the expanded weight is scratch."""

    def step(packed: PackedWeight) -> Callable[[], object]:
        return lambda: torch.nn.functional.linear(x, dequantize(packed, x.dtype))

    return Side("dequantize_matmul", [step(w) for w in held], held[0].resident_bytes, {})


def torch_own(variant: Variant, held: Sequence[PackedWeight], x: torch.Tensor) -> Side:
    """torch's operator for the format.

    Raises:
        NotImplementedError: it has none for this format.
        RuntimeError: it cannot run here, with torch's reason.
    """
    if variant.name == "int8 w8a8":
        return _int_mm(held, x)
    if variant.name == "fp8_e4m3 w8a8":
        return _scaled_mm(held, x)
    if variant.kind == "int4" and variant.zeros and variant.group in (32, 64, 128, 256):
        return _int4pack(variant, held, x)
    raise NotImplementedError(f"torch has no operator for {variant.name}")


def _int_mm(held: Sequence[PackedWeight], x: torch.Tensor) -> Side:
    codes, step = quantize_tokens(x, "int8")
    # torch asks for more than 16 rows
    filled = torch.nn.functional.pad(codes, (0, 0, 0, max(17 - len(x), 0) and 32 - len(x)))

    def one(packed: PackedWeight) -> Callable[[], object]:
        w, scale = codes_of(packed), packed.scale[0, : packed.shape[0]].float()

        def multiply() -> object:
            sums = torch._int_mm(filled, w.T)[: len(x)]
            return (sums * (step[:, None] * scale)).to(x.dtype)

        return multiply

    return Side("torch._int_mm", [one(w) for w in held], _codes_bytes(held[0]), {"rows": len(filled), "fused": False})


def _scaled_mm(held: Sequence[PackedWeight], x: torch.Tensor) -> Side:
    codes, step = quantize_tokens(x, "fp8_e4m3")
    # row-wise scales, and whole blocks of 16 rows
    filled = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, -len(x) % 16)).view(codes.dtype)
    steps = torch.nn.functional.pad(step, (0, -len(x) % 16), value=1.0)[:, None]

    def one(packed: PackedWeight) -> Callable[[], object]:
        w = codes_of(packed).view(torch.float8_e4m3fn)
        scale = packed.scale[:1, : packed.shape[0]].float().contiguous()
        return lambda: torch._scaled_mm(filled, w.T, scale_a=steps, scale_b=scale, out_dtype=torch.bfloat16)

    return Side("torch._scaled_mm", [one(w) for w in held], _codes_bytes(held[0]), {"rows": len(filled)})


def _int4pack(variant: Variant, held: Sequence[PackedWeight], x: torch.Tensor) -> Side:
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
    return Side("torch._weight_int4pack_mm", [one(w) for w in held], size, {"group": variant.group})


def _codes_bytes(packed: PackedWeight) -> int:
    return packed.shape[0] * packed.shape[1] + 4 * packed.shape[0]


def _linear(x: torch.Tensor, w: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.nn.functional.linear(x, w)


def _weight_only(
    x: torch.Tensor, w: PackedWeight, config: Config, memory: Workspace, decode: bool
) -> Callable[[], object]:
    return lambda: weight_only(x, w, config, workspace=memory, decode=decode)


def _native(
    codes: torch.Tensor, step: torch.Tensor, w: PackedWeight, config: Config, memory: Workspace, dtype: torch.dtype
) -> Callable[[], object]:
    return lambda: native(codes, step, w, config, dtype=dtype, workspace=memory)


def _copy(packed: PackedWeight) -> PackedWeight:
    fields: dict[str, Any] = {"words": packed.words.clone(), "scale": packed.scale.clone()}
    if packed.zero is not None:
        fields["zero"] = packed.zero.clone()
    return type(packed)(**{**packed.__dict__, **fields})
