"""Run single products on a GPU for `products`: in our kernels, torch's operators, and another library's kernels.

A variant runs as a layer would (`kernels.linear`): for each shape and batch with the fastest of our kernel's tile sizes
and of the layer's other ways to multiply. These are tried first, in times that are not recorded. `NAME.torch` is
torch's own operator for the format, if it has one. A step includes the quantization of 8-bit inputs.

A step is one CUDA graph of many products over copies of the weight that exceed the cache. It returns the time of one
product by the device's clock.

Formats without a kernel of ours, and int4 in humming's packing (`foreign`), run in another library's kernels
(`kernels.humming`), in one way at every M. Their stored weights are random; their results are checked against the
product with the dequantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from quantkit.errors import InputError
from quantkit.formats import load_format
from quantkit.kernels.dispatch import EXPANDED, OTHER_PACKING, OURS, Config, candidates, width
from quantkit.kernels.humming import NAME, HummingLinear
from quantkit.kernels.layout import KINDS, PackedWeight
from quantkit.kernels.linear import other
from quantkit.kernels.native import require
from quantkit.measurement.cuda import sides
from quantkit.measurement.cuda.device import GpuDevice, Implementation, copies, fitting
from quantkit.measurement.cuda.sides import FormatVariant, error, known, values, weight
from quantkit.measurement.operators.products import Runnable
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import Settings, Step
from quantkit.model import layouts
from quantkit.model.sizes.shapes import LinearShape
from quantkit.scheme import WeightScheme

RUNTIME = "torch"
BASELINE = "bfloat16"
TORCH = ".torch"
_QUANTIZE, _TWIN = "quantize ", " without decoding"
# largest number of a weight's rows for checking a result
_CHECKED = 1024
# additional rounding error of weights: to the inputs' dtype; torch's int4 operator also rounds scales and offsets
_ROUNDED = {EXPANDED: 2.0**-8, "torch._weight_int4pack_mm": 2.0**-6}
# allowed relative error of a foreign product: with inputs in 8 bits (another rounding rule), and in 16 bits
_ROUNDED_INPUTS, _FLOAT = 2.0**-4, 2.0**-7
# samples of each candidate in the search for the fastest
_TRIES = 3
_RATES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_TYPES = {
    **{"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn},
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
}


@dataclass(frozen=True)
class ForeignVariant:
    """A format in another library's kernel.

    Args:
        name: name in `foreign`.
        layout: name of the checkpoint layout.
        weights: fields of the weights' scheme.
        inputs: fields of the inputs' dynamic scheme; None if inputs are not quantized.
    """

    name: str
    layout: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None

    @property
    def scheme(self) -> WeightScheme:
        """Scheme of the weights."""
        return WeightScheme.model_validate(dict(self.weights))

    @property
    def group(self) -> int:
        """Columns per scale."""
        return self.scheme.group or 0

    def stands_for(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> bool:
        """Return True if a bundle's layer has these schemes."""
        own = self.scheme.model_dump(mode="json")
        same = all(scheme.get(key, own[key]) == own[key] for key in ("format", "granularity", "group", "symmetric"))
        if self.inputs is None or activations is None:
            return same and self.inputs is activations
        return same and all(activations.get(key) == self.inputs[key] for key in ("format", "granularity", "dynamic"))


@cache
def foreign() -> dict[str, ForeignVariant]:
    """Return the other library's variants by name; a bundle can hold each of them. `int4.g128.fp8` rounds inputs."""
    by_token = {"format": "fp8_e4m3", "granularity": "token", "dynamic": True}
    blocks = {"format": "fp8_e4m3", "granularity": "block", "group": 128, "scale": "float32"}
    int4 = {"format": "int4", "granularity": "group", "group": 128}
    variants = [
        ForeignVariant("nvfp4", "nvfp4_pack_quantized", {"format": "nvfp4"}),
        ForeignVariant("mxfp4", "mxfp4_pack_quantized", {"format": "mxfp4"}),
        ForeignVariant("fp8_e4m3.b128.dynamic", "float_quantized", blocks, {**by_token, "granularity": "group"}),
        ForeignVariant("int4.g128.fp8", "pack_quantized", int4, by_token),
    ]
    variants += [
        ForeignVariant(
            f"{ours.name}{OTHER_PACKING}",
            "pack_quantized",
            {"format": "int4", "granularity": "group", "group": ours.group, "symmetric": not ours.zeros},
        )
        for ours in known().values()
        if ours.kind == "int4" and ours.group
    ]
    return {variant.name: variant for variant in variants}


