"""Single products on a GPU, as `products` times them: our kernels, dequantize-then-matmul, torch's own operators.

A variant is timed the way a layer would run it (`kernels.linear`): for each shape and batch the fastest of our kernel's
tile sizes and of what else the layer can run, found by trying them before anything is recorded, so that the recorded
times are none of those that were chosen by. `NAME.torch` is torch's own operator for the format, where it has one.
Inputs that have to be 8-bit are quantized within the step.

A step is one CUDA graph of many products, over copies of the weight that no cache holds; it says itself, from the
device's clock, what one of them took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quantkit.errors import InputError
from quantkit.kernels.configs import Config, candidates, width
from quantkit.kernels.dispatch import EXPANDED, OURS
from quantkit.kernels.launch import Workspace
from quantkit.kernels.layout import KINDS, PackedWeight
from quantkit.kernels.linear import other
from quantkit.kernels.native import require
from quantkit.measurement.cuda import sides, timing
from quantkit.measurement.cuda.device import GpuDevice, fitting
from quantkit.measurement.cuda.weights import FormatVariant, error, known, values, weight
from quantkit.measurement.operators import foreign
from quantkit.measurement.operators.products import Runnable
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import Step
from quantkit.model.sizes.shapes import LinearShape

RUNTIME = "torch"
BASELINE = "bfloat16"
TORCH = ".torch"
_QUANTIZE, _TWIN = "quantize ", " without decoding"
# rows of a weight at most that a result is checked on
_CHECKED = 1024
# what a way to multiply rounds weights by besides: to the inputs' dtype; torch's int4 operator its scales and offsets
_ROUNDED = {EXPANDED: 2.0**-8, "torch._weight_int4pack_mm": 2.0**-6}
# samples of a candidate while the fastest is looked for
_TRIES = 3


def torch_names() -> list[str]:
    """The variants that torch has an operator for."""
    zeros = [name for name, variant in known().items() if variant.kind == "int4" and variant.zeros]
    return [f"{name}{TORCH}" for name in (*zeros, "int8.dynamic", "fp8_e4m3.dynamic")]


def variant_of(name: str) -> FormatVariant:
    """The format of `int4.g128.zeros`, or of `int4.g128.zeros.torch`. Raises KeyError."""
    return known()[name.removesuffix(TORCH)]


def check_shape(variant: FormatVariant | foreign.ForeignVariant, linear: LinearShape) -> None:
    """Refuse a group that does not divide K. Raises InputError `group-indivisible`."""
    if variant.group and linear.K % variant.group:
        fitting = [str(size) for size in (32, 64, 128) if linear.K % size == 0]
        raise InputError(
            "group-indivisible",
            where=f"{variant.name} at {linear.label}",
            value=f"K {linear.K} in groups of {variant.group}",
            rule="a group divides K",
            remedy=f"use groups of {' or '.join(fitting)}" if fitting else "use int4.channel, int8 or fp8_e4m3",
        )


@dataclass(frozen=True)
class CudaBench:
    """See the module.

    Args:
        device: to run on; on a CPU, in Triton's interpreter, no time means anything.
        dtype: of activations.
        seed: of weights.
    """

    device: GpuDevice
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    memory: Workspace = field(default_factory=Workspace)

    def quantizer(self, variant: str) -> str:
        """See `products.Bench`."""
        native = variant != BASELINE and variant not in foreign.known() and variant_of(variant).native
        return f"{_QUANTIZE}{variant_of(variant).format}" if native else ""

    def twin(self, variant: str) -> str:
        """See `products.Bench`; what multiplies 8-bit codes decodes nothing, and torch's operators have none."""
        if variant in (BASELINE, *foreign.known()) or variant.endswith(TORCH) or variant_of(variant).native:
            return ""
        return f"{variant}{_TWIN}"

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> dict[str, Runnable | str]:
        """See `products.Bench`. Weights are random codes under random scales; tile sizes are chosen here."""
        self.device.sample(linear.label)
        found: dict[str, Runnable | str] = {}
        for name in variants:
            try:
                with fitting(linear.label):
                    found[name] = self._side(name, linear, found)
                    side = found[name]
                    if isinstance(side, _Quantized):
                        for M in batches:
                            side.choose(M)
            except InputError as problem:
                found[name] = problem.code
            except NotImplementedError:
                found[name] = "no-operator"
            except RuntimeError:
                # torch's operators ask for shapes that only they know
                if not name.endswith(TORCH):
                    raise
                found[name] = "no-operator"
        return found

    def _side(self, name: str, linear: LinearShape, found: Mapping[str, Runnable | str]) -> Runnable:
        shape, at = (linear.N, linear.K), self.device.torch_device
        if name == BASELINE:
            return _Plain(_float_cost(linear, self.dtype), self._baseline(shape))
        if name.startswith(_QUANTIZE):
            return _Plain(StepCost("", 0.0), self._tokens(name.removeprefix(_QUANTIZE), linear.K))
        if name.endswith(_TWIN):
            of = found[name.removesuffix(_TWIN)]
            if isinstance(of, str):
                raise InputError(of, where=name)
            assert isinstance(of, _Quantized)
            return _Twin(of)
        if name in foreign.known():
            check_shape(foreign.known()[name], linear)
            return foreign.ForeignProduct.of(name, linear, self.device, self.dtype, self.seed)
        variant = variant_of(name)
        check_shape(variant, linear)
        if variant.native and self.device.sm:
            require(variant.kind, self.device.sm)
        held = sides.held_copies(variant, shape, self.device)
        small = weight(variant, min(linear.N, _CHECKED), linear.K, at, self.seed)
        cost = StepCost(
            variant.format,
            variant.stored_bytes(*shape),
            flops_per_token=2.0 * linear.K * linear.N,
            io_bytes_per_token=2.0 * (linear.K + linear.N),
            compute=variant.format if variant.native else _rate(self.dtype),
        )
        own = name.endswith(TORCH)
        return _Quantized(variant, own, cost, held, small, self.device, self.dtype, self.memory)

    def _baseline(self, shape: tuple[int, int]) -> Callable[[int], timing.Implementation]:
        return lambda M: sides.baseline(shape, M, self.dtype, self.device)

    def _tokens(self, name: str, K: int) -> Callable[[int], timing.Implementation]:
        variant = known()[f"{name}.dynamic"]
        return lambda M: sides.tokens(variant, sides.inputs(M, K, self.dtype, self.device.torch_device))


