"""The GPU of this machine: identity, clocks, memory, seconds of an operation, ceilings.

Seconds: a side holds so many copies of its weight that together they fill the last-level cache three times. A pass runs
the operation once on each copy, so no copy is still in the cache. One CUDA graph holds the passes and is replayed
twice: the first replay keeps the device busy while the host queues the second, which two events time. That time over
the number of operations is one sample. Sides are visited in the order A B B A.

Behind each operation the graph has a plain kernel, an addition to one number, and the time of a graph of these alone is
subtracted. Without it, a kernel that may start before the end of the last one (programmatic launch, as quantkit's do)
would hide its start behind a copy of itself, and a library's kernel would not.

Ceilings: highest rates of the device, measured in the same run.

    read      largest element of an array beyond the size of any cache
    copy      copy of the same array by a kernel; its bytes count twice (in a graph, `Tensor.copy_` is no kernel but a
              copy by the driver, which is slower)
    compute   square product of random numbers in each input type, 2 n^3 operations, by torch's own library
    launch    addition to one number, eager and in a graph
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from quantkit import machine
from quantkit.errors import InputError
from quantkit.kernels.workspace import one_graph
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.timing.clocks import asked_of_gpu, gpu_slowed
from quantkit.measurement.timing.schedule import Array, Visit, interleave
from quantkit.stats.abba import aa_spread

PACKAGES = ("torch", "triton", "numpy", "bitsandbytes", "gemlite", "torchao", "vllm", "humming-kernels")
_ASKED = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# a run is throttled if a fixed product loses more than this share of its best rate
DRIFT = 0.1
# all copies of a weight together, as a multiple of the last-level cache
ROTATION = 3
# seconds of a graph beyond which more operations add nothing
_LONG = 1e-3
_RESAMPLES = 1000


@dataclass
class GpuDevice:
    """A GPU, or the CPU that runs Triton's interpreter.

    Args:
        torch_device: `cuda` or `cpu`.
        dry: True for a test of the plumbing: tiny sizes, figures without meaning.
    """

    torch_device: str
    dry: bool
    clocks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last-level cache."""
        return 1 if self.torch_device == "cpu" else int(torch.cuda.get_device_properties(0).L2_cache_size)

    @property
    def sm(self) -> int:
        """Architecture: 80, 89, 90; 0 for a CPU."""
        if self.torch_device == "cpu":
            return 0
        major, minor = torch.cuda.get_device_capability(0)
        return 10 * major + minor

    def identity(self) -> dict[str, str]:
        """Return the `device` of rows."""
        if self.torch_device == "cpu":
            return {"id": "interpreter", "kind": "cpu", "name": f"{platform.machine()}, Triton's interpreter"}
        return machine.gpu(torch.cuda.get_device_name(0))

    def describe(self) -> dict[str, Any]:
        """Return every property behind the figures."""
        facts: dict[str, Any] = {**self.identity(), "sm": self.sm, "last_level_cache": self.cache_bytes}
        if self.torch_device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            facts |= {"multiprocessors": properties.multi_processor_count, "memory": properties.total_memory}
            facts["driver"] = asked_of_gpu("driver_version")
        return facts

    def sample(self, when: str) -> None:
        """Record the clocks; `when`: point of the run."""
        if self.torch_device == "cuda":
            values = asked_of_gpu(",".join(_ASKED)).split(", ")
            self.clocks.append({"when": when, **dict(zip(_ASKED, values, strict=False))})

    def throttled(self) -> bool:
        """Tell if the driver held the clock well below its highest at any sample."""
        return any(_slowed(sample) for sample in self.clocks)


def _slowed(sample: dict[str, Any]) -> bool:
    try:
        return gpu_slowed(sample["clocks.sm"], sample["clocks.max.sm"], sample[_ASKED[-1]])
    except (KeyError, ValueError):
        return False