def torch_names() -> list[str]:
    """List the names of variants that have an operator in torch."""
    zeros = [name for name, variant in known().items() if variant.kind == "int4" and variant.zeros]
    return [f"{name}{TORCH}" for name in (*zeros, "int8.dynamic", "fp8_e4m3.dynamic")]


def variant_of(name: str) -> FormatVariant:
    """Return the variant of a name such as `int4.g128.zeros` or `int4.g128.zeros.torch`. Raises KeyError."""
    return known()[name.removesuffix(TORCH)]


def check_shape(variant: FormatVariant | ForeignVariant, linear: LinearShape) -> None:
    """Refuse a K not divisible by the group. Raises InputError `group-indivisible`."""
    if variant.group and linear.K % variant.group:
        able = [str(size) for size in (32, 64, 128) if linear.K % size == 0]
        value = f"K {linear.K} in groups of {variant.group}"
        remedy = f"use groups of {' or '.join(able)}" if able else "use int4.channel, int8 or fp8_e4m3"
        raise InputError(
            "group-indivisible", f"{variant.name} at {linear.label}", value, "the group must divide K", remedy
        )


@dataclass(frozen=True)
class CudaBench:
    """A `products.Bench` on a GPU; see the module.

    Args:
        device: GPU to run on. On a CPU, Triton's interpreter checks results; its times mean nothing.
        dtype: dtype of activations.
        seed: seed of the weights.
    """

    device: GpuDevice
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def quantizer(self, variant: str) -> str:
        """See `products.Bench`."""
        native = variant != BASELINE and variant not in foreign() and variant_of(variant).native
        return f"{_QUANTIZE}{variant_of(variant).format}" if native else ""

    def twin(self, variant: str) -> str:
        """Return the twin of `products.Bench`; products of 8-bit codes and torch's operators have none."""
        if variant in (BASELINE, *foreign()) or variant.endswith(TORCH) or variant_of(variant).native:
            return ""
        return f"{variant}{_TWIN}"

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> dict[str, Runnable | str]:
        """See `products.Bench`. Weights are random codes under random scales; tile sizes are chosen here."""
        self.device.sample(linear.label)
        ready: dict[str, Runnable | str] = {}
        for name in variants:
            try:
                with fitting(linear.label):
                    side = ready[name] = self._side(name, linear, ready)
                    if isinstance(side, _Quantized):
                        for M in batches:
                            side.choose(M)
            except InputError as problem:
                ready[name] = problem.code
            except NotImplementedError:
                ready[name] = "no-operator"
            except RuntimeError:
                # only torch's operators know their limits on shapes
                if not name.endswith(TORCH):
                    raise
                ready[name] = "no-operator"
        return ready

    def inputs(self, columns: int, M: int) -> torch.Tensor:
        """Return random x [M, columns]."""
        return sides.inputs(M, columns, self.dtype, self.device.torch_device)

    def cost(self, name: str, linear: LinearShape, weight_bytes: float, compute: str = "") -> StepCost:
        """Return the cost of a product; inputs and outputs have 16 bits."""
        flops, io = 2.0 * linear.K * linear.N, 2.0 * (linear.K + linear.N)
        compute = compute or _RATES[self.dtype]
        return StepCost(name, weight_bytes, flops_per_token=flops, io_bytes_per_token=io, compute=compute)

    def _side(self, name: str, linear: LinearShape, ready: Mapping[str, Runnable | str]) -> Runnable:
        shape = linear.N, linear.K
        if name == BASELINE:
            cost = self.cost(BASELINE, linear, 2.0 * linear.K * linear.N)
            return _Plain(cost, lambda M: sides.baseline(shape, M, self.dtype, self.device))
        if name.startswith(_QUANTIZE):
            dynamic = known()[f"{name.removeprefix(_QUANTIZE)}.dynamic"]
            return _Plain(StepCost("", 0.0), lambda M: sides.tokens(dynamic, self.inputs(linear.K, M)))
        if name.endswith(_TWIN):
            of = ready[name.removesuffix(_TWIN)]
            if isinstance(of, str):
                raise InputError(of, where=name)
            assert isinstance(of, _Quantized)
            return _Plain(of.cost, of.twin)
        if name in foreign():
            check_shape(foreign()[name], linear)
            return self._foreign(foreign()[name], linear)
        variant = variant_of(name)
        check_shape(variant, linear)
        if variant.native and self.device.sm:
            require(variant.kind, self.device.sm)
        held = sides.held_copies(variant, shape, self.device)
        small = weight(variant, min(linear.N, _CHECKED), linear.K, self.device.torch_device, self.seed)
        cost = self.cost(variant.format, linear, variant.stored_bytes(*shape), variant.format if variant.native else "")
        return _Quantized(self, variant, name.endswith(TORCH), cost, held, small)

    def _foreign(self, variant: ForeignVariant, linear: LinearShape) -> Runnable:
        """Build a checked product. Raises InputError `kernel-unsupported`, `wrong-result`; MissingDependency."""
        self._check_foreign(variant, (min(linear.N, _CHECKED), linear.K))
        shape = linear.N, linear.K
        parts = self._stored(variant, shape)
        size = sum(part.numel() * part.element_size() for part in parts.values())
        cost = self.cost(variant.scheme.format, linear, float(size), "fp8_e4m3" if variant.inputs else "")
        held = [self._product(variant, parts, shape) for _ in range(copies(size, self.device.cache_bytes))]

        def implementation(M: int) -> Implementation:
            x = self.inputs(linear.K, M)
            return Implementation(NAME, [partial(product, x) for product in held], held[0].resident_bytes, {})

        told = {"compute_type": cost.compute}
        return _Plain(cost, implementation, resident=held[0].resident_bytes, told=told)

    def _stored(self, variant: ForeignVariant, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Return the tensors of a random weight [N, K], by their names in the layout."""
        at = self.device.torch_device
        generator, layout = torch.Generator(device=at).manual_seed(self.seed), layouts.load_layout(variant.layout)
        parts: dict[str, torch.Tensor] = {}
        for name, kind, size in layout.headers("", shape, variant.scheme):
            codes = name == layout.codes
            if kind == "I64":
                part = torch.tensor(shape, device=at)
            elif kind == "I32":
                part = torch.randint(-(2**31), 2**31, size, generator=generator, device=at)
            elif kind == "U8":
                # bytes of two codes each, or exponents near 0
                part = torch.randint(*((0, 256) if codes else (126, 129)), size, generator=generator, device=at)
            elif codes:
                part = torch.randn(size, generator=generator, device=at)
            else:
                part = 0.5 + torch.rand(size, generator=generator, device=at)
            parts[name.removeprefix(".")] = part.to(_TYPES[kind])
        return parts

    def _product(
        self, variant: ForeignVariant, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> HummingLinear:
        config = layouts.load_layout(variant.layout).quantization_config({"": variant.scheme}, [], "bfloat16")
        group = {**config["config_groups"]["group_0"], "format": config["format"]}
        if variant.inputs is not None:
            granularity = variant.inputs["granularity"]
            told = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, "strategy": granularity}
            size = variant.scheme.group if granularity == "group" else None
            group["input_activations"] = {**told, "group_size": size}
        return HummingLinear(parts, group, shape, dtype=self.dtype, device=self.device.torch_device)

    def _check_foreign(self, variant: ForeignVariant, shape: tuple[int, int]) -> None:
        parts, layout = self._stored(variant, shape), layouts.load_layout(variant.layout)
        read_back = layout.read_back("", variant.scheme, lambda name: parts[name.removeprefix(".")].cpu())
        dense = load_format(variant.scheme.format).dequantize(read_back).double()
        product = self._product(variant, parts, shape)
        for M in (1, 17):
            x = self.inputs(shape[1], M)
            want = x.cpu().double() @ dense.T
            off = float((product(x).cpu().double() - want).norm() / want.norm())
            if not off <= (_ROUNDED_INPUTS if variant.inputs else _FLOAT):
                raise _wrong(variant.name, M, f"{NAME} is off by {off:.2g} of the product's size")


def _wrong(name: str, M: int, value: str) -> InputError:
    return InputError("wrong-result", where=f"{name}, batch {M}", value=value)


class _OneProduct:
    """A side whose step is one product, with weights that exceed the cache."""

    def products(self, M: int) -> int:
        return 1

    def hot(self, M: int) -> Step | None:
        return None


@dataclass(frozen=True)
class _Plain(_OneProduct):
    """A side with one way for every M: a float product, a quantizer of inputs, a twin, another library's product."""

    cost: StepCost
    implementation: Callable[[int], Implementation]
    resident: int | None = None
    told: Settings = field(default_factory=dict)
    ready: dict[int, tuple[Step, Implementation]] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int | None:
        return int(self.cost.weight_bytes) if self.resident is None else self.resident

    def settings(self, M: int) -> Settings:
        side = self._ready(M)[1]
        return {"kernel": side.name, **self.told, "copies": len(side.steps)}

    def step(self, M: int) -> Step:
        return self._ready(M)[0]

    def _ready(self, M: int) -> tuple[Step, Implementation]:
        if M not in self.ready:
            with fitting(f"batch {M}"):
                side = self.implementation(M)
                self.ready[M] = side.ready(), side
        return self.ready[M]


@dataclass(frozen=True)
class _Chosen:
    """The fastest way to multiply at one M."""

    name: str
    config: Config | None
    step: Step


@dataclass(frozen=True)
class _Quantized(_OneProduct):
    """A side with a quantized weight; `own` limits it to torch's operator."""

    bench: CudaBench
    variant: FormatVariant
    own: bool
    cost: StepCost
    held: Sequence[PackedWeight]
    small: PackedWeight
    widths: dict[int, Config] = field(default_factory=dict)
    chosen: dict[int, _Chosen] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int | None:
        return self.held[0].resident_bytes

    def settings(self, M: int) -> Settings:
        chosen = self.choose(M)
        tiles = chosen.config.as_dict() if chosen.config is not None else {}
        return {
            "kernel": chosen.name,
            "compute_type": self.cost.compute,
            "group": self.variant.group or None,
            "copies": len(self.held),
            **{f"config.{name}": size for name, size in tiles.items()},
        }

    def step(self, M: int) -> Step:
        return self.choose(M).step

    def hot(self, M: int) -> Step | None:
        if self.held[0].resident_bytes > self.bench.device.cache_bytes / 2:
            return None
        chosen = self.choose(M)
        return self._way(chosen.name, chosen.config, self.held[:1], M).ready()

    def choose(self, M: int) -> _Chosen:
        """Return the fastest way at M rows, after a check. Raises InputError `wrong-result`, `out-of-memory`."""
        if M not in self.chosen:
            with fitting(f"batch {M}"):
                self.chosen[M] = self._fastest(M)
        return self.chosen[M]

    def twin(self, M: int) -> Implementation:
        """Return our kernel without its decoding. Raises InputError `no-twin` if another way is the fastest."""
        chosen = self.choose(M)
        if chosen.config is None:
            raise InputError("no-twin", where=f"batch {M}", value=chosen.name)
        return sides.ours(self.held, self._inputs(M), chosen.config, decode=False)

    def _fastest(self, M: int) -> _Chosen:
        if self.own:
            ways: list[tuple[str, Config | None]] = [("", None)]
        else:
            ways = [(OURS, self._config(M)), *([(name, None)] if (name := other(self.held[0])) else [])]
        tried = []
        for name, config in ways:
            side = self._way(name, config, self.held, M)
            tried.append(_Chosen(side.name, config, side.ready()))
        best = tried[_fastest_of(len(tried), lambda number: tried[number].step)]
        self._check(best, M)
        return best

    def _config(self, M: int) -> Config:
        """Return the fastest tile sizes for M's width of tiles, searched once for each width."""
        wide = width(M)
        if wide not in self.widths:
            able = candidates(M, native=self.variant.native)[: 1 if self.bench.device.dry else None]
            best = _fastest_of(len(able), lambda number: self._way(OURS, able[number], self.held, M).ready())
            self.widths[wide] = able[best]
        return self.widths[wide]

    def _way(self, name: str, config: Config | None, held: Sequence[PackedWeight], M: int) -> Implementation:
        x = self._inputs(M)
        if config is not None:
            return sides.ours(held, x, config, quantize=True)
        return sides.expanded(held, x) if name == EXPANDED else sides.torch_own(self.variant, held, x, quantize=True)

    def _check(self, chosen: _Chosen, M: int) -> None:
        y = self._way(chosen.name, chosen.config, [self.small], M).steps[0]()
        assert isinstance(y, torch.Tensor)
        plain = values(self.small, _codebook(self.small))
        worst = error(self.variant, plain, self._inputs(M), y, rounded=_ROUNDED.get(chosen.name, 0.0))
        if worst > 1:
            value = f"the error of {chosen.name} is {worst:.3g} times the largest rounding error"
            raise _wrong(self.variant.name, M, value)

    def _inputs(self, M: int) -> torch.Tensor:
        return self.bench.inputs(self.held[0].shape[1], M)


def _fastest_of(count: int, ready: Callable[[int], Step]) -> int:
    return 0 if count == 1 else int(np.argmin([_tried(ready(number)) for number in range(count)]))


def _tried(step: Callable[[], Any]) -> float:
    step()
    return float(np.median([step() for _ in range(_TRIES)]))


def _codebook(packed: PackedWeight) -> torch.Tensor:
    from quantkit.formats.nf4 import VALUES

    return torch.tensor(VALUES if packed.kind == "nf4" else range(2 ** KINDS[packed.kind].bits))