class _OneProduct:
    """A step is one product, over weights that no cache holds."""

    def products(self, M: int) -> int:
        return 1

    def hot(self, M: int) -> Step | None:
        return None


@dataclass(frozen=True)
class _Plain(_OneProduct):
    """The float product, or quantizing inputs: one way at every M."""

    cost: StepCost
    made: Callable[[int], timing.Implementation]
    ready: dict[int, tuple[Step, timing.Implementation]] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int | None:
        return int(self.cost.weight_bytes)

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
        side = self._ready(M)[1]
        return {"kernel": side.name, "copies": len(side.steps)}

    def step(self, M: int) -> Step:
        return self._ready(M)[0]

    def _ready(self, M: int) -> tuple[Step, timing.Implementation]:
        if M not in self.ready:
            with fitting(f"batch {M}"):
                side = self.made(M)
                self.ready[M] = side.ready(), side
        return self.ready[M]


@dataclass(frozen=True)
class _Chosen:
    """What multiplies at one M."""

    name: str
    config: Config | None
    side: timing.Implementation
    step: Step


@dataclass(frozen=True)
class _Quantized(_OneProduct):
    """A weight in one format; `own`: only torch's operator multiplies it."""

    variant: FormatVariant
    own: bool
    cost: StepCost
    held: Sequence[PackedWeight]
    small: PackedWeight
    device: GpuDevice
    dtype: torch.dtype
    memory: Workspace
    widths: dict[int, Config] = field(default_factory=dict)
    chosen: dict[int, _Chosen] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int | None:
        return self.held[0].resident_bytes

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
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
        if self.held[0].resident_bytes > self.device.cache_bytes / 2:
            return None
        chosen = self.choose(M)
        return self._way(chosen.name, chosen.config, self.held[:1], M).ready()

    def choose(self, M: int) -> _Chosen:
        """The fastest way at M rows, checked; once for each M. Raises InputError `wrong-result`, `out-of-memory`."""
        if M not in self.chosen:
            with fitting(f"batch {M}"):
                self.chosen[M] = self._fastest(M)
        return self.chosen[M]

    def twin(self, M: int) -> Step:
        """Our kernel without its decoding. Raises InputError `no-twin` where another way is the fastest."""
        chosen = self.choose(M)
        if chosen.config is None:
            raise InputError("no-twin", where=f"batch {M}", value=chosen.name)
        with fitting(f"batch {M}"):
            return sides.ours(self.held, self._inputs(M), chosen.config, self.memory, decode=False).ready()

    def _fastest(self, M: int) -> _Chosen:
        if self.own:
            ways: list[tuple[str, Config | None]] = [("", None)]
        else:
            ways = [(OURS, self._config(M)), *([(name, None)] if (name := other(self.held[0])) else [])]
        tried = []
        for name, config in ways:
            side = self._way(name, config, self.held, M)
            tried.append(_Chosen(side.name, config, side, side.ready()))
        best = tried[_fastest_of(len(tried), lambda number: tried[number].step)]
        self._check(best, M)
        return best

    def _config(self, M: int) -> Config:
        """The fastest tile sizes for this width of x, tried at its first M."""
        wide = width(M)
        if wide not in self.widths:
            able = candidates(M, native=self.variant.native)[: 1 if self.device.dry else None]
            best = _fastest_of(len(able), lambda number: self._way(OURS, able[number], self.held, M).ready())
            self.widths[wide] = able[best]
        return self.widths[wide]

    def _way(self, name: str, config: Config | None, held: Sequence[PackedWeight], M: int) -> timing.Implementation:
        x = self._inputs(M)
        if config is not None:
            return sides.ours(held, x, config, self.memory, quantize=True)
        if name == EXPANDED:
            return sides.expanded(held, x)
        return sides.torch_own(self.variant, held, x, quantize=True)

    def _check(self, chosen: _Chosen, M: int) -> None:
        """Refuse what gives wrong numbers, on the first rows of a weight like it."""
        y = self._way(chosen.name, chosen.config, [self.small], M).steps[0]()
        assert isinstance(y, torch.Tensor)
        plain = values(self.small, _codebook(self.small))
        worst = error(self.variant, plain, self._inputs(M), y, rounded=_ROUNDED.get(chosen.name, 0.0))
        if worst > 1:
            value = f"{chosen.name} is {worst:.3g} times as far from float64 as rounding explains"
            raise InputError("wrong-result", where=f"{self.variant.name}, batch {M}", value=value)

    def _inputs(self, M: int) -> torch.Tensor:
        return sides.inputs(M, self.held[0].shape[1], self.dtype, self.device.torch_device)


