"""What a CPU can do at best: bytes read and copied a second, multiplications a second, in float32 and in int8.

A roofline stands on these: no operation can take less than `max(bytes / read, flops / compute)`.

    read     each thread takes the maximum over its part of an array that no cache holds; among NumPy's reductions the
             maximum of bytes is the one whose arithmetic hides behind the loads, so it comes closest to the memory
    copy     the same parts copied; the bytes count twice, once read and once written
    compute  a square matrix product, 2 n^3 operations, as the library at hand does it on all cores

Every figure is the median of repeated runs with its spread; nothing here is a promise of the hardware's maker.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.measure.rows import Device, Row
from quantkit.plan import machine

Bytes = NDArray[np.int8]
# seconds that one measurement may take
_BUDGET = 5.0
# halves of one measurement that differ by more than this share: something else was running
_NOISY = 0.1


@dataclass(frozen=True)
class Ceiling:
    """One measured ceiling.

    Args:
        name: `ceiling.read`, `ceiling.copy` or `ceiling.compute`.
        unit: `B/s`, `flop/s` or `op/s`.
        samples: one figure a run, in `unit`; empty if it could not be measured.
        settings: how it was measured: threads, kernel, compute type.
        shape: bytes, or the sides of the matrices.
        reason: why there are no samples.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    settings: dict[str, str | bool | int | float | None]
    shape: dict[str, int]
    reason: str = ""

    @property
    def value(self) -> float | None:
        """The median, None if it was not measured."""
        return float(np.median(self.samples)) if self.samples else None

    def row(self, *, device: dict[str, str], versions: dict[str, str]) -> Row:
        """The row of `measurements.jsonl`; its subject is the device itself. Without samples, `flags` says why."""
        values = sorted(self.samples)
        half = max(len(values) // 2, 1)
        # two halves of the same measurement: how far apart they lie is the noise of the machine
        halves = [float(np.median(part)) for part in (self.samples[:half], self.samples[half:]) if part]
        spread = abs(halves[0] / halves[1] - 1) if len(halves) == 2 else None
        return Row(
            name=self.name,
            value=self.value,
            unit=self.unit,
            stat="median",
            better="higher",
            quantiles={f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)} if values else None,
            ci95=median_interval(values),
            n=len(values) or None,
            aa_spread=spread,
            subject=device["id"],
            shape=self.shape,
            settings=self.settings,
            device=Device.model_validate(device),
            versions=versions,
            flags=[self.reason] if self.reason else ["noisy"] if spread is not None and spread > _NOISY else [],
        )


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """A distribution-free interval for the median: the order statistics that hold it with at least this probability.

    P(the k-th smallest of n lies above the median) = P(Binomial(n, 1/2) < k). None with fewer than six values, where
    not even the extremes reach 95 %.
    """
    n, tail, below = len(values), (1 - level) / 2, 0.0
    k = 0
    while k < n and below + math.comb(n, k) / 2**n <= tail:
        below += math.comb(n, k) / 2**n
        k += 1
    return (sorted(values)[k - 1], sorted(values)[n - k]) if k else None


def read(threads: int, size: int, runs: int) -> Ceiling:
    """Read bandwidth, B/s, over `size` bytes in `threads` threads."""
    source = np.ones(size, np.int8)
    samples = _rates(lambda part: part.max(), np.array_split(source, threads), size, runs)
    return Ceiling("ceiling.read", "B/s", samples, {"threads": threads, "kernel": "numpy max of int8"}, {"bytes": size})


def copy(threads: int, size: int, runs: int) -> Ceiling:
    """Copy bandwidth, B/s read plus B/s written, of `size` bytes in `threads` threads."""
    source, goal = np.ones(size, np.int8), np.zeros(size, np.int8)
    pairs = list(zip(np.array_split(goal, threads), np.array_split(source, threads), strict=True))
    samples = _rates(lambda pair: np.copyto(*pair), pairs, 2 * size, runs)
    return Ceiling("ceiling.copy", "B/s", samples, {"threads": threads, "kernel": "numpy copyto"}, {"bytes": size})


