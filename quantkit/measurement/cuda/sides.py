"""Random weights of real shapes, and implementations of their product: 16-bit baseline, our kernel, its raw twin,
torch.

The time of a product does not depend on the choice of codes, but zeros would flatter a GPU. So codes, scales and zero
points are all random. Results are compared with float64, within a bound derived from rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch.nn.functional import linear

from quantkit.kernels.dispatch import EXPANDED, Config
from quantkit.kernels.layout import KINDS, PackedWeight, codes_of, pack_parts, scales_of
from quantkit.kernels.matmul import by_slabs, interpreted, slab_rows, weight_only
from quantkit.kernels.native import multiply, native, quantize_tokens, torch_product
from quantkit.measurement.cuda.device import GpuDevice, Implementation, copies

Shape = tuple[int, int]
Step = Callable[[], object]
# returns the codes [M, K] of an input and the step of each row, [M]
Quantized = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def inputs(batch: int, columns: int, dtype: torch.dtype, at: str) -> torch.Tensor:
    """Draw x [M, K] of unit normal numbers."""
    generator = torch.Generator(device=at).manual_seed(batch)
    return torch.randn(batch, columns, generator=generator, device=at).to(dtype)


def baseline(shape: Shape, batch: int, dtype: torch.dtype, device: GpuDevice) -> Implementation:
    """Make torch's product in 16 bits."""
    at, size = device.torch_device, 2 * shape[0] * shape[1]
    held = [torch.randn(shape, device=at).to(dtype) for _ in range(copies(size, device.cache_bytes))]
    x = inputs(batch, shape[1], dtype, at)
    return Implementation("torch.linear", [partial(linear, x, w) for w in held], size, {"dtype": str(dtype)})


def held_copies(variant: FormatVariant, shape: Shape, device: GpuDevice) -> list[PackedWeight]:
    """Make enough copies of a packed weight to exceed the cache together."""
    first = weight(variant, *shape, device.torch_device)
    return [first, *(_copy(first) for _ in range(copies(first.resident_bytes, device.cache_bytes) - 1))]


def _copy(packed: PackedWeight) -> PackedWeight:
    zero = None if packed.zero is None else packed.zero.clone()
    return replace(packed, words=packed.words.clone(), scale=packed.scale.clone(), zero=zero)


def ours(
    held: Sequence[PackedWeight],
    x: torch.Tensor,
    config: Config,
    *,
    decode: bool = True,
    quantize: bool = False,
) -> Implementation:
    """Make our kernel, or its raw twin; `quantize`: True to quantize 8-bit inputs in each step."""
    settings = {"decode": decode, **config.as_dict()}
    if held[0].kind.endswith(".native"):
        quantized = _quantized(x, held[0].kind.removesuffix(".native"), within=quantize)
        steps: list[Step] = [partial(_native, quantized, w, config, x.dtype) for w in held]
    else:
        steps = [partial(weight_only, x, w, config, decode=decode) for w in held]
    return Implementation("quantkit" if decode else "quantkit raw twin", steps, held[0].resident_bytes, settings)


def _native(quantized: Quantized, w: PackedWeight, config: Config, dtype: torch.dtype) -> object:
    return native(*quantized(), w, config, dtype=dtype)


def tokens(variant: FormatVariant, x: torch.Tensor) -> Implementation:
    """Make the quantization of the activations alone."""
    return Implementation("quantize_tokens", [partial(quantize_tokens, x, variant.format)] * 8, 0, {})


def expanded(held: Sequence[PackedWeight], x: torch.Tensor) -> Implementation:
    """Make torch's product with a weight that is expanded slab by slab."""
    steps = [partial(by_slabs, x, w) for w in held]
    rows = slab_rows(*held[0].shape, x.device)
    return Implementation(EXPANDED, steps, held[0].resident_bytes, {"slab_rows": rows})


