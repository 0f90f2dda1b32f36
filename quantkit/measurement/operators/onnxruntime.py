"""Single products in ONNX Runtime on the CPU, as `products` times them.

Weights beyond the cache are spread over sessions of a few products each, all on one pool of threads: one that spins
after its step would slow the next. A step runs one session, memory to memory, and the next step the next session. What
`session.run` costs is in the time, shared by the products of a session; `ceiling.launch` says how much that is.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import machine
from quantkit.errors import InputError
from quantkit.exporters.onnx import single_op as single
from quantkit.exporters.onnx.single_op import SingleProduct, StorageVariant
from quantkit.measurement.operators.ceilings import last_level_cache
from quantkit.measurement.operators.products import Runnable, copies
from quantkit.measurement.operators.tax import StepCost
from quantkit.measurement.timing.schedule import Array, Step
from quantkit.planning.model.shapes import LinearShape

if TYPE_CHECKING:
    import onnxruntime

Places = dict[tuple[int, str, int], Any]  # (rows, name and dtype, N) -> a tensor that all sides of a shape share
RUNTIME = "onnxruntime"
# products of one session, at most: launching it is then a small part of their time
_MOST = 32
# from so many rows on a session is one product of a few, in turn: many would take seconds, and reading a weight is a
# small part of such a product's time, wherever it is read from
_ROWS, _SINGLES = 256, 16
# a protobuf holds no more
_FILE = 2**31 - 2**20
# rows at which a product is checked: kernels for one row and for many are not the same
_CHECKED = (1, 17)


@dataclass(frozen=True)
class OnnxRuntimeBench:
    """See the module.

    Args:
        threads: of one product; more than one need `onnxruntime.set_global_thread_pool_sizes` before the first session.
        cache: bytes of the last-level cache.
        seed: of weights and activations.
    """

    threads: int
    cache: int = field(default_factory=last_level_cache)
    seed: int = 0

    def quantizer(self, variant: str) -> str:
        """See `products.Bench`."""
        return single.variant(variant).quantizer

    def twin(self, variant: str) -> str:
        """See `products.Bench`: a black box."""
        return ""

    def prepare(
        self, linear: LinearShape, variants: Sequence[str], batches: Sequence[int]
    ) -> dict[str, Runnable | str]:
        """See `products.Bench`. Weights are normal, in every variant the same before they are quantized."""
        import torch

        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 8191 * linear.K + linear.N)
        weight = torch.randn(linear.N, linear.K, generator=generator).mul_(0.02)
        found: dict[str, Runnable | str] = {}
        places: Places = {}
        # a few rows say how large each is: the same number of products of each are to make a step
        few = min(linear.N, 64)
        needed = []
        for name in variants:
            try:
                one = single.product(single.variant(name), weight[:few])
            except InputError as error:
                found[name] = error.code
                continue
            if one.values is not None:
                needed.append(copies(StepCost(name, one.weight_bytes * linear.N / few), self.cache))
        together = max(1, min(_MOST, *needed)) if needed else 1
        for name in variants:
            if name not in found:
                # one at a time: what is not needed any more makes room
                product = single.product(single.variant(name), weight)
                found[name] = self._side(product, together, max(batches) >= _ROWS, places)
        return found

    def _side(
        self, product: SingleProduct, together: int, large: bool, places: dict[tuple[int, str, int], Any]
    ) -> Runnable | str:
        needed = copies(_cost(product), self.cache) if product.values is not None else together
        # in the file, in the session, and packed for its kernel; what it is made of is there already
        if 3 * product.weight_bytes * needed > machine.memory_available():
            return "out-of-memory"
        sessions = []
        for first in range(0, needed, together):
            turns = list(range(first, first + together))
            sessions.append(self._session(product, turns))
            if (
                first == 0
                and product.values is not None
                and self._error(product, sessions[0], turns) > (product.variant.limit)
            ):
                return "wrong-result"
        singles = sessions
        if large and together > 1:
            count = min(needed, _SINGLES) if product.values is not None else 1
            singles = [self._session(product, [turn]) for turn in range(count)]
        alone = None
        if product.values is not None and product.weight_bytes <= self.cache / 2:
            alone = self._session(product, [0])
        kernel = _kernel(product.variant.name, self.threads)
        cost = _cost(product)
        return _OnnxSide(
            product.variant, cost, product.K, product.N, together, kernel, places, sessions, singles, alone
        )

    def _error(self, product: SingleProduct, session: onnxruntime.InferenceSession, turns: Sequence[int]) -> float:
        """The largest relative error of what the session gives."""
        worst = 0.0
        for rows in _CHECKED:
            x = _activations(rows, product.K, product.variant.activations)
            worst = max(worst, product.error(x, session.run(None, {"x0": x}), turns))
        return worst if np.isfinite(worst) else np.inf

    def _session(self, product: SingleProduct, turns: Sequence[int]) -> onnxruntime.InferenceSession:
        import onnxruntime

        options = _options(self.threads)
        apart = product.weight_bytes * len(turns) > _FILE
        if apart:
            floats = product.floats(turns)
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(each) for each in floats.values()]
            options.add_external_initializers(list(floats), values)
        model = product.model(turns, apart=apart)
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


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

    def settings(self, M: int) -> Mapping[str, str | bool | int | float | None]:
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
            self._check_memory(M, products)
            sessions = self.singles if M >= _ROWS else self.sessions
            steps = itertools.cycle(self._runs(sessions, M, products))
            self.bound[M] = lambda: next(steps)()  # noqa: PLW0108 (another one each time)
        return self.bound[M]

    def hot(self, M: int) -> Step | None:
        return self._runs([self.alone], M, 1)[0] if self.alone is not None else None

    def _runs(self, sessions: Sequence[onnxruntime.InferenceSession], M: int, outputs: int) -> list[Step]:
        """One run of each session, memory to memory; all variants of a shape share inputs and outputs."""
        import onnxruntime

        place = onnxruntime.OrtValue.ortvalue_from_numpy

        def shared(name: str, dtype: str, values: Callable[[], Array]) -> Any:
            key = (M, f"{name} {dtype}", self.N)
            if key not in self.places:
                self.places[key] = place(values())
            return self.places[key]

        kind = self.variant.activations
        x = shared("x", kind, lambda: _activations(M, self.K, kind))
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

    def _check_memory(self, M: int, outputs: int) -> None:
        needed = 4 * M * (self.K + outputs * self.N)
        if needed > machine.memory_available() // 2:
            value = f"activations of {needed / 1e9:.1f} GB at batch {M}"
            raise InputError("out-of-memory", where=f"{self.K}x{self.N}", value=value, remedy="smaller batches")


@dataclass(frozen=True)
class _Run:
    session: Any
    binding: Any
    held: Any  # a binding does not hold what is bound to it in every version

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


def _activations(M: int, K: int, dtype: str) -> Array:
    return np.random.default_rng(M).standard_normal((M, K), np.float32).astype(dtype)


def _cost(product: SingleProduct) -> StepCost:
    """Of one product: the weight once, x and y once."""
    bytes_each = np.dtype(product.variant.activations).itemsize
    return StepCost(
        product.variant.format,
        product.weight_bytes,
        flops_per_token=2.0 * product.K * product.N if product.values is not None else 0.0,
        io_bytes_per_token=bytes_each * (product.K + product.N),
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


@cache
def _kernel(name: str, threads: int) -> tuple[str, float]:
    """(the operators that a variant becomes once the graph is optimized, bytes of its weight then to those before).

    Found on a small product: what is fused does not depend on its size.
    """
    import onnx
    import onnxruntime
    import torch

    K = N = 256
    product = single.product(single.variant(name), torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    with tempfile.TemporaryDirectory(prefix="quantkit-kernel-") as folder:
        path = Path(folder) / "optimized.onnx"
        options = _options(threads)
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(product.model([0]), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(path).graph
    operators = ", ".join(dict.fromkeys(node.op_type for node in graph.node))
    weights = [onnx.numpy_helper.to_array(value) for value in graph.initializer]
    # numpy has no 4-bit numbers: one there takes a byte
    bits = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4}
    sizes = [
        array.size * bits.get(value.data_type, 8 * array.dtype.itemsize) // 8
        for array, value in zip(weights, graph.initializer, strict=True)
        if array.size > 1
    ]
    return operators, sum(sizes) / product.weight_bytes if product.weight_bytes else 0.0