def versions() -> dict[str, str]:
    """Return the versions of installed packages by name."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turn "out of memory" in the body into InputError `out-of-memory`."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        torch.cuda.empty_cache()
        value = str(problem).splitlines()[0]
        raise InputError("out-of-memory", where=where, value=value, remedy="smaller batches") from None


def allocated() -> int:
    """Count the bytes of this process's tensors; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


# --- seconds ---------------------------------------------------------------------------------------------------------


@dataclass
class Implementation:
    """One implementation of an operation.

    Args:
        name: name of the candidate.
        steps: one call for each copy of the weight.
        resident_bytes: bytes of one copy.
        settings: settings of its rows.
        least: fewest operations in a graph of less than a millisecond; they keep the graph's launch a small part of
            its time.
        spaced: True for a plain kernel behind each operation, whose time is subtracted; False times operations that
            follow directly on each other.
    """

    name: str
    steps: Sequence[Callable[[], object]]
    resident_bytes: int
    settings: dict[str, Any]
    least: int = 64
    spaced: bool = True

    def ready(self) -> Callable[[], float]:
        """Compile, capture, and return a function that takes one sample, in seconds."""
        self.steps[0]()
        if not torch.cuda.is_available():
            return self._host
        number = torch.zeros(1, device="cuda")
        plain: list[Callable[[], object]] = [partial(number.add_, 1)] if self.spaced else []
        torch.cuda.synchronize()
        one = max(_replayed(self.steps[:1])(), 1e-6)
        steps = [*self.steps] * -(-min(self.least, math.ceil(_LONG / one)) // len(self.steps))
        both = _replayed([call for step in steps for call in (step, *plain)])
        alone = _replayed(plain * len(steps)) if plain else lambda: 0.0
        return lambda: (both() - alone()) / len(steps)

    def _host(self) -> float:
        begin = time.perf_counter()
        for step in self.steps:
            step()
        return (time.perf_counter() - begin) / len(self.steps)


def _replayed(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """Capture the calls as one CUDA graph, and return a function that times its replay, in seconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), one_graph():
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return sample


def copies(size: int, cache: int, *, most: int = 1024) -> int:
    """Count the copies of `size` bytes to fill the cache `ROTATION` times; at least two."""
    return max(2, min(most, -(-ROTATION * cache // max(size, 1))))


def interleaved(samplers: Sequence[Callable[[], float]], blocks: int, generator: np.random.Generator) -> list[Array]:
    """Return [blocks, 2] seconds of each side, timed in turns; each visit begins with an untimed sample."""
    sides = {str(number): sampler for number, sampler in enumerate(samplers)}
    timing = interleave(sides, blocks=(blocks, blocks), seconds=0.0, generator=generator, visit=Visit(1, 1))
    return [timing.seconds[side][..., 0] for side in sides]


def summary(times: Array, generator: np.random.Generator) -> dict[str, Any]:
    """Return median, quantiles, n, A/A spread, and the 95 % interval over resampled blocks (None for one block)."""
    drawn = times[generator.integers(0, len(times), (_RESAMPLES, len(times)))].reshape(_RESAMPLES, -1)
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {
        "value": float(np.median(times)),
        "quantiles": {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)},
        "ci95": [float(low), float(high)] if len(times) > 1 else None,
        "n": int(times.size),
        "aa_spread": aa_spread(times[:, :, None], generator),
    }


def ratio(baseline: Array, subject: Array, generator: np.random.Generator) -> tuple[float, list[float] | None]:
    """Return the subject's speed-up and its 95 % interval over resampled blocks, the same for both sides (None for one
    block)."""
    index = generator.integers(0, len(subject), (_RESAMPLES, len(subject)))
    draws = [np.median(side[index].reshape(_RESAMPLES, -1), axis=1) for side in (baseline, subject)]
    point = float(np.median(baseline) / np.median(subject))
    if len(subject) < 2:
        return point, None
    low, high = np.quantile(draws[0] / draws[1], (0.025, 0.975))
    return point, [min(float(low), point), max(float(high), point)]


# --- ceilings --------------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _read(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the largest int32 of a program's part: loads, and one maximum each."""
    most = tl.full((BLOCK,), -2147483648, tl.int32)
    at = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    for _ in range(steps):
        most = tl.maximum(most, tl.load(x_ptr + at))
        at += BLOCK
    tl.store(y_ptr + tl.program_id(0), tl.max(most, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a program's part of int32."""
    at = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    for _ in range(steps):
        tl.store(y_ptr + at, tl.load(x_ptr + at))
        at += BLOCK


def sampled(device: GpuDevice, blocks: int, generator: np.random.Generator) -> list[Ceiling]:
    """Measure all ceilings; a failed one is empty and has a reason."""
    at = device.torch_device
    block, programs = (4096, 4096) if not device.dry else (256, 2)
    count = 64 * block * programs if not device.dry else 2 * block * programs
    x = torch.randint(-1000, 1000, (count,), dtype=torch.int32, device=at)
    y, z = torch.empty(programs, dtype=torch.int32, device=at), torch.empty_like(x)
    steps = count // block // programs
    small = torch.zeros(1, device=at)
    kernels: list[tuple[str, str, float, Callable[[], object], dict[str, Any]]] = [
        ("ceiling.read", "B/s", 4.0 * count, lambda: _read[(programs,)](x, y, steps, BLOCK=block, num_warps=8), {}),
        ("ceiling.copy", "B/s", 8.0 * count, lambda: _copy[(programs,)](x, z, steps, BLOCK=block, num_warps=8), {}),
    ]
    side = 8192 if not device.dry else 32
    measured = []
    for name, make in _products(side, at).items():
        try:
            step = make()
            step()
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            reason = f"not measured: {str(error).splitlines()[0]}"
            measured.append(Ceiling("ceiling.compute", "op/s", (), {"compute_type": name}, {}, reason))
            continue
        kernels.append(("ceiling.compute", "op/s", 2.0 * side**3, step, {"compute_type": name}))
    for name, unit, work, step, settings in kernels:
        times = interleaved([Implementation(name, [step], 0, {}, least=2, spaced=False).ready()], blocks, generator)[0]
        measured.append(Ceiling(name, unit, tuple(map(float, (work / times).ravel())), settings, {}))
    alone = Implementation("launch", [lambda: small.add_(1)] * 64, 0, {}, spaced=False).ready()
    times = interleaved([alone], blocks, generator)[0]
    return [*measured, Ceiling("ceiling.launch", "s", tuple(map(float, times.ravel())), {"graph": at == "cuda"}, {})]


def measured(device: GpuDevice, blocks: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Return the rows `ceiling.*` of `sampled`; a row without a value has a reason."""
    one = device.identity()
    return [ceiling.as_dict(device=one, versions={}) for ceiling in sampled(device, blocks, generator)]


def _products(side: int, at: str) -> dict[str, Callable[[], Callable[[], object]]]:
    def floats(dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(side, side, device=at).to(dtype) for _ in range(2))
        return lambda: torch.mm(a, b.T)

    def int8() -> Callable[[], object]:
        a, b = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=at) for _ in range(2))
        return lambda: torch._int_mm(a, b.T)

    def fp8() -> Callable[[], object]:
        a, b = (torch.randn(side, side, device=at).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=at)
        return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    halves = {"bf16": lambda: floats(torch.bfloat16), "fp16": lambda: floats(torch.float16)}
    return {**halves, "int8": int8, "fp8_e4m3": fp8}


def of(rows: Sequence[Mapping[str, Any]], name: str, compute: str = "") -> float | None:
    """Return the measured value of a ceiling."""
    for row in rows:
        if row["name"] == name and (not compute or row["settings"]["compute_type"] == compute):
            value: float | None = row["value"]
            return value
    return None


def slower(before: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> bool:
    """Tell if the same products took longer the second time, by more than `DRIFT`."""
    pairs = [(of(before, "ceiling.compute", kind), of(again, "ceiling.compute", kind)) for kind in ("bf16", "fp16")]
    return any(last < (1 - DRIFT) * first for first, last in pairs if first and last)