def compute_fp32(size: int, runs: int) -> Ceiling:
    """The rate of a float32 product of two [size, size] matrices, flop/s, as NumPy's BLAS does it."""
    generator = np.random.default_rng(0)
    left = generator.standard_normal((size, size), np.float32)
    right = generator.standard_normal((size, size), np.float32)
    out = np.empty((size, size), np.float32)
    samples = _timed(lambda: np.matmul(left, right, out=out), 2.0 * size**3, runs)
    return Ceiling(
        "ceiling.compute", "flop/s", samples, {"compute_type": "fp32", "kernel": "numpy matmul"}, _sides(size)
    )


def compute_int8(size: int, runs: int) -> Ceiling:
    """The rate of an int8 product with int32 sums, op/s: the fastest kernel of torch and ONNX Runtime that is there.

    A kernel is first tried on matrices of an eighth of the side: without the instructions for it, a library may fall
    back to a plain loop, a hundred times slower than another kernel.
    """
    kernels = {
        "torch _int_mm": _int8_torch,
        "torch quantized linear": _int8_torch_quantized,
        "onnxruntime MatMulInteger": _int8_onnxruntime,
    }
    tried: dict[str, float] = {}
    reasons = []
    small = max(size // 8, 32)
    for name, make in kernels.items():
        try:
            tried[name] = max(_timed(make(*_int8_pair(small)), 2.0 * small**3, 3))
        except (ImportError, AttributeError, RuntimeError) as error:
            reasons.append(f"{name}: {(str(error) or type(error).__name__).splitlines()[0]}")
    if not tried:
        reason = "not measured: " + "; ".join(reasons)
        return Ceiling("ceiling.compute", "op/s", (), {"compute_type": "int8", "kernel": None}, _sides(size), reason)
    best = max(tried, key=tried.__getitem__)
    samples = _timed(kernels[best](*_int8_pair(size)), 2.0 * size**3, runs)
    return Ceiling("ceiling.compute", "op/s", samples, {"compute_type": "int8", "kernel": best}, _sides(size))


def _sides(size: int) -> dict[str, int]:
    return {"M": size, "N": size, "K": size}


def _int8_pair(size: int) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(0)
    return generator.integers(-127, 128, (size, size), np.int8), generator.integers(-127, 128, (size, size), np.int8)


def _need(*packages: str) -> None:
    for package in packages:
        if not machine.has(package):
            raise ImportError(f"{package} is not installed")


def _int8_torch(left: Bytes, right: Bytes) -> Callable[[], object]:
    _need("torch")
    import torch

    x, w = torch.from_numpy(left), torch.from_numpy(right)
    return lambda: torch._int_mm(x, w)


def _int8_torch_quantized(left: Bytes, right: Bytes) -> Callable[[], object]:
    _need("torch")
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated; while they are there, so is their kernel
        x = torch.quantize_per_tensor(torch.from_numpy(left).float(), 1.0, 128, torch.quint8)
        w = torch.quantize_per_tensor(torch.from_numpy(right).float(), 1.0, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(w, None)
    return lambda: torch.ops.quantized.linear(x, packed, 1000.0, 128)


def _int8_onnxruntime(left: Bytes, right: Bytes) -> Callable[[], object]:
    _need("onnxruntime", "onnx")
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    size = left.shape[0]
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "int8",
        [helper.make_tensor_value_info("x", TensorProto.INT8, [size, size])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [size, size])],
        [numpy_helper.from_array(right, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": left})


def _rates(task: Callable[[Any], object], parts: list[Any], size: int, runs: int) -> tuple[float, ...]:
    with ThreadPoolExecutor(len(parts)) as pool:
        return _timed(lambda: list(pool.map(task, parts)), float(size), runs)


def _timed(task: Callable[[], object], work: float, runs: int) -> tuple[float, ...]:
    """`work` a second for each run, after one that is not counted (it faults the pages in and starts the threads).

    A machine too slow for all runs within the budget makes fewer, three at least.
    """
    task()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < runs and (len(samples) < 3 or time.perf_counter() - begin < _BUDGET):
        start = time.perf_counter()
        task()
        samples.append(work / (time.perf_counter() - start))
    return tuple(samples)
