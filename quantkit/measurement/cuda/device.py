"""The device at hand: what it is, with which software, whether its clocks held, and its memory."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.timing.clocks import asked_of_gpu, gpu_slowed

PACKAGES = ("torch", "triton", "numpy", "bitsandbytes", "gemlite", "torchao", "vllm", "humming-kernels")
_ASKED = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# the share by which a fixed product may take longer than at its best before the run is called throttled
DRIFT = 0.1


@dataclass
class GpuDevice:
    """A GPU, or the CPU that Triton's interpreter runs on.

    Args:
        torch_device: `cuda` or `cpu`.
        dry: plumbing only: tiny sizes, no figure means anything.
    """

    torch_device: str
    dry: bool
    clocks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cache_bytes(self) -> int:
        """Of the last-level cache."""
        if self.torch_device == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(0).L2_cache_size)

    @property
    def sm(self) -> int:
        """80, 89, 90; 0 of a CPU."""
        if self.torch_device == "cpu":
            return 0
        major, minor = torch.cuda.get_device_capability(0)
        return 10 * major + minor

    def identity(self) -> dict[str, str]:
        """The `device` of rows."""
        if self.torch_device == "cpu":
            return {"id": "interpreter", "kind": "cpu", "name": f"{platform.machine()}, Triton's interpreter"}
        return machine.gpu(torch.cuda.get_device_name(0))

    def describe(self) -> dict[str, Any]:
        """Everything that figures depend on."""
        found: dict[str, Any] = {**self.identity(), "sm": self.sm, "last_level_cache": self.cache_bytes}
        if self.torch_device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            found |= {"multiprocessors": properties.multi_processor_count, "memory": properties.total_memory}
            found["driver"] = asked_of_gpu("driver_version")
        return found

    def sample(self, when: str) -> None:
        """Note the clocks; `when` says at what point of the run."""
        if self.torch_device == "cuda":
            values = asked_of_gpu(",".join(_ASKED)).split(", ")
            self.clocks.append({"when": when, **dict(zip(_ASKED, values, strict=False))})

    def throttled(self) -> bool:
        """Whether the driver held the clock well below its highest at any sample."""
        return any(_slowed(sample) for sample in self.clocks)


def versions() -> dict[str, str]:
    """Package -> version."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _slowed(sample: dict[str, Any]) -> bool:
    try:
        return gpu_slowed(sample["clocks.sm"], sample["clocks.max.sm"], sample[_ASKED[-1]])
    except (KeyError, ValueError):
        return False


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turns "out of memory" in the body into InputError `out-of-memory`."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        torch.cuda.empty_cache()
        value = str(problem).splitlines()[0]
        raise InputError("out-of-memory", where=where, value=value, remedy="smaller batches") from None


def allocated() -> int:
    """Bytes that this process's tensors take; 0 where there is no GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