def torch_own(
    variant: FormatVariant, held: Sequence[PackedWeight], x: torch.Tensor, *, quantize: bool = False
) -> Implementation:
    """Make torch's own operator for the format; `quantize` as for `ours`.

    Raises NotImplementedError: torch has none for this format; RuntimeError: torch cannot run it here, with its reason.
    """
    if name := torch_product(held[0]):
        quantized = _quantized(x, variant.format, within=quantize)
        return Implementation(name, [partial(_own, quantized, w, x.dtype) for w in held], held[0].resident_bytes, {})
    if variant.kind == "int4" and variant.zeros and variant.group in (32, 64, 128, 256):
        return _int4pack(variant, held, x)
    raise NotImplementedError(f"torch has no operator for {variant.name}")


def _own(quantized: Quantized, w: PackedWeight, dtype: torch.dtype) -> object:
    return multiply(*quantized(), w, dtype)


def _int4pack(variant: FormatVariant, held: Sequence[PackedWeight], x: torch.Tensor) -> Implementation:
    if x.dtype != torch.bfloat16:
        raise NotImplementedError("torch._weight_int4pack_mm takes bfloat16 alone")

    def one(packed: PackedWeight) -> Step:
        rows = packed.shape[0]
        codes = (codes_of(packed).int() + KINDS["int4"].offset).to(torch.uint8)
        words = torch._convert_weight_to_int4pack((codes[:, ::2] << 4) | codes[:, 1::2], 8)
        scale = packed.scale[:, :rows].float()
        zero = packed.zero[:, :rows].float() if packed.zero is not None else torch.full_like(scale, 8.0)
        # w = (code - 8) scale + offset
        both = torch.stack([scale, (8 - zero) * scale], dim=2).bfloat16().contiguous()
        return partial(torch._weight_int4pack_mm, x, words, variant.group, both)

    size = held[0].words.numel() * 4 + held[0].scale.numel() * 4
    return Implementation("torch._weight_int4pack_mm", [one(w) for w in held], size, {"group": variant.group})


def _quantized(x: torch.Tensor, name: str, *, within: bool) -> Quantized:
    """Return a function for the codes of x and their steps, computed anew each time or once."""
    if within:
        return partial(quantize_tokens, x, name)
    once = quantize_tokens(x, name)
    return lambda: once


