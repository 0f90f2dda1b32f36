"""Run single products in ONNX Runtime on the CPU for `products`.

The weights exceed the cache, spread over sessions of a few products each. Each step runs the next session. All sessions
share one thread pool: threads of another pool would spin after their step and slow the next. A time includes its share
of `session.run`'s overhead, which `ceiling.launch` measures.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit import limits, machine
from quantkit.errors import InputError
from quantkit.exporters.onnx import single_op as single
from quantkit.exporters.onnx.single_op import MOST, SingleProduct, StorageVariant, activations
from quantkit.graph import protobuf
from quantkit.measurement.operators.ceilings import last_level_cache
from quantkit.measurement.operators.products import Runnable, copies
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import Array, Settings, Step
from quantkit.model.sizes.shapes import LinearShape

if TYPE_CHECKING:
    import onnxruntime
    import torch

Places = dict[tuple[int, str, int], Any]  # tensors by (rows, name and dtype, N), shared by all sides of a shape
# size of the product that shows a variant's kernel: fusion does not depend on the size
SMALL = LinearShape(name="small", K=256, N=256)
# from this many rows on, a session is a single product and only a few weights take turns: more would take seconds, and
# reading the weight is a small part of the time
_ROWS, _SINGLES = 256, 16
# largest protobuf
_FILE = 2**31 - 2**20
# field numbers of onnx/onnx.proto: graph, node, op_type, initializer; bits of TensorProto.DataType, 8 for all others
_OPERATORS, _CONSTANTS = (7, 1, 4), (7, 5)
_BITS = {1: 32, 4: 16, 5: 16, 6: 32, 7: 64, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 21: 4, 22: 4}
# number of rows from which a whole weight's size is computed
_FEW = 64


@dataclass(frozen=True)
class OnnxRuntimeBench:
    """A `products.Bench`; see the module.

    Args:
        threads: threads of one product; more than one need `onnxruntime.set_global_thread_pool_sizes` first.
        cache: bytes of the last-level cache.
        seed: seed of the weights.
        source: function that returns the source of a linear's products; None makes them from random weights.
        kernels: operators and relative weight bytes of each variant so far.
    """

    threads: int
    cache: int = field(default_factory=last_level_cache)
    seed: int = 0
    source: Callable[[LinearShape], ProductSource] | None = None
    kernels: dict[str, tuple[str, float]] = field(default_factory=dict)

    def quantizer(self, variant: str) -> str:
        """See `products.Bench`."""
        return single.variant(variant).quantizer

    def twin(self, variant: str) -> str:
        """Return "": the runtime has no kernel without decoding. See `products.Bench`."""
        return ""

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> dict[str, Runnable | str]:
        """See `products.Bench`."""
        source = self._source(linear)
        ready: dict[str, Runnable | str] = {}
        places: Places = {}
        # sizes come first: a step has the same number of products for every variant
        needed = []
        for name in variants:
            try:
                size = source.weight_bytes(name)
            except InputError as error:
                ready[name] = error.code
                continue
            if size:
                needed.append(copies(StepCost(name, size), self.cache))
        together = max(1, min(MOST, *needed)) if needed else 1
        for name in variants:
            if name not in ready:
                # one at a time, to free memory in between
                ready[name] = self._side(source.product(name), together, max(batches) >= _ROWS, places)
        return ready

    def _source(self, linear: LinearShape) -> ProductSource:
        return self.source(linear) if self.source is not None else RandomProducts(linear, self.seed)

    def _side(self, product: SingleProduct, together: int, large: bool, places: Places) -> Runnable | str:
        cost = cost_of(product)
        needed = copies(cost, self.cache) if product.weighs else together
        # a weight is in the file, in the session, and packed for its kernel
        if 3 * product.weight_bytes * needed > machine.memory_available():
            return "out-of-memory"
        sessions = []
        for first in range(0, needed, together):
            turns = list(range(first, first + together))
            sessions.append(self._session(product, turns))
            if first == 0 and product.weighs:
                # NaN if the session returns one
                error = product.error(lambda x: sessions[0].run(None, {"x0": x}), turns)
                if not error <= product.variant.limit:
                    return "wrong-result"
        singles = sessions
        if large and together > 1:
            count = min(needed, _SINGLES) if product.weighs else 1
            singles = [self._session(product, [turn]) for turn in range(count)]
        fits = product.weighs and product.weight_bytes <= self.cache / 2
        alone = self._session(product, [0]) if fits else None
        kernel, size = self._kernel(product.variant.name), (product.K, product.N)
        return _OnnxSide(product.variant, cost, *size, together, kernel, places, sessions, singles, alone)

    def _session(self, product: SingleProduct, turns: Sequence[int]) -> onnxruntime.InferenceSession:
        import onnxruntime

        options = _options(self.threads)
        apart = product.weight_bytes * len(turns) > _FILE
        if apart:
            floats = product.floats(turns)
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in floats.values()]
            options.add_external_initializers(list(floats), values)
        model = product.model(turns, apart=apart)
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def _kernel(self, name: str) -> tuple[str, float]:
        """Return (operators of a variant's optimized graph, weight bytes relative to the original graph's)."""
        import onnxruntime

        if name not in self.kernels:
            product = self._source(SMALL).product(name)
            with tempfile.TemporaryDirectory(prefix="quantkit-kernel-") as folder:
                path = Path(folder) / "optimized.onnx"
                options = _options(self.threads)
                options.optimized_model_filepath = str(path)
                onnxruntime.InferenceSession(product.model([0]), options, providers=["CPUExecutionProvider"])
                operators, size = _optimized(limits.read(path))
            self.kernels[name] = operators, size / product.weight_bytes if product.weight_bytes else 0.0
        return self.kernels[name]


@dataclass(frozen=True)
class _OnnxSide:
    variant: StorageVariant
    cost: StepCost
    K: int
    N: int
    together: int
    kernel: tuple[str, float]
    places: Places
    sessions: Sequence[onnxruntime.InferenceSession]
    singles: Sequence[onnxruntime.InferenceSession]
    alone: onnxruntime.InferenceSession | None
    bound: dict[int, Step] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int | None:
        return int(self.cost.weight_bytes * self.kernel[1])

    def settings(self, M: int) -> Settings:
        scheme = self.variant.scheme
        return {
            "variant": self.variant.name,
            "kernel": self.kernel[0],
            "compute_type": self.variant.compute,
            "group": scheme.group if scheme else None,
            "accuracy_level": self.variant.level,
            "copies": self.together * len(self.sessions),
        }

    def products(self, M: int) -> int:
        return 1 if M >= _ROWS else self.together

    def step(self, M: int) -> Step:
        if M not in self.bound:
            products = self.products(M)
            needed = 4 * M * (self.K + products * self.N)
            if needed > machine.memory_available() // 2:
                value = f"activations of {needed / 1e9:.1f} GB at batch {M}"
                raise InputError("out-of-memory", where=f"{self.K}x{self.N}", value=value, remedy="smaller batches")
            steps = itertools.cycle(self._runs(self.singles if M >= _ROWS else self.sessions, M, products))
            self.bound[M] = lambda: next(steps)()  # noqa: PLW0108 (another one each time)
        return self.bound[M]

    def hot(self, M: int) -> Step | None:
        return self._runs([self.alone], M, 1)[0] if self.alone is not None else None

    def _runs(self, sessions: Sequence[onnxruntime.InferenceSession], M: int, outputs: int) -> list[Step]:
        """Return a step for each session; all variants of a shape share their input and output buffers."""
        import onnxruntime

        def shared(name: str, dtype: str, values: Callable[[], Array]) -> Any:
            key = (M, f"{name} {dtype}", self.N)
            if key not in self.places:
                self.places[key] = onnxruntime.OrtValue.ortvalue_from_numpy(values())
            return self.places[key]

        kind = self.variant.activations
        x = shared("x", kind, lambda: activations(M, self.K, kind))
        result = kind if self.variant.format else "uint8"
        ys = [shared(f"y{i}", result, lambda: np.zeros((M, self.N), result)) for i in range(outputs)]
        steps: list[Step] = []
        for session in sessions:
            binding = session.io_binding()
            for value in session.get_inputs():
                binding.bind_ortvalue_input(value.name, x)
            for value, y in zip(session.get_outputs(), ys, strict=True):
                binding.bind_ortvalue_output(value.name, y)
            steps.append(_Run(session, binding, (x, ys)))
        return steps


@dataclass(frozen=True)
class _Run:
    session: Any
    binding: Any
    held: Any  # not every version's binding keeps its tensors alive

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


def cost_of(product: SingleProduct) -> StepCost:
    """Return the cost of one product: it reads the weight and x, and writes y, once each."""
    size = np.dtype(product.variant.activations).itemsize
    return StepCost(
        product.variant.format,
        product.weight_bytes,
        flops_per_token=2.0 * product.K * product.N if product.weighs else 0.0,
        io_bytes_per_token=size * (product.K + product.N),
        compute="int8" if product.variant.compute == "int8" else "fp32",
    )


def _options(threads: int) -> onnxruntime.SessionOptions:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    if threads == 1:
        options.intra_op_num_threads = 1
    else:
        options.use_per_session_threads = False
    for key, value in single.EXACT_SUMS.items():
        options.add_session_config_entry(key, value)
    return options


def _optimized(model: bytes) -> tuple[str, int]:
    """Return (operators of a graph, bytes of its constants except single numbers)."""
    operators = [bytes(kind).decode() for kind in protobuf.inside(model, *_OPERATORS) if not isinstance(kind, int)]
    size = 0
    for tensor in protobuf.inside(model, *_CONSTANTS):
        count = math.prod(n for sizes in protobuf.inside(tensor, 1) for n in protobuf.numbers(sizes))
        kind = next(protobuf.inside(tensor, 2), 0)
        size += count * _BITS.get(kind, 8) // 8 if count > 1 and isinstance(kind, int) else 0
    return ", ".join(dict.fromkeys(operators)), size


class ProductSource(Protocol):
    """A source of the products of one linear, by name of variant."""

    def weight_bytes(self, variant: str) -> float:
        """Return the bytes of one weight; 0 without a weight. Raises the errors of `product`."""
        ...

    def product(self, variant: str) -> SingleProduct:
        """Make or read a product. Raises InputError: `group-indivisible`, `shape-invalid`, those of the variant."""
        ...


class RandomProducts:
    """A source of products with normal weights, equal in every variant before quantization. Needs torch and onnx.

    Args:
        linear: shape of the products.
        seed: seed of the weights.
    """

    def __init__(self, linear: LinearShape, seed: int = 0) -> None:
        self.linear, self.seed = linear, seed

    @cached_property
    def _weight(self) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 8191 * self.linear.K + self.linear.N)
        return torch.randn(self.linear.N, self.linear.K, generator=generator).mul_(0.02)

    def weight_bytes(self, variant: str) -> float:
        """See `ProductSource`; computed from a few rows."""
        import torch

        few = min(self.linear.N, _FEW)
        weight = torch.randn(few, self.linear.K, generator=torch.Generator().manual_seed(self.seed))
        return single.product(single.variant(variant), weight).weight_bytes * self.linear.N / few

    def product(self, variant: str) -> SingleProduct:
        """See `ProductSource`."""
        return single.product(single.variant(variant), self._weight)


class StoredProducts:
    """A source of products from a folder, with the file of `SingleProduct.save` for each variant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def weight_bytes(self, variant: str) -> float:
        """See `ProductSource`."""
        return float(SingleProduct.bytes_in(self.folder / file_of(variant)))

    def product(self, variant: str) -> SingleProduct:
        """See `ProductSource`."""
        return SingleProduct.read(self.folder / file_of(variant), single.variant(variant))


def file_of(variant: str) -> str:
    """Return the file name of a variant's product."""
    return f"{variant}.npz"
