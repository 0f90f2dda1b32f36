"""Formats that no kernel of ours multiplies, timed in another library's (`kernels.backends`): one way at every M.

Weights are random as they are stored, which is what the library takes; what they stand for is read back by their
layout and format, and the product of it is what a result is checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.kernels.backends.humming import NAME, HummingLinear
from quantkit.measurement.cuda import timing
from quantkit.measurement.cuda.device import GpuDevice, fitting
from quantkit.measurement.cuda.sides import inputs
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import Step
from quantkit.model import layouts
from quantkit.model.sizes.shapes import LinearShape
from quantkit.scheme import WeightScheme

# of a product's size: what rounding inputs to 8 bits by another rule may change, and 16 bits
_ROUNDED, _FLOAT = 2.0**-4, 2.0**-7
_CHECKED = 1024
_TYPES = {
    **{"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn},
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
}


@dataclass(frozen=True)
class ForeignVariant:
    """A format as it is timed.

    Args:
        name: as in `known`.
        layout: by its name.
        weights: the scheme.
        inputs: what they are rounded to by token as they come; None: they are not.
    """

    name: str
    layout: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None

    @property
    def scheme(self) -> WeightScheme:
        """Of weights."""
        return WeightScheme.model_validate(dict(self.weights))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.scheme.group or 0

    def stands_for(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> bool:
        """Whether a layer of a bundle is stored so."""
        own = self.scheme.model_dump(mode="json")
        same = all(scheme.get(key, own[key]) == own[key] for key in ("format", "granularity", "group", "symmetric"))
        if self.inputs is None or activations is None:
            return same and self.inputs is activations
        keys = ("format", "granularity", "dynamic")
        return same and all(activations.get(key) == self.inputs[key] for key in keys)


@cache
def known() -> dict[str, ForeignVariant]:
    """Name -> variant; each is what some bundle holds."""
    by_token = {"format": "fp8_e4m3", "granularity": "token", "dynamic": True}
    blocks = {"format": "fp8_e4m3", "granularity": "block", "group": 128, "scale": "float32"}
    found = [
        ForeignVariant("nvfp4", "nvfp4_pack_quantized", {"format": "nvfp4"}),
        ForeignVariant("mxfp4", "mxfp4_pack_quantized", {"format": "mxfp4"}),
        ForeignVariant("fp8_e4m3.b128.dynamic", "float_quantized", blocks, {**by_token, "granularity": "group"}),
        ForeignVariant(
            "int4.g128.fp8", "pack_quantized", {"format": "int4", "granularity": "group", "group": 128}, by_token
        ),
    ]
    return {each.name: each for each in found}


def stored(variant: ForeignVariant, shape: tuple[int, int], at: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a random weight [N, K], by the names of its layout."""
    generator, layout = torch.Generator(device=at).manual_seed(seed), layouts.load_layout(variant.layout)
    found: dict[str, torch.Tensor] = {}
    for name, kind, size in layout.headers("", shape, variant.scheme):
        codes, dtype = name == layout.codes, _TYPES[kind]
        if kind == "I64":
            part = torch.tensor(shape, device=at)
        elif kind == "I32":
            part = torch.randint(-(2**31), 2**31, size, generator=generator, device=at)
        elif kind == "U8":
            # two codes, or an exponent of about 0
            part = torch.randint(*((0, 256) if codes else (126, 129)), size, generator=generator, device=at)
        elif codes:
            part = torch.randn(size, generator=generator, device=at)
        else:
            part = 0.5 + torch.rand(size, generator=generator, device=at)
        found[name.removeprefix(".")] = part.to(dtype)
    return found


def linear(
    variant: ForeignVariant, parts: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, at: str
) -> HummingLinear:
    """The product of what is stored. Raises InputError `kernel-unsupported`; MissingDependency: compressed-tensors."""
    config = layouts.load_layout(variant.layout).quantization_config({"": variant.scheme}, [], "bfloat16")
    group = {**config["config_groups"]["group_0"], "format": config["format"]}
    if variant.inputs is not None:
        width = variant.scheme.group if variant.inputs["granularity"] == "group" else None
        told = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True}
        group["input_activations"] = told | {"strategy": variant.inputs["granularity"], "group_size": width}
    return HummingLinear(parts, group, shape, dtype=dtype, device=at)


@dataclass(frozen=True)
class ForeignProduct:
    """One weight in another library's kernel: a `products.Runnable`."""

    variant: ForeignVariant
    cost: StepCost
    held: list[HummingLinear]
    device: GpuDevice
    dtype: torch.dtype
    ready: dict[int, Step] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, shape: LinearShape, device: GpuDevice, dtype: torch.dtype, seed: int) -> ForeignProduct:
        """Checked on the first rows of a weight like it.

        Raises:
            InputError: `kernel-unsupported`, `wrong-result`.
            MissingDependency: compressed-tensors.
        """
        variant, at, size = known()[name], device.torch_device, (shape.N, shape.K)
        _check(variant, (min(shape.N, _CHECKED), shape.K), dtype, at, seed)
        parts = stored(variant, size, at, seed)
        size_bytes = sum(part.numel() * part.element_size() for part in parts.values())
        count = timing.copies(size_bytes, device.cache_bytes)
        rate = "fp8_e4m3" if variant.inputs else {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        cost = StepCost(
            variant.scheme.format,
            float(size_bytes),
            flops_per_token=2.0 * shape.K * shape.N,
            io_bytes_per_token=2.0 * (shape.K + shape.N),
            compute=rate,
        )
        return cls(variant, cost, [linear(variant, parts, size, dtype, at) for _ in range(count)], device, dtype)

    @property
    def resident_bytes(self) -> int | None:
        """See `products.Runnable`."""
        return self.held[0].resident_bytes

    def products(self, M: int) -> int:
        """See `products.Runnable`."""
        return 1

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
        """See `products.Runnable`."""
        return {"kernel": NAME, "compute_type": self.cost.compute, "copies": len(self.held)}

    def step(self, M: int) -> Step:
        """See `products.Runnable`."""
        if M not in self.ready:
            with fitting(f"batch {M}"):
                x = inputs(M, self.held[0].shape[1], self.dtype, self.device.torch_device)
                steps = [lambda each=each: each(x) for each in self.held]
                self.ready[M] = timing.Implementation(NAME, steps, self.held[0].resident_bytes, {}).ready()
        return self.ready[M]

    def hot(self, M: int) -> Step | None:
        """See `products.Runnable`."""
        return None


def _check(variant: ForeignVariant, shape: tuple[int, int], dtype: torch.dtype, at: str, seed: int) -> None:
    """Refuse what gives wrong numbers, at one row and at more than a tile of them."""
    parts, layout = stored(variant, shape, at, seed), layouts.load_layout(variant.layout)
    read_back = layout.read_back("", variant.scheme, lambda name: parts[name.removeprefix(".")].cpu())
    dense = load_format(variant.scheme.format).dequantize(read_back).double()
    product = linear(variant, parts, shape, dtype, at)
    for M in (1, 17):
        x = inputs(M, shape[1], dtype, at)
        want = x.cpu().double() @ dense.T
        off = float((product(x).cpu().double() - want).norm() / want.norm())
        if not off <= (_ROUNDED if variant.inputs else _FLOAT):
            value = f"{NAME} is off by {off:.2g} of the product's size"
            raise InputError("wrong-result", where=f"{variant.name}, batch {M}", value=value)
