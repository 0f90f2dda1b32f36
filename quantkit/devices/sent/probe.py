"""What a device is."""

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

# the lock of the machine, as `jobs` has it
_SHARED = "/tmp/quantkit.lock"  # noqa: S108 (looked at alone)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """See `quantkit.devices.probed.Probed`, which is what is taken of the answer.

    Args:
        asked: `machine`, the source of `quantkit.machine`; `workdir`; `packages`, names.
    """
    machine: Any = types.ModuleType("machine")
    exec(asked["machine"], machine.__dict__)  # noqa: S102 (what this program was sent with)
    place = Path(os.path.expanduser(asked["workdir"]))  # noqa: PTH111
    there = next(each for each in (place, *place.parents) if each.exists())
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
        "packages": {name: found for name in asked["packages"] if (found := machine.installed(name))},
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
            return "".join(each for each in text if each.isprintable() or each == "\n")
    except OSError:
        return ""


def _temperature() -> float | None:
    """Of the hottest zone, in degrees Celsius."""
    found = [_text(str(path)) for path in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    return max((int(each) / 1000 for each in found if each.lstrip("-").isdigit()), default=None)


def gpus() -> list[dict[str, Any]]:
    """As `nvidia-smi` lists them; none where it does not answer."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,compute_cap,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            memory = int(parts[2]) << 20 if parts[2].isdigit() else 0  # a Jetson's GPU has the machine's
            found.append({"name": parts[0], "sm": parts[1], "memory": memory, "driver": parts[3]})
    return found


def _cuda() -> str:
    """The CUDA that its torch is built for, as torch's own file has it: importing torch would take seconds."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("torch")
        for folder in (found.submodule_search_locations if found else None) or ():
            text = _text(f"{folder}/version.py", 4000)
            told = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]{1,20})['\"]", text, re.MULTILINE)
            if told:
                return told[1]
    return ""


def _busy(place: Path) -> str:
    """Who holds the device, by the lock of the workdir or the machine's, whichever workdir has that; see `jobs`."""
    shared = os.environ.get("QUANTKIT_LOCK", _SHARED)
    for path in (str(place / "lock"), *([shared] if shared else [])):
        # of what lies where all may write nothing is waited for, and no link is followed
        with contextlib.suppress(OSError):
            stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
            with stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    # it is held before it says by whom
                    return stream.read(2000).decode("utf-8", "replace") or "{}"
    return ""
