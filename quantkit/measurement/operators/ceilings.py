"""Measure the ceilings of a CPU: bytes read and copied a second, and operations a second by type.

They are the roofline: no operation takes less than `max(bytes / read, flops / compute)`.

    read     each thread takes the maximum of its part of an array larger than the caches; of NumPy's reductions, the
             maximum of bytes is the one that is limited by memory, not by arithmetic
    copy     each thread copies its part; bytes count twice, once read and once written
    compute  a square matrix product, 2 n^3 operations, in the fastest installed library
    launch   the time of running an empty graph

Every figure is the median of repeated runs, with its spread.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import limits, machine
from quantkit.errors import MissingDependency

if TYPE_CHECKING:
    from quantkit.measurement.rows import Row

Bytes = NDArray[np.int8]
Told = dict[str, str | bool | int | float | None]
# time limit of one measurement in seconds
_BUDGET = 5.0
# relative difference between the halves of a measurement that means a busy machine
NOISY = 0.1
# assumed size of an unknown last-level cache
LARGE_CACHE = 64 * 2**20
# least number of bytes to read
_LEAST = 256 * 2**20
_EMPTY = "Identity.onnx"


@dataclass(frozen=True)
class Pool:
    """The threads of ONNX Runtime's sessions.

    Args:
        threads: threads of one operation; None for all cores.
        shared: True in a process that called `onnxruntime.set_global_thread_pool_sizes`.
        graphs: folder that `write_graphs` wrote, for a machine without the onnx package; None makes the graphs.
    """

    threads: int | None = None
    shared: bool = False
    graphs: Path | None = None


# functions that prepare a product of two matrices, by name
Kernels = Mapping[str, Callable[[Any, Any, Pool], Callable[[], object]]]


@dataclass(frozen=True)
class Ceiling:
    """One measured ceiling.

    Args:
        name: `ceiling.read`, `ceiling.copy`, `ceiling.compute` or `ceiling.launch`.
        unit: `B/s`, `flop/s`, `op/s` or `s`.
        samples: figure of each run, in `unit`; empty if it could not be measured.
        settings: settings of the measurement: threads, kernel, compute type.
        shape: bytes, or sides of the matrices.
        reason: reason for having no samples; "" with samples.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    settings: Told
    shape: dict[str, int]
    reason: str = ""

    @property
    def value(self) -> float | None:
        """Median; None if not measured."""
        return float(np.median(self.samples)) if self.samples else None

    @property
    def error(self) -> float:
        """Relative distance of the interval's farther end from the median; with few samples, of the farthest sample."""
        if not self.value:
            return 0.0
        ends = median_interval(sorted(self.samples)) or (min(self.samples), max(self.samples))
        return max(abs(end / self.value - 1) for end in ends)

    def as_dict(self, *, device: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of its row; its subject is the device. Without samples, `flags` holds the reason."""
        values = sorted(self.samples)
        half = max(len(values) // 2, 1)
        # the difference between the halves of a measurement is the noise of the machine
        halves = [float(np.median(part)) for part in (self.samples[:half], self.samples[half:]) if part]
        spread = abs(halves[0] / halves[1] - 1) if len(halves) == 2 else None
        return {
            "schema": 1,
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "stat": "median",
            "better": "lower" if self.unit == "s" else "higher",
            "quantiles": {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)} if values else None,
            "ci95": median_interval(values),
            "n": len(values) or None,
            "aa_spread": spread,
            "subject": device["id"],
            "shape": self.shape,
            "settings": self.settings,
            "device": dict(device),
            "versions": dict(versions),
            "flags": [self.reason] if self.reason else ["noisy"] if spread is not None and spread > NOISY else [],
        }

    def row(self, *, device: Mapping[str, str], versions: Mapping[str, str]) -> Row:
        """Return the row of `measurements.jsonl`."""
        # imported here: a rented GPU machine for benchmarks has no pydantic
        from quantkit.measurement.rows import Row

        return Row.model_validate(self.as_dict(device=device, versions=versions))


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return a distribution-free interval of the median, from order statistics.

    P(the k-th smallest of n lies above the median) = P(Binomial(n, 1/2) < k). None with fewer than six values, where
    even the extremes do not reach 95 %.
    """
    n, tail, below = len(values), (1 - level) / 2, 0.0
    k = 0
    while k < n and below + math.comb(n, k) / 2**n <= tail:
        below += math.comb(n, k) / 2**n
        k += 1
    return (sorted(values)[k - 1], sorted(values)[n - k]) if k else None


def joined(before: Sequence[Ceiling], after: Sequence[Ceiling]) -> list[Ceiling]:
    """Join two measurements; the halves of each ceiling are then the start and the end of the run."""
    return [
        replace(first, samples=first.samples + second.samples)
        if first.settings == second.settings and first.samples and second.samples
        else max(first, second, key=lambda ceiling: ceiling.value or 0.0)
        for first, second in zip(before, after, strict=True)
    ]


def measured(
    threads: int,
    names: Sequence[str] = ("read", "compute"),
    *,
    size: int = 1024,
    runs: int = 7,
    pool: Pool | None = None,
) -> list[Ceiling]:
    """Measure the named ceilings, in order: `read`, `copy`, `compute` (float32, then int8), `bf16`, `launch`.

    This takes a second or two. The read array is four times the last-level cache, but at most an eighth of the
    process's memory limit; a copy needs twice that.

    Args:
        threads: threads of read, copy and launch.
        names: names of the ceilings.
        size: side of the square matrices of the product.
        runs: repetitions of each.
        pool: threads of ONNX Runtime; None for all cores.
    """
    span = min(max(4 * last_level_cache(), _LEAST), machine.memory_limit() // 8)
    take: dict[str, Callable[[], list[Ceiling]]] = {
        "read": lambda: [_read(threads, span, runs)],
        "copy": lambda: [_copy(threads, span, runs)],
        "compute": lambda: [_compute_fp32(size, runs, pool or Pool()), _compute_int8(size, runs, pool or Pool())],
        "bf16": lambda: [_compute("bf16", "flop/s", {"torch mm": _bf16_torch}, _fp32_pair, size, runs, pool or Pool())],
        "launch": lambda: [_launch(threads, runs, pool or Pool(threads))],
    }
    return [ceiling for name in names for ceiling in take[name]()]


def last_level_cache() -> int:
    """Return the bytes of the last-level cache; if unknown, a size larger than any desktop's."""
    return machine.last_level_cache() or LARGE_CACHE


def _read(threads: int, size: int, runs: int) -> Ceiling:
    source = np.ones(size, np.int8)
    samples = _rates(lambda part: part.max(), np.array_split(source, threads), size, runs)
    return Ceiling("ceiling.read", "B/s", samples, {"threads": threads, "kernel": "numpy max of int8"}, {"bytes": size})


def _copy(threads: int, size: int, runs: int) -> Ceiling:
    source, goal = np.ones(size, np.int8), np.zeros(size, np.int8)
    pairs = list(zip(np.array_split(goal, threads), np.array_split(source, threads), strict=True))
    samples = _rates(lambda pair: np.copyto(*pair), pairs, 2 * size, runs)
    return Ceiling("ceiling.copy", "B/s", samples, {"threads": threads, "kernel": "numpy copyto"}, {"bytes": size})


def _launch(threads: int, runs: int, pool: Pool) -> Ceiling:
    settings: Told = {"threads": threads, "kernel": "onnxruntime Identity"}
    if not machine.has("onnxruntime") or (pool.graphs is None and not machine.has("onnx")):
        return Ceiling("ceiling.launch", "s", (), settings, {"M": 1}, "not measured: onnxruntime or onnx is missing")
    graph = _empty_graph() if pool.graphs is None else limits.read(pool.graphs / _EMPTY)
    step = _onnxruntime(graph, {"x": np.zeros(1, np.float32)}, pool)
    # a thousand at a time: one alone is near the clock's resolution
    rates = _timed(lambda: [step() for _ in range(1000)], 1000.0, runs)
    return Ceiling("ceiling.launch", "s", tuple(1 / rate for rate in rates), settings, {"M": 1})


def _compute_fp32(size: int, runs: int, pool: Pool) -> Ceiling:
    kernels: Kernels = {"numpy matmul": _fp32_numpy, "onnxruntime MatMul": partial(_product, "MatMul")}
    return _compute("fp32", "flop/s", kernels, _fp32_pair, size, runs, pool)


def _compute_int8(size: int, runs: int, pool: Pool) -> Ceiling:
    kernels: Kernels = {
        "torch _int_mm": _int8_torch,
        "torch quantized linear": _int8_torch_quantized,
        "onnxruntime MatMulInteger": partial(_product, "MatMulInteger"),
    }
    return _compute("int8", "op/s", kernels, _int8_pair, size, runs, pool)


def _compute(
    kind: str, unit: str, kernels: Kernels, pair: Callable[[int], tuple[Any, Any]], size: int, runs: int, pool: Pool
) -> Ceiling:
    """Measure the rate of the fastest kernel.

    Every kernel is first tried on matrices of an eighth of the side: a library without a kernel for these instructions
    runs a plain loop that is a hundred times slower.
    """
    tried: dict[str, float] = {}
    reasons = []
    small, shape = _small(size), {"M": size, "N": size, "K": size}
    for name, make in kernels.items():
        try:
            tried[name] = max(_timed(make(*pair(small), pool), 2.0 * small**3, 3))
        except (ImportError, AttributeError, RuntimeError) as error:
            reasons.append(f"{name}: {(str(error) or type(error).__name__).splitlines()[0]}")
    settings: Told = {"compute_type": kind, "kernel": None}
    settings |= {"threads": pool.threads} if pool.threads is not None else {}
    if not tried:
        return Ceiling("ceiling.compute", unit, (), settings, shape, "not measured: " + "; ".join(reasons))
    # near-fastest kernels are tried again at full size: small matrices favour kernels with little setup
    close = [name for name in tried if tried[name] * 3 > max(tried.values())]
    rates = {name: _timed(kernels[name](*pair(size), pool), 2.0 * size**3, runs) for name in close}
    best = max(rates, key=lambda name: float(np.median(rates[name])))
    return Ceiling("ceiling.compute", unit, rates[best], settings | {"kernel": best}, shape)


def _fp32_pair(size: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((size, size), np.float32), generator.standard_normal((size, size), np.float32)


def _int8_pair(size: int) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(0)
    return generator.integers(-127, 128, (size, size), np.int8), generator.integers(-127, 128, (size, size), np.int8)


def _need(*packages: str) -> None:
    for package in packages:
        if not machine.has(package):
            raise ImportError(f"{package} is not installed")


def _bf16_torch(left: Any, right: Any, pool: Pool) -> Callable[[], object]:
    _need("torch")
    import torch

    return partial(torch.mm, *(torch.from_numpy(one).bfloat16() for one in (left, right)))


def _int8_torch(left: Bytes, right: Bytes, pool: Pool) -> Callable[[], object]:
    _need("torch")
    import torch

    return partial(torch._int_mm, torch.from_numpy(left), torch.from_numpy(right))


def _int8_torch_quantized(left: Bytes, right: Bytes, pool: Pool) -> Callable[[], object]:
    _need("torch")
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantized tensors are deprecated, but still available
        x = torch.quantize_per_tensor(torch.from_numpy(left).float(), 1.0, 128, torch.quint8)
        w = torch.quantize_per_tensor(torch.from_numpy(right).float(), 1.0, 0, torch.qint8)
    return partial(torch.ops.quantized.linear, x, torch.ops.quantized.linear_prepack(w, None), 1000.0, 128)


def _fp32_numpy(left: Any, right: Any, pool: Pool) -> Callable[[], object]:
    return partial(np.matmul, left, right, out=np.empty_like(left))


def _product(kind: str, left: Any, right: Any, pool: Pool) -> Callable[[], object]:
    _need("onnxruntime", *(() if pool.graphs else ("onnx",)))
    size = len(left)
    graph = _product_graph(kind, size) if pool.graphs is None else limits.read(pool.graphs / _file(kind, size))
    # unsigned inputs: x86 has no fast kernel for signed ones (a thirtieth of the speed)
    return _onnxruntime(graph, {"x": left.view(np.uint8) if left.dtype == np.int8 else left}, pool)


def _empty_graph() -> bytes:
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    return _serialized(helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "empty", ends[:1], ends[1:]))


def _product_graph(kind: str, size: int) -> bytes:
    from onnx import TensorProto, helper

    integers = (TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32)
    x, w, y = integers if kind == "MatMulInteger" else (TensorProto.FLOAT,) * 3
    ends = [helper.make_tensor_value_info(name, of, (size, size)) for name, of in (("x", x), ("y", y))]
    ones = helper.make_node("ConstantOfShape", ["sides"], ["w"], value=helper.make_tensor("one", w, [1], [1]))
    sides = helper.make_tensor("sides", TensorProto.INT64, [2], [size, size])
    nodes = [ones, helper.make_node(kind, ["x", "w"], ["y"])]
    return _serialized(helper.make_graph(nodes, kind, ends[:1], ends[1:], [sides]))


def write_graphs(folder: Path, size: int = 1024) -> list[Path]:
    """Write the graphs of `measured` for this size, a few hundred bytes, for a machine without the onnx package.

    Raises MissingDependency: onnx.
    """
    with MissingDependency.unless_found("onnx", extra="compile", purpose="writing the graphs for the ceilings"):
        sizes = [(kind, side) for kind in ("MatMul", "MatMulInteger") for side in (size, _small(size))]
        graphs = {_file(kind, side): _product_graph(kind, side) for kind, side in sizes}
        graphs[_EMPTY] = _empty_graph()
    for name, data in graphs.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in graphs]


def _file(kind: str, size: int) -> str:
    return f"{kind}-{size}.onnx"


def _small(size: int) -> int:
    return max(size // 8, 32)


def _serialized(graph: Any) -> bytes:
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def _onnxruntime(graph: bytes, feeds: dict[str, Any], pool: Pool) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if pool.shared:
        options.use_per_session_threads = False
    elif pool.threads is not None:
        options.intra_op_num_threads = pool.threads
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, values in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(values))
    (out,) = session.run(None, feeds)
    binding.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(out))
    return partial(session.run_with_iobinding, binding)


def _rates(task: Callable[[Any], object], parts: list[Any], size: int, runs: int) -> tuple[float, ...]:
    with ThreadPoolExecutor(len(parts)) as pool:
        return _timed(lambda: list(pool.map(task, parts)), float(size), runs)


def _timed(task: Callable[[], object], work: float, runs: int) -> tuple[float, ...]:
    """Return `work` per second for each run, after an untimed run that touches the memory and starts the threads.

    A machine that is too slow for all runs within the time limit makes fewer, at least three.
    """
    task()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < runs and (len(samples) < 3 or time.perf_counter() - begin < _BUDGET):
        start = time.perf_counter()
        task()
        samples.append(work / (time.perf_counter() - start))
    return tuple(samples)