@dataclass(frozen=True)
class _Twin(_OneProduct):
    """The loads of another side's kernel, at each M in its tile sizes."""

    of: _Quantized
    ready: dict[int, Step] = field(default_factory=dict)

    @property
    def cost(self) -> StepCost:
        return self.of.cost

    @property
    def resident_bytes(self) -> int | None:
        return self.of.resident_bytes

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
        return self.of.settings(M)

    def step(self, M: int) -> Step:
        if M not in self.ready:
            self.ready[M] = self.of.twin(M)
        return self.ready[M]


def _fastest_of(count: int, ready: Callable[[int], Step]) -> int:
    """The number of the fastest step, each made ready when its turn comes; one alone is not timed."""
    return 0 if count == 1 else int(np.argmin([_tried(ready(number)) for number in range(count)]))


def _tried(step: Callable[[], Any]) -> float:
    step()
    return float(np.median([step() for _ in range(_TRIES)]))


def _float_cost(linear: LinearShape, dtype: torch.dtype) -> StepCost:
    weights = linear.K * linear.N
    io = 2.0 * (linear.K + linear.N)
    return StepCost(BASELINE, 2.0 * weights, flops_per_token=2.0 * weights, io_bytes_per_token=io, compute=_rate(dtype))


def _rate(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _codebook(packed: PackedWeight) -> torch.Tensor:
    from quantkit.formats.nf4 import VALUES

    return torch.tensor(VALUES if packed.kind == "nf4" else range(2 ** KINDS[packed.kind].bits))