@dataclass(frozen=True)
class FormatVariant:
    """A format to time.

    Args:
        name: name in `known`.
        format: name in the rows.
        kind: kind of the packed weight.
        group: columns that share a scale; 0 for a whole row.
        zeros: True for a format with zero points.
        nested: True for quantized scales.
    """

    name: str
    format: str
    kind: str
    group: int = 0
    zeros: bool = False
    nested: bool = False

    @property
    def native(self) -> bool:
        """Tell if the product takes 8-bit inputs."""
        return self.kind.endswith(".native")

    def stored_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes of codes, scales and zeros of a weight [rows, columns]."""
        groups = columns // self.group if self.group else 1
        scale = 1.0 + 4 / 256 if self.nested else 2.0
        return rows * columns * KINDS[self.kind].bits / 8 + rows * groups * (scale + float(self.zeros))


@cache
def known() -> dict[str, FormatVariant]:
    """Return name -> variant; in `int8.dynamic` and its like, inputs are quantized by token at run time."""
    variants = [FormatVariant("int4.channel", "int4", "int4")]
    for group in (32, 64, 128):
        variants.append(FormatVariant(f"int4.g{group}", "int4", "int4", group))
        variants.append(FormatVariant(f"int4.g{group}.zeros", "int4", "int4", group, zeros=True))
    for name in ("int8", "fp8_e4m3"):
        variants += [FormatVariant(name, name, name), FormatVariant(f"{name}.dynamic", name, f"{name}.native")]
    variants += [
        FormatVariant("nf4.g64", "nf4", "nf4", 64),
        FormatVariant("nf4.g64.double", "nf4", "nf4", 64, nested=True),
    ]
    return {variant.name: variant for variant in variants}


def weight(variant: FormatVariant, rows: int, columns: int, at: str, seed: int = 0) -> PackedWeight:
    """Draw a packed weight [rows, columns]: random codes, and random scales that give outputs of about unit size."""
    generator = torch.Generator(device=at).manual_seed(seed)
    form = KINDS[variant.kind]
    groups = columns // variant.group if variant.group else 1
    if variant.format == "fp8_e4m3":
        drawn = torch.randn(rows, columns, generator=generator, device=at) * 100
        codes, typical = drawn.clamp(-448, 448).to(torch.float8_e4m3fn), 100.0
    else:
        drawn = torch.randint(0, 2**form.bits, (rows, columns), generator=generator, device=at)
        codes = drawn.to(torch.uint8) if variant.kind == "nf4" else (drawn - 2 ** (form.bits - 1)).to(torch.int8)
        typical = 0.5 if variant.kind == "nf4" else 2 ** (form.bits - 1) / 1.7
    zero = None
    if variant.zeros:
        zero = torch.randint(-2, 3, (rows, groups), generator=generator, device=at).to(torch.int8)
    scale = (0.5 + torch.rand(rows, groups, generator=generator, device=at)) / (typical * columns**0.5)
    nested = None
    if variant.nested:
        size = float(scale.max())
        # rising values from 0 to 1: they do not affect the time
        nested = (
            torch.full((-(-rows * groups // 256),), size, device=at),
            torch.linspace(0, 1, 256, device=at),
            torch.full((1,), size / 256, device=at),
        )
        scale = torch.randint(64, 256, (rows, groups), generator=generator, device=at).to(torch.uint8)
    else:
        scale = scale.half()
    group = variant.group or columns
    return pack_parts(variant.kind, codes, scale, zero, group=group, nested=nested)


def values(packed: PackedWeight, codebook: torch.Tensor) -> torch.Tensor:
    """Dequantize a packed weight to [N, K] float64, slowly and plainly."""
    codes, (_, columns) = codes_of(packed), packed.shape
    if packed.kind.startswith("fp8"):
        plain = codes.view(torch.float8_e4m3fn).double()
    elif packed.kind == "nf4":
        plain = codebook.to(codes.device).double()[codes.int()]
    else:
        plain = codes.double()
    spread = -(-columns // packed.groups)
    if packed.zero is not None:
        zero = packed.zero[:, : packed.shape[0]].T.double() - KINDS[packed.kind].offset
        plain = plain - zero.repeat_interleave(spread, dim=1)[:, :columns]
    return plain * scales_of(packed).double().repeat_interleave(spread, dim=1)[:, :columns]


def exact_inputs(variant: FormatVariant, x: torch.Tensor) -> torch.Tensor:
    """Return the inputs [M, K] of the product in float64, rounded to 8 bits by token if the variant takes those."""
    if not variant.native:
        return x.double()
    codes, step = quantize_tokens(x, variant.format)
    return codes.double() * step.double()[:, None]


def error(
    variant: FormatVariant, plain: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, rounded: float = 0.0
) -> float:
    """Return the largest error of y [M, N] as a share of the allowed error; a correct product has at most 1.

    Args:
        plain: dequantized weight, [N, K] float64.
        x: inputs [M, K], float16 or bfloat16.
        y: product, in the dtype of x.
        rounded: relative rounding of weights that an implementation adds.
    """
    # the interpreter truncates to bfloat16, a GPU rounds
    bits = 11 if x.dtype == torch.float16 else 7 if interpreted() else 8
    decoded = rounded + (2.0**-bits if variant.kind == "nf4" else 0.0)
    # Hopper truncates sums of FP8 products to 14 bits over 32 unroll columns, then adds in float32
    kept = 2.0**-13 if variant.kind == "fp8_e4m3.native" else 0.0
    exact = exact_inputs(variant, x)
    want, size = exact @ plain.T, exact.abs() @ plain.abs().T
    sums = (x.shape[1] + 4) * 2.0**-23 + kept
    allowed = size * (sums + decoded) + want.abs() * 2.0**-bits * 1.01 + 2.0**-24
    worst = float(((y.double() - want).abs() / allowed).max())
    return worst if worst == worst else float("inf")  # noqa: PLR0124 (NaN)
