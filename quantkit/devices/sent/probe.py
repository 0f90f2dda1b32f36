"""Collect facts about a device."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

# the machine's lock, as in `work`
_SHARED = "/tmp/quantkit.lock"  # noqa: S108 (only read)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Collect the facts of `quantkit.devices.probed.Probed`.

    Args:
        asked: `machine`, source of `quantkit.machine`; `workdir`; `packages`, names.
    """
    machine: Any = types.ModuleType("machine")
    exec(asked["machine"], machine.__dict__)  # noqa: S102 (what this program was sent with)
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    return {
        "host": socket.gethostname()[:200],
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "model": _text("/proc/device-tree/model") or _text("/sys/devices/virtual/dmi/id/product_name"),
        "processor": machine.cpu_name(),
        "isa": machine.isa_features(),
        "cores": machine.cores(),
        "memory": machine.memory_limit(),
        "memory_free": machine.memory_available(),
        "last_level_cache": machine.last_level_cache(),
        "disk_free": shutil.disk_usage(there).free,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": "-".join(platform.libc_ver()),
        "bits": sys.maxsize.bit_length() + 1,
        "packages": {name: version for name in asked["packages"] if (version := machine.installed(name))},
        "gpus": gpus(),
        "cuda": _cuda(),
        "triton": machine.has("triton"),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "temperature": _temperature(),
        "time": time.time(),
        "busy": _busy(place),
    }


def _text(path: str, most: int = 200) -> str:
    try:
        with open(path, "rb") as stream:  # noqa: PTH123
            text = stream.read(most).decode("utf-8", "replace").strip("\0\n ")
            return "".join(letter for letter in text if letter.isprintable() or letter == "\n")
    except OSError:
        return ""


def _temperature() -> float | None:
    zones = [_text(str(path)) for path in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    return max((int(degrees) / 1000 for degrees in zones if degrees.lstrip("-").isdigit()), default=None)


def gpus() -> list[dict[str, Any]]:
    """List the GPUs of `nvidia-smi`; empty if it does not answer."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,compute_cap,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return []
    listed = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            memory = int(parts[2]) << 20 if parts[2].isdigit() else 0  # a Jetson's GPU shares the machine's memory
            listed.append({"name": parts[0], "sm": parts[1], "memory": memory, "driver": parts[3]})
    return listed


def _cuda() -> str:
    """Read the CUDA version of torch from its version file: importing torch would take seconds."""
    with contextlib.suppress(ImportError, ValueError):
        package = importlib.util.find_spec("torch")
        for folder in (package.submodule_search_locations if package else None) or ():
            text = _text(f"{folder}/version.py", 4000)
            told = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]{1,20})['\"]", text, re.MULTILINE)
            if told:
                return told[1]
    return ""


def _busy(place: Path) -> str:
    """Return the owner of the device: of the workdir's lock, or of the machine's; see `work`."""
    shared = os.environ.get("QUANTKIT_LOCK", _SHARED)
    for path in (str(place / "lock"), *([shared] if shared else [])):
        # in a folder open to all users: never wait, never follow a link
        with contextlib.suppress(OSError):
            stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
            with stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    # an owner takes the lock before it writes its name
                    return stream.read(2000).decode("utf-8", "replace") or "{}"
    return ""
