"""The candidates of one operation: the high-precision baseline, ours, our raw twin, torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.kernels import operators
from quantkit.kernels.configs import Config
from quantkit.kernels.dequantize import dequantize
from quantkit.kernels.launch import Workspace
from quantkit.kernels.layout import KINDS, PackedWeight, codes_of
from quantkit.kernels.matmul import weight_only
from quantkit.kernels.native import native
from quantkit.kernels.quantize import quantize_tokens
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
    if name := operators.of(held[0]):
        quantized = _quantized(x, variant.format, within=quantize)
        return Implementation(name, [_own(quantized, w, x.dtype) for w in held], held[0].resident_bytes, {})
    if variant.kind == "int4" and variant.zeros and variant.group in (32, 64, 128, 256):
        return _int4pack(variant, held, x)
    raise NotImplementedError(f"torch has no operator for {variant.name}")


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


def _own(quantized: Callable[[], Tokens], w: PackedWeight, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: operators.multiply(*quantized(), w, dtype)


def _quantized(x: torch.Tensor, name: str, *, within: bool) -> Callable[[], Tokens]:
    """What gives the codes of x and their steps: anew each time, or made once."""
    if within:
        return lambda: quantize_tokens(x, name)
    made = quantize_tokens(x, name)
    return lambda: made


def _copy(packed: PackedWeight) -> PackedWeight:
    fields: dict[str, Any] = {"words": packed.words.clone(), "scale": packed.scale.clone()}
    if packed.zero is not None:
        fields["zero"] = packed.zero.clone()
    return type(packed)(**{**packed.__dict__, **fields})
